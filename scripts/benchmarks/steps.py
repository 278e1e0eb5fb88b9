"""Puts the logged steps of training runs into one result file, with what they belong to.

    python -m scripts.benchmarks.steps "1 GPU=outputs/one" "2 GPUs=outputs/two" --out step.json

The newest start of each run says where it comes from (docs/training.md, "What a run writes"). Runs
of different commits, GPUs or versions are refused, because they cannot be compared.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from scripts.benchmarks.options import parser_of
from scripts.benchmarks.provenance import commit_of
from titan_sparse.commands import refuses
from titan_sparse.data.shards import write_json
from titan_sparse.training.metrics_output import read_metrics


@refuses
def main(words: list[str]) -> int:
    parser = parser_of("scripts.benchmarks.steps", __doc__)
    parser.add_argument("runs", nargs="+", type=named_run, metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(words)
    write_json(args.out, collect(args.runs))
    print(f"wrote {args.out}")
    return 0


def named_run(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text}: write NAME=FOLDER")
    return name, Path(folder)


def collect(runs: list[tuple[str, Path]]) -> dict:
    """The content of the result file. Raises ValueError, one line, for runs that do not belong
    together, and for a folder without a start."""
    result: dict = {"command": "each run: its own key command"}
    parts = {}
    for name, folder in runs:
        starts = sorted((folder / "starts").glob("*/start.json"))
        if not starts:
            raise ValueError(f"{folder} holds no starts/*/start.json; write a run's output_dir")
        start = json.loads(starts[-1].read_text(encoding="utf-8"))
        about = {
            "commit": commit_of(start["git"]),
            "gpu": start["ranks"][0]["device"],
            "versions": start["versions"],
        }
        for key, value in about.items():
            if result.setdefault(key, value) != value:
                raise ValueError(f"{folder} has another {key} than {runs[0][1]}; measure both anew")
        result.setdefault("date", start["date"][:10])
        parts[name] = {
            "command": command_of(start),
            "gpus": start["world_size"],
            "steps": [line for _, line in sorted(read_metrics(folder).items())],
        }
    return result | {"runs": parts}


def command_of(start: dict) -> str:
    """The run's command without paths of its machine. start: the content of its start.json."""
    words = shlex.split(start["command"])
    # Without the interpreter and its own options: python -u train.py, python -m titan_sparse.train.
    for place, word in enumerate(words):
        if word == "-m" or word.endswith(".py"):
            ranks = str(start["world_size"])
            options = words[place + 1 :]
            program = [os.path.basename(word), *options]
            return shlex.join(["torchrun", "--nproc-per-node", ranks, *program])
    return "unknown: the run was no program of its own"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
