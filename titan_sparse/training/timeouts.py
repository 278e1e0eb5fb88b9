"""How long ranks wait for each other.

Long while the first step compiles and while a checkpoint is written, short otherwise. A collective
has the timeout that its process group had when the collective began.
"""

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist


def set_timeout(seconds: float, without: Collection[dist.ProcessGroup] = ()) -> None:
    """Change the timeout of every process group made so far, those of meshes and of ContextParallel
    included.

    without: groups that keep theirs. Before the timeout gets shorter all ranks should meet().
    Otherwise one begins a short collective that another, still compiling or writing, joins too late.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in without:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def meet() -> None:
    """Wait until all ranks are here, under the current timeout.

    On the CPU, so that no GPU is waited for.
    """
    dist.all_reduce(torch.zeros(()))
