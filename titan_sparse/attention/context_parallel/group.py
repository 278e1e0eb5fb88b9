"""The group of ranks that share one sequence, with its layout and its schedule."""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_sparse.attention.context_parallel import layouts
from titan_sparse.attention.context_parallel.comm import Communicator
from titan_sparse.attention.context_parallel.schedules import SCHEDULES, Moves, choose
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask, token_positions
from titan_sparse.kernels.dtypes import accumulation_dtype

_numbers = itertools.count()
_CONTEXTS: "weakref.WeakValueDictionary[str, ContextParallel]" = weakref.WeakValueDictionary()
"""Every ContextParallel that still lives, by key."""


def whole_block_size(size: int) -> int:
    """size, as an int. Raises ValueError unless it is a whole number of 1 or more."""
    if int(size) != size or size < 1:
        raise ValueError(f"block_size={size}: a block holds a whole number of tokens, 1 or more")
    return int(size)


class ContextParallel(Communicator):
    """A context-parallel group with its layout and schedule.

    inter, intra: nodes, and ranks of a node. schedule: its name; moves: what it sends (Moves).
    rings: ranks of the outer ring and of the inner one. key: names this object in custom ops.
    by_heads: with the schedule ulysses between several ranks, what attends to this
    rank's heads; else None.
    What it has sent is counted in `sent` (comm.py).
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        layout: str = "striped",
        schedule: str = "auto",
        block_size: int = 128,
        backward_circulates: str = "auto",
        gradient_dtype: torch.dtype | None = None,
        overlap_stages: tuple[int, int] | None = None,
        route_by: str = "auto",
        costs: layouts.Costs | None = None,
    ):
        """mesh: axes ("cp_inter", "cp_intra") or ("cp",), one rank a device; None for one process.
        layout: "contiguous", "zigzag", "striped", or "balanced", which follows from a mask
        (see balance()).
        schedule: "auto", "local", "all_gather", "ring", "double_ring" (needs two axes),
        "group_cast" or "ulysses".
        block_size: tokens.
        backward_circulates: what travels around a ring in the backward: "kv", "q", or "auto",
        whichever sends fewer bytes.
        gradient_dtype: of gradients between ranks; by default the fp32 (fp64 for fp64) that they
        are summed in.
        overlap_stages: in how many stages group_cast moves other ranks' blocks in the forward and
        in the backward; by default 2 and 2.
        route_by: what decides how far a ring sends a chunk: "mask", once a batch; "auto": in the
        layouts contiguous and zigzag also the slashes that heads selected, for which the host
        waits in every layer.
        costs: by which "balanced" deals out blocks, the same on all ranks; by default those of an
        H200.

        Creating one is collective over the mesh. Raises ValueError for what the mesh cannot do.
        """
        for name, value, known in (
            ("backward_circulates", backward_circulates, ("auto", "kv", "q")),
            ("route_by", route_by, ("auto", "mask")),
            ("layout", layout, layouts.ALL_LAYOUTS),
            ("schedule", schedule, ("auto", *SCHEDULES)),
        ):
            if value not in known:
                raise ValueError(f'{name} "{value}" is unknown; write one of {", ".join(known)}')
        block_size = whole_block_size(block_size)
        if overlap_stages is not None and min(overlap_stages) < 1:
            raise ValueError(
                f"overlap_stages={overlap_stages}: remote blocks come in one part or more; "
                "write 1 or more"
            )
        if not getattr(gradient_dtype or torch.float32, "is_floating_point", False):
            raise ValueError(
                f"gradient_dtype={gradient_dtype!r} is not a floating dtype; write torch.bfloat16 or None"
            )
        if costs is not None and layout != "balanced":
            raise ValueError(
                f'costs would be ignored with layout "{layout}"; write layout="balanced" or costs=None'
            )
        nodes = self._nodes(mesh, schedule)
        device_type = "cpu" if mesh is None else mesh.device_type
        self.inter = len(nodes)
        self.intra = len(nodes[0])
        record = SCHEDULES.get(schedule) or choose(self.inter, self.intra, backward_circulates)
        self.layout = layout
        self.schedule = record.name
        self.block_size = block_size
        self.backward_circulates = backward_circulates
        self.gradient_dtype = gradient_dtype
        self.overlap_stages = overlap_stages or (2, 2)
        self.route_by = route_by
        self.rings = record.rings(self.inter, self.intra)
        has_ring = record.moves in (Moves.CHUNKS, Moves.TOKENS) and math.prod(self.rings) > 1
        for name, value in (("backward_circulates", backward_circulates), ("route_by", route_by)):
            if value != "auto" and self.inter * self.intra > 1 and not has_ring:
                raise ValueError(
                    f'{name}="{value}" would be ignored with schedule "{self.schedule}", which has no '
                    f'ring; write schedule="ring" or {name}="auto"'
                )
        if overlap_stages and self.inter * self.intra > 1 and record.moves is not Moves.BLOCKS:
            raise ValueError(
                f'overlap_stages={overlap_stages} would be ignored with schedule "{self.schedule}"; write '
                'schedule="group_cast" or overlap_stages=None'
            )
        super().__init__(nodes, record.has_node_axis, device_type)
        # One rank has nothing to move, whatever the schedule.
        self.moves = record.moves if self.size > 1 else Moves.NOTHING
        self.costs = costs or layouts.DEFAULT_COSTS
        if self.depends_on_mask:
            self._refuse_different_costs(device_type)
        self._tables: dict[tuple, Tensor] = {}
        self.calls: dict[str, Any] = {}
        """The options of attention calls over this group, by key (ops.py)."""
        self.key = f"cp{next(_numbers)}:{layout}:{self.schedule}:{block_size}:{self.ranks}"
        _CONTEXTS[self.key] = self
        self.by_heads: _ByHeads | None = None
        if self.moves is Moves.TOKENS:
            self.by_heads = _ByHeads(self, mesh)

    def _nodes(self, mesh: DeviceMesh | None, schedule: str) -> list[list[int]]:
        """Global ranks [inter][intra]."""
        if mesh is None:
            return [[0]]
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(
                f"mesh={type(mesh).__name__} is not a DeviceMesh; of a process group write "
                'DeviceMesh.from_group(group, "cpu" or "cuda", mesh_dim_names=("cp",))'
            )
        ranks = mesh.mesh.tolist()
        names = mesh.mesh_dim_names
        in_order = mesh.mesh.flatten().tolist()
        if in_order != sorted(in_order):
            # Communicators count their members by global rank: in another order neighbors would not
            # be those of the mesh.
            raise ValueError(f"ContextParallel needs a mesh with ascending ranks, not {ranks}")
        if names == ("cp_inter", "cp_intra"):
            return ranks
        if names != ("cp",):
            raise ValueError(
                f'ContextParallel needs mesh axes ("cp_inter", "cp_intra") or ("cp",), not {names}'
            )
        if schedule != "auto" and SCHEDULES[schedule].needs_node_axis:
            raise ValueError(
                f'schedule "{schedule}" needs mesh axes ("cp_inter", "cp_intra"); '
                'write "ring" for ("cp",)'
            )
        return [ranks]

    @property
    def whole(self) -> "ContextParallel":
        """All ranks that share the sequence: this object, unless it is another one's `by_heads`."""
        return self

    def _refuse_different_costs(self, device_type: str) -> None:
        """Ranks with different costs would compute different tables, without an error."""
        costs = torch.tensor(self.costs, device=device_type)
        costs_of_ranks = self.all_gather(costs)
        # What is sent is counted from the first attention call on.
        self.sent.clear()
        if (costs_of_ranks != costs).any():
            raise ValueError(
                f"the ranks of a sequence have different costs: {costs_of_ranks.tolist()}; write the "
                "same on all of them (attention.balance_costs: the same file on all nodes)"
            )

    def __copy__(self) -> "ContextParallel":
        """Itself: it stands for processes, and copies of a module share them (an
        EMA of its weights)."""
        return self

    def __deepcopy__(self, memo: dict) -> "ContextParallel":
        return self

    # Layout

    def block_table(self, seq_len: int, device: torch.device = torch.device("cpu")) -> Tensor:
        """int64 [ranks, n]: the global blocks of every rank, which follow from the length.

        Raises ValueError if the length does not divide, and for the layout "balanced", which needs
        more than the length.
        """
        if self.depends_on_mask:
            raise ValueError(
                'layout "balanced" follows from a mask: write rows = cp.balance(mask.rows(seq_len)), then '
                "cp.shard(x, dim, rows.table), cp.unshard(x, dim, rows.table) and attend(..., mask=rows)"
            )
        key = (seq_len, device)
        if key not in self._tables:
            self._tables[key] = self._make_table(seq_len).to(device)
        return self._tables[key]

    def _make_table(self, seq_len: int) -> Tensor:
        # One rank owns all blocks in any layout.
        layout = self.layout if self.size > 1 else "contiguous"
        return layouts.block_ids(layout, self.size, seq_len, self.block_size)

    @property
    def depends_on_mask(self) -> bool:
        """True if another mask means another layout: "balanced", between several ranks."""
        return self.layout == "balanced" and self.size > 1

    def balance(self, ranges: MaskRanges) -> MaskRanges:
        """The same mask with its table in the layout "balanced"; unchanged for other layouts.

        Not collective: all ranks compute the same table. The host waits for a mask on a GPU. Raises
        ValueError for a mask that is not resolved.
        """
        if not isinstance(ranges, MaskRanges):
            name = type(ranges).__name__
            raise ValueError(
                f"balance({name}) needs a resolved mask; write balance(mask.rows(seq_len))"
            )
        if not self.depends_on_mask:
            return ranges
        # [ranks, n]
        table = layouts.balanced(ranges, self.size, self.block_size, self.costs)
        return ranges._replace(table=table.to(ranges.start.device))

    def table(self, ranges: MaskRanges) -> Tensor:
        """int64 [ranks, n], on the mask's device: the global blocks of every rank for this mask."""
        if self.depends_on_mask and ranges.table is not None:
            return ranges.table
        # The same for all masks of this length.
        return self.block_table(ranges.start.shape[1], ranges.start.device)

    def blocks(self, ranges: MaskRanges, rank: int | None = None) -> Tensor:
        """int64 [n]: the global blocks of `rank` (default: this rank), in local order."""
        return self.table(ranges)[self.rank if rank is None else rank]

    def local_lookup(self, ranges: MaskRanges) -> Tensor:
        """int64 [length + 1]: where this rank holds each token, -1 if it does
        not, and for no token."""
        positions = token_positions(self.blocks(ranges), self.block_size)
        lookup = positions.new_full((ranges.start.shape[1] + 1,), -1)
        lookup[positions] = torch.arange(len(positions), device=lookup.device)
        return lookup

    def order_in_node(self, length: int, table: Tensor | None, device: torch.device) -> Tensor:
        """int64 [intra * n], on the device: where the node's blocks are, in global order, among
        those of its ranks one after the other.

        length: tokens of a rank. table: as in shard().
        """
        key = ("order in node", length, device)
        if table is None and key in self._tables:
            return self._tables[key]
        of_all = self.block_table(length * self.size, device) if table is None else table
        first = self.rank // self.intra * self.intra
        order = of_all[first : first + self.intra].flatten().argsort()
        if table is None:
            self._tables[key] = order
        return order

    def of_all_heads(self, x: Tensor, dim: int) -> Tensor:
        """x of the heads that this rank computes -> of all heads, along `dim`; x
        itself but on `by_heads`.

        x is the same on all nodes. Collective over `whole`.
        """
        return x

    def shard(self, x: Tensor, dim: int, table: Tensor | None = None) -> Tensor:
        """This rank's blocks of a full tensor, along `dim`.

        table: the one that balance() made; None for other layouts. Raises ValueError for a table of
        another length, and for one that this layout does not have.
        """
        table = self._table_of(x.shape[dim], table)
        return layouts.take_blocks(x, dim, table[self.rank], self.block_size)

    def _table_of(self, tokens: int, table: Tensor | None) -> Tensor:
        """The blocks of every rank of a sequence of so many tokens: `table`,
        as shard() takes it."""
        if table is None:
            # Without a mask, the layout does not depend on one.
            return self.block_table(tokens)
        if not self.depends_on_mask:
            raise ValueError(
                f'layout "{self.layout}" of {self.size} ranks has no table of a mask; leave it out'
            )
        if table.numel() * self.block_size != tokens:
            raise ValueError(
                f"the table is for {table.numel() * self.block_size} tokens, and there are {tokens}; "
                f"write the table of cp.balance(mask.rows({tokens}))"
            )
        return table

    def count_plain_ring(self, k: Tensor, backward: bool = False) -> None:
        """Add to plain_ring_bytes what a ring sends in which each chunk visits every rank.

        k: [B, Hkv, S_local, D], contiguous or not. A backward sends the gradients too, in the dtype
        that they have between ranks.
        """
        element_bytes = k.element_size()
        if backward:
            gradient_dtype = self.gradient_dtype or accumulation_dtype(k.dtype)
            element_bytes += gradient_dtype.itemsize
        # 2: keys and values.
        self.plain_ring_bytes += 2 * k.numel() * element_bytes * (self.size - 1)

    @contextlib.contextmanager
    def memory_apart(self) -> Iterator[None]:
        of_heads = self.by_heads.memory_apart() if self.by_heads else contextlib.nullcontext()
        with super().memory_apart(), of_heads:
            yield

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int, table: Tensor | None = None) -> Tensor:
        """The full tensor from all ranks' shards, in global order, on every rank.

        No gradient flows back. table: as in shard().
        """
        table = self._table_of(x.shape[dim] * self.size, table)
        # Not torch.cat(), which under autocast refuses the other 16-bit dtype.
        dim %= x.ndim
        whole = self.all_gather(x).movedim(0, dim).flatten(dim, dim + 1)
        return layouts.restore_blocks(whole, dim, table, self.block_size)


class _ByHeads(ContextParallel):
    """The group that attends to this rank's heads, under the schedule ulysses (ulysses.py).

    Its ranks are nodes: of each node the rank that has the same heads. All tokens of a node are on
    it, in global order. Inside one node it is one rank, which has the whole sequence.
    """

    def __init__(self, whole: ContextParallel, mesh: DeviceMesh | None):
        # Weak: no circle of references keeps process groups.
        self._whole = weakref.ref(whole)
        super().__init__(
            mesh,
            whole.layout,
            "ring",
            whole.block_size,
            whole.backward_circulates,
            whole.gradient_dtype,
            route_by=whole.route_by,
            costs=whole.costs if whole.layout == "balanced" else None,
        )
        self.sent = whole.sent

    def _nodes(self, mesh: DeviceMesh | None, schedule: str) -> list[list[int]]:
        return [self.whole.ranks[self.whole.rank % self.whole.intra :: self.whole.intra]]

    @property
    def whole(self) -> ContextParallel:
        whole = self._whole()
        assert whole is not None  # It lives until the last backward through it.
        return whole

    def of_all_heads(self, x: Tensor, dim: int) -> Tensor:
        of_node = self.whole.all_gather(x)[: self.whole.intra]
        return torch.cat(list(of_node), dim)

    def _make_table(self, seq_len: int) -> Tensor:
        if self.size == 1:
            return super()._make_table(seq_len)
        return self._of_nodes(self.whole.block_table(seq_len))

    def table(self, ranges: MaskRanges) -> Tensor:
        of_ranks = ranges.table
        if not self.depends_on_mask or of_ranks is None:
            return super().table(ranges)
        key = ("blocks of nodes", self.key)
        return once_per_mask(ranges, key, lambda: self._of_nodes(of_ranks))

    def _of_nodes(self, table: Tensor) -> Tensor:
        """int64 [ranks, n] of all ranks -> [nodes, n], ascending."""
        return table.view(self.size, -1).sort(1).values


ONE_RANK = "one rank"
"""How the key of what cp=None means begins. The block size follows: "one rank:128"."""


@functools.cache
def one_rank(block_size: int) -> ContextParallel:
    """The group for cp=None: one rank that owns everything, in blocks of `block_size`.

    It holds no process groups.
    """
    return ContextParallel(None, "contiguous", "local", block_size)


def context_of(key: str) -> ContextParallel:
    """The ContextParallel of this key. Raises RuntimeError if it no longer lives."""
    prefix, _, block_size = key.partition(":")
    if prefix == ONE_RANK:
        return one_rank(int(block_size))
    context = _CONTEXTS.get(key)
    if context is None:
        raise RuntimeError(
            f'"{key}" is gone: keep the ContextParallel until the last backward through it'
        )
    return context
