"""Training jobs for tests that plant faults: train.py's program in forks of a process that has
loaded torch already.

A start takes a second instead of the eight of a new interpreter. Everything else is as torchrun
would have it: arguments, environment, output, exit status.
"""

import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import torch

from tests.distributed import forkserver, set_variables, torchrun
from tests.faults.planted import Faults, plant
from tests.runs import write_texts
from titan_sparse.commands import train
from titan_sparse.config.reading import as_words

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


def run_job(
    words: list[str],
    output: Path,
    ranks: int = 1,
    faults: Faults | None = None,
    file_bytes: int = 0,
) -> tuple[int, str]:
    """A job of `ranks` processes to its end. One that does not end within a minute is killed.

    words: train.py's command line. output: the file that stdout and stderr of all ranks go to.
    file_bytes: no process can write a file that is longer. Returns the job's status, which is 0 or
    that of the first rank that did not end with 0, and what it has printed.
    """
    # torchtitan asks for GPUs when it is imported, which must not start CUDA before the fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = forkserver()
    shared = (ranks, free_port(), words, str(output), faults or Faults(), file_bytes)
    processes = [context.Process(target=_rank_main, args=(rank, *shared)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()
    status = next((process.exitcode for process in processes if process.exitcode), 0)
    return status, output.read_text(errors="replace")


def under_torchrun(
    ranks: int, settings: dict[str, object], faults: Faults, output: IO, restarts: int = 0
) -> subprocess.Popen:
    """Starts a job, whose ranks torchrun starts again after a failure."""
    program = ROOT / "tests/faults/planted.py"
    words = [json.dumps(dataclasses.asdict(faults)), *as_words(settings)]
    command = torchrun(ranks, program, *words)
    command[3:3] = ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def run_under_torchrun(
    folder: Path, ranks: int, settings: dict[str, object], faults: Faults
) -> str:
    """What a job prints that must fail within 150 seconds. No process of it may be left."""
    write_texts(folder / "texts")
    paths = {"training.output_dir": folder / "run", "data.source": folder / "texts"}
    with open(folder / "log", "w") as output:
        job = under_torchrun(ranks, SETTINGS | paths | settings, faults, output)
        status = job.wait(150)
    printed = (folder / "log").read_text()
    assert status == 1, printed
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(bytes(folder) in line for line in lines), printed
    return printed


def metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl. Raises ValueError for one that is no JSON."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def whole_checkpoints(folder: Path) -> tuple[int | None, list[str]]:
    """The newest step whose checkpoint is whole, None without one, and what is wrong with others.

    Looks at the files alone, with sha256sum.
    """
    whole, problems = [], []
    for path in folder.glob("step-*[0-9]"):
        check = ["sha256sum", "--check", "--strict", "--quiet", "checksums.sha256"]
        done = subprocess.run(check, cwd=path, capture_output=True, text=True)
        lines = (path / "checksums.sha256").read_text().splitlines() if not done.returncode else []
        listed = {line.split("  ", 1)[1] for line in lines} | {"checksums.sha256"}
        if {entry.name for entry in path.iterdir()} == listed >= {".metadata"}:
            whole.append(int(path.name.removeprefix("step-")))
        else:
            problems.append(f"{path.name} is not whole: {done.stderr}")
    return max(whole, default=None), problems


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _rank_main(
    rank: int, ranks: int, port: int, words: list[str], output: str, faults: Faults, file_bytes: int
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    torch.set_num_threads(1)
    if ranks > 1:
        set_variables(rank, ranks)
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv = [str(ROOT / "train.py"), *words]
    plant(faults)
    sys.exit(train.main())
