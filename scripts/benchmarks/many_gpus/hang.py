"""A rank that hangs, and one that dies: is it named, and how soon is the job over?

    python -m scripts.benchmarks.many_gpus.hang --ranks 8 --out hang.json

A row is a fault of rank 1 in the third step: the line that names it, and the seconds from the fault
to the end of all processes. Status 1 if a rank is not named, or another one is.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from scripts.benchmarks.many_gpus import results
from scripts.benchmarks.many_gpus.parity import COMMON, WORDS
from scripts.benchmarks.options import positive
from tests.training.test_watch import run_until_it_ends

TIMEOUT_SECONDS = 8

FAULTS = {
    "hang": ("time.sleep(1e6)", "holds up the others in step 3"),
    "kill": (
        "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)",
        "has given no sign of life, last seen in step 3",
    ),
}
"""{name: (what the rank does, how it is named)}."""


def main(words: list[str]) -> int:
    args = parse(words)
    path = Path(args.out)
    result = results.header(args, args.device) | {"ranks": args.ranks, "rows": []}
    for fault in args.faults:
        result["rows"].append(row(fault, args.ranks, args.device))
        results.write(path, result)
    return 0 if all(row["named"] for row in result["rows"]) else 1


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.many_gpus.hang",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--ranks", type=positive, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(words)
    if args.ranks < 2:
        parser.error("--ranks 1: nobody waits for the only rank; write 2 or more")
    return args


def row(fault: str, ranks: int, device: str) -> dict:
    """Plant the fault. AssertionError if the job ends well, or leaves a process behind."""
    action, how = FAULTS[fault]
    words = [*WORDS[device], *COMMON]
    # ["--key", "value", ...] -> {"key": "value"}
    options = {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2])}
    options |= {"parallelism.cp": ranks, "parallelism.timeout_seconds": TIMEOUT_SECONDS}
    with tempfile.TemporaryDirectory() as folder:
        output, seconds = run_until_it_ends(Path(folder), ranks, 1, action, options)
    lines = [line for line in output.splitlines() if how in line]
    others = [
        line for line in lines if re.search(rf"rank (?!1 )\d+ \(host \S+ process \d+\) {how}", line)
    ]
    return {
        "fault": fault,
        "named": any(re.search(rf"rank 1 \(.*{how}", line) for line in lines) and not others,
        "line": lines[0] if lines else None,
        "seconds": round(seconds, 1),
        "timeout_seconds": TIMEOUT_SECONDS,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
