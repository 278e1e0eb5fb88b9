"""The origin of a benchmark's numbers: command, commit, date, GPU, versions, options."""

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

import torch

from titan_sparse.training import run_folder
from titan_sparse.training.run_folder import git_commit, version_of

ROOT = Path(__file__).parents[2]


def provenance(args: argparse.Namespace, device: str | torch.device = "cuda") -> dict:
    """The first keys of every result file. The options hold the shapes that rows do not repeat.

    device: where the numbers were taken, cuda or cpu.
    """
    on_gpu = torch.device(device).type == "cuda"
    return {
        "command": command(),
        "commit": commit_of(git_commit(ROOT / "pyproject.toml")),
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "versions": versions(),
        "options": vars(args),
    }


def commit_of(git: dict | None) -> str:
    """git: what git_commit() found. "-dirty" where files differ from the commit."""
    if git is None:
        return "unknown: the run was started outside of a checkout"
    return git["commit"] + ("-dirty" if git["changed_files"] else "")


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


PACKAGES = (
    *("flash-attn", "liger-kernel", "cut-cross-entropy"),
    *("transformers", "accelerate", "peft"),
)


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on: those of a run, and more. None
    for what is not there."""
    return {
        **run_folder.versions(),
        **{package: version_of(package) for package in PACKAGES},
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": output_of("nvidia-smi --query-gpu=driver_version --format=csv,noheader"),
    }


def output_of(line: str) -> str | None:
    """The first line that a command prints; None if it fails or does not exist."""
    try:
        done = subprocess.run(line.split(), cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0] or None
