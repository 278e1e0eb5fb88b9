"""One sequence over several ranks: who they are, and everything they say to each other inside attention.

No other file of the attention package communicates. Inner, outer and gradient transfers each have a communicator of
their own: on a shared one a fast inner hop queues behind the slow outer one.
"""

import atexit
import functools
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_sparse.attention.context_parallel import balanced, layouts
from titan_sparse.attention.context_parallel import windows as schedules
from titan_sparse.attention.masks.ranges import MaskRanges

# Renamed in torch 2.13, where the old names warn; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_CONTEXTS: dict[str, "ContextParallel"] = {}
_GROUPS: dict[tuple, dist.ProcessGroup] = {}


class ContextParallel:
    """A context-parallel group with its layout and schedule.

    mesh: axes ("cp_inter", "cp_intra") or ("cp",), one rank a device; None for a single process. layout: contiguous,
    zigzag, striped, or balanced, which follows from a mask: balance(). schedule: auto, local, all_gather, ring, double_ring (two
    axes needed) or group_cast. block_size: tokens. backward_circulates: kv, q, or auto, the one that is fewer bytes; for rings.
    gradient_dtype: of dK and dV (dQ) on the wire, default the fp32 (fp64 for fp64) that they are summed in. overlap_stages: in
    how many parts group_cast moves remote blocks in the forward, in the backward.
    sent: bytes that this rank has sent so far: keys, values, queries and gradients by axis (inner, outer, inner_gradient,
    outer_gradient), "verticals", and "collectives", all that waits: selection, and statistics. Of a sum over ranks each rank
    sends 2 (W - 1) / W of its size, as NCCL's rings do.
    Creating one is collective over the mesh. Raises ValueError for what the mesh cannot do.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        layout: str = "striped",
        schedule: str = "auto",
        block_size: int = 128,
        backward_circulates: str = "auto",
        gradient_dtype: torch.dtype | None = None,
        overlap_stages: tuple[int, int] = (2, 2),
    ):
        if backward_circulates not in ("auto", "kv", "q"):
            raise ValueError(
                f'backward_circulates "{backward_circulates}" is unknown; write "auto", "kv" or "q"'
            )
        if layout not in layouts.ALL_LAYOUTS:
            raise ValueError(
                f'layout "{layout}" is unknown; write one of {", ".join(layouts.ALL_LAYOUTS)}'
            )
        if schedule != "auto" and schedule not in schedules.SCHEDULES:
            raise ValueError(
                f'schedule "{schedule}" is unknown; write "auto" or one of {", ".join(schedules.SCHEDULES)}'
            )
        if min(overlap_stages) < 1:
            raise ValueError(
                f"overlap_stages={overlap_stages}: remote blocks come in one part or more; write 1 or more"
            )
        ranks = [[0]] if mesh is None else _two_axes(mesh, schedule)
        self.inter, self.intra = len(ranks), len(ranks[0])
        self.size = self.inter * self.intra
        self.layout, self.block_size = layout, block_size
        self.backward_circulates, self.gradient_dtype = backward_circulates, gradient_dtype
        self.overlap_stages = overlap_stages
        self.sent, self.plain_ring_bytes = Counter(), 0
        self._buffers: dict[tuple, list[Tensor]] = {}
        if schedule == "auto":
            schedule = schedules.choose(self.inter, self.intra, backward_circulates)
        self.schedule = schedule
        self.ranks = [rank for node in ranks for rank in node]
        self.rank = self.ranks.index(dist.get_rank()) if self.size > 1 else 0
        self.windows = schedules.SCHEDULES[self.schedule](self.inter, self.intra, self.rank)
        self._create_groups(ranks, "cpu" if mesh is None else mesh.device_type)
        # The number makes the key this object's own.
        self.key = f"{len(_CONTEXTS)}:{layout}:{self.schedule}:{block_size}:{self.ranks}"
        _CONTEXTS[self.key] = self

    def _create_groups(self, ranks: list[list[int]], device_type: str) -> None:
        node, local_rank = divmod(self.rank, self.intra)
        inner, outer = ranks[node], [other[local_rank] for other in ranks]
        if self.schedule not in ("double_ring", "group_cast"):
            inner, outer = self.ranks, [self.ranks[self.rank]]
        self.group = _new_group(self.ranks, "cp")
        members = {
            "inner": inner,
            "outer": outer,
            "inner_gradient": inner,
            "outer_gradient": outer,
            "verticals": self.ranks,
        }
        new_group = _new_transfer_group if device_type == "cuda" else _new_group
        self.groups = {axis: new_group(ranks, f"cp {axis}") for axis, ranks in members.items()}

    # Layout ---------------------------------------------------------------------------------------------------------

    @functools.lru_cache(maxsize=8)  # noqa: B019  a ContextParallel lives as long as the program
    def block_table(self, seq_len: int, device: torch.device = torch.device("cpu")) -> Tensor:
        """int64 [ranks, n]: the global blocks of every rank, as follows from the length; ValueError if it does not divide,
        and for the layout "balanced", which needs more than the length."""
        if self.depends_on_mask:
            raise ValueError(
                'layout "balanced" follows from a mask: write rows = cp.balance(mask.rows(seq_len)), then '
                "cp.shard(x, dim, rows.table), cp.unshard(x, dim, rows.table) and attend(..., mask=rows)"
            )
        layout = "contiguous" if self.layout == "balanced" else self.layout
        return layouts.block_ids(layout, self.size, seq_len, self.block_size).to(device)

    @property
    def depends_on_mask(self) -> bool:
        """Whether the layout is another one for another mask: "balanced", between several ranks."""
        return self.layout == "balanced" and self.size > 1

    def balance(self, rows: MaskRanges) -> MaskRanges:
        """The same mask with the table of the layout "balanced" for it; as it is for other layouts. Not collective: all
        ranks come to the same table. The host waits for a mask on a GPU."""
        if not self.depends_on_mask:
            return rows
        return rows._replace(
            table=balanced.block_table(rows, self.size, self.block_size).to(rows.start.device)
        )

    def table(self, rows: MaskRanges) -> Tensor:
        """int64 [ranks, n], on the mask's device: the global blocks of every rank for this mask."""
        if self.depends_on_mask and rows.table is not None:
            return rows.table
        return self.block_table(rows.start.shape[1], rows.start.device)

    def blocks(self, rows: MaskRanges, rank: int | None = None) -> Tensor:
        """int64 [n]: the global blocks of `rank`, or of this rank, in local order."""
        return self.table(rows)[self.rank if rank is None else rank]

    def local_lookup(self, rows: MaskRanges) -> Tensor:
        """int64 [length + 1]: where this rank holds each token, -1 if it does not; the last entry, for no token, is -1."""
        here, device = (
            layouts.token_positions(self.blocks(rows), self.block_size),
            rows.start.device,
        )
        lookup = torch.full((rows.start.shape[1] + 1,), -1, device=device)
        lookup[here] = torch.arange(len(here), device=device)
        return lookup

    def local_position(self, positions: Tensor, rows: MaskRanges) -> Tensor:
        """int64, shape of `positions` (global; the length allowed): where this rank holds the token, -1 if it does not."""
        return self.local_lookup(rows)[positions.long()]

    def shard(self, x: Tensor, dim: int, table: Tensor | None = None) -> Tensor:
        """This rank's blocks of a full tensor, along `dim`. table: rows.table of balance(), None for other layouts."""
        table = self.block_table(x.shape[dim]) if table is None else table
        return layouts.take_blocks(x, dim, table[self.rank], self.block_size)

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int, table: Tensor | None = None) -> Tensor:
        """The full tensor from all ranks' shards, in global order, on every rank. No gradient flows back. table: as in
        shard()."""
        table = self.block_table(x.shape[dim] * self.size) if table is None else table
        whole = torch.cat(list(self.all_gather(x)), dim=dim)
        return layouts.restore_blocks(whole, dim, table, self.block_size)

    # Collectives over all ranks -------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        x = x.contiguous()
        if self.size > 1:
            self.sent["collectives"] += self._reduced_bytes(x)
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]"""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size, *x.shape)
        self.sent["collectives"] += x.nbytes * (self.size - 1)
        _all_gather(out.flatten(0, 1), x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """x[r] goes to rank r; returns what came, by sender: [ranks, ...] -> [ranks, ...]."""
        if self.size == 1:
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.sent["collectives"] += x.nbytes // self.size * (self.size - 1)
        dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    def start_all_reduce(self, x: Tensor) -> "Pending":
        """Begin to sum x, the verticals' keys and values or their gradients, contiguous, over ranks in place."""
        if self.size == 1:
            return Pending(x)
        self.sent["verticals"] += self._reduced_bytes(x)
        return Pending(x, dist.all_reduce(x, group=self.groups["verticals"], async_op=True))

    def start_all_gather(self, x: Tensor, slot: str) -> "Pending":
        """Begin to gather [ranks, *x.shape] into the buffer `slot`."""
        [out] = self.buffer(slot, [x], self.size)
        self.sent["inner"] += x.nbytes * (self.size - 1)
        return Pending(
            out,
            _all_gather(
                out.flatten(0, 1), x.contiguous(), group=self.groups["inner"], async_op=True
            ),
        )

    def start_reduce_scatter(self, x: Tensor) -> "Pending":
        """Begin to sum x[r] over ranks on rank r: [ranks, ...] -> [...]."""
        out = torch.empty_like(x[0])
        self.sent["inner_gradient"] += x[0].nbytes * (self.size - 1)
        work = _reduce_scatter(
            out.flatten(), x.flatten(), group=self.groups["inner_gradient"], async_op=True
        )
        return Pending(out, work, x)

    @property
    def bytes_sent(self) -> int:
        """Bytes of keys, values, queries and gradients that this rank has sent, over all axes; without verticals."""
        return sum(
            self.sent[axis] for axis in ("inner", "outer", "inner_gradient", "outer_gradient")
        )

    def _reduced_bytes(self, x: Tensor) -> int:
        return 2 * x.nbytes * (self.size - 1) // self.size

    # Group cast -----------------------------------------------------------------------------------------------------

    def start_exchange(
        self, x: Tensor, sends: list[int], receives: list[int], axis: str, out: Tensor
    ) -> "Pending":
        """Begin to send sends[i] rows of x to member i of an axis, those of the members one after the other; receives[i]
        rows of member i come to `out` in that order. What a rank sends to itself is not counted as sent."""
        if self.groups[axis] is None:  # alone
            return Pending(x)
        own = sends[dist.get_rank(self.groups[axis])]
        self.sent[axis] += (len(x) - own) * (x[:1].nbytes if len(x) else 0)
        work = dist.all_to_all_single(
            out, x, receives, sends, group=self.groups[axis], async_op=True
        )
        return Pending(out, work, x)

    def rows(self, slot: str, like: Tensor, count: int) -> Tensor:
        """[count, *like.shape[1:]], the first rows of memory that is kept for the slot and grows where it is too small."""
        key = (slot, like.shape[1:], like.dtype, like.device)
        if key not in self._buffers or len(self._buffers[key][0]) < count:
            self._buffers[key] = [like.new_empty(count, *like.shape[1:])]
        return self._buffers[key][0][:count]

    # Rings ----------------------------------------------------------------------------------------------------------

    def shift(
        self, chunk: list[Tensor], axis: str, slot: str, sends: bool = True, receives: bool = True
    ) -> "Transfer":
        """Start sending a chunk to the next rank of an axis ("inner", "outer", "inner_gradient", "outer_gradient").

        What the previous rank sends comes into the buffers `slot`. sends, receives: whether this rank does, which its
        neighbours have to agree on.
        """
        self.sent[axis] += sum(x.nbytes for x in chunk) if sends else 0
        return Transfer(
            chunk, self.buffer(slot, chunk) if receives else [], self.groups[axis], sends
        )

    def buffer(self, slot: str, like: list[Tensor], ranks: int | None = None) -> list[Tensor]:
        """Memory for tensors like these (for `ranks` of each), the same for the same slot, shapes and dtypes."""
        key = (slot, ranks, *((x.shape, x.dtype, x.device) for x in like))
        if key not in self._buffers:
            self._buffers[key] = [x.new_empty(*([ranks] if ranks else []), *x.shape) for x in like]
        return self._buffers[key]


class Pending:
    """A collective in flight, or what needed none. `kept` lives as long as the collective reads it."""

    def __init__(self, result: Tensor, work: dist.Work | None = None, kept: Tensor | None = None):
        self.result, self.work, self.kept = result, work, kept

    def wait(self) -> Tensor:
        """The result."""
        if self.work is not None:
            self.work.wait()
            self.work = self.kept = None
        return self.result


class Transfer:
    """A send to the next rank of a ring and the matching receive from the previous one, in flight."""

    def __init__(
        self, chunk: list[Tensor], received: list[Tensor], group: dist.ProcessGroup, sends: bool
    ):
        self.sent, self.received = [x.contiguous() for x in chunk], received
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        operations = [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size)
            for x in self.sent
            if sends
        ]
        operations += [
            dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % size) for x in received
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """What the previous rank sent; empty if it sent nothing."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        return self.received


def single_key(block_size: int) -> str:
    """The key of what cp=None means: one rank that owns everything, in blocks of `block_size`."""
    return f"single:{block_size}"


def forget_contexts() -> None:
    """Let go of every ContextParallel made so far, none of which can be used any more, and of its groups, whoever holds it: at
    the end of a program. What Python itself tears down last may abort the process, as gloo's threads then find no
    interpreter."""
    for context in _CONTEXTS.values():
        context.group, context.groups = None, {}
    _CONTEXTS.clear()
    _GROUPS.clear()
    ContextParallel.block_table.cache_clear()


atexit.register(forget_contexts)


def context_by_key(key: str) -> ContextParallel:
    """The ContextParallel whose `key` this is: custom ops take strings, not objects."""
    if key not in _CONTEXTS:
        _CONTEXTS[key] = ContextParallel(
            None, "contiguous", "local", int(key.removeprefix("single:"))
        )
    return _CONTEXTS[key]


def _two_axes(mesh: DeviceMesh, schedule: str) -> list[list[int]]:
    """Global ranks [inter][intra] of a cp mesh."""
    names = mesh.mesh_dim_names
    if mesh.mesh.flatten().tolist() != sorted(mesh.mesh.flatten().tolist()):
        # Communicators count their members by global rank: in another order neighbours would not be those of the mesh.
        raise ValueError(
            f"ContextParallel needs a mesh with ascending ranks, not {mesh.mesh.tolist()}"
        )
    if names == ("cp_inter", "cp_intra"):
        return mesh.mesh.tolist()
    if names != ("cp",):
        raise ValueError(
            f'ContextParallel needs mesh axes ("cp_inter", "cp_intra") or ("cp",), not {names}'
        )
    if schedule == "double_ring":
        raise ValueError(
            'schedule "double_ring" needs mesh axes ("cp_inter", "cp_intra"); write "ring" for ("cp",)'
        )
    return [mesh.mesh.tolist()]


def _new_group(ranks: list[int], description: str, **options) -> dist.ProcessGroup | None:
    """A communicator of its own for these ranks; None for a single one, which has nobody to talk to."""
    if len(ranks) == 1:
        return None
    # A communicator takes memory and a second to connect: contexts with the same ranks share theirs.
    key = (dist.group.WORLD, description, tuple(ranks))
    if key not in _GROUPS:
        # Only the members take part, so that other context-parallel groups of the world may come at another time.
        _GROUPS[key] = dist.new_group(
            ranks, use_local_synchronization=True, group_desc=description, **options
        )
    return _GROUPS[key]


def _new_transfer_group(ranks: list[int], description: str) -> dist.ProcessGroup | None:
    """For what moves beside the compute kernels: NCCL's get their multiprocessors as soon as any are free, not when the
    kernels that fill the GPU are done."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return _new_group(ranks, description, backend="nccl", pg_options=options)
