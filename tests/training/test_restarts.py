"""Whole jobs under torchrun that lose a rank, hang, lose their launcher, or are asked to stop."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed import torchrun
from tests.faults.jobs import SETTINGS, words_of
from tests.runs import write_texts
from titan_sparse.training.metrics_output import read_lines

ROOT = Path(__file__).parents[2]

# train.py, but for what one rank does in a micro-batch of a step, once in the job's life.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from titan_sparse.trainer import Trainer
from titan_sparse import train

folder = Path(sys.argv[0]).parent
rank = os.environ["RANK"]
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
faults = {faults}
forward_backward = Trainer._forward_backward
done = {{}}

def forward_backward_or_not(self, *args):
    step = self.progress.step + 1
    done[step] = done.get(step, 0) + 1
    fault = faults.get((attempt, rank, step, done[step]))
    if fault:
        (folder / f"hit{{attempt}}").write_text(str(time.time()))
        exec(fault)
    time.sleep({seconds})
    return forward_backward(self, *args)

(folder / f"pid{{rank}}.{{attempt}}").write_text(str(os.getpid()))
Trainer._forward_backward = forward_backward_or_not
if __name__ == "__main__":
    sys.exit(train.main())
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"

DEFAULTS = SETTINGS | {
    "training.steps": 6,
    "parallelism.cp": 2,
    "parallelism.timeout_seconds": 20,
}


def start(
    folder: Path,
    options: dict,
    faults: dict | None = None,
    seconds: float = 0,
    restarts: int = 0,
    processes: int = 2,
) -> subprocess.Popen:
    """The job, under torchrun. faults: (attempt, rank, step, micro-batch), the latter two counted from
    1, to Python code. seconds: that each micro-batch takes longer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder / "texts")
    (folder / "job.py").write_text(SCRIPT.format(faults=faults or {}, seconds=seconds))
    paths = {"training.output_dir": folder / "run", "data.source": folder / "texts"}
    options = DEFAULTS | paths | options
    command = torchrun(processes, folder / "job.py", *words_of(options))
    command[3:3] = ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(job: subprocess.Popen, status: int = 0) -> str:
    """What it printed. It must end with this status."""
    output, _ = job.communicate(timeout=150)
    assert job.returncode == status, output
    return output


def losses(folder: Path) -> dict[int, list[float]]:
    """Of each step; more than one where a step was done again."""
    found: dict[int, list[float]] = {}
    for line in read_lines(folder / "run/metrics.jsonl"):
        found.setdefault(line["step"], []).append(line["loss"])
    return found


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.faults
def test_a_job_that_recovers_twice_equals_the_undisturbed_one(tmp_path):
    finish(start(tmp_path / "undisturbed", {}))
    undisturbed = losses(tmp_path / "undisturbed")
    faults = {("0", "1", 4, 1): KILL, ("1", "0", 6, 1): KILL}
    output = finish(start(tmp_path / "disturbed", {}, faults, restarts=2))
    assert all((tmp_path / "disturbed" / name).exists() for name in ("hit0", "hit1")), output
    assert "resumed at step 2" in output and "resumed at step 4" in output, output
    assert "rank 1 (host" in output and "has given no sign of life" in output
    assert "Traceback" not in output, output
    found = losses(tmp_path / "disturbed")
    for step, (loss,) in undisturbed.items():
        assert set(found[step]) == {loss}, (step, found[step], loss)
    assert len(found[3]) == 2 and len(found[5]) == 2  # from the checkpoint on


def run_until_it_ends(
    folder: Path, processes: int, rank: int, action: str, options: dict
) -> tuple[str, float]:
    """What torchrun prints if `rank` does this in the third step, and the seconds from there to the
    end of all processes."""
    job = start(folder, options, {("0", str(rank), 3, 1): action}, processes=processes)
    output = finish(job, status=1)
    seconds = time.time() - float((folder / "hit0").read_text())
    assert not any(process.exists() for process in processes_of(folder, processes))
    return output, seconds


def processes_of(folder: Path, ranks: int) -> list[Path]:
    """Their folders in /proc."""
    numbers = []
    for rank in range(ranks):
        wait_for(folder / f"pid{rank}.0")
        numbers.append((folder / f"pid{rank}.0").read_text())
    return [Path("/proc", number) for number in numbers]


@pytest.mark.faults
def test_ranks_end_with_a_killed_torchrun(tmp_path):
    job = start(tmp_path, {"training.steps": 1000}, {("0", "0", 3, 1): "pass"}, seconds=0.2)
    wait_for(tmp_path / "hit0")
    job.kill()
    killed = time.monotonic()
    job.communicate(timeout=60)  # ranks hold the pipe open
    while any(process.exists() for process in processes_of(tmp_path, 2)):
        assert time.monotonic() - killed < 10
        time.sleep(0.1)


REFUSE = "from titan_sparse.config import Refusal; raise Refusal('a.b = 1: write 2')"
FILL = "raise OSError(28, 'No space left on device', 'a/b')"


@pytest.mark.faults
@pytest.mark.parametrize(
    "action, ranks, words, status",
    [
        (REFUSE, "01", "write 2", 2),
        (FILL, "1", "No space left", 1),
        ("", "", "attention.pattern", 2),
    ],
)
def test_an_end_is_told_in_one_line(tmp_path, action, ranks, words, status):
    """All ranks report the same line; or only the second does, once there is a process group; or a
    mistake in the configuration ends all before they do anything."""
    options = {} if ranks else {"attention.patern": "dense"}
    job = start(tmp_path, options, {("0", rank, 2, 1): action for rank in ranks})
    output = finish(job, status=1)  # torchrun's own
    # torchrun itself ends with a traceback, and then its summary.
    lines, _, summary = output.partition("failed (exitcode")
    told = [line for line in lines.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and words in told[0] and words in summary, output
    assert f"exitcode  : {status} " in summary, output
    assert "Traceback" not in lines, output
