"""All tables of long sequences over several GPUs, by one command, for as many GPUs as there are.

    python -m scripts.benchmarks.many_gpus --out many --seconds 570
    python -m scripts.benchmarks.many_gpus --out many --list
    python -m scripts.benchmarks.many_gpus --out toy --device cpu --toy

1  attention scaling on 1, 2, 4 and 8 GPUs, beside torch's context_parallel; a double ring over two
   pretended nodes
2  packed documents and a window, beside what MagiAttention published
3  Qwen3-8B's step at 1,048,576 tokens, sparse and dense, beside what TRL published
4  Llama-3.1-8B at 524,288 tokens, Qwen2.5-3B at 2,097,152 and at the longest that fits
5  NCCL parity on three meshes, a hang, a soak of 200 steps, a restart, a kill

Each run is a program of its own, with less than eight minutes. Its results are OUT/NAME.json,
written row by row. What is complete is not done again: with --seconds, what would not fit any more
is left, and the same command goes on. A run that fails is recorded with its error, and the others
go on. What needs more GPUs than there are is recorded as not run. At the end all results in OUT are
printed as tables with the goals beside them, and written to OUT/tables.md. Without flash-attn-4 the
kernels are triton's; rows say so.

Status 0: all runs that were asked for and can run here are complete; 1: some failed; 3: none
failed, and some are left.
"""

import argparse
import functools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from scripts.benchmarks.many_gpus import results
from scripts.benchmarks.many_gpus.runs import PARTS, Run, runs
from scripts.benchmarks.many_gpus.tables import tables
from scripts.benchmarks.options import positive
from scripts.benchmarks.provenance import versions

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 470
"""Of a run."""

ORPHANS_SECONDS = 5
"""Until ranks have seen that their torchrun is dead, and have given their memory back."""

LEFT = 3
"""The exit status if some runs are left."""


def main(words: list[str]) -> int:
    args = parse(words)
    gpus = args.gpus or (2 if args.device == "cpu" else torch.cuda.device_count())
    if not gpus:
        print("there is no GPU here; write --device cpu --toy to try it out", file=sys.stderr)
        return 2
    plan = runs(gpus, args.toy)
    asked = [run for run in plan if run.part in args.parts and is_asked(run, args.only)]
    if args.list:
        print(listing(asked, gpus))
        return 0
    out = Path(args.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.seconds if args.seconds else math.inf
    statuses = set()
    for run in asked:
        status = carry_out(run, args, gpus, ends)
        statuses.add(status)
        print(f"part {run.part}  {run.name}: {status}", flush=True)
    text = tables(out)
    (out / "tables.md").write_text(text)
    print(text)
    if "failed" in statuses:
        return 1
    return LEFT if "left" in statuses else 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options; exits with status 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.many_gpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", default="outputs/many_gpus", help="folder of the results")
    add("--parts", type=int, nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--only", nargs="+", default=[], help="of these parts, runs whose names begin so")
    add("--again", action="store_true", help="what is complete too")
    add("--list", action="store_true", help="print the runs with their expected seconds, and stop")
    add("--seconds", type=float, help="for all runs together; default: as long as it takes")
    add("--gpus", type=positive, help="use fewer than there are")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--toy", action="store_true", help="sizes for a CPU, which say nothing")
    args = parser.parse_args(words)
    if (args.device == "cpu") != args.toy:
        parser.error("--device cpu and --toy go together; write both or none")
    return args


def is_asked(run: Run, names: list[str]) -> bool:
    return not names or any(run.name.startswith(name) for name in names)


def listing(asked: list[Run], gpus: int) -> str:
    """A line for each run: part, name, GPUs, expected seconds."""
    lines = [f"{'part':>4} {'run':<36} {'GPUs':>4} {'seconds':>8}"]
    for run in asked:
        seconds = f"{run.seconds:8.0f}" if run.ranks <= gpus else "   no GPUs"
        lines.append(f"{run.part:>4} {run.name:<36} {run.ranks:>4} {seconds}")
    return "\n".join(lines)


def carry_out(run: Run, args: argparse.Namespace, gpus: int, ends: float) -> str:
    """Make the run's files that are missing.

    Returns "complete", "was complete", "failed", "left", or why it cannot run here. ends: when
    there is no more time, on the monotonic clock.
    """
    out = Path(args.out)
    missing = list(run.files)
    if not args.again:
        missing = [name for name in missing if not results.is_done(out / f"{name}.json")]
    if not missing:
        return "was complete"
    if run.ranks > gpus:
        return not_run(args, missing, f"needs {run.ranks} GPUs, found {gpus}")
    without = [name for name in missing if name in run.needs_flash and not has_flash()]
    if without:
        status = not_run(args, without, "flash-attn-4 is not installed")
        missing = [name for name in missing if name not in without]
        if not missing:
            return status
    if run.seconds > ends - time.monotonic():
        return "left"
    began = time.monotonic()
    error = start(run, args, missing, min(LIMIT_SECONDS, ends - began))
    seconds = round(time.monotonic() - began, 1)
    for name in missing:
        conclude(out / f"{name}.json", args, error, seconds)
    print(f"{run.name}: {seconds} s, {run.seconds:.0f} were expected", flush=True)
    if error:
        print(error, flush=True)
    return "failed" if error else "complete"


@functools.cache
def has_flash() -> bool:
    """Whether flash-attn-4 is installed. Asking its kernels would make a context on a GPU."""
    return versions()["flash-attn-4"] is not None


def not_run(args: argparse.Namespace, names: list[str], why: str) -> str:
    """Record it, unless there are rows of an earlier call. Returns "not run: " and why."""
    for name in names:
        path = Path(args.out) / f"{name}.json"
        if not results.read(path).get("rows"):
            results.write(path, results.header(args, args.device) | {"not_run": why, "rows": []})
    return f"not run: {why}"


def start(run: Run, args: argparse.Namespace, names: list[str], limit: float) -> str | None:
    """Start the run's program. Returns None, or how it has failed, with its last lines."""
    out = Path(args.out).resolve()
    for name in names:
        # Rows of an earlier try would look like this one's.
        (out / f"{name}.json").unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    log = out / "logs" / f"{run.name}.log"
    with open(log, "w") as file:
        job = subprocess.Popen(
            run.command(out, names),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group that can be killed as a whole
        )
        try:
            status = job.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not over after {limit:.0f} s: {results.last_lines(log)}"
        finally:
            end(job)
    return f"status {status}: {results.last_lines(log)}" if status else None


def end(job: subprocess.Popen) -> None:
    """Kill what is left of its group; ranks end with their torchrun."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        time.sleep(ORPHANS_SECONDS)


def conclude(path: Path, args: argparse.Namespace, error: str | None, seconds: float) -> None:
    """Write into a result how its run has ended. A file that says it is complete stays so."""
    result = results.read(path) or results.header(args, args.device) | {"rows": []}
    if result.get("complete"):
        return
    ended = {"error": error} if error else {"complete": True}
    results.write(path, result | ended | {"run_seconds": seconds})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
