"""One fault at a time in a whole job: its exit status, its line, and what is left.

Ranks that are killed or stuck, and launchers, are in tests/training/test_restarts.py and
test_watch.py; kills inside of saves in test_kills.py.
"""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import SETTINGS, ForkedJob, metrics, words_of
from tests.faults.kills import whole_checkpoints
from tests.faults.planted import Faults
from tests.runs import write_texts
from tests.training.checkpoint.helpers import flip_bit


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


def test_a_flipped_bit_costs_one_interval(run, undisturbed):
    assert run.train({"training.steps": 4})[0] == 0
    flip_bit(next(run.checkpoints.glob("step-4/*.distcp")))
    status, text = run.train()
    assert status == 0, text
    assert re.search("damaged: .*step-4", text) and "resumed at step 2" in text, text
    assert run.losses() == undisturbed and run.newest() == 8


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
def disk(tmp_path) -> Iterator[Path]:
    """The folder of a disk of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.faults
def test_a_disk_that_others_fill_under_saves_in_the_background(run, disk):
    run.folder = disk / "run"
    run.checkpoints = run.folder / "checkpoint"
    settings = {"checkpoint.async_mode": "async", "training.steps": 20}
    settings |= {"lr_scheduler.total_steps": 20}
    with run.begin(settings, faults=Faults(seconds=0.2)) as job:
        wait_for_step(job, 3)
        with open(disk / "of another", "wb", buffering=0) as file:
            while job.is_running():
                # Room for a line of metrics, and for no save.
                free = shutil.disk_usage(disk).free
                file.write(bytes(max(0, free - 2**18)))
                time.sleep(0.01)
        assert job.wait() == 1, job.text()
        line = one_line(job.text())
    assert "no space left" in line and "GiB" in line
    assert run.newest() >= 2
    (disk / "of another").unlink()
    status, text = run.train(settings)
    assert status == 0 and "resumed at step" in text, text
    run.losses()


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


def test_poison_without_end_ends_with_status_3(run):
    settings = {"guard.max_skips_in_a_row": 2, "guard.max_rollbacks": 1}
    status, text = run.train(settings, faults=Faults(poisoned_from=4))
    assert status == 3, text
    assert f"look at loss and grad_norm in {run.folder / 'metrics.jsonl'}" in one_line(text)
    assert run.newest() == 2


def wait_for_step(job: ForkedJob, count: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while len(job.steps()) < count:
        assert job.is_running() and time.monotonic() < deadline, job.text()
        time.sleep(0.02)
