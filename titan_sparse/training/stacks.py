"""What a rank is doing, written to files when nothing moves: Python stacks, and NCCL's records."""

import faulthandler
import os
from pathlib import Path

import torch

_MAX_TRACE_BYTES = 64 * 2**20
"""Of NCCL's flight recorder, which keeps a few thousand entries: a bound for the disk."""


def record_collectives() -> None:
    """Have NCCL's flight recorder keep the last collectives, unless the environment says otherwise.

    Call it before any process group is made.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")


def write_stacks(folder: Path, rank: int) -> None:
    """Into folder: stacks_rank_N.txt, the stacks of all threads of this process; and on GPUs
    nccl_trace_rank_N, for `torchfrtrace --prefix nccl_trace_rank_ FOLDER`.

    Raises OSError if they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"stacks_rank_{rank}.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    if torch.cuda.is_available():
        # Pickled by torch. Without stacks: they would make it many times longer.
        trace = torch._C._distributed_c10d._dump_nccl_trace(includeStackTraces=False)
        if len(trace) <= _MAX_TRACE_BYTES:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
