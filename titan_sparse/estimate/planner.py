"""The time that one layer's attention would take on many ranks, from an index and a few measured
rates.

This needs no GPU and no processes. The work of every rank and step and the bytes on every link are
counted exactly. The times are bounds. On each rank a step takes as long as its kernels or the
slowest transfer at the same time, whichever is longer. Transfers that nothing hides are added, and
the last rank counts. W is the number of ranks everywhere.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import group_cast_plan, layouts, ring_routing
from titan_sparse.attention.context_parallel.needed_keys import goes_by_index
from titan_sparse.attention.context_parallel.schedules import (
    RING,
    Moves,
    Schedule,
    head_groups,
    heads_gathered,
    kv_copies,
)
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.visibility import seen_blocks, seen_chunks, visible_pairs
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS, Constants, KVShape
from titan_sparse.estimate.visits import Visits, by_step, count_visits


@dataclass(frozen=True)
class Setting:
    """A spread of the work over `inter` nodes of `intra` ranks.

    overlap_stages: of group_cast, forward and backward. balance: costs by which the layout
    "balanced" assigns blocks.
    """

    layout: str
    schedule: Schedule
    inter: int
    intra: int
    overlap_stages: tuple[int, int] = (2, 2)
    balance: layouts.Costs = layouts.DEFAULT_COSTS

    @property
    def ranks(self) -> int:
        """Context-parallel ranks, called W in shapes."""
        return self.inter * self.intra


class LayerWork(NamedTuple):
    """Attention of one layer: what it chose, under which mask, the shape of K and V, and what a
    layout gives each rank. It is the same for all schedules.

    table: blocks of the ranks, int64 [W, n]. visits: the pairs that they compute.
    """

    index: BlockIndex
    ranges: MaskRanges
    shape: KVShape
    table: Tensor
    visits: Visits


class Pass(NamedTuple):
    """A forward or a backward.

    compute: seconds of kernels and launches, float64 [W, steps]. transfers: seconds of the
    transfers that run at the same time as each step, float64 [steps]. ends: seconds of transfers
    before the first or after the last step. seconds: until the last rank is done. sent: bytes that
    each rank sends, inside its node and to other nodes.
    """

    compute: Tensor
    transfers: Tensor
    ends: float
    seconds: float
    sent: ring_routing.Traffic

    def exposed(self) -> float:
        """Seconds beyond the computing of the busiest rank."""
        return self.seconds - self.compute.sum(-1).max().item()


class LayerPlan(NamedTuple):
    """One layer's attention in a setting.

    density: share of the visible pairs that are computed. work: pairs of tokens of all heads and
    sequences by step of the forward, float64 [W, steps].
    """

    setting: Setting
    density: float
    work: Tensor
    forward: Pass
    backward: Pass


def table_of(
    ranges: MaskRanges,
    layout: str,
    ranks: int,
    block_size: int,
    balance: layouts.Costs = layouts.DEFAULT_COSTS,
) -> Tensor:
    """The blocks of each rank under this mask, int64 [ranks, n].

    balance: costs by which the layout "balanced" assigns them. Raises ValueError if the sequence
    does not divide.
    """
    if layout == "balanced":
        return layouts.balanced(ranges, ranks, block_size, balance)
    return layouts.block_ids(layout, ranks, ranges.start.shape[1], block_size)


def count(index: BlockIndex, ranges: MaskRanges, shape: KVShape, setting: Setting) -> LayerWork:
    """A layer's work in the layout of a setting."""
    table = table_of(ranges, setting.layout, setting.ranks, index.block_size, setting.balance)
    return LayerWork(index, ranges, shape, table, count_visits(index, ranges, table))


def plan_layer(layer: LayerWork, setting: Setting, constants: Constants) -> LayerPlan:
    planner = _Planner(layer, setting, constants)
    if setting.schedule.moves is Moves.HEADS:
        work, forward, backward = planner.all_gather()
    elif setting.schedule.moves is Moves.BLOCKS:
        work, forward, backward = planner.group_cast()
    elif setting.schedule.moves is Moves.TOKENS:
        work, forward, backward = planner.ulysses()
    else:
        work, forward, backward = planner.ring()
    # The mask is the same for all heads, and one mask may stand for all sequences.
    sequences_per_mask = layer.index.batch // len(layer.ranges.start)
    visible = visible_pairs(layer.ranges).sum().item() * layer.index.heads * sequences_per_mask
    return LayerPlan(setting, work.sum().item() / visible, work, forward, backward)


class _Planner:
    """Bytes and seconds of a layer. Each schedule has a method that returns work and passes."""

    def __init__(self, layer: LayerWork, setting: Setting, constants: Constants):
        self.layer = layer
        self.setting = setting
        self.constants = constants
        shape = layer.shape
        tokens = layer.index.batch * layer.ranges.start.shape[1]
        # Of K and V of one rank.
        elements = 2 * tokens * shape.kv_heads * shape.head_dim // setting.ranks
        self.key_bytes = elements * shape.element_bytes
        self.gradient_bytes = elements * shape.gradient_bytes

    def ring(self) -> tuple[Tensor, Pass, Pass]:
        """In a double ring, hops between nodes run at the same time as windows. Heads travel in
        groups: one group is computed while the next one travels."""
        setting = self.setting
        windows, steps = setting.schedule.rings(setting.inter, setting.intra)
        groups = head_groups(self.layer.shape.kv_heads, windows)
        needed, work = self._work_by_step()
        key_hops = ring_routing.hops_needed(needed, windows, steps)
        gradient_hops = ring_routing.gradient_hops(needed, windows, steps)
        keys_sent = _bytes((ring_routing.traffic(key_hops, setting.intra), self.key_bytes))
        gradients_sent = (ring_routing.traffic(gradient_hops, setting.intra), self.gradient_bytes)

        # Hops around the inner rings after each step, [W]. A plain ring goes through all nodes, and
        # waits for its slowest hop.
        across = steps > setting.intra
        keys = key_hops.inner.any(0).flatten() * self._link_seconds(self.key_bytes, across)
        gradients = gradient_hops.inner.any(0).flatten() * self._link_seconds(
            self.gradient_bytes, across
        )
        # Gradients travel while others are computed, and the last ones travel alone.
        last_gradient = gradients[-1].item()
        gradients[-1] = 0
        forward = self._pass(work, keys, keys_sent, launches=groups)
        backward = self._pass(
            work,
            torch.maximum(keys, gradients),
            _bytes((keys_sent, 1), gradients_sent),
            backward=True,
            ends=last_gradient / groups,
            launches=groups,
        )
        if windows == 1:
            return work, forward, backward

        hops = windows - 1
        key_seconds = self._link_seconds(self.key_bytes, across=True).item()
        gradient_seconds = self._link_seconds(self.gradient_bytes, across=True).item()
        # The links may be busy throughout, and then the last group of the last window remains.
        last_window = forward.compute.amax(0).unflatten(0, (windows, -1))[-1].sum().item()
        forward_seconds = max(forward.seconds, hops * key_seconds + last_window / groups)

        # The backward computes the first step of the first window, then the other windows, then the
        # rest of the first one, which hides how the gradients of the last window cross.
        by_window = backward.compute.amax(0).unflatten(0, (windows, -1)).sum(-1)
        first_step = backward.compute[:, 0].max().item()
        rest = by_window[0].item() - first_step
        crossing = backward.seconds - rest - by_window[-1].item() * (1 - 1 / groups)
        backward_seconds = max(
            backward.seconds + max(0.0, key_seconds / groups - first_step),
            max(crossing, hops * key_seconds) + gradient_seconds,
            key_seconds + hops * gradient_seconds,
        )
        backward = backward._replace(seconds=backward_seconds)
        return work, forward._replace(seconds=forward_seconds), backward

    def all_gather(self) -> tuple[Tensor, Pass, Pass]:
        """Everything is sent to everybody, some KV heads at a time."""
        heads = self.layer.shape.kv_heads
        at_once = heads_gathered(heads, self.key_bytes * self.setting.ranks // heads)
        groups = -(-heads // at_once)
        _, work = self._work_by_step()
        # [W, groups]: heads are assumed to be alike, and groups to have equally many.
        of_group = (work.sum(1, keepdim=True) / groups).expand(-1, groups)
        chunks = ring_routing.all_gather_traffic(self.setting.ranks, self.setting.intra)
        gather = self._collective_seconds(self.key_bytes / groups)
        scatter = self._collective_seconds(self.gradient_bytes / groups)

        # The next heads are gathered while some are computed, and their gradients are scattered
        # while the next ones are computed.
        gathers = torch.full((groups,), gather, dtype=torch.float64)
        gathers[-1] = 0
        scatters = torch.full((groups,), scatter, dtype=torch.float64)
        scatters[0] = 0
        forward = self._pass(of_group, gathers, _bytes((chunks, self.key_bytes)), ends=gather)
        backward = self._pass(
            of_group,
            torch.maximum(gathers, scatters),
            _bytes((chunks, self.key_bytes + self.gradient_bytes)),
            backward=True,
            ends=gather + scatter,
        )
        return work, forward, backward

    def ulysses(self) -> tuple[Tensor, Pass, Pass]:
        """The ranks of a node share the heads, and those with the same heads
        make a ring of nodes."""
        setting = self.setting
        layer = self.layer
        ranks = setting.intra
        heads = layer.index.heads
        kv_heads = layer.shape.kv_heads * kv_copies(heads, layer.shape.kv_heads, ranks)
        shape = layer.shape._replace(kv_heads=kv_heads // ranks)
        table = layer.table.view(setting.inter, -1).sort(1).values
        nodes = dataclasses.replace(setting, schedule=RING, intra=1)
        passes = []
        for first in range(0, heads, heads // ranks):
            index = layer.index.of_heads(slice(first, first + heads // ranks))
            visits = count_visits(index, layer.ranges, table)
            of_heads = LayerWork(index, layer.ranges, shape, table, visits)
            passes.append(_Planner(of_heads, nodes, self.constants).ring())
        works, forwards, backwards = zip(*passes)

        # q and out, K and V, of one rank; it keeps what it has of its own heads.
        vectors = 2 * (heads + kv_heads) * (ranks - 1) / ranks
        traded = vectors * self.key_bytes / (2 * layer.shape.kv_heads)
        # Two trades, which nothing hides.
        seconds = 2 * self._link_seconds(traded / 2, across=False).item()

        def joined(of_ranks: tuple[Pass, ...]) -> Pass:
            return Pass(
                compute=_by_node([one.compute for one in of_ranks]),
                transfers=torch.stack([one.transfers for one in of_ranks]).amax(0),
                ends=max(one.ends for one in of_ranks) + seconds,
                seconds=max(one.seconds for one in of_ranks) + seconds,
                sent=ring_routing.Traffic(
                    inside=_by_node([torch.full_like(one.sent.across, traded) for one in of_ranks]),
                    across=_by_node([one.sent.across for one in of_ranks]),
                ),
            )

        return _by_node(works), joined(forwards), joined(backwards)

    def group_cast(self) -> tuple[Tensor, Pass, Pass]:
        """Single blocks travel, from their owners to the ranks that need them."""
        setting = self.setting
        layer = self.layer
        if layer.index.selects_all:
            # The mask alone determines what a dense pattern needs.
            needed = seen_blocks(layer.ranges, layer.table, layer.index.block_size)
        else:
            needed = layer.visits.met
        wanted = group_cast_plan.wanted_blocks(needed, layer.table, setting.inter, setting.intra)

        # [W, 1]: on own blocks, and on those of others, which come in equal stages.
        pairs = layer.visits.pairs.double()
        own = pairs.diagonal()[:, None]
        verticals = layer.visits.vertical_pairs[:, None]
        others = pairs.sum(1, keepdim=True) - own + verticals
        forward_stages, backward_stages = setting.overlap_stages
        work = torch.cat([own, *[others / forward_stages] * forward_stages], 1)
        # The backward computes half of the own blocks at the end.
        stages = [others / backward_stages] * backward_stages
        backward_work = torch.cat([own / 2, *stages, own / 2], 1)

        # Keys come during the step before theirs, and gradients return during the step after it.
        nothing = torch.zeros(1, dtype=torch.float64)
        keys, sent = self._exchanges(wanted, forward_stages, self.key_bytes)
        forward = self._pass(work, torch.cat([keys, nothing]), sent)
        keys, sent = self._exchanges(wanted, backward_stages, self.key_bytes)
        gradients, returned = self._exchanges(wanted, backward_stages, self.gradient_bytes, True)
        beside = torch.maximum(
            torch.cat([keys, nothing, nothing]), torch.cat([nothing, nothing, gradients])
        )
        both = _bytes((sent, 1), (returned, 1))
        return work, forward, self._pass(backward_work, beside, both, backward=True)

    def _exchanges(
        self, wanted: Tensor, stages: int, chunk_bytes: int, backward: bool = False
    ) -> tuple[Tensor, ring_routing.Traffic]:
        """Seconds of the exchange of each stage, float64 [stages], and bytes
        that each rank sends."""
        block_bytes = chunk_bytes // self.layer.table.shape[1]
        sent = group_cast_plan.traffic(wanted, stages, backward)
        received = group_cast_plan.traffic(wanted, stages, not backward)
        seconds = []
        for across, (there, back) in enumerate(zip(sent, received)):
            # A rank sends and receives at the same time.
            busiest = torch.maximum(there, back).amax(0)
            seconds.append(self._link_seconds(busiest * block_bytes, bool(across)))
        # Blocks from other nodes are handed on inside, and gradients are collected inside first.
        # The stages between hide one exchange behind the other.
        exchange = torch.maximum(*seconds)
        lone = -1 if backward else 0
        exchange[lone] = seconds[0][lone] + seconds[1][lone]
        return exchange, ring_routing.Traffic(*(blocks.sum(1) * block_bytes for blocks in sent))

    def _work_by_step(self) -> tuple[Tensor, Tensor]:
        """The chunks that each rank is sent and computes on, bool [W, W], and pairs of tokens by
        step of the forward, float64 [W, W]."""
        setting = self.setting
        index = self.layer.index
        ranges = self.layer.ranges
        table = self.layer.table
        # By the mask first, then by what the pattern chose.
        needed = seen_chunks(ranges, table, index.block_size)
        if goes_by_index(index, setting.layout):
            needed = needed & self.layer.visits.met[:, table].any(-1)
        # By rank and step, the rank whose keys and values are computed on: int64 [W, W].
        sources = torch.tensor(setting.schedule.step_sources(setting.inter, setting.intra))
        return needed, by_step(self.layer.visits, sources, needed)

    def _link_seconds(self, size: Tensor | float, across: bool) -> Tensor:
        """Seconds of a transfer of `size` bytes inside a node or across; none
        where there are none."""
        constants = self.constants
        gb_s = constants.across_gb_s if across else constants.inside_gb_s
        latency_ms = constants.across_latency_ms if across else constants.inside_latency_ms
        size = torch.as_tensor(size, dtype=torch.float64)
        return size / (gb_s * 1e9) + (size > 0) * latency_ms / 1e3

    def _collective_seconds(self, size: float) -> float:
        """Seconds until every rank has the chunks of all others, `size` bytes each.

        Transfers inside nodes and across them run at the same time.
        """
        sent = ring_routing.all_gather_traffic(self.setting.ranks, self.setting.intra)
        inside = self._link_seconds(sent.inside.max() * size, across=False)
        across = self._link_seconds(sent.across.max() * size, across=True)
        return max(inside.item(), across.item())

    def _pass(
        self,
        pairs: Tensor,
        beside: Tensor,
        sent: ring_routing.Traffic,
        backward: bool = False,
        ends: float = 0.0,
        launches: int = 1,
    ) -> Pass:
        """Steps one after the other.

        pairs: float64 [W, steps], in the order of the pass. beside: float64 [steps], seconds of the
        transfers that run at the same time as each step. sent: as in Pass. ends: of transfers
        before the first or after the last step. launches: of kernels, for each step.
        """
        constants = self.constants
        shape = self.layer.shape
        tflops = constants.backward_tflops if backward else constants.forward_tflops
        flops = (BACKWARD_FLOPS if backward else FORWARD_FLOPS) * shape.head_dim
        launch = (pairs > 0) * launches * constants.launch_ms / 1e3
        compute = pairs * flops / (tflops * 1e12) + launch
        # The all-reduce of the gathered verticals, or of their gradients, hides behind the step
        # before they are met, or behind the one after their gradients are complete. It is a
        # reduce-scatter and an all-gather of 1 / W of the whole.
        elements = 2 * self.layer.index.verticals.numel() * shape.head_dim
        width = shape.gradient_bytes if backward else shape.element_bytes
        verticals = 2 * self._collective_seconds(elements * width / self.setting.ranks)
        hides_behind = -1 if backward else 0
        beside = beside.clone()
        beside[hides_behind] = beside[hides_behind].clamp(min=verticals)
        of_rank = torch.maximum(compute, beside).sum(-1)
        return Pass(compute, beside, ends, of_rank.max().item() + ends, sent)


def _by_node(of_ranks: Sequence[Tensor]) -> Tensor:
    """Values [ranks, ...] node by node, from those of each rank of a node, [nodes, ...]."""
    return torch.stack(list(of_ranks), 1).flatten(0, 1)


def _bytes(*kinds: tuple[ring_routing.Traffic, int]) -> ring_routing.Traffic:
    """Bytes of several kinds of traffic. kinds: what is sent, and bytes of one of it."""
    return ring_routing.Traffic(
        inside=sum(sent.inside * size for sent, size in kinds),
        across=sum(sent.across * size for sent, size in kinds),
    )
