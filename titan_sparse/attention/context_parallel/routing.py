"""Which hops a KV chunk and its gradient have to make: pure integers, no process groups.

A chunk that nobody further along needs is not passed on, and a gradient travels only once there is one. All ranks know
the index, so all work this out alike and no message tells another rank what to expect. Ranks count [inter][intra]; a
plain ring is inter = 1. In window o a chunk is o nodes from home; at step t of a window it is t inner hops further.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Hops(NamedTuple):
    """Hops that something of each of W source ranks makes; int64.

    In window o hop t, from step t's place on the inner ring to the next, is made for inner_from[s, o] <= t < inner_to[s, o]
    ([W, inter]); on the outer ring hop o, from window o's node to the next, for outer_from[s] <= o < outer_to[s] ([W]).
    """

    inner_from: Tensor
    inner_to: Tensor
    outer_from: Tensor
    outer_to: Tensor


class Traffic(NamedTuple):
    """How much each of W ranks sends in all, inside its node and across to another; int64 [W], in chunks."""

    inside: Tensor
    across: Tensor


def visited_ranks(inter: int, intra: int) -> Tensor:
    """int64 [W, inter, intra]: the rank where the chunk of rank s is in window o at step t; inverse of the schedules."""
    window, step = torch.arange(inter)[:, None], torch.arange(intra)
    source = torch.arange(inter * intra)[:, None, None]
    return (source // intra + window) % inter * intra + (source % intra + step) % intra


def users(needed: Tensor, inter: int, intra: int) -> Tensor:
    """bool [W, inter, intra]: the chunk of rank s is needed where it is in window o at step t.

    needed: bool [W, W], rank r needs the chunk of rank s (balance.needed_chunks).
    """
    visited = visited_ranks(inter, intra)
    return needed[visited, torch.arange(len(needed))[:, None, None]]


def hops_needed(needed: Tensor, inter: int, intra: int) -> Hops:
    """Hops of the KV chunks: inside each node up to the furthest rank that needs it, and up to the furthest such node.

    On the outer ring it passes through nodes that do not need it, without visiting their other ranks.
    """
    used = users(needed, inter, intra)
    inner, outer = _furthest(used), _furthest(used.any(-1))
    return Hops(torch.zeros_like(inner), inner, torch.zeros_like(outer), outer)


def gradient_hops(needed: Tensor, inter: int, intra: int) -> Hops:
    """Hops of the gradients, which travel one step behind their chunks and are summed on the way.

    They begin at the first user away from where the chunk entered the node (whose own share waits there) and go on around
    the ring, past the furthest user, to that rank; from node to node likewise, and home. Nothing travels for a chunk
    without such users.
    """
    used = users(needed, inter, intra)
    inner, outer = _first(used), _first(used.any(-1))
    return Hops(inner, torch.full_like(inner, intra), outer, torch.full_like(outer, inter))


def traffic(hops: Hops, node_size: int) -> Traffic:
    """Chunks that each rank sends. node_size: ranks of a node, which for a plain ring is not intra.

    The last rank of a node sends across in a plain ring; in a double ring every rank does, by the outer hops.
    """
    size, inter = hops.inner_to.shape
    rank = visited_ranks(inter, size // inter)
    step, window = torch.arange(size // inter), torch.arange(inter)
    inner = (hops.inner_from[..., None] <= step) & (step < hops.inner_to[..., None])
    outer = (hops.outer_from[:, None] <= window) & (window < hops.outer_to[:, None])
    sent = torch.zeros(2, size, dtype=torch.int64)
    for made, sender, receiver in (
        (inner, rank, rank.roll(-1, 2)),
        (outer, rank[..., 0], rank[..., 0].roll(-1, 1)),
    ):
        across = (sender // node_size != receiver // node_size).long()
        sent.view(-1).index_add_(0, (across * size + sender).flatten(), made.flatten().long())
    return Traffic(*sent)


def all_gather_traffic(ranks: int, node_size: int) -> Traffic:
    """Chunks that each rank sends in an all-gather around a ring of all ranks, which is how NCCL moves large ones.

    Like a plain ring, except that NCCL makes rings through every rank's network link: what crosses to the next node is
    counted evenly over the node's ranks, rounded up.
    """
    across = -(-(ranks - 1) // node_size) if ranks > node_size else 0
    return Traffic(torch.full((ranks,), ranks - 1 - across), torch.full((ranks,), across))


def _furthest(used: Tensor) -> Tensor:
    """Largest place along the last dim that is used, 0 if none."""
    return (used * torch.arange(used.shape[-1])).amax(-1)


def _first(used: Tensor) -> Tensor:
    """Smallest place from 1 on along the last dim that is used, the dim's length if none."""
    size = used.shape[-1]
    place = torch.arange(size)
    return torch.where(used & (place > 0), place, size).amin(-1)
