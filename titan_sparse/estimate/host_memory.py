"""CPU memory that a rank takes for what is not on its GPU, from shapes alone.

Python, libraries, the loader and the disk cache come on top.
"""

import os
from pathlib import Path

from titan_sparse.config import Checkpoint
from titan_sparse.estimate.memory import GIB, Step, kept_by_block, master_bytes

HOST_RESERVE = 0.1
"""Share of a machine's memory that stays free, for what is not counted."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_gib(step: Step, checkpoint: Checkpoint) -> dict[str, float]:
    """GiB of one rank by part; a part that takes nothing is left out.

    Of data-parallel replicas each is counted with a whole save, though they share it out.
    """
    parameters = master_bytes(step)
    states = parameters * step.optimizer_states
    parts: dict[str, float] = {}
    if step.offload_optimizer:
        # Weights, their gradients, and what the optimizer keeps.
        parts["optimizer.offload"] = 2 * parameters + states
    if step.offload:
        # All blocks but the last, whose backward comes at once.
        blocks = step.model.layers - 1
        parts["activation_checkpoint.offload"] = blocks * kept_by_block(step)
    if checkpoint.enable and checkpoint.async_mode != "disabled":
        parts["copy for a save"] = parameters + states
    return {part: size / GIB for part, size in parts.items() if size}


def host_of_this_machine() -> float:
    """GiB: its memory, or what a container may have of it."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.is_file():
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit.isdecimal():
            size = min(size, int(limit))
    return size / GIB
