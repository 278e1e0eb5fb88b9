"""Everything that the ranks of one sequence say to each other inside attention.

No other file of the attention package communicates. Inner, outer and gradient transfers each have
a communicator of their own: on a shared one a fast inner hop queues behind the slow outer one.
"""

import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13, where the old names warn; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GROUPS: weakref.WeakValueDictionary[tuple, dist.ProcessGroup] = weakref.WeakValueDictionary()
"""Communicators by description and ranks. Each takes memory and a second to connect, so all that
live at the same time share them."""


class Pending:
    """A collective in flight, or a result that needed none."""

    def __init__(
        self, result: Tensor, work: dist.Work | None = None, input_kept: Tensor | None = None
    ):
        """input_kept: what the collective reads; it must live until the collective is done."""
        self.result = result
        self.work = work
        self.input_kept = input_kept

    def wait(self) -> Tensor:
        """The result."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.input_kept = None
        return self.result


class Transfer:
    """A send to the next rank of a ring and the matching receive from the previous one, in flight."""

    def __init__(
        self, chunk: list[Tensor], received: list[Tensor], group: dist.ProcessGroup, sends: bool
    ):
        """received: buffers for what the previous rank sends; none if it sends nothing."""
        self.sent = [x.contiguous() for x in chunk]
        self.received = received
        size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        next_rank = (rank + 1) % size
        previous_rank = (rank - 1) % size
        operations = []
        if sends:
            for x in self.sent:
                operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=next_rank))
        for x in received:
            operations.append(dist.P2POp(dist.irecv, x, group=group, group_peer=previous_rank))
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """What the previous rank sent; empty if it sent nothing."""
        for work in self.works:
            work.wait()
        self.works = []
        self.sent = []
        return self.received


class Communicator:
    """The communicators of one context-parallel group, its buffers, and its counters.

    rank, size: of this rank in the group, and ranks of the group.
    sent: bytes that this rank has sent so far. Keys, values, queries and gradients are counted by
    axis ("inner", "outer", "inner_gradient", "outer_gradient"); "verticals" are the gathered
    verticals and their gradients; "collectives" is everything that makes a rank wait: selection
    and statistics. Of a sum over W ranks each rank sends 2 (W - 1) / W of its size, as in NCCL's
    rings.
    plain_ring_bytes: what a ring would have sent in which each chunk visits every rank.
    """

    def __init__(self, nodes: list[list[int]], rank: int, has_node_axis: bool, device_type: str):
        """nodes: global ranks, [inter][intra]. Collective over them.

        has_node_axis: inner communicators span a node, outer ones the nodes; else the inner ones
        span all ranks.
        """
        all_ranks = [r for node in nodes for r in node]
        self.rank = rank
        self.size = len(all_ranks)
        self.sent = Counter()
        self.plain_ring_bytes = 0
        self._buffers: dict[tuple, list[Tensor]] = {}
        node, local_rank = divmod(rank, len(nodes[0]))
        inner = nodes[node]
        outer = [other[local_rank] for other in nodes]
        if not has_node_axis:
            inner = all_ranks
            outer = [all_ranks[rank]]
        members = {
            "inner": inner,
            "outer": outer,
            "inner_gradient": inner,
            "outer_gradient": outer,
            "verticals": all_ranks,
        }
        self.groups = {"collectives": _group(all_ranks, "cp")}
        for axis, ranks in members.items():
            self.groups[axis] = _group(ranks, f"cp {axis}", transfers=device_type == "cuda")
        # Whoever still holds this object when Python ends: gloo's threads must not meet an
        # interpreter that is gone, which aborts the process.
        weakref.finalize(self, self.groups.clear)

    # Collectives that make a rank wait

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over ranks."""
        x = x.contiguous()
        if self.size > 1:
            self.sent["collectives"] += self._bytes_of_sum(x)
            dist.all_reduce(x, group=self.groups["collectives"])
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x of all ranks: [ranks, *x.shape]."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size, *x.shape)
        self.sent["collectives"] += x.nbytes * (self.size - 1)
        _all_gather(out.flatten(0, 1), x.contiguous(), group=self.groups["collectives"])
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """x[r] goes to rank r. Returns what came, by sender: [ranks, ...] -> [ranks, ...]."""
        if self.size == 1:
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.sent["collectives"] += x.nbytes // self.size * (self.size - 1)
        dist.all_to_all_single(out, x.contiguous(), group=self.groups["collectives"])
        return out

    # Collectives that run beside compute

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Begin to sum x over ranks in place: contiguous keys and values of verticals, or their
        gradients."""
        if self.size == 1:
            return Pending(x)
        self.sent["verticals"] += self._bytes_of_sum(x)
        return Pending(x, dist.all_reduce(x, group=self.groups["verticals"], async_op=True))

    def start_all_gather(self, x: Tensor, slot: str) -> Pending:
        """Begin to gather [ranks, *x.shape] into the buffer `slot`."""
        [out] = self.buffer(slot, [x], self.size)
        self.sent["inner"] += x.nbytes * (self.size - 1)
        work = _all_gather(
            out.flatten(0, 1), x.contiguous(), group=self.groups["inner"], async_op=True
        )
        return Pending(out, work)

    def start_reduce_scatter(self, x: Tensor) -> Pending:
        """Begin to sum x[r] over ranks, on rank r: [ranks, ...] -> [...]."""
        out = torch.empty_like(x[0])
        self.sent["inner_gradient"] += x[0].nbytes * (self.size - 1)
        group = self.groups["inner_gradient"]
        work = _reduce_scatter(out.flatten(), x.flatten(), group=group, async_op=True)
        return Pending(out, work, x)

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
        row_bytes = x[:1].nbytes if len(x) else 0
        self.sent[axis] += (len(x) - sends[dist.get_rank(group)]) * row_bytes
        work = dist.all_to_all_single(out, x, receives, sends, group=group, async_op=True)
        return Pending(out, work, x)

    def shift(
        self, chunk: list[Tensor], axis: str, slot: str, sends: bool = True, receives: bool = True
    ) -> Transfer:
        """Start to send a chunk to the next rank of an axis.

        What the previous rank sends comes into the buffers `slot`. sends, receives: whether this
        rank does; its neighbors have to agree.
        """
        if sends:
            self.sent[axis] += sum(x.nbytes for x in chunk)
        received = self.buffer(slot, chunk) if receives else []
        return Transfer(chunk, received, self.groups[axis], sends)

    # Memory and bookkeeping

    def buffer(self, slot: str, like: list[Tensor], ranks: int | None = None) -> list[Tensor]:
        """Memory for tensors like these, or for `ranks` of each.

        It is the same memory for the same slot, shapes and dtypes.
        """
        key = (slot, ranks, *((x.shape, x.dtype, x.device) for x in like))
        if key not in self._buffers:
            leading = [] if ranks is None else [ranks]
            self._buffers[key] = [x.new_empty(*leading, *x.shape) for x in like]
        return self._buffers[key]

    def rows(self, slot: str, like: Tensor, count: int) -> Tensor:
        """[count, *like.shape[1:]]: the first rows of memory that is kept for the slot.

        The memory grows where it is too small.
        """
        key = (slot, like.shape[1:], like.dtype, like.device)
        if key not in self._buffers or len(self._buffers[key][0]) < count:
            self._buffers[key] = [like.new_empty(count, *like.shape[1:])]
        return self._buffers[key][0][:count]

    @property
    def bytes_sent(self) -> int:
        """Bytes of keys, values, queries and gradients sent by this rank over all axes, without
        verticals."""
        axes = ("inner", "outer", "inner_gradient", "outer_gradient")
        return sum(self.sent[axis] for axis in axes)

    def _bytes_of_sum(self, x: Tensor) -> int:
        return 2 * x.nbytes * (self.size - 1) // self.size


def _group(ranks: list[int], description: str, transfers: bool = False) -> dist.ProcessGroup | None:
    """A communicator for these ranks; None for a single one, which has nobody to talk to.

    transfers: it moves data beside compute kernels, on NCCL. Its kernels get multiprocessors as
    soon as any are free, not when the kernels that fill the GPU are done.
    """
    if len(ranks) == 1:
        return None
    key = (dist.group.WORLD, description, tuple(ranks))
    group = _GROUPS.get(key)
    if group is None:
        options = {}
        if transfers:
            nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options = {"backend": "nccl", "pg_options": nccl}
        # Only the members take part, so other context-parallel groups may come at another time.
        group = dist.new_group(
            ranks, use_local_synchronization=True, group_desc=description, **options
        )
        _GROUPS[key] = group
    return group
