"""Saves in the foreground, on a thread and in a process: the same files, and failures are reported."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed import run_processes
from tests.training.checkpoint.helpers import FullFile, Run, names_in, same
from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.training.checkpoint import SaveError, check_async_mode, verify, writer

MODES = ["disabled", "async", "async_with_pinned_mem"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_saves_the_state_of_its_step(alone, tmp_path, mode):
    """The updates after a save must not get into it."""
    whole = Run(tmp_path / "whole").train(6)
    run = Run(tmp_path / "run", async_mode=mode).train(4)
    assert run.checkpointer.last_save_seconds > 0 and run.checkpointer.last_saved == 4
    for step in range(1, 5):
        verify(run.folder / f"step-{step}")
    again = Run(tmp_path / "run").train(6)
    assert same(again.state(), whole.state())


def test_a_step_waits_for_the_copies_only(alone, tmp_path, monkeypatch):
    """Training continues however slow the disk is, and the save holds the step that it names."""
    write_share = writer.write_share

    def slow(*args):
        time.sleep(0.6)
        return write_share(*args)

    monkeypatch.setattr("titan_sparse.training.checkpoint.saver.write_share", slow)
    run = Run(tmp_path, async_mode="async")
    run.checkpointer.load()
    run.step()
    run.checkpointer.prepare()
    wanted = run.state()
    began = time.monotonic()
    run.checkpointer.save(1)
    run.step()
    assert time.monotonic() - began < 0.5 and not (run.folder / "step-1").exists()
    run.checkpointer.close()
    again = Run(tmp_path)
    assert again.checkpointer.load() and same(again.state(), wanted)


def test_state_that_is_replaced_is_planned_anew(alone, tmp_path):
    """torch's own load_state_dict() makes new tensors."""
    run = Run(tmp_path, async_mode="async").train(1)
    run = Run(tmp_path, async_mode="async")
    run.checkpointer.load()
    run.checkpointer.prepare()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] + 1
    run.step()
    run.checkpointer.save(2)
    run.checkpointer.close()
    again = Run(tmp_path)
    assert again.checkpointer.load() and same(again.state(), run.state())


def test_pinned_memory_needs_a_gpu():
    section = Checkpoint(enable=True, async_mode="async_with_pinned_mem")
    with pytest.raises(Refusal, match='async_mode = "async_with_pinned_mem" needs a GPU'):
        check_async_mode(section, torch.device("cpu"))
    check_async_mode(section, torch.device("cuda"))
    check_async_mode(Checkpoint(enable=True, async_mode="async"), torch.device("cpu"))


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_is_one_line(alone, tmp_path, monkeypatch, mode):
    wanted = Run(tmp_path).train(1).state()
    run = Run(tmp_path, async_mode=mode)
    run.checkpointer.load()
    monkeypatch.setattr(writer, "HashedFile", FullFile)
    run.step()
    with pytest.raises(
        SaveError, match=r"step-2 could not be saved: no space left .* GiB"
    ) as caught:
        run.checkpointer.save(2)
        run.checkpointer.close()
    assert "\n" not in str(caught.value)
    assert names_in(run.folder) == {"step-1"}
    again = Run(tmp_path)
    assert again.checkpointer.load() and same(again.state(), wanted)


def _limited_file_size(folder: Path, mode: str) -> None:
    """One rank of two cannot write: both say so, and nothing half-written stays."""
    run = Run(folder, width=20_000, async_mode=mode)
    run.checkpointer.load()
    run.step()
    run.checkpointer.prepare()
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    try:
        run.checkpointer.save(1)
        run.checkpointer.close()
    except SaveError as error:
        assert "no space left" in str(error)
    else:
        raise AssertionError("it was saved")
    assert names_in(run.folder) <= {"step-1.incomplete"}  # rank 0 may not have deleted it yet


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_two_ranks_fail_together(tmp_path, mode):
    run_processes(2, _limited_file_size, tmp_path, mode)
    assert names_in(tmp_path / "checkpoint") == set()


def _save_on_two(folder: Path) -> None:
    for mode in MODES:
        wanted = Run(folder / mode, async_mode=mode).train(2).state()
        run = Run(folder / mode)
        assert run.checkpointer.load() and same(run.state(), wanted)


def test_two_ranks_share_the_work(tmp_path):
    run_processes(2, _save_on_two, tmp_path)
    for mode in MODES:
        ranks = {name[:3] for name in names_in(tmp_path / mode / "checkpoint/step-2")}
        assert {"__0", "__1"} <= ranks


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.checkpoint.helpers import Run, join_alone
from titan_sparse.training.checkpoint import folders, saver, writer

module, name = sys.argv[2].split(".")
original = getattr({"folders": folders, "saver": saver, "writer": writer}[module], name)
calls = 0

def killed(*args):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

for module in (folders, saver, writer):
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
    run = Run(tmp_path / "run", keep_latest_k=2)
    assert run.checkpointer.load() and run.progress.step == whole
    run.train(6)
    assert same(run.state(), wanted)
    assert names_in(run.folder) == {"step-5", "step-6"}


def test_a_dead_writing_process_is_told(alone, tmp_path):
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.checkpointer.load()
    run.step()
    run.checkpointer.prepare()
    run.checkpointer.saver.process.process.kill()
    run.checkpointer.save(1)
    with pytest.raises(SaveError, match="the process that writes checkpoints has died"):
        run.checkpointer.close()
