"""Whole jobs under torchrun that lose a rank, their launcher, or are asked to stop."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed import torchrun
from tests.runs import write_texts

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

SETTINGS = {
    "training.steps": 6,
    "training.seq_len": 128,
    "training.device": "cpu",
    "training.dtype": "float32",
    "attention.block_size": 16,
    "attention.pattern": "dense",
    "parallelism.cp": 2,
    "parallelism.timeout_seconds": 20,
    "lr_scheduler.warmup_steps": 1,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "metrics.tensorboard": "false",
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
    options = (
        SETTINGS
        | {
            "training.output_dir": folder / "run",
            "data.source": folder / "texts",
        }
        | options
    )
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = torchrun(processes, folder / "job.py", *words)
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
    for line in (folder / "run/metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found.setdefault(values["step"], []).append(values["loss"])
    return found


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, list[float]]:
    """The losses of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder, {}))
    return losses(folder)


def test_a_job_recovers_twice_from_a_killed_rank(tmp_path, undisturbed):
    faults = {("0", "1", 4, 1): KILL, ("1", "0", 6, 1): KILL}
    output = finish(start(tmp_path, {}, faults, restarts=2))
    assert (tmp_path / "hit0").exists() and (tmp_path / "hit1").exists(), output
    found = losses(tmp_path)
    for step, (loss,) in undisturbed.items():
        assert set(found[step]) == {loss}, (step, found[step], loss)
    assert len(found[3]) == 2 and len(found[5]) == 2  # from the checkpoint on
