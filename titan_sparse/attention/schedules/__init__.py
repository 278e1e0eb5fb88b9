"""Execute the schedules: one file each, all with the same functions (`Executor`).

The table of schedules, as integers, is context_parallel/schedule.py.
"""

from typing import Protocol

from torch import Tensor

from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.schedule import Moves
from titan_sparse.attention.schedules import all_gather, group_cast, ring, single


class Executor(Protocol):
    """The functions that a file of this folder offers, by what its schedule moves."""

    def forward(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the keys and values of the gathered
        verticals [2, B, Hq, C, D]."""

    def backward(
        self, call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's q, k and v, in their dtype."""


EXECUTORS: dict[Moves, Executor] = {
    Moves.NOTHING: single,
    Moves.CHUNKS: ring,
    Moves.HEADS: all_gather,
    Moves.BLOCKS: group_cast,
}
