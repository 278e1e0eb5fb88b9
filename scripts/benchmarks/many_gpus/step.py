"""Training steps beside what --dry-run expects of them: seconds, tokens/s, MFU, memory, recall.

    python -m scripts.benchmarks.many_gpus.step --ranks 8 --out step.json \\
        --config train_configs/qwen3_8b_1m.toml [--section.key value ...]

Options that are not its own go to train.py, which torchrun starts. A row is a line of metrics.jsonl.
--longest takes the length that --find-max-length says. Without flash-attn-4, "auto" is triton:
`kernel` is the line of the banner.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from scripts.benchmarks.many_gpus import results
from scripts.benchmarks.options import positive
from titan_sparse.training.metrics_output import read_lines

ROOT = Path(__file__).parents[3]
H200_GIB = 139.8

FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "tokens_seen",
    "step_seconds",
    "tokens_per_second_per_device",
    "mfu",
    "memory_gib",
    "density",
    "recall",
    "capped",
    "exposed_communication_share",
)
"""Of metrics.jsonl."""


def main(words: list[str]) -> int:
    args, options = parse(words)
    path = Path(args.out)
    result = results.header(args, args.device) | {"ranks": args.ranks, "train": options}
    if args.longest:
        found = asked(options, args, "--find-max-length")
        result["find_max_length"] = found
        length = re.search(r"training.seq_len = (\d+)", found)
        if not length:
            print(found, file=sys.stderr)
            return 1
        options += ["--training.seq_len", length[1]]
    result["train"] = options
    result["rows"] = []
    results.write(path, result)
    # Beside the start of the run, which takes as long.
    estimate = threading.Thread(target=add_estimate, args=(options, args, result))
    estimate.start()
    with tempfile.TemporaryDirectory() as folder:
        status = train(options, args.ranks, Path(folder), result, path)
    estimate.join()
    results.write(path, result)
    print(results.last_lines(path.with_suffix(".log")))
    return status


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.many_gpus.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=positive, required=True)
    parser.add_argument("--longest", action="store_true", help="the longest sequence that fits")
    parser.add_argument(
        "--device-memory", type=float, default=H200_GIB, help="GiB, of the estimate"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", required=True)
    return parser.parse_known_args(words)


def add_estimate(options: list[str], args: argparse.Namespace, result: dict) -> None:
    """What --dry-run expects."""
    report = asked(options, args, "--dry-run")
    peak = re.search(r"peak ([\d.]+) GiB", report)
    result["expected_gib"] = float(peak[1]) if peak else None
    result["expected"] = report.splitlines()


def asked(options: list[str], args: argparse.Namespace, flag: str) -> str:
    """What train.py prints with --dry-run or --find-max-length."""
    memory = args.device_memory or (H200_GIB if args.device == "cpu" else 0)
    flags = [flag, "--ranks", str(args.ranks)]
    if memory:
        flags += ["--device-memory", str(memory)]
    program = [sys.executable, "train.py", *options, *flags]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def train(options: list[str], ranks: int, run: Path, result: dict, path: Path) -> int:
    """Train in the folder `run`, adding rows to the result as they come. Returns torchrun's status.

    What it prints goes to a file beside the result's.
    """
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", str(ranks), "train.py", *options]
    program += ["--training.output_dir", str(run)]
    # torchrun would say 1, which an optimizer on the CPU feels.
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    log = path.with_suffix(".log")
    began = time.monotonic()
    with open(log, "w") as file:
        job = subprocess.Popen(
            program, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while job.poll() is None:
                time.sleep(0.5)
                add_rows(run, result, path)
        finally:
            # Ranks end with their torchrun.
            job.kill()
    add_rows(run, result, path)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["kernel"] = kernel(log.read_text(errors="replace"))
    return job.returncode


def add_rows(run: Path, result: dict, path: Path) -> None:
    """Bring the result's rows up to what the run has logged."""
    metrics = run / "metrics.jsonl"
    lines = read_lines(metrics) if metrics.is_file() else []
    if len(lines) > len(result["rows"]):
        result["rows"] = [{key: line[key] for key in FIELDS if key in line} for line in lines]
        results.write(path, result)


def kernel(log: str) -> str | None:
    """The banner's line about attention's kernel."""
    found = re.search(r"^ *kernel  (.*)$", log, re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
