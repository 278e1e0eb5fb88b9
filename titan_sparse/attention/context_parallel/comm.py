"""All communication between the ranks of one sequence inside attention.

No other file of the attention package communicates. Inner, outer and gradient transfers each have
a communicator of their own: on a shared one a fast inner hop queues behind the slow outer one.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, where the old names warn; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GROUPS: weakref.WeakValueDictionary[tuple, dist.ProcessGroup] = weakref.WeakValueDictionary()
"""Communicators by description and ranks. Each takes memory and a second to connect, so all that
live at the same time share them."""


@dataclass
class Pending:
    """A transfer or a collective in flight, or a result that needed none.

    kept: what is sent; it must live until it is there, and no longer.
    """

    result: Any
    works: Sequence[dist.Work | None] = ()
    kept: Any = None

    def wait(self) -> Any:
        for work in self.works:
            # None if the collective ran on the stream of compute.
            if work is not None:
                work.wait()
        self.works = ()
        self.kept = None
        return self.result


class Communicator:
    """The communicators of one context-parallel group, its buffers, and its counters.

    ranks: the global ranks of the group. size: their number. rank: this one's place among them.
    sent: bytes that this rank has sent so far. Keys, values, queries and gradients are counted by
    axis ("inner", "outer", "inner_gradient", "outer_gradient"); "verticals" are the gathered
    verticals and their gradients; "collectives" is everything that makes a rank wait: selection
    and statistics. Of a sum over W ranks each rank sends 2 (W - 1) / W of its size, as in NCCL's
    rings.
    plain_ring_bytes: what a ring would have sent in which each chunk visits every rank.
    """

    def __init__(self, nodes: list[list[int]], has_node_axis: bool, device_type: str):
        """nodes: global ranks, [inter][intra]. Collective over them.

        has_node_axis: inner communicators span a node, outer ones the nodes; else the inner ones
        span all ranks.
        """
        self.ranks = [rank for node in nodes for rank in node]
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if self.size > 1 else 0
        self.sent: Counter[str] = Counter()
        self.plain_ring_bytes = 0
        self.memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        inner, outer = self.ranks, [self.ranks[self.rank]]
        if has_node_axis:
            node, local_rank = divmod(self.rank, len(nodes[0]))
            inner = nodes[node]
            outer = [other[local_rank] for other in nodes]
        members = {"verticals": self.ranks, "inner": inner, "outer": outer}
        members |= {"inner_gradient": inner, "outer_gradient": outer}
        self.groups = {"collectives": _group(self.ranks, "cp")}
        for axis, ranks in members.items():
            self.groups[axis] = _group(ranks, f"cp {axis}", transfers=device_type == "cuda")
        # Whoever still holds this object when Python ends: gloo's threads must not meet an
        # interpreter that is gone, which aborts the process.
        weakref.finalize(self, self.groups.clear)

    # Collectives that make a rank wait

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over ranks."""
        return self._sum(x.contiguous(), "collectives").wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """x of all ranks: [ranks, *x.shape]."""
        if self.size == 1:
            return x[None]
        return self._gather(x, x.new_empty(self.size, *x.shape), "collectives").wait()

    def all_to_all(self, x: Tensor, axis: str = "collectives") -> Tensor:
        """Send x[r] to rank r of an axis: [ranks, ...]. Returns what came, by
        sender: [ranks, ...]."""
        once_each = [1] * len(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self.start_exchange(x.contiguous(), once_each, once_each, axis, out).wait()

    # Collectives that run beside compute

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Begin to sum x over ranks, in place.

        x: contiguous keys and values of verticals, or their gradients.
        """
        return self._sum(x, "verticals")

    def start_all_gather(self, x: Tensor, slot: str) -> Pending:
        """Begin to gather x of all ranks, [ranks, *x.shape], into the buffer `slot`."""
        return self._gather(x, self.rows(slot, x[None], self.size), "inner")

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        """Begin to sum x[r] over ranks, on rank r: [ranks, ...] -> [...]."""
        self.sent["inner_gradient"] += x[1:].nbytes
        out = torch.empty_like(x[0])
        group = self.groups["inner_gradient"]
        work = _reduce_scatter(out.flatten(), x.flatten(), group=group, async_op=True)
        return Pending(out, [work], kept=x)

    def start_exchange(
        self, x: Tensor, sends: list[int], receives: list[int], axis: str, out: Tensor
    ) -> Pending:
        """Begin an all-to-all of rows over an axis.

        The first sends[0] rows of x go to its first member, the next sends[1] to its second, and
        so on. receives[i] rows of member i come to `out`, in that order. What a rank sends to
        itself does not count as sent.
        """
        group = self.groups[axis]
        if group is None:  # This rank is alone on the axis.
            return Pending(x)
        rows_kept = sends[dist.get_rank(group)]
        self.sent[axis] += x[rows_kept:].nbytes
        beside = axis != "collectives"
        work = dist.all_to_all_single(out, x, receives, sends, group=group, async_op=beside)
        return Pending(out, [work], kept=x)

    def shift(
        self, chunk: list[Tensor], axis: str, slot: str, sends: bool = True, receives: bool = True
    ) -> Pending:
        """Start to send a chunk to the next rank of an axis, and to receive the previous one's.

        The result is what comes into the buffers `slot`; empty if the previous rank sends nothing.
        sends, receives: whether this rank sends and receives; its neighbors have to agree.
        """
        group = self.groups[axis]
        size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        sent = [x.contiguous() for x in chunk] if sends else []
        self.sent[axis] += sum(x.nbytes for x in sent)
        received = []
        if receives:
            received = [self.rows(f"{slot} {i}", x, len(x)) for i, x in enumerate(chunk)]
        to_next = [(dist.isend, x, (rank + 1) % size) for x in sent]
        from_previous = [(dist.irecv, x, (rank - 1) % size) for x in received]
        operations = [
            dist.P2POp(operation, x, group=group, group_peer=peer)
            for operation, x, peer in to_next + from_previous
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(received, works, kept=sent)

    def _sum(self, x: Tensor, axis: str) -> Pending:
        if self.size == 1:
            return Pending(x)
        # As in NCCL's rings.
        self.sent[axis] += 2 * x.nbytes * (self.size - 1) // self.size
        work = dist.all_reduce(x, group=self.groups[axis], async_op=axis != "collectives")
        return Pending(x, [work])

    def _gather(self, x: Tensor, out: Tensor, axis: str) -> Pending:
        self.sent[axis] += x.nbytes * (self.size - 1)
        # The collective wants the ranks one after the other along the first dim.
        beside = axis != "collectives"
        into = out.flatten(0, 1)
        work = _all_gather(into, x.contiguous(), group=self.groups[axis], async_op=beside)
        return Pending(out, [work])

    # Memory and bookkeeping

    def rows(self, slot: str, like: Tensor, count: int) -> Tensor:
        """[count, *like.shape[1:]] in the memory that is kept for the slot.

        It is as large as the largest request so far: a run that sees many lengths, such as an
        evaluation, keeps room for the longest. Taking a slot again overwrites what it held.
        """
        key = (slot, like.dtype, like.device)
        shape = (count, *like.shape[1:])
        size = math.prod(shape)
        if key not in self.memory or self.memory[key].numel() < size:
            # The old memory goes first: both are never held at the same time.
            self.memory.pop(key, None)
            self.memory[key] = like.new_empty(size)
        return self.memory[key][:size].view(shape)

    @contextmanager
    def memory_apart(self) -> Iterator[None]:
        """Inside, slots have other memory. A CUDA graph that is captured there goes on using it,
        and what is kept for the slots outside may grow, or be freed, without the graph."""
        before, self.memory = self.memory, {}
        try:
            yield
        finally:
            self.memory = before

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over all axes: keys, values, queries and gradients.

        Verticals do not count.
        """
        axes = ("inner", "outer", "inner_gradient", "outer_gradient")
        return sum(self.sent[axis] for axis in axes)


def _group(ranks: list[int], description: str, transfers: bool = False) -> dist.ProcessGroup | None:
    """A communicator for these ranks; None for a single rank.

    transfers: it moves data while compute kernels run, on NCCL. Its kernels get multiprocessors as
    soon as any are free, not when the kernels that fill the GPU are done.
    """
    if len(ranks) == 1:
        return None
    key = (dist.group.WORLD, description, tuple(ranks))
    known = _GROUPS.get(key)
    if known is not None:
        return known
    backend, options = None, None
    if transfers:
        backend = "nccl"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Only the members take part, so other context-parallel groups may come at another time.
    group = dist.new_group(
        ranks,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=description,
    )
    assert isinstance(group, dist.ProcessGroup)  # This rank is one of its members.
    _GROUPS[key] = group
    return group
