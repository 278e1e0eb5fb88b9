"""Whether the disk can take what a run will save: told before the first step."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.training.checkpoint.folders import complete_steps


def save_bytes(own: Iterable[Tensor]) -> int:
    """Bytes of a save's tensors over all ranks. own: those that this rank writes. Collective."""
    total = torch.tensor(sum(tensor.nbytes for tensor in own))
    dist.all_reduce(total)
    return int(total)


def expected_bytes(model: nn.Module, optimizers: list[Optimizer]) -> int:
    """Bytes of a save's tensors over all ranks, before the optimizer has made its own.

    Replicas are written once, frozen weights not at all. Adam has two tensors of each parameter's size.
    """
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            total += parameter.numel() * parameter.element_size()
    moments = 0 if all(isinstance(o, torch.optim.SGD) for o in optimizers) else 2
    return total * (1 + moments)


def check_disk(folder: Path, section: Checkpoint, needed_bytes: int, saves_left: int) -> None:
    """Refuse, in one line on all ranks, a folder that can't be written or is too small. Collective.

    needed_bytes: of one save. saves_left: what the run will do at most. Rotation deletes the oldest
    only when the new one is whole, so that for a moment there is one more than keep_latest_k.
    Raises Refusal.
    """
    problem = _write_problem(folder)
    if not problem and dist.get_rank() == 0:
        problem = _space_problem(folder, section, needed_bytes, saves_left)
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for text in problems:
        if text:
            raise Refusal(text)


def _write_problem(folder: Path) -> str:
    probe = folder / f".probe-{dist.get_rank()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY)
        os.close(descriptor)
        probe.unlink()
    except OSError as error:
        return (
            f"checkpoints can't be written to {folder} ({error.strerror}); "
            "write another training.output_dir, or checkpoint.enable = false"
        )
    return ""


def _space_problem(folder: Path, section: Checkpoint, needed_bytes: int, saves_left: int) -> str:
    saves = 1
    if section.keep_latest_k:
        room_for = section.keep_latest_k + 1 - len(complete_steps(folder))
        saves = max(1, min(saves_left, room_for))
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= saves * needed_bytes:
        return ""
    return (
        f"{folder} has {_gib(free_bytes)} GiB free, a save needs {_gib(needed_bytes)} GiB and up to "
        f"{saves} more will be there at once; free some, lower checkpoint.keep_latest_k = "
        f"{section.keep_latest_k}, or write another training.output_dir"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
