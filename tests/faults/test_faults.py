"""One fault at a time in a whole job: its exit status, its line, and what is left.

Ranks that are killed or stuck, and launchers, are in tests/training/test_restarts.py and
test_watch.py; kills inside of saves in test_kills.py.
"""

import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import SETTINGS, ForkedJob, metrics, words_of
from tests.faults.kills import whole_checkpoints
from tests.faults.planted import Faults
from tests.runs import write_texts


class Run:
    """A run in a folder: started again and again, with what has gone wrong in between."""

    def __init__(self, folder: Path):
        self.folder = folder / "run"
        self.checkpoints = self.folder / "checkpoint"
        self.texts = folder / "texts"
        self.outputs = folder
        self.starts = 0
        write_texts(self.texts)

    def words(self, settings: dict[str, object]) -> list[str]:
        """Of the command line: 8 steps are planned."""
        own = {
            "training.output_dir": self.folder,
            "data.source": self.texts,
            "training.steps": 8,
            "lr_scheduler.total_steps": 8,
        }
        return words_of(SETTINGS | own | settings)

    def begin(self, settings: dict | None = None, **options: object) -> ForkedJob:
        self.starts += 1
        return ForkedJob(self.words(settings or {}), self.outputs / f"out-{self.starts}", **options)

    def train(self, settings: dict | None = None, **options: object) -> tuple[int, str]:
        """To its end. Returns its status and what it has printed."""
        with self.begin(settings, **options) as job:
            return job.wait(), job.text()

    def newest(self) -> int | None:
        """Step of the newest checkpoint. All must be whole."""
        step, broken = whole_checkpoints(self.checkpoints)
        assert not broken
        return step

    def losses(self) -> dict[int, float]:
        """By step; a step that was done again had the same loss."""
        found: dict[int, float] = {}
        for line in metrics(self.folder):
            assert found.setdefault(line["step"], line["loss"]) == line["loss"], line["step"]
        return found


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    alone = Run(tmp_path_factory.mktemp("undisturbed"))
    status, text = alone.train({"checkpoint.enable": "false"})
    assert status == 0, text
    return alone.losses()


def one_line(text: str) -> str:
    """The one line of an error, with no traceback beside it."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_flipped_bit_costs_one_interval(run, undisturbed):
    assert run.train({"training.steps": 4})[0] == 0
    flip_a_bit(next(run.checkpoints.glob("step-4/*.distcp")))
    status, text = run.train()
    assert status == 0, text
    assert re.search("damaged: .*step-4", text) and "resumed at step 2" in text, text
    assert run.losses() == undisturbed and run.newest() == 8


@pytest.mark.faults
def test_a_run_with_broken_checkpoints_alone_does_not_begin_anew(run):
    assert run.train({"training.steps": 4})[0] == 0
    for path in run.checkpoints.glob("step-*/*.distcp"):
        flip_a_bit(path)
    status, text = run.train()
    assert status == 2, text
    assert "is whole" in one_line(text) and str(run.checkpoints) in one_line(text)
    assert [line["step"] for line in metrics(run.folder)] == [1, 2, 3, 4]


def test_a_disk_that_fills_leaves_the_last_checkpoint(run, undisturbed):
    assert run.train({"training.steps": 4})[0] == 0
    status, text = run.train(file_bytes=100_000)
    assert status == 1, text
    line = one_line(text)
    assert "step-6" in line and "no space left" in line and "GiB" in line
    assert run.newest() == 4
    status, text = run.train()
    assert status == 0 and "resumed at step 4" in text, text
    assert run.losses() == undisturbed


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many MB. Returns its folder."""
    folder = tmp_path / "disk"

    def make(size: int) -> Path:
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        return folder

    yield make
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.faults
def test_a_disk_that_others_fill_under_saves_in_the_background(run, disk):
    folder = disk(64)
    run.folder = folder / "run"
    run.checkpoints = run.folder / "checkpoint"
    settings = {"checkpoint.async_mode": "async", "training.steps": 20}
    settings |= {"lr_scheduler.total_steps": 20}
    with run.begin(settings, faults=Faults(seconds=0.2)) as job:
        wait_for_step(job, 3)
        with open(folder / "of another", "wb", buffering=0) as file:
            while job.is_running():
                # Room for a line of metrics, and for no save.
                free = shutil.disk_usage(folder).free
                file.write(bytes(max(0, free - 2**18)))
                time.sleep(0.01)
        assert job.wait() == 1, job.text()
        line = one_line(job.text())
    assert "no space left" in line and "GiB" in line
    assert run.newest() >= 2
    (folder / "of another").unlink()
    status, text = run.train(settings)
    assert status == 0 and "resumed at step" in text, text
    run.losses()


@pytest.mark.faults
def test_a_disk_that_is_too_small_is_told_before_the_first_step(run, disk):
    folder = disk(4)
    status, text = run.train({"training.output_dir": folder / "run"})
    assert status == 2, text
    assert re.search(r"has \S+ GiB free, a save needs \S+ GiB", one_line(text)), text
    assert not metrics(folder / "run")


@pytest.mark.faults
def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(run):
    status, text = run.train({"training.output_dir": "/proc/run"})
    assert status == 2 and "training.output_dir" in one_line(text), text


@pytest.mark.faults
def test_a_second_run_in_the_folder_is_refused(run):
    with run.begin({"training.steps": 1000}, faults=Faults(seconds=0.05)) as first:
        wait_for_step(first, 1)
        status, text = run.train({"training.steps": 1000})
        assert status == 2, text
        process = f"process {first.processes[0].pid}"
        assert process in one_line(text) and "host" in one_line(text), text
        seen = len(first.steps())
        wait_for_step(first, seen + 1)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0, first.text()


@pytest.mark.faults
def test_a_stop_signal_in_a_long_accumulation(run):
    """The step would take 20 times 0.5 s more. It is dropped, and done when the run resumes."""
    accumulated = {"training.gradient_accumulation_steps": 20, "training.steps": 2}
    settings = accumulated | {"training.stop_grace_seconds": 2}
    with run.begin(settings, faults=Faults(seconds=0.5)) as job:
        wait_for_step(job, 1)
        time.sleep(1)
        job.signal(signal.SIGTERM)
        began = time.monotonic()
        assert job.wait() == 0, job.text()
        assert time.monotonic() - began < 5
    assert run.newest() == 1 and [line["step"] for line in metrics(run.folder)] == [1]
    assert run.train(settings)[0] == 0
    whole = Run(run.outputs / "whole")
    assert whole.train(accumulated)[0] == 0
    assert run.losses() == whole.losses()


@pytest.mark.faults  # as a whole job; tests/training/test_poison.py shows the same of the trainer
def test_one_poisoned_gradient_costs_one_update(run):
    settings = {"parallelism.cp": 2}
    status, text = run.train(settings, ranks=2, faults=Faults(rank=1, poisoned=[5]))
    assert status == 0, text
    assert "step 5: update skipped" in text
    lines = metrics(run.folder)
    assert [line["skipped_updates"] for line in lines] == [0] * 4 + [1] * 4
    assert all(line["loss"] is not None for line in lines) and run.newest() == 8


def test_poison_without_end_ends_with_status_3(run):
    settings = {"guard.max_skips_in_a_row": 2, "guard.max_rollbacks": 1}
    status, text = run.train(settings, faults=Faults(poisoned_from=4))
    assert status == 3, text
    assert f"look at loss and grad_norm in {run.folder / 'metrics.jsonl'}" in one_line(text)
    assert run.newest() == 2


class Hostile:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.faults
def test_a_hostile_checkpoint_runs_no_code(run, tmp_path):
    """Neither as the run's own checkpoint nor as another run's from which weights are taken."""
    assert run.train({"training.steps": 2})[0] == 0
    mark = tmp_path / "mark"
    for path in run.checkpoints.glob("step-*"):
        (path / "checksums.sha256").unlink()
        (path / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    elsewhere = {
        "training.output_dir": tmp_path / "other",
        "checkpoint.initial_load_path": run.checkpoints / "step-2",
    }
    for settings in ({}, elsewhere):
        status, text = run.train(settings)
        assert status == 2 and ".metadata" in one_line(text), text
        assert not mark.exists()


def wait_for_step(job: ForkedJob, count: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while len(job.steps()) < count:
        assert job.is_running() and time.monotonic() < deadline, job.text()
        time.sleep(0.02)
