"""The group of ranks that share one sequence, with its layout and its schedule."""

import functools
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_sparse.attention.context_parallel import balanced, layouts
from titan_sparse.attention.context_parallel.comm import Communicator
from titan_sparse.attention.context_parallel.schedules import SCHEDULES, Moves, choose
from titan_sparse.attention.masks.ranges import MaskRanges, token_positions

_numbers = itertools.count()
_CONTEXTS: "weakref.WeakValueDictionary[str, ContextParallel]" = weakref.WeakValueDictionary()
"""Every ContextParallel that still lives, by key."""


class ContextParallel(Communicator):
    """A context-parallel group with its layout and schedule.

    inter, intra: nodes, and ranks of a node. schedule: its name; moves: what it sends (Moves).
    windows: of this rank, as schedules.py has them. key: names this object in custom ops.
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
        overlap_stages: tuple[int, int] = (2, 2),
        route_by: str = "auto",
        costs: balanced.Costs | None = None,
    ):
        """mesh: axes ("cp_inter", "cp_intra") or ("cp",), one rank a device; None for one process.
        layout: "contiguous", "zigzag", "striped", or "balanced", which follows from a mask
        (see balance()).
        schedule: "auto", "local", "all_gather", "ring", "double_ring" (needs two axes) or
        "group_cast".
        block_size: tokens.
        backward_circulates: what travels around a ring in the backward: "kv", "q", or "auto",
        whichever sends fewer bytes.
        gradient_dtype: of gradients between ranks; by default the fp32 (fp64 for fp64) that they
        are summed in.
        overlap_stages: in how many stages group_cast moves other ranks' blocks in the forward and
        in the backward.
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
        if min(overlap_stages) < 1:
            raise ValueError(
                f"overlap_stages={overlap_stages}: remote blocks come in one part or more; "
                "write 1 or more"
            )
        if costs is not None and layout != "balanced":
            raise ValueError(
                f'costs would be ignored with layout "{layout}"; write layout="balanced" or costs=None'
            )
        nodes = [[0]] if mesh is None else _ranks_by_node(mesh, schedule)
        device_type = "cpu" if mesh is None else mesh.device_type
        self.inter = len(nodes)
        self.intra = len(nodes[0])
        record = SCHEDULES.get(schedule) or choose(self.inter, self.intra, backward_circulates)
        self.ranks = [rank for node in nodes for rank in node]
        rank = self.ranks.index(dist.get_rank()) if len(self.ranks) > 1 else 0
        self.layout = layout
        self.schedule = record.name
        # One rank has nothing to move, whatever the schedule.
        self.moves = record.moves if len(self.ranks) > 1 else Moves.NOTHING
        self.block_size = block_size
        self.backward_circulates = backward_circulates
        self.gradient_dtype = gradient_dtype
        self.overlap_stages = overlap_stages
        self.route_by = route_by
        self.windows = record.windows(self.inter, self.intra, rank)
        super().__init__(nodes, rank, record.has_node_axis, device_type)
        self.costs = costs or balanced.DEFAULT_COSTS
        if self.depends_on_mask:
            self._refuse_different_costs(device_type)
        self._tables: dict[tuple, Tensor] = {}
        self.calls: dict[str, Any] = {}
        """The options of attention calls over this group, by key (ops.py)."""
        self.key = f"cp{next(_numbers)}:{layout}:{self.schedule}:{block_size}:{self.ranks}"
        _CONTEXTS[self.key] = self

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
            # One rank owns all blocks in any layout.
            layout = self.layout if self.size > 1 else "contiguous"
            table = layouts.block_ids(layout, self.size, seq_len, self.block_size)
            self._tables[key] = table.to(device)
        return self._tables[key]

    @property
    def depends_on_mask(self) -> bool:
        """True if another mask means another layout: "balanced", between several ranks."""
        return self.layout == "balanced" and self.size > 1

    def balance(self, ranges: MaskRanges) -> MaskRanges:
        """The same mask with its table in the layout "balanced"; unchanged for other layouts.

        Not collective: all ranks compute the same table. The host waits for a mask on a GPU.
        """
        if not self.depends_on_mask:
            return ranges
        # [ranks, n]
        table = balanced.block_table(ranges, self.size, self.block_size, self.costs)
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
        """int64 [length + 1]: where this rank holds each token, -1 if it does not, and for no token."""
        positions = token_positions(self.blocks(ranges), self.block_size)
        lookup = positions.new_full((ranges.start.shape[1] + 1,), -1)
        lookup[positions] = torch.arange(len(positions), device=lookup.device)
        return lookup

    def shard(self, x: Tensor, dim: int, table: Tensor | None = None) -> Tensor:
        """This rank's blocks of a full tensor, along `dim`.

        table: the one that balance() made; None for other layouts.
        """
        if table is None:
            # Without a mask, the layout does not depend on one.
            table = self.block_table(x.shape[dim])
        return layouts.take_blocks(x, dim, table[self.rank], self.block_size)

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int, table: Tensor | None = None) -> Tensor:
        """The full tensor from all ranks' shards, in global order, on every rank.

        No gradient flows back. table: as in shard().
        """
        if table is None:
            table = self.block_table(x.shape[dim] * self.size)
        whole = torch.cat(list(self.all_gather(x)), dim=dim)
        return layouts.restore_blocks(whole, dim, table, self.block_size)


ONE_RANK = "one rank"
"""How the key of what cp=None means begins. The block size follows: "one rank:128"."""


@functools.cache
def one_rank(block_size: int) -> ContextParallel:
    """The group for cp=None: one rank that owns everything, in blocks of `block_size`.

    It holds no process groups.
    """
    return ContextParallel(None, "contiguous", "local", block_size)


def context_of(key: str) -> ContextParallel:
    """The ContextParallel of this key. Raises KeyError if it no longer lives."""
    prefix, _, block_size = key.partition(":")
    if prefix == ONE_RANK:
        return one_rank(int(block_size))
    return _CONTEXTS[key]


def _ranks_by_node(mesh: DeviceMesh, schedule: str) -> list[list[int]]:
    """Global ranks [inter][intra] of a context-parallel mesh."""
    names = mesh.mesh_dim_names
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        # Communicators count their members by global rank: in another order neighbors would not be
        # those of the mesh.
        raise ValueError(
            f"ContextParallel needs a mesh with ascending ranks, not {mesh.mesh.tolist()}"
        )
    if names == ("cp_inter", "cp_intra"):
        return mesh.mesh.tolist()
    if names != ("cp",):
        raise ValueError(
            f'ContextParallel needs mesh axes ("cp_inter", "cp_intra") or ("cp",), not {names}'
        )
    if schedule != "auto" and SCHEDULES[schedule].needs_node_axis:
        raise ValueError(
            'schedule "double_ring" needs mesh axes ("cp_inter", "cp_intra"); write "ring" for ("cp",)'
        )
    return [mesh.mesh.tolist()]
