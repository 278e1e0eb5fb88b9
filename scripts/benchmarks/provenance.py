"""What the numbers of a benchmark belong to: command, commit, date, GPU, versions, options.

No other file writes these. What an old result file lacks says so: "unknown: " and why.
"""

import argparse
import datetime
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

KEYS = ("command", "commit", "date", "gpu", "versions")
"""What every result file has, at its top."""

UNKNOWN = "unknown: "
"""Begins a value that nobody has recorded; why follows."""


def provenance(args: argparse.Namespace, device: str | torch.device = "cuda") -> dict:
    """The first keys of every result file. The options hold the shapes that rows do not repeat.

    device: where the numbers were taken, cuda or cpu.
    """
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "gpu": device_name(device),
        "versions": versions(),
        "options": vars(args),
    }


def of_start(start: dict) -> dict:
    """The same for a training run, without the options. start: the content of its start.json."""
    words = shlex.split(start["command"])
    # Without the interpreter and its own options: python -u train.py, python -m titan_sparse.train.
    places = [i for i, word in enumerate(words) if word.endswith(".py") or word == "-m"]
    command = f"{UNKNOWN}the run was no program of its own"
    if places:
        first = places[0]
        program = [os.path.basename(words[first]), *words[first + 1 :]]
        ranks = str(start["world_size"])
        command = shlex.join(["torchrun", "--nproc-per-node", ranks, *program])
    git = start["git"]
    commit = f"{UNKNOWN}the run was started outside of a checkout"
    if git is not None:
        commit = git["commit"] + ("-dirty" if git["changed_files"] else "")
    return {
        "command": command,
        "commit": commit,
        "date": start["date"][:10],
        "gpu": start["ranks"][0]["device"],
        "versions": start["versions"],
    }


def problems(result: dict) -> list[str]:
    """What is wrong or missing in a result file's origin. Empty if it is complete."""
    found = [f"{key} is missing" for key in KEYS if not result.get(key)]
    if found:
        return found
    versions = result["versions"]
    if not isinstance(versions, dict) or not versions.get("torch"):
        found.append("versions has no torch")
    if not re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"]):
        found.append(f"date is {result['date']!r}")
    hexadecimal = r"[0-9a-f]{40}(-dirty)?"
    is_told = result["commit"].startswith((UNKNOWN, "none: "))
    if not is_told and not re.fullmatch(hexadecimal, result["commit"]):
        found.append(f"commit is {result['commit']!r}")
    for key in ("command", "commit", "gpu"):
        if result[key].startswith(UNKNOWN) and len(result[key]) < 20:
            found.append(f"{key} is unknown, but not why")
    if result["command"].startswith("each run: "):
        runs = result.get("runs") or result.get("rows") or []
        runs = runs.values() if isinstance(runs, dict) else runs
        if not runs or not all(run.get("command") for run in runs):
            found.append("not each run has its command")
    return found


def command() -> str:
    """This process's command line: python -m MODULE or torchrun -m MODULE, and its options."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:  # run by its path
        program = ["python", os.path.basename(sys.argv[0])]
    else:
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
        if "TORCHELASTIC_RUN_ID" in os.environ:
            ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
            program = ["torchrun", "--nproc-per-node", ranks, *program[1:]]
    return " ".join([*program, *sys.argv[1:]])


def commit() -> str | None:
    """The commit of this checkout, "-dirty" where files differ from it; None without git."""
    described = output_of(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
    return described or None


def device_name(device: str | torch.device) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None for what is not there."""
    drivers = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "torch": torch.__version__,
        "triton": version("triton"),
        "flash-attn-4": version("flash-attn-4"),
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": drivers.partition("\n")[0] or None,
    }


def version(package: str) -> str | None:
    """None for what is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(words: list[str]) -> str:
    """What a command prints; empty if it fails or does not exist."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
