"""What the numbers of a benchmark belong to: command, commit, date, GPU, versions, options."""

import argparse
import datetime
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


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
    """The GPU's name, or CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None for what is not there."""
    drivers = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flash-attn-4": _version("flash-attn-4"),
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": drivers.partition("\n")[0] or None,
    }


def _version(package: str) -> str | None:
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
