"""Training jobs for tests that plant faults: train.py's program in forks of a process that has loaded
torch already.

A start takes a second instead of the eight of a new interpreter. Everything else is as torchrun
would have it: arguments, environment, output, exit status.
"""

import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.planted import Faults, plant

ROOT = Path(__file__).parents[2]

SETTINGS = {
    "training.seq_len": 64,
    "training.device": "cpu",
    "training.dtype": "float32",
    "attention.block_size": 16,
    "attention.pattern": "dense",
    "model.layers": 2,
    "lr_scheduler.warmup_steps": 1,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "metrics.tensorboard": "false",
    "metrics.recall_every": 0,
    "metrics.log_every": 1,
}
"""Of a run whose steps take some ten milliseconds on one core."""


def words_of(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


class ForkedJob:
    """A job of `ranks` processes, started at once. Used as a context, it leaves none behind.

    words: train.py's command line. output: the file that stdout and stderr of all ranks go to.
    faults: what goes wrong inside of it. file_bytes: no process can write a file that is longer.
    """

    def __init__(
        self,
        words: list[str],
        output: Path,
        ranks: int = 1,
        faults: Faults | None = None,
        file_bytes: int = 0,
        forks: bool = True,
    ):
        """forks: from a process with all modules loaded, which is fast. CUDA cannot be forked."""
        self.output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        # torchtitan asks for GPUs when it is imported, which must not start CUDA before the fork.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(["datasets", "titan_sparse.trainer"])
        shared = (ranks, _free_port(), words, str(output), faults or Faults(), file_bytes)
        self.processes = [
            context.Process(target=_rank_main, args=(rank, *shared)) for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"^step (\d+)/", self.text(), re.MULTILINE)]

    def is_running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def wait(self, seconds: float = 60) -> int:
        """The status it ends with: 0, or that of the first rank that did not end with 0.

        A signal counts negatively. Raises TimeoutError after so many seconds.
        """
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                raise TimeoutError(f"process {process.pid} has not ended after {seconds:.0f} s")
        return next((process.exitcode for process in self.processes if process.exitcode), 0)

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        """Send a signal to these ranks, or to all, as far as they are there."""
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive():
                os.kill(process.pid, number)

    def __enter__(self) -> "ForkedJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()


def run_job(
    words: list[str], output: Path, seconds: float = 60, **options: object
) -> tuple[int, str]:
    """A ForkedJob with these options, to its end, which must come within so many seconds.

    Returns its status and what it has printed.
    """
    with ForkedJob(words, output, **options) as job:
        return job.wait(seconds), job.text()


def metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl. Raises ValueError for one that is no JSON."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def whole_checkpoints(folder: Path) -> tuple[int | None, list[str]]:
    """The newest step whose checkpoint is whole, None without one, and what is wrong with others.

    Looks at the files alone, with sha256sum.
    """
    newest = None
    problems = []
    for path in folder.glob("step-*"):
        if not re.fullmatch(r"step-\d+", path.name):
            continue
        check = ["sha256sum", "--check", "--strict", "--quiet", "checksums.sha256"]
        done = subprocess.run(check, cwd=path, capture_output=True, text=True)
        there = {entry.name for entry in path.iterdir()} - {"checksums.sha256"}
        listed = set()
        if done.returncode == 0:
            lines = (path / "checksums.sha256").read_text().splitlines()
            listed = {line.split("  ", 1)[1] for line in lines}
        if there != listed or ".metadata" not in listed:
            problems.append(f"{path.name} is not whole: {done.stderr}{sorted(there ^ listed)}")
        else:
            newest = max(newest or 0, int(path.name.removeprefix("step-")))
    return newest, problems


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _rank_main(
    rank: int,
    ranks: int,
    port: int,
    words: list[str],
    output: str,
    faults: Faults,
    file_bytes: int,
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    sys.argv = [str(ROOT / "train.py"), *words]
    # Imported here: the process of the tests may not want torch.
    import torch

    from titan_sparse import train

    torch.set_num_threads(1)
    plant(faults)
    sys.exit(train.main())
