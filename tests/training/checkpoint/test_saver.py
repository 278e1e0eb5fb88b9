"""Saves in the foreground and on a thread: durable before they have a name, failures reported."""

import gc
import logging
import os
import resource
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed import forkserver, on_ranks
from tests.refusals import refused
from tests.training.checkpoint.helpers import (
    FullFile,
    Run,
    flip_bit,
    join_alone,
    names_in,
    resumed,
    same,
)
from titan_sparse.config import Refusal
from titan_sparse.training.checkpoint import saver
from titan_sparse.training.checkpoint.reader import Broken, read_into, read_metadata, verify
from titan_sparse.training.checkpoint.saver import SaveError
from titan_sparse.training.faults.process_groups import on_first_rank

MODES = ["disabled", "async"]


def test_everything_is_durable_before_it_has_its_name(alone, tmp_path, events):
    run = Run(tmp_path)
    left_over = run.folder / "step-1.incomplete"
    left_over.mkdir(parents=True)
    (left_over / "__0_0.distcp").write_text("of an earlier attempt")
    run.step()
    # Much larger than what is saved of it.
    run.checkpointer.weights["weight"] = torch.zeros(100_000)[:30].view(5, 6)
    run.checkpointer.save(1)
    count = sum(name.endswith(".distcp") for name in events)
    assert sorted(events[:count]) == [f"__0_{number}.distcp" for number in range(count)]
    assert events[count:] == [
        "step-1.incomplete",
        "config.toml",
        ".metadata",
        "checksums.sha256",
        "step-1.incomplete",
        "step-1.incomplete > step-1",
        "checkpoint",
    ]
    files = run.folder.glob("step-1/*.distcp")
    assert count >= 1 and sum(path.stat().st_size for path in files) < 50_000
    # As DCP's own would say it.
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    ours, theirs = read_metadata(run.folder / "step-1"), read_metadata(tmp_path / "dcp")
    assert ours.version == theirs.version
    assert Path(ours.storage_meta.checkpoint_id) == run.folder / "step-1"


def test_a_step_waits_for_the_copies_only(alone, tmp_path, monkeypatch):
    """Over another group, however slow the disk is. The next save and going back wait for it."""
    save, groups = dcp.save, []

    def slow(*args, process_group, **settings):
        time.sleep(0.6)
        groups.append(process_group)
        return save(*args, process_group=process_group, **settings)

    monkeypatch.setattr(dcp, "save", slow)
    run = Run(tmp_path, async_mode="async")
    run.checkpointer.load()
    run.step()
    wanted = run.state()
    began = time.monotonic()
    run.checkpointer.save(1)
    run.step()
    run.checkpointer.raise_failure()
    assert time.monotonic() - began < 0.5 and not (run.folder / "step-1").exists()
    run.checkpointer.save(2)
    assert run.checkpointer.go_back(before=2) == 1
    assert names_in(run.folder) == {"step-1", "rolled-back-1"}
    assert same(run.state() | {"sequence": 1}, wanted)
    assert run.checkpointer.go_back(before=1) is None
    run.checkpointer.close()
    assert run.checkpointer.last_save_seconds > 0
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
    assert resumed(tmp_path).loader.sequence == 1
    assert groups == [run.checkpointer.group] * 2
    assert run.checkpointer.group not in (None, dist.group.WORLD)


@pytest.mark.parametrize("error", [0, 2])
def test_memory_stays_pinned_until_the_end(alone, tmp_path, monkeypatch, caplog, error):
    """A save without pinned memory is better than none."""
    released = []

    def pin(memory: torch.Tensor) -> int:
        weakref.finalize(memory, released.append, memory.nbytes)
        return error

    monkeypatch.setattr(saver, "pin", pin)
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    for step in (1, 2):
        run.step()
        run.checkpointer.save(step)
        run.checkpointer.wait()
    gc.collect()
    assert not released and ("can't be pinned (CUDA error 2)" in caplog.text) == bool(error)
    run.checkpointer.close()
    gc.collect()
    assert len(released) == 1 and released[0] % 512 == 0
    assert same(resumed(tmp_path).state(), run.state())


@pytest.mark.parametrize("how", ["at once", "at the next step", "at the next save", "at the end"])
def test_a_full_disk_is_one_line(alone, tmp_path, monkeypatch, how):
    wanted = Run(tmp_path).train(1).state()
    run = Run(tmp_path, async_mode="disabled" if how == "at once" else "async")
    run.checkpointer.load()
    monkeypatch.setattr(saver, "HashedFile", FullFile)
    run.step()
    text = r"step-2 could not be saved: no space left .* needs 4.02e-07 GiB"
    with refused(text, SaveError):
        run.checkpointer.save(2)
        deadline = time.monotonic() + 10
        while how == "at the next step" and time.monotonic() < deadline:
            run.checkpointer.raise_failure()
            time.sleep(0.01)
        if how == "at the next save":
            run.checkpointer.save(3)
        run.checkpointer.close()
    run.checkpointer.close()
    assert names_in(run.folder) == {"step-1"}
    assert same(resumed(tmp_path).state(), wanted)


def _be_killed(folder: Path, name: str, call: int, mode: str) -> None:
    original, calls = getattr(saver, name), []

    def killed(*args):
        calls.append(args)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(saver, name, killed)
    join_alone()
    Run(folder, keep_latest_k=2, async_mode=mode).train(5)


@pytest.mark.parametrize(
    "name, call, mode, whole",
    [("_write_bytes", 11, "disabled", 3), ("publish", 4, "async", 3), ("rotate", 4, "disabled", 4)],
)
def test_killed_inside_a_save(alone, tmp_path, caplog, name, call, mode, whole):
    """At any point there is a whole checkpoint, and going on from it equals never having died."""
    wanted = Run(tmp_path / "whole").train(6).state()
    arguments = (tmp_path / "run", name, call, mode)
    killed = forkserver().Process(target=_be_killed, args=arguments)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    caplog.set_level(logging.INFO, "titan_sparse")
    run = resumed(tmp_path / "run", keep_latest_k=2)
    assert ("saves that were cut short: step-" in caplog.text) == (name != "rotate")
    assert run.progress.step == whole
    run.train(6)
    assert same(run.state(), wanted)
    assert names_in(run.folder) == {"step-5", "step-6"}


# Two ranks: one changes the folder, each checks and writes its share, and they fail together.


def _refuse(*_, **__) -> None:
    raise AssertionError("this is rank 0's")


def _fails(work: Callable[[], None], text: str) -> None:
    with pytest.raises(Broken, match=text):
        work()
    dist.barrier()


@on_ranks(2)
def test_a_problem_of_one_rank_is_the_problem_of_both(tmp_path):
    rank = dist.get_rank()
    done = []
    assert on_first_rank(lambda: done.append(rank) or "the answer") == "the answer"
    assert done == ([0] if rank == 0 else [])
    if rank == 1:
        saver._Files.prepare_global_plan = saver._Files.finish = saver.shutil.rmtree = _refuse
    for mode in MODES:
        run = Run(tmp_path / mode, async_mode=mode).train(2)
        wanted = run.state()
        assert same(resumed(tmp_path / mode).state(), wanted)
        ranks = {name[:3] for name in names_in(run.folder / "step-2")}
        assert {"__0", "__1"} <= ranks

    checkpoint = run.folder / "step-2"
    for name in sorted(names_in(checkpoint) - {"checksums.sha256"}):
        dist.barrier()
        if rank == 0:
            flip_bit(checkpoint / name)
        dist.barrier()
        _fails(lambda: verify(checkpoint), name)
        if rank == 0:
            flip_bit(checkpoint / name)

    dist.barrier()
    load = torch.load
    if rank == 1:
        torch.load = _refuse
    weight = torch.zeros(5, 6)
    _fails(lambda: read_into({"weight": weight}, checkpoint), "this is rank 0's")
    torch.load = load

    dist.barrier()

    # One rank cannot write: both say so, and nothing half-written stays.
    runs = [Run(tmp_path / f"full {mode}", width=20_000, async_mode=mode) for mode in MODES]
    for run in runs:
        run.step()
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    for run in runs:
        with pytest.raises(SaveError, match="no space left"):
            run.checkpointer.save(1)
            run.checkpointer.close()
        dist.barrier()
        assert names_in(run.folder) == set()


def test_a_disk_too_small_is_refused_before_the_first_step(alone, tmp_path, monkeypatch):
    """Three tensors of each parameter's size: the weights and Adam's two moments."""
    run = Run(tmp_path)
    needed = 3 * (5 * 6 + 5) * 4
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    run.checkpointer.check_disk()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(Refusal, match="has 3.9e-07 GiB free, and a save needs 3.91e-07 GiB"):
        run.checkpointer.check_disk()
