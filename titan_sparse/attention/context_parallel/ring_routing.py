"""Compute which hops a KV chunk and its gradient must make.

A rank does not pass on a chunk that no later rank needs, and a gradient travels only once it
exists. All ranks know the index and compute the same hops, so they need no messages about what to
expect.

Ranks are numbered [inter][intra]. A plain ring is inter = 1. In window o a chunk is o nodes from
home. At step t of a window it is t inner hops further.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel.schedules import ring_windows


class Hops(NamedTuple):
    """The hops that the chunks of W source ranks make, or their gradients.

    inner: bool [W, inter, intra]. In window o, hop t goes from step t's place on the inner ring to
    the next. outer: bool [W, inter]. Hop o goes from window o's node to the next.
    """

    inner: Tensor
    outer: Tensor


class Route(NamedTuple):
    """The actions of one rank in a ring, by [window][step].

    sources: the rank whose chunk it has. computes: whether it computes on that chunk. inner, outer:
    whether it sends and receives in a chunk's hop to the next rank, and by [window] in that of the
    window's first chunk to the next node. gradient_inner, gradient_outer: the same for gradients.
    After the last window a gradient comes home, to the rank that had the chunk in the first.
    """

    sources: list[list[int]]
    computes: list[list[bool]]
    inner: list[list[list[bool]]]
    outer: list[list[bool]]
    gradient_inner: list[list[list[bool]]]
    gradient_outer: list[list[bool]]

    @property
    def computing_steps(self) -> int:
        return sum(sum(window) for window in self.computes)


class Traffic(NamedTuple):
    """The amount that each of W ranks sends. int64 [W] in chunks, or [W, stages] in blocks
    (group_cast).

    inside: to ranks of its own node. across: to ranks of other nodes.
    """

    inside: Tensor
    across: Tensor


def route_of(inter: int, intra: int, rank: int, needed: Tensor) -> Route:
    """needed: bool [W, W] on the host, rank r computes on the chunk of rank s."""
    # The cache of _route() needs values that it can hash.
    return _route(inter, intra, rank, needed.numpy().tobytes())


@functools.lru_cache(maxsize=64)
def _route(inter: int, intra: int, rank: int, needed_bytes: bytes) -> Route:
    """Cached: the route is the same for all layers, and computing it takes a hundred small
    operations of the host."""
    # [inter, intra]
    sources = torch.tensor(ring_windows(inter, intra, rank), device="cpu")
    ranks = inter * intra
    needed = torch.frombuffer(bytearray(needed_bytes), dtype=torch.bool).view(ranks, ranks)
    window = torch.arange(inter, device="cpu")
    place = torch.arange(intra, device="cpu")
    hops = []
    for find in (hops_needed, gradient_hops):
        made = find(needed, inter, intra)
        # A rank sends what it holds, and receives what it holds next.
        inner = [made.inner[sources.roll(by, 1), window[:, None], place] for by in (0, -1)]
        outer = [made.outer[sources[:, 0].roll(by), window] for by in (0, -1)]
        hops += [torch.stack(inner, -1).tolist(), torch.stack(outer, -1).tolist()]
    # A rank always computes on its own chunk.
    computes = needed[rank, sources] | (sources == rank)
    return Route(sources.tolist(), computes.tolist(), *hops)


def visited_ranks(inter: int, intra: int) -> Tensor:
    """int64 [W, inter, intra]: the rank where the chunk of rank s is in window o at step t.

    This is the inverse of the schedules: a plain ring of 3 ranks is [[[0, 1,
    2]], [[1, 2, 0]], ...].
    """
    # [W, 1, 1], [inter, 1] and [intra]
    source = torch.arange(inter * intra, device="cpu")[:, None, None]
    window = torch.arange(inter, device="cpu")[:, None]
    step = torch.arange(intra, device="cpu")
    # Ranks are numbered node by node.
    source_node = source // intra
    source_local_rank = source % intra
    # A window is one node further, a step one rank further inside the node.
    node = (source_node + window) % inter
    local_rank = (source_local_rank + step) % intra
    return node * intra + local_rank


def users(needed: Tensor, inter: int, intra: int) -> Tensor:
    """bool [W, inter, intra]: the chunk of rank s is needed where it is in window o at step t.

    needed: bool [W, W], rank r needs the chunk of rank s (needed_keys.needed_chunks).
    """
    # [W, inter, intra] and [W, 1, 1]
    receiver = visited_ranks(inter, intra)
    source = torch.arange(len(needed), device="cpu")[:, None, None]
    return needed[receiver, source]


def hops_needed(needed: Tensor, inter: int, intra: int) -> Hops:
    """Hops of the KV chunks.

    Inside each node a chunk goes up to the furthest rank that needs it, and on the outer ring up to
    the furthest node that does. It passes through nodes that do not need it without visiting their
    other ranks.
    """
    used = users(needed, inter, intra)
    return Hops(inner=_used_later(used), outer=_used_later(used.any(-1)))


def gradient_hops(needed: Tensor, inter: int, intra: int) -> Hops:
    """Hops of the gradients, which travel one step behind their chunks and are summed on the way.

    Inside a node a gradient begins at the first user away from where the chunk entered the node. It
    goes on around the ring, past the furthest user, to the rank where the chunk entered, whose own
    share waits there. It travels between nodes in the same way, and then home. Nothing travels
    for a chunk that is used only where it entered.
    """
    used = users(needed, inter, intra)
    return Hops(inner=_used_so_far(used), outer=_used_so_far(used.any(-1)))


def _used_later(used: Tensor) -> Tensor:
    """True if a later place along the last dim is used."""
    return used.sum(-1, keepdim=True) > used.cumsum(-1)


def _used_so_far(used: Tensor) -> Tensor:
    """True if this place along the last dim is used, or one before it, the first left out."""
    return used.cumsum(-1) > used[..., :1].long()


def traffic(hops: Hops, node_size: int) -> Traffic:
    """Chunks that each rank sends. node_size: ranks of a node, which for a plain ring is not intra.

    In a plain ring the last rank of a node sends across. In a double ring every rank does, by the
    outer hops.
    """
    ranks, inter, intra = hops.inner.shape
    # [W, inter, intra], and [W, inter] where a chunk comes into each node
    visited = visited_ranks(inter, intra)
    entered = visited[..., 0]
    inside, across = torch.zeros(2, ranks, dtype=torch.int64, device="cpu")
    for made, sender, receiver in (
        (hops.inner, visited, visited.roll(-1, 2)),
        (hops.outer, entered, entered.roll(-1, 1)),
    ):
        stays = sender // node_size == receiver // node_size
        inside += sender[made & stays].bincount(minlength=ranks)
        across += sender[made & ~stays].bincount(minlength=ranks)
    return Traffic(inside, across)


def all_gather_traffic(ranks: int, node_size: int) -> Traffic:
    """Chunks that each rank sends in an all-gather around a ring of all ranks.

    This is how NCCL moves large ones. It is like a plain ring, except that NCCL makes rings through
    every rank's network link. What crosses to the next node is therefore counted evenly over the
    node's ranks, rounded up.
    """
    across = 0
    if ranks > node_size:
        across = -(-(ranks - 1) // node_size)
    return Traffic(
        torch.full((ranks,), ranks - 1 - across, device="cpu"),
        torch.full((ranks,), across, device="cpu"),
    )
