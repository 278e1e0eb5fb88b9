"""A long job under torchrun with a kill -9 every so many steps and one poisoned gradient.

    python -m tests.faults.soak --steps 500 --kill-every 50 --device cuda

It must end by itself with status 0, with every loss that of the job that has the same poisoned step
and no kill, with one skipped update, and with as much memory as at the beginning. Options that are
not its own go to train.py.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.jobs import SETTINGS, metrics, under_torchrun, whole_checkpoints
from tests.faults.planted import Faults
from tests.runs import write_texts

ON_GPU = {
    "model.flavour": "qwen2.5-0.5b",
    "model.layers": 4,
    "model.vocab_size": 512,
    "training.seq_len": 16384,
    "training.device": "cuda",
    "training.dtype": "bfloat16",
    "training.deterministic": "true",
    "attention.block_size": 128,
    "checkpoint.async_mode": "async_with_pinned_mem",
    "checkpoint.interval": 10,
}
"""Some 60 million parameters, 16K tokens a step."""


@dataclass
class Run:
    status: int
    output: str
    lines: list[dict]
    """of metrics.jsonl"""
    restart_seconds: list[float]
    """from each kill to the end of the next step"""

    def memory_growth_gib(self, first_steps: int) -> float:
        """By how much the memory of later steps is above that of the first ones."""
        memory = [line["memory_gib"] for line in self.lines]
        return max(memory) - max(memory[:first_steps])


def torchrun_job(
    folder: Path, name: str, settings: dict, faults: Faults, ranks: int, kill_at: list[int]
) -> Run:
    """The job under torchrun, which starts it again after each kill.

    kill_at: a random rank is killed when metrics.jsonl has such a step.
    """
    settings = settings | {"training.output_dir": folder / name}
    output = folder / f"{name}.log"
    with open(output, "w") as file:
        job = under_torchrun(ranks, settings, faults, file, len(kill_at))
        try:
            restart_seconds = _kill_at_steps(job, folder / name, kill_at)
            status = job.wait()
        finally:
            # Ranks end with their torchrun.
            job.kill()
    return Run(status, output.read_text(), metrics(folder / name), restart_seconds)


def _kill_at_steps(job: subprocess.Popen, run: Path, kill_at: list[int]) -> list[float]:
    victims = random.Random(0)
    restart_seconds = []
    for step in kill_at:
        _wait(job, lambda step=step: metrics(run)[-1:] and metrics(run)[-1]["step"] >= step)
        if job.poll() is not None:
            break
        lines = len(metrics(run))
        killed = time.monotonic()
        os.kill(victims.choice(ranks_of(job.pid)), signal.SIGKILL)
        _wait(job, lambda lines=lines: len(metrics(run)) > lines)
        restart_seconds.append(time.monotonic() - killed)
    return restart_seconds


def _wait(job: subprocess.Popen, condition: Callable[[], object]) -> None:
    while job.poll() is None and not condition():
        time.sleep(0.02)


def ranks_of(torchrun_process: int) -> list[int]:
    """The processes of the job that torchrun has started, in order."""
    children = Path(f"/proc/{torchrun_process}/task").glob("*/children")
    processes = [int(word) for path in children for word in path.read_text().split()]
    return sorted(
        number
        for number in processes
        if b"planted.py" in Path(f"/proc/{number}/cmdline").read_bytes()
    )


def soak(folder: Path, settings: dict, ranks: int, kill_every: int) -> dict[str, object]:
    """What happened, and the list of problems: empty if nothing was lost."""
    write_texts(folder / "texts", documents=200)
    steps = int(settings["training.steps"])
    settings = settings | {"data.source": folder / "texts", "parallelism.cp": ranks}
    kill_at = list(range(kill_every, steps, kill_every))
    # Between two kills, on the last rank.
    faults = Faults(rank=ranks - 1, poisoned=[kill_every + kill_every // 2])
    undisturbed = torchrun_job(folder, "undisturbed", settings, faults, ranks, [])
    disturbed = torchrun_job(folder, "disturbed", settings, faults, ranks, kill_at)
    both = disturbed, undisturbed
    problems = [
        f"a job ended with {run.status}: {run.output[-2000:]}"
        for run in both
        if run.status or {line["step"] for line in run.lines} != set(range(1, steps + 1))
    ]
    problems += whole_checkpoints(folder / "disturbed/checkpoint")[1]
    if problems:
        return {"problems": problems}

    # A repeated step counts twice.
    wanted = {line["step"]: line["loss"] for line in undisturbed.lines}
    apart = [abs(line["loss"] - wanted[line["step"]]) for line in disturbed.lines]
    skipped = [run.lines[-1]["skipped_updates"] for run in both]
    growth = [run.memory_growth_gib(max(kill_every // 2, 1)) for run in both]
    peak = max(line["memory_gib"] for line in disturbed.lines)
    resumed = re.findall(r"resumed at step (\d+)", disturbed.output)
    kills = len(disturbed.restart_seconds)
    checks = {
        f"{kill_at} was planned, resumed at {resumed}": kills == len(resumed) == len(kill_at),
        f"losses differ by up to {max(apart)}": max(apart) == 0,
        f"{skipped} skipped updates, not 1": skipped == [1, 1],
        "a rank ends with a traceback": "Traceback" not in disturbed.output,
        "no killed rank is named": ranks == 1 or "has given no sign of life" in disturbed.output,
        f"memory grew by {growth} GiB": max(growth) <= 0.05 + 0.02 * peak,
    }
    return {
        "kills": kills,
        "restart_seconds": [round(seconds, 1) for seconds in disturbed.restart_seconds],
        "lines": len(apart),
        "lines_equal_to_the_bit": apart.count(0.0),
        "skipped_updates": skipped[0],
        "memory_gib": peak,
        "memory_growth_gib": growth,
        "problems": [problem for problem, holds in checks.items() if not holds],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kill-every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args, options = parser.parse_known_args()

    settings = SETTINGS | (ON_GPU if args.device == "cuda" else {})
    settings |= {"training.steps": args.steps}
    words = [word.removeprefix("--") for word in options]
    settings |= dict(zip(words[::2], options[1::2], strict=True))
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    found = soak(folder, settings, args.ranks, args.kill_every)
    print(json.dumps(found, indent=1))
    if found["problems"]:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
