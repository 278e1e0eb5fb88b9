"""How long ranks wait for each other: long while the first step compiles and while a checkpoint is written, else short.

A collective has the timeout that its process group had when it began.
"""

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist


def set_timeout(seconds: float, without: Collection[dist.ProcessGroup] = ()) -> None:
    """Change the timeout of every process group made so far, those of meshes and of ContextParallel too.

    without: groups that keep theirs. Before it gets shorter all ranks should meet(): else one begins a short collective
    that another, still compiling or writing, will join late.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in without:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def meet() -> None:
    """Wait until all ranks are here, under the timeout that holds. On the CPU, so that no GPU is waited for."""
    dist.all_reduce(torch.zeros(()))
