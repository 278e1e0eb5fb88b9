"""Execute the schedules: one loop over steps (steps.py), and a file for what each schedule moves.

The table of schedules, as integers, is context_parallel/schedule.py.
"""

from torch import Tensor

from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel.schedule import Moves
from titan_sparse.attention.schedules import gathered, ring, steps
from titan_sparse.attention.schedules.all_gather import AllGather
from titan_sparse.attention.schedules.group_cast import GroupCast
from titan_sparse.attention.schedules.ring import Ring
from titan_sparse.attention.schedules.single import Single

TRANSPORTS: dict[Moves, type[steps.Transport]] = {
    Moves.NOTHING: Single,
    Moves.CHUNKS: Ring,
    Moves.HEADS: AllGather,
    Moves.BLOCKS: GroupCast,
}


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, Hq, S_local, D], lse [B, Hq, S_local], and the keys and values of the gathered
    verticals [2, B, Hq, C, D]."""
    geometry = gathered.geometry_of(call, len(q))
    if geometry is not None:
        no_verticals = q.new_empty(2, *q.shape[:2], 0, q.shape[3])
        return *gathered.forward(call, geometry, q, k, v), no_verticals
    call.count_plain_ring(k)
    return steps.forward(call, TRANSPORTS[call.cp.moves], q, k, v)


def backward(
    call: AttentionCall, queries: Queries, k: Tensor, v: Tensor, vertical_kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, in their dtype."""
    geometry = gathered.geometry_of(call, len(k))
    if geometry is not None:
        return gathered.backward(call, geometry, queries, k, v)
    call.count_plain_ring(k, backward=True)
    if call.cp.moves is Moves.CHUNKS and ring.circulates_queries_of(call, queries.q, k):
        return ring.backward_with_queries_circulating(call, queries, k, v, vertical_kv)
    return steps.backward(call, TRANSPORTS[call.cp.moves], queries, k, v, vertical_kv)
