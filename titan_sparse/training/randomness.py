"""The random draws of a step. A resumed run draws the same."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from titan_sparse.config import Config
from titan_sparse.models.initialization import stable_seed

_STEPS_APART = 1_000_003
"""Steps after which a run would look at the rows of a run with the next training.seed."""


def probe_seed(training_seed: int, step: int) -> int:
    """From which probes draw their rows in this step, the same on all ranks and in a resumed run."""
    return (training_seed * _STEPS_APART + step) % 2**32


def draw_dropout(config: Config, step: int) -> None:
    """Seed the dropout of adapters: the same in a resumed run, and different on each rank."""
    if config.lora.dropout:
        name = f"dropout of step {step} on rank {dist.get_rank()}"
        torch.manual_seed(stable_seed(config.training.seed, name))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop nothing within the block. Afterwards each module drops as before."""
    dropouts = [
        module for module in model.modules() if isinstance(module, nn.Dropout) and module.training
    ]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()
