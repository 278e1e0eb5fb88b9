"""Saves in the foreground, on a thread and in a process: the same files, and failures are reported."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_processes
from tests.runs import tiny_config, train, write_texts
from tests.training.checkpoint.helpers import (
    FullFile,
    Run,
    flip_bit,
    names_in,
    open_files,
    resumed,
    same,
)
from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.models import huggingface
from titan_sparse.training.checkpoint import (
    Broken,
    SaveError,
    check_async_mode,
    checkpointer,
    read_into,
    saver,
    verify,
    writer,
)
from titan_sparse.training.checkpoint.writer import Staging, Writer
from titan_sparse.training.guard import Guard

MODES = ["disabled", "async", "async_with_pinned_mem"]
COPIES = "titan_sparse checkpoint"
"""The memory of copies, among a process's open files."""


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_saves_the_state_of_its_step(alone, tmp_path, mode):
    """The updates after a save must not get into it."""
    whole = Run(tmp_path / "whole").train(6)
    run = Run(tmp_path / "run", async_mode=mode).train(4)
    assert run.checkpointer.last_save_seconds > 0
    for step in range(1, 5):
        verify(run.folder / f"step-{step}")
    again = Run(tmp_path / "run").train(6)
    assert same(again.state(), whole.state())


def test_a_step_waits_for_the_copies_only(alone, tmp_path, monkeypatch, caplog):
    """Training continues however slow the disk is, and the save holds the step that it names. The
    next save waits for it, and says so, and going back waits too."""
    write = Writer.write

    def slow(*args):
        time.sleep(0.6)
        return write(*args)

    monkeypatch.setattr(Writer, "write", slow)
    run = Run(tmp_path, async_mode="async")
    run.checkpointer.load()
    run.step()
    run.checkpointer.prepare()
    wanted = run.state()
    began = time.monotonic()
    run.checkpointer.save(1)
    run.step()
    run.checkpointer.raise_failure()
    assert time.monotonic() - began < 0.5 and not (run.folder / "step-1").exists()
    assert "is shorter than a save" not in caplog.text
    run.checkpointer.save(2)
    assert "is shorter than a save" in caplog.text
    assert run.checkpointer.go_back(before=2) == 1
    assert names_in(run.folder) == {"step-1", "rolled-back-1"}
    assert same(run.state() | {"sequence": 1}, wanted)
    assert run.checkpointer.go_back(before=1) is None
    run.checkpointer.close()


def test_a_save_is_of_its_step(tmp_path, monkeypatch):
    """In a run of the trainer, with copies so late that the next update would be in them."""
    now = threading.Event()
    states: list[dict[str, Tensor]] = []
    begin, copy, update = Staging.begin, Staging.copy, Guard.update

    def noted_begin(staging: Staging) -> None:
        now.clear()
        parts = zip(staging.slots, staging.sources, strict=True)
        states.append({index.fqn: source.clone() for index, source in parts})
        begin(staging)

    def late_copy(staging: Staging) -> None:
        now.wait(0.3)
        copy(staging)

    def noted_update(guard: Guard, *args) -> None:
        update(guard, *args)
        now.set()

    monkeypatch.setattr(Staging, "begin", noted_begin)
    monkeypatch.setattr(Staging, "copy", late_copy)
    monkeypatch.setattr(Guard, "update", noted_update)
    write_texts(tmp_path / "texts")
    config = tiny_config(
        tmp_path,
        "run",
        checkpoint__enable=True,
        checkpoint__interval=1,
        checkpoint__keep_latest_k=0,
        checkpoint__async_mode="async",
        training__steps=3,
        optimizer__name="AdamW",
        optimizer__lr=0.01,
    )
    train(config)
    assert len(states) == 3
    for step, wanted in enumerate(states, 1):
        saved = {name: torch.empty_like(state) for name, state in wanted.items()}
        read_into(saved, tmp_path / f"run/checkpoint/step-{step}", alone=True)
        assert same(saved, wanted), step


def test_state_that_is_replaced_is_planned_anew(alone, tmp_path):
    """torch's own load_state_dict() makes new tensors."""
    Run(tmp_path, async_mode="async").train(1)
    run = Run(tmp_path, async_mode="async")
    run.checkpointer.load()
    run.checkpointer.prepare()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] + 1
    run.step()
    run.checkpointer.save(2)
    run.checkpointer.close()
    assert same(resumed(tmp_path).state(), run.state())


def test_pinned_memory_needs_a_gpu():
    section = Checkpoint(enable=True, async_mode="async_with_pinned_mem")
    with pytest.raises(Refusal, match='async_mode = "async_with_pinned_mem" needs a GPU'):
        check_async_mode(section, torch.device("cpu"))
    check_async_mode(section, torch.device("cuda"))
    check_async_mode(Checkpoint(enable=True, async_mode="async"), torch.device("cpu"))


@pytest.mark.parametrize("how", ["at once", "at the next step", "at the next save", "at the end"])
def test_a_full_disk_is_one_line(alone, tmp_path, monkeypatch, how):
    wanted = Run(tmp_path).train(1).state()
    run = Run(tmp_path, async_mode="disabled" if how == "at once" else "async")
    run.checkpointer.load()
    monkeypatch.setattr(writer, "HashedFile", FullFile)
    run.step()
    text = r"step-2 could not be saved: no space left .* needs 3.99e-07 GiB"
    with pytest.raises(SaveError, match=text) as caught:
        run.checkpointer.save(2)
        deadline = time.monotonic() + 10
        while how == "at the next step" and time.monotonic() < deadline:
            run.checkpointer.raise_failure()
            time.sleep(0.01)
        if how == "at the next save":
            run.checkpointer.save(3)
        run.checkpointer.close()
    assert "\n" not in str(caught.value)
    run.checkpointer.close()
    assert names_in(run.folder) == {"step-1"}
    assert same(resumed(tmp_path).state(), wanted)


def _save_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")}


def test_close_gives_thread_and_memory_back(alone, tmp_path):
    """And a new plan, for tensors that were replaced, that of the one before. A save in the foreground
    needs neither."""
    threads, copies = _save_threads(), open_files(COPIES)
    foreground = Run(tmp_path / "foreground")
    foreground.step()
    foreground.checkpointer.prepare()
    assert open_files(COPIES) == copies and not _save_threads() - threads
    run = Run(tmp_path, async_mode="async")
    run.step()
    run.checkpointer.prepare()
    one_more = open_files(COPIES)
    assert one_more > copies
    run.checkpointer.prepare()
    assert open_files(COPIES) == one_more
    run.checkpointer.save(1)
    assert _save_threads() - threads
    for _ in range(2):  # the second finds nothing to give back
        run.checkpointer.close()
        assert open_files(COPIES) == copies and not _save_threads() - threads


def test_a_save_in_the_background_has_a_group_of_its_own(alone, tmp_path, monkeypatch):
    """Training communicates over the world's group at the same time."""
    assert Run(tmp_path).checkpointer.background_groups() == []
    run = Run(tmp_path, async_mode="async")
    [group] = run.checkpointer.background_groups()
    assert group is not dist.group.WORLD and dist.get_backend(group) == "gloo"
    run.step()
    run.checkpointer.prepare()
    used = []

    def noted(original: Callable, *args, group=None, **settings) -> None:
        used.append(group)
        original(*args, group=group, **settings)

    for name in ("gather_object", "all_gather_object"):
        monkeypatch.setattr(dist, name, partial(noted, getattr(dist, name)))
    run.checkpointer.save(1)
    run.checkpointer.close()
    assert used == [group] * 4


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ValueError("where\nodd")]
)
def test_a_bug_is_logged_with_its_place(alone, tmp_path, monkeypatch, caplog, error):
    """A disk's failure is logged without it, since its message is enough."""

    def fail(*_):
        raise error

    monkeypatch.setattr(Writer, "write", fail)
    run = Run(tmp_path)
    run.step()
    with pytest.raises(SaveError, match="step-1 could not be saved: .*(Input/output error|odd)$"):
        run.checkpointer.save(1)
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == isinstance(error, ValueError)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.checkpoint.helpers import Run, join_alone
from titan_sparse.training.checkpoint import folders, writer

module, name = sys.argv[2].split(".")
original = getattr({"folders": folders, "writer": writer}[module], name)
calls = 0

def killed(*args):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

for module in (folders, writer):
    if hasattr(module, name):
        setattr(module, name, killed)
join_alone()
Run(Path(sys.argv[1]), keep_latest_k=2, async_mode=sys.argv[4]).train(5)
"""
POINTS = [
    pytest.param("writer.share_out", 4, 3, marks=pytest.mark.faults),
    pytest.param("writer._write_bytes", 10, 3, marks=pytest.mark.faults),
    ("writer._write_bytes", 11, 3),
    ("writer.publish", 4, 3),
    pytest.param("folders.sync_folder", 9, 3, marks=pytest.mark.faults),
    ("writer.rotate", 4, 4),
]
"""Where it dies: function, at which call, and the step that is whole then."""


@pytest.mark.parametrize("point, call, whole", POINTS)
def test_killed_inside_a_save(alone, tmp_path, point, call, whole):
    """At any point there is a whole checkpoint, and going on from it equals never having died."""
    wanted = Run(tmp_path / "whole").train(6).state()
    mode = "async" if call % 2 else "disabled"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), point, str(call), mode]
    killed = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    run = resumed(tmp_path / "run", keep_latest_k=2)
    assert run.progress.step == whole
    run.train(6)
    assert same(run.state(), wanted)
    assert names_in(run.folder) == {"step-5", "step-6"}


def test_a_dead_writing_process_is_told(alone, tmp_path):
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.step()
    run.checkpointer.prepare()
    run.checkpointer.writer.process.kill()
    run.checkpointer.save(1)
    with pytest.raises(SaveError, match=r"process that writes checkpoints has died \(status -9\)"):
        run.checkpointer.close()


# Two ranks: one changes the folder, each checks and writes its share, and they fail together.


def _refuse(*_, **__) -> None:
    raise AssertionError("this is rank 0's")


def _save_on_two(folder: Path) -> None:
    rank = dist.get_rank()
    done = []
    assert checkpointer._on_first_rank(lambda: done.append(rank) or "the answer") == "the answer"
    assert done == ([0] if rank == 0 else [])
    if rank == 1:
        writer.Save.begin = Writer.publish = saver.shutil.rmtree = _refuse
    for mode in MODES:
        run = Run(folder / mode, async_mode=mode).train(2)
        wanted = run.state()
        assert same(resumed(folder / mode).state(), wanted)
        ranks = {name[:3] for name in names_in(run.folder / "step-2")}
        assert {"__0", "__1"} <= ranks


def test_rank_0_alone_changes_the_folder(tmp_path):
    run_processes(2, _save_on_two, tmp_path)


def _fail_on_one(folder: Path) -> None:
    """One rank cannot write: both say so, and nothing half-written stays."""
    runs = [Run(folder / mode, width=20_000, async_mode=mode) for mode in MODES[:2]]
    for run in runs:
        run.checkpointer.load()
        run.step()
        run.checkpointer.prepare()
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    for run in runs:
        with pytest.raises(SaveError, match="no space left"):
            run.checkpointer.save(1)
            run.checkpointer.close()
        dist.barrier()
        assert names_in(run.folder) == set()


def test_two_ranks_fail_together(tmp_path):
    run_processes(2, _fail_on_one, tmp_path)


def _fails(work: Callable[[], None], text: str) -> None:
    with pytest.raises(Broken, match=text):
        work()
    dist.barrier()


def _read_on_two(folder: Path) -> None:
    rank = dist.get_rank()
    run = Run(folder).train(1)
    checkpoint = run.folder / "step-1"
    verify(checkpoint)
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

    def export_weights(_, read: Callable[[dict], None], *__, **___) -> None:
        read({"weight": weight})

    huggingface.export_weights = export_weights
    if rank == 0:  # the other one does not take part
        run.checkpointer.save_in_hf(1, None, torch.float32, "")
        assert torch.equal(weight, run.model.weight)
    dist.barrier()


def test_a_problem_of_one_is_the_problem_of_both(tmp_path):
    run_processes(2, _read_on_two, tmp_path)


# Whether the disk has room for what a run will save, checked before the first step.

ONE_SAVE = 3 * (5 * 6 + 5) * 4
"""Bytes: the weights and Adam's two moments."""


@pytest.mark.parametrize(
    "keep, interval, saved, step, steps, needed",
    [
        (3, 1, 0, 0, 100, 4),
        (3, 1, 0, 0, 3, 3),
        # Checkpoints that are there have their room.
        (3, 1, 2, 2, 100, 2),
        # The last step is saved as well, off the interval too.
        (5, 2, 0, 0, 3, 2),
        (5, 1, 0, 2, 3, 1),
        (5, 1, 0, 3, 3, 1),
        # A disk need not hold all of them at once.
        (0, 1, 0, 0, 100, 1),
    ],
)
def test_a_disk_too_small_is_refused(
    alone, tmp_path, monkeypatch, keep, interval, saved, step, steps, needed
):
    run = Run(tmp_path, keep_latest_k=keep, interval=interval).train(saved)
    run.progress.step = step
    usage = shutil.disk_usage(tmp_path)
    for free, fits in [(needed * ONE_SAVE, True), (needed * ONE_SAVE - 1, False)]:
        monkeypatch.setattr(saver.shutil, "disk_usage", lambda _, f=free: usage._replace(free=f))
        if fits:
            run.checkpointer.check_disk(steps)
            continue
        text = (
            rf"has .*e-0\d GiB free, a save needs 3.91e-07 GiB and up to {needed} more .* = {keep}"
        )
        with pytest.raises(Refusal, match=text):
            run.checkpointer.check_disk(steps)


@pytest.mark.parametrize("ranks, cores, threads", [(1, 16, 4), (5, 16, 3), (32, 16, 1), ("", 3, 3)])
def test_ranks_of_a_node_share_its_cores(monkeypatch, ranks, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if not ranks:  # started without torchrun
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert saver._threads() == threads


def test_what_optimizers_will_have(alone, tmp_path):
    """SGD has nothing beside the weights. With an AdamW among several, all are counted as its."""
    model = Run(tmp_path).model
    sgd = torch.optim.SGD(model.parameters())
    adam = torch.optim.AdamW(model.parameters())
    assert saver.expected_bytes(model, [sgd]) == ONE_SAVE // 3
    assert saver.expected_bytes(model, [sgd, adam]) == ONE_SAVE
    model.weight.requires_grad_(False)
    assert saver.expected_bytes(model, [sgd]) == 5 * 4
