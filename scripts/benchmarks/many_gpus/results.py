"""The result files of scripts.benchmarks.many_gpus: JSON, written anew after each row.

A file has the keys of provenance() and `rows`. `complete`: its run has ended as it should. `error`:
how it ended otherwise; the rows until then are there. `not_run`: why there is nothing.
"""

import argparse
import json
import os
from pathlib import Path

import torch

from scripts.benchmarks.provenance import output_of, provenance

LAST_LINES = 15
"""Of a program that failed, which are recorded."""


def read(path: Path) -> dict:
    """A result; {} where there is none."""
    return json.loads(path.read_text()) if path.is_file() else {}


def write(path: Path, result: dict) -> None:
    """All at once: a run that is killed leaves a whole file."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


def is_done(path: Path) -> bool:
    return bool(read(path).get("complete"))


def header(args: argparse.Namespace, device: str) -> dict:
    """provenance(), with all GPUs' names, by a process that must leave their memory to others.

    torch would make a context on a GPU to know its name.
    """
    about = provenance(args, "cpu")
    if device == "cuda":
        names = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
        about["gpu"] = names.partition("\n")[0] or None
        about["gpus_here"] = torch.cuda.device_count()
    return about


def last_lines(log: Path) -> str:
    """What a program printed last; empty if nothing."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])
