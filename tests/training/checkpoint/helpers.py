"""A run small enough to save and load in milliseconds: one layer, Adam, a loader that counts."""

import errno
import gc
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_sparse.config import Checkpoint
from titan_sparse.training.checkpoint import saver
from titan_sparse.training.checkpoint.checkpointer import Checkpointer, Progress

TEXTS = {"config.toml": "[training]\nsteps = 9\n"}


class CountingLoader:
    """Stands in for the PackedLoader: all that is saved of it is a place,
    which changes in place."""

    def __init__(self) -> None:
        self.places = [0]

    @property
    def sequence(self) -> int:
        return self.places[0]

    def state_dict(self) -> dict[str, Any]:
        return {"places": self.places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = state["places"]


class Run:
    """What a Trainer has, as far as it is saved."""

    def __init__(self, output_dir: Path, width: int = 6, states: dict | None = None, **section):
        torch.manual_seed(0)
        self.folder = output_dir / "checkpoint"
        self.model = nn.Linear(width, 5)
        self.model.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = CountingLoader()
        self.progress = Progress(torch.device("cpu"))
        self.checkpointer = Checkpointer(
            Checkpoint(**{"enable": True, "interval": 1, "keep_latest_k": 0} | section),
            str(output_dir),
            self.model,
            self.optimizer,
            self.loader,
            self.progress,
            states or {},
            TEXTS,
        )

    def step(self) -> None:
        """An update that depends on the random-number state, as dropout's would."""
        self.checkpointer.before_update()
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.loader.places[0] += 1
        self.progress.step += 1
        self.progress.tokens_seen += 10

    def train(self, steps: int) -> "Run":
        """Resume, then train up to `steps` and save after each."""
        self.checkpointer.load()
        while self.progress.step < steps:
            self.step()
            self.checkpointer.raise_failure()
            self.checkpointer.save(self.progress.step)
        self.checkpointer.close()
        return self

    def state(self) -> dict[str, Any]:
        tensors = {name: x.clone() for name, x in self.checkpointer.state()[0].items()}
        counts = {"sequence": self.loader.sequence, **self.progress.state_dict()}
        return tensors | counts


class FullFile(saver.HashedFile):
    def write(self, data) -> int:
        if self.tell() > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(x, right[name]) if isinstance(x, torch.Tensor) else x == right[name]
        for name, x in left.items()
    )


def resumed(folder: Path, **section) -> Run:
    """A run that goes on from what is there."""
    run = Run(folder, **section)
    assert run.checkpointer.load()
    return run


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def open_files(name: str) -> int:
    """How many of this process's open files have `name` in theirs."""
    gc.collect()  # what earlier tests have left would go at any time
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += name in os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the one that listed them
    return count


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def write_sums(checkpoint: Path) -> None:
    """Make the checksums those of the files as they are now, as an attacker would."""
    sums = checkpoint / "checksums.sha256"
    sums.unlink(missing_ok=True)
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(checkpoint.iterdir())
    ]
    sums.write_text("".join(lines))


def join_alone() -> None:
    """A process group of this process alone, unless there is one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
