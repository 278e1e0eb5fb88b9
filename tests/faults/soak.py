"""A long job under torchrun with a kill -9 every so many steps and one poisoned gradient.

    python -m tests.faults.soak --steps 500 --kill-every 50 --device cuda --out soak.json

It must end by itself with status 0, with every loss that of the job that has the same poisoned step
and no kill, with one skipped update, and with as much memory as at the beginning. Options that are
not its own go to train.py.
"""

import argparse
import dataclasses
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
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.provenance import provenance
from tests.distributed import torchrun
from tests.faults.jobs import ROOT, SETTINGS, metrics, words_of
from tests.faults.kills import options_of
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

MEMORY_GROWTH_GIB = 0.05
MEMORY_GROWTH = 0.02
"""Bounds of what memory may grow by after the first steps."""


@dataclass
class Run:
    status: int
    output: str
    lines: list[dict]
    """of metrics.jsonl"""
    seconds: float
    restart_seconds: list[float] = field(default_factory=list)
    """from each kill to the end of the next step"""


def torchrun_job(
    folder: Path, name: str, settings: dict, faults: Faults, ranks: int, kill_at: list[int]
) -> Run:
    """The job under torchrun, which starts it again after each kill.

    kill_at: a random rank is killed when metrics.jsonl has such a step.
    """
    words = words_of(settings | {"training.output_dir": folder / name})
    program = ROOT / "tests" / "faults" / "planted.py"
    command = torchrun(ranks, program, json.dumps(dataclasses.asdict(faults)), *words)
    command[3:3] = ["--max-restarts", str(len(kill_at)), "--monitor-interval", "0.1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    output = folder / f"{name}.log"
    began = time.monotonic()
    with open(output, "w") as file:
        job = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            restart_seconds = _kill_at_steps(job, folder / name, kill_at)
            status = job.wait()
        finally:
            # Ranks end with their torchrun.
            job.kill()
    seconds = time.monotonic() - began
    return Run(status, output.read_text(), metrics(folder / name), seconds, restart_seconds)


def _kill_at_steps(job: subprocess.Popen, run: Path, kill_at: list[int]) -> list[float]:
    victims = random.Random(0)
    restart_seconds = []
    for step in kill_at:
        _wait_for_step(job, run, step, 0)
        if job.poll() is not None:
            break
        lines = len(metrics(run))
        killed = time.monotonic()
        os.kill(victims.choice(ranks_of(job.pid)), signal.SIGKILL)
        _wait_for_step(job, run, 0, lines + 1)
        restart_seconds.append(time.monotonic() - killed)
    return restart_seconds


def _wait_for_step(job: subprocess.Popen, run: Path, step: int, lines: int) -> None:
    """Until this step is the last, or a later one, there are so many lines, or the job has ended."""
    while job.poll() is None:
        there = metrics(run)
        if len(there) >= max(lines, 1) and there[-1]["step"] >= step:
            return
        time.sleep(0.02)


def ranks_of(torchrun_process: int) -> list[int]:
    """The processes of the job that torchrun has started, in order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is a name in parentheses, the fourth the parent.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == torchrun_process and b"planted.py" in command:
            found.append(int(stat.parent.name))
    return sorted(found)


def differences(disturbed: Run, undisturbed: Run) -> list[float]:
    """|loss - loss of the undisturbed job| of every line. A repeated step counts twice."""
    wanted = {line["step"]: line["loss"] for line in undisturbed.lines}
    return [abs(line["loss"] - wanted[line["step"]]) for line in disturbed.lines]


def memory_growth_gib(run: Run, first_steps: int) -> float:
    """The largest growth of a process's peak after its first steps, in GiB.

    A new process begins where the step number goes back.
    """
    growth = 0.0
    early = 0.0
    last_step = 0
    steps_of_process = 0
    for line in run.lines:
        if line["step"] <= last_step:
            steps_of_process = 0
        last_step = line["step"]
        steps_of_process += 1
        if steps_of_process <= first_steps:
            early = line["memory_gib"]
        growth = max(growth, line["memory_gib"] - early)
    return growth


def problems_of(
    disturbed: Run, undisturbed: Run, steps: int, kill_at: list[int], tolerance: float
) -> list[str]:
    problems = []
    for name, run in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        if run.status != 0:
            problems.append(f"the {name} job ended with {run.status}: {run.output[-2000:]}")
            return problems
        if {line["step"] for line in run.lines} != set(range(1, steps + 1)):
            problems.append(f"the {name} job lacks steps")
        if run.lines[-1]["skipped_updates"] != 1:
            problems.append(f"{name}: {run.lines[-1]['skipped_updates']} skipped updates, not 1")
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+)", disturbed.output)]
    if len(disturbed.restart_seconds) != len(kill_at) or len(resumed) != len(kill_at):
        problems.append(f"{len(kill_at)} kills were planned, resumed at {resumed}")
    worst = max(differences(disturbed, undisturbed))
    if not worst <= tolerance:
        problems.append(f"losses differ by up to {worst}")
    peak = max(line["memory_gib"] for line in undisturbed.lines)
    bound = MEMORY_GROWTH_GIB + MEMORY_GROWTH * peak
    for name, run in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        growth = memory_growth_gib(run, first_steps(kill_at))
        if growth > bound:
            problems.append(f"{name}: memory grew by {growth:.3f} GiB")
    return problems


def first_steps(kill_at: list[int]) -> int:
    """Of a process: in these its memory may still grow."""
    return max(kill_at[0] // 2, 1)


def soak(
    folder: Path,
    settings: dict,
    ranks: int,
    kill_every: int,
    tolerance: float = 0.0,
) -> dict[str, object]:
    write_texts(folder / "texts", documents=200)
    steps = int(settings["training.steps"])
    settings = settings | {"data.source": folder / "texts", "parallelism.cp": ranks}
    kill_at = list(range(kill_every, steps, kill_every))
    # Between two kills, on the last rank.
    faults = Faults(rank=ranks - 1, poisoned=[kill_every + kill_every // 2])
    undisturbed = torchrun_job(folder, "undisturbed", settings, faults, ranks, [])
    disturbed = torchrun_job(folder, "disturbed", settings, faults, ranks, kill_at)
    problems = problems_of(disturbed, undisturbed, steps, kill_at, tolerance)
    results: dict[str, object] = {
        "steps": steps,
        "kills": len(kill_at),
        "poisoned_step": faults.poisoned[0],
        "seconds": round(disturbed.seconds, 1),
        "undisturbed_seconds": round(undisturbed.seconds, 1),
        "restart_seconds": [round(seconds, 1) for seconds in disturbed.restart_seconds],
        "problems": problems,
    }
    if undisturbed.lines and disturbed.lines:
        apart = differences(disturbed, undisturbed)
        results |= {
            "lines": len(apart),
            "lines_equal_to_the_bit": apart.count(0.0),
            "largest_difference_of_losses": max(apart),
            "skipped_updates": disturbed.lines[-1]["skipped_updates"],
            "memory_gib": max(line["memory_gib"] for line in disturbed.lines),
            "memory_growth_gib": memory_growth_gib(disturbed, first_steps(kill_at)),
            "undisturbed_memory_growth_gib": memory_growth_gib(undisturbed, first_steps(kill_at)),
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kill-every", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of losses")
    parser.add_argument("--out", help="file for the numbers, JSON")
    args, options = parser.parse_known_args()

    settings = SETTINGS | (ON_GPU if args.device == "cuda" else {})
    settings |= {"training.steps": args.steps}
    settings |= dict(options_of(options))
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    found = soak(folder, settings, args.ranks, args.kill_every, args.tolerance)
    results = provenance(args, args.device) | {"train": options} | found
    print(json.dumps(found, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    if found["problems"]:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
