"""How long one layer's attention would take on many ranks, from an index and a few measured rates.

There is no GPU and there are no processes. The work of every rank and step and the bytes on every
link are counted exactly. The times are bounds: on each rank a step takes as long as its kernels or
the slowest transfer beside it, whichever is longer, transfers with nothing to hide behind are added,
and the last rank counts. W is the number of ranks everywhere.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import balanced, group_cast_plan, layouts, routing
from titan_sparse.attention.context_parallel.schedule import Moves, Schedule, head_groups
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.masks.reach import seen_blocks, visible_pairs
from titan_sparse.attention.observe.visits import Visits, by_step, count_visits_of_all_heads
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.attention.patterns.dense import DenseIndex
from titan_sparse.attention.schedules.needs import met_blocks, needed_chunks_of
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS, Constants, Shape


@dataclass(frozen=True)
class Layer:
    """Attention of one layer: what it chose, under which mask, and the shape of K and V."""

    index: BlockIndex
    ranges: MaskRanges
    shape: Shape


@dataclass(frozen=True)
class Setting:
    """How the work is spread over `inter` nodes of `intra` ranks.

    overlap_stages: of group_cast, forward and backward. balance: costs by which the layout
    "balanced" deals out blocks.
    """

    layout: str
    schedule: Schedule
    inter: int
    intra: int
    overlap_stages: tuple[int, int] = (2, 2)
    balance: balanced.Costs = balanced.DEFAULT_COSTS

    @property
    def ranks(self) -> int:
        """Context-parallel ranks, called W in shapes."""
        return self.inter * self.intra


class Pass(NamedTuple):
    """A forward or a backward. compute: seconds of kernels and launches, float64 [W, steps].

    time: seconds until the last rank is done. sent: bytes that each rank sends, inside its node and
    to other nodes.
    """

    compute: Tensor
    time: float
    sent: routing.Traffic

    def seconds(self) -> float:
        """Seconds until the last rank is done."""
        return self.time

    def exposed(self) -> float:
        """Seconds beyond the computing of the busiest rank."""
        return self.time - self.compute.sum(-1).max().item()


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
    balance: balanced.Costs = balanced.DEFAULT_COSTS,
) -> Tensor:
    """The blocks of each rank under this mask, int64 [ranks, n].

    balance: costs by which the layout "balanced" deals them out. Raises ValueError if the sequence
    does not divide.
    """
    if layout == "balanced":
        return balanced.block_table(ranges, ranks, block_size, balance)
    seq_len = ranges.start.shape[1]
    return layouts.block_ids(layout, ranks, seq_len, block_size)


def count(
    index: BlockIndex,
    ranges: MaskRanges,
    layout: str,
    ranks: int,
    balance: balanced.Costs = balanced.DEFAULT_COSTS,
) -> Visits:
    """What a layout gives each rank to compute, all heads together. balance: as in Setting."""
    table = table_of(ranges, layout, ranks, index.block_size, balance)
    return count_visits_of_all_heads(index, ranges, table)


def plan_layer(visits: Visits, layer: Layer, setting: Setting, constants: Constants) -> LayerPlan:
    """The plan of one layer in one setting. visits: from count() for the same layout."""
    kinds = {Moves.HEADS: _AllGather, Moves.BLOCKS: _GroupCast}
    planned = kinds.get(setting.schedule.moves, _Ring)(visits, layer, setting, constants)
    work, forward, backward = planned.passes()
    # The mask is the same for all heads, and one mask may stand for all sequences.
    sequences_per_mask = len(layer.index.verticals) // len(layer.ranges.start)
    visible = visible_pairs(layer.ranges).sum().item() * layer.index.heads * sequences_per_mask
    return LayerPlan(setting, work.sum().item() / visible, work, forward, backward)


class _Costs:
    """Bytes and seconds of a layer under a setting, on a machine with these constants."""

    def __init__(self, visits: Visits, layer: Layer, setting: Setting, constants: Constants):
        self.visits = visits
        self.layer = layer
        self.setting = setting
        self.constants = constants
        shape = layer.shape
        tokens = len(layer.index.verticals) * layer.ranges.start.shape[1]
        # Of K and V of one rank.
        elements = 2 * tokens * shape.kv_heads * shape.head_dim // setting.ranks
        self.key_bytes = elements * shape.element_bytes
        self.gradient_bytes = elements * shape.gradient_bytes

    def table(self) -> Tensor:
        """The blocks of each rank, int64 [W, n]."""
        layer = self.layer
        setting = self.setting
        size = layer.index.block_size
        return table_of(layer.ranges, setting.layout, setting.ranks, size, setting.balance)

    def compute_seconds(self, pairs: Tensor, backward: bool) -> Tensor:
        """Seconds of kernels and launches for pairs of tokens; none where there are none."""
        constants = self.constants
        tflops = constants.backward_tflops if backward else constants.forward_tflops
        flops = (BACKWARD_FLOPS if backward else FORWARD_FLOPS) * self.layer.shape.head_dim
        return pairs * flops / (tflops * 1e12) + (pairs > 0) * constants.launch_ms / 1e3

    def link_seconds(self, size: Tensor | float, across: bool) -> Tensor:
        """Seconds of a transfer of `size` bytes inside a node or across; none where there are none."""
        constants = self.constants
        gb_s = constants.across_gb_s if across else constants.inside_gb_s
        latency_ms = constants.across_latency_ms if across else constants.inside_latency_ms
        size = torch.as_tensor(size, dtype=torch.float64)
        return size / (gb_s * 1e9) + (size > 0) * latency_ms / 1e3

    def collective_seconds(self, size: float) -> float:
        """Seconds until every rank has the chunks of all others, `size` bytes each.

        What goes inside nodes and what goes across them goes at the same time.
        """
        sent = routing.all_gather_traffic(self.setting.ranks, self.setting.intra)
        inside = self.link_seconds(sent.inside.max() * size, across=False)
        across = self.link_seconds(sent.across.max() * size, across=True)
        return max(inside.item(), across.item())

    def vertical_seconds(self, element_bytes: int) -> float:
        """Seconds of the all-reduce of the gathered verticals, or of their gradients.

        It is a reduce-scatter and an all-gather of 1 / W of the whole.
        """
        elements = 2 * self.layer.index.verticals.numel() * self.layer.shape.head_dim
        return 2 * self.collective_seconds(elements * element_bytes / self.setting.ranks)

    def pass_of(
        self,
        pairs: Tensor,
        beside: Tensor,
        sent: routing.Traffic,
        backward: bool,
        ends: float = 0.0,
        launches: int = 1,
    ) -> Pass:
        """Steps one after the other.

        pairs: float64 [W, steps], in the order of the pass. beside: float64 [steps], seconds of the
        transfers that run beside each step. ends: of transfers before the first or after the last
        step. launches: of kernels, for each step.
        """
        compute = launches * self.compute_seconds(pairs / launches, backward)
        shape = self.layer.shape
        # The exchange of the verticals hides behind the step before they are met, or behind the one
        # after their gradients are complete.
        width = shape.gradient_bytes if backward else shape.element_bytes
        beside = beside.clone()
        hides_behind = -1 if backward else 0
        beside[hides_behind] = beside[hides_behind].clamp(min=self.vertical_seconds(width))
        of_rank = torch.maximum(compute, beside).sum(-1)
        return Pass(compute, of_rank.max().item() + ends, sent)

    def works_by_step(self) -> tuple[Tensor, Tensor]:
        """Pairs of tokens by step of the forward and of the backward, float64 [W, W] each."""
        setting = self.setting
        windows, _ = setting.schedule.rings(setting.inter, setting.intra)
        sources, needed = self.sources(), self.needed()
        works = []
        for backward in (False, True):
            work = by_step(self.visits, sources, backward, windows, needed)
            works.append(work.sum((0, 1)).double())
        return works[0], works[1]

    def sources(self) -> Tensor:
        """By rank and step, the rank whose keys and values are computed on: int64 [W, W]."""
        return torch.tensor(
            self.setting.schedule.step_sources(self.setting.inter, self.setting.intra)
        )

    def needed(self) -> Tensor:
        """The chunks that each rank is sent and computes on, bool [W, W]."""
        layer = self.layer
        ranges = layer.ranges
        if self.setting.layout == "balanced":
            ranges = ranges._replace(table=self.table())
        return needed_chunks_of(layer.index, ranges, self.setting.layout, self.setting.ranks)


class _Ring(_Costs):
    """A ring, a double ring, or one rank alone."""

    def passes(self) -> tuple[Tensor, Pass, Pass]:
        setting = self.setting
        windows, steps = setting.schedule.rings(setting.inter, setting.intra)
        groups = head_groups(self.layer.shape.kv_heads, windows)
        forward_work, backward_work = self.works_by_step()
        key_hops = routing.hops_needed(self.needed(), windows, steps)
        gradient_hops = routing.gradient_hops(self.needed(), windows, steps)
        keys = routing.traffic(key_hops, setting.intra)
        gradients = routing.traffic(gradient_hops, setting.intra)

        # [W]: gradients go on while others are computed, and the last ones go alone.
        key_seconds = self._hop_seconds(key_hops, self.key_bytes)
        gradient_seconds = self._hop_seconds(gradient_hops, self.gradient_bytes)
        last_gradient = gradient_seconds[-1].item()
        gradient_seconds[-1] = 0
        forward = self.pass_of(
            forward_work,
            key_seconds,
            routing.Traffic(keys.inside * self.key_bytes, keys.across * self.key_bytes),
            backward=False,
            launches=groups,
        )
        sent = [
            of_keys * self.key_bytes + of_gradients * self.gradient_bytes
            for of_keys, of_gradients in zip(keys, gradients)
        ]
        backward = self.pass_of(
            backward_work,
            torch.maximum(key_seconds, gradient_seconds),
            routing.Traffic(*sent),
            backward=True,
            ends=last_gradient / groups,
            launches=groups,
        )
        if windows > 1:
            forward, backward = self._between_nodes(forward, backward, windows, groups)
        return forward_work, forward, backward

    def _hop_seconds(self, hops: routing.Hops, size: int) -> Tensor:
        """Seconds of the hops around the inner rings after each step, float64 [W]."""
        setting = self.setting
        ranks, windows = hops.inner_to.shape
        steps = ranks // windows
        step = torch.arange(steps)
        # [W, windows, steps]
        made = (hops.inner_from[..., None] <= step) & (step < hops.inner_to[..., None])
        # A plain ring goes through all nodes, and waits for its slowest hop.
        across = steps > setting.intra
        return made.any(0).flatten() * self.link_seconds(size, across)

    def _between_nodes(
        self, forward: Pass, backward: Pass, windows: int, groups: int
    ) -> tuple[Pass, Pass]:
        """The passes of a double ring, whose hops between nodes run beside whole windows.

        Heads travel in groups: one group is computed while the next one travels.
        """
        hops = windows - 1
        keys = self.link_seconds(self.key_bytes, across=True).item()
        gradients = self.link_seconds(self.gradient_bytes, across=True).item()
        # The first chunk crosses beside the first window. The links may be busy throughout, and then
        # the last group of the last window remains.
        last_window = forward.compute.amax(0).unflatten(0, (windows, -1))[-1].sum().item()
        forward_time = max(forward.time, hops * keys + last_window / groups)

        # The backward computes the first step of the first window, then the other windows, then the
        # rest of the first one, behind which the gradients of the last window cross.
        seconds = backward.compute.amax(0)
        first_step = seconds[0].item()
        rest = seconds[: len(seconds) // windows].sum().item() - first_step
        last_window = seconds.unflatten(0, (windows, -1))[-1].sum().item()
        crossing = backward.time - rest - last_window * (1 - 1 / groups)
        backward_time = max(
            backward.time + max(0.0, keys / groups - first_step),
            max(crossing, hops * keys) + gradients,
            keys + hops * gradients,
        )
        return forward._replace(time=forward_time), backward._replace(time=backward_time)


class _AllGather(_Costs):
    """all_gather, which sends everything to everybody, one KV head at a time."""

    def passes(self) -> tuple[Tensor, Pass, Pass]:
        setting = self.setting
        heads = self.layer.shape.kv_heads
        forward_work, _ = self.works_by_step()
        # [W, KV heads]: heads are taken to be alike.
        of_head = (forward_work.sum(1, keepdim=True) / heads).expand(-1, heads)
        chunks = routing.all_gather_traffic(setting.ranks, setting.intra)
        gather = self.collective_seconds(self.key_bytes / heads)
        scatter = self.collective_seconds(self.gradient_bytes / heads)

        # The next head is gathered while one is computed, and its gradient is scattered while the
        # next one is computed.
        gathers = torch.full((heads,), gather, dtype=torch.float64)
        gathers[-1] = 0
        scatters = torch.full((heads,), scatter, dtype=torch.float64)
        scatters[0] = 0
        sent = routing.Traffic(chunks.inside * self.key_bytes, chunks.across * self.key_bytes)
        forward = self.pass_of(of_head, gathers, sent, backward=False, ends=gather)
        both = self.key_bytes + self.gradient_bytes
        sent = routing.Traffic(chunks.inside * both, chunks.across * both)
        backward = self.pass_of(
            of_head,
            torch.maximum(gathers, scatters),
            sent,
            backward=True,
            ends=gather + scatter,
        )
        return forward_work, forward, backward


class _GroupCast(_Costs):
    """group_cast: what moves is single blocks, from their owners to the ranks that need them."""

    def passes(self) -> tuple[Tensor, Pass, Pass]:
        setting = self.setting
        layer = self.layer
        table = self.table()
        if isinstance(layer.index, DenseIndex):
            # The mask alone says what a dense pattern needs.
            needed = seen_blocks(layer.ranges, table, layer.index.block_size)
        else:
            needed = met_blocks(layer.ranges, layer.index, table)
        wanted = group_cast_plan.wanted_blocks(needed, table, setting.inter, setting.intra)
        key_bytes = self.key_bytes // table.shape[1]
        gradient_bytes = self.gradient_bytes // table.shape[1]

        # [W, 1]: on own blocks, and on those of others, which come in equal stages.
        pairs = self.visits.pairs.sum((0, 1)).double()
        own = pairs.diagonal()[:, None]
        verticals = self.visits.vertical_pairs.sum((0, 1, 3))[:, None]
        others = pairs.sum(1, keepdim=True) - own + verticals
        forward_stages, backward_stages = setting.overlap_stages
        forward_work = torch.cat([own, *[others / forward_stages] * forward_stages], 1)
        # The backward computes half of the own blocks at the end.
        stages = [others / backward_stages] * backward_stages
        backward_work = torch.cat([own / 2, *stages, own / 2], 1)

        keys, sent_forward = self._stages(wanted, forward_stages, key_bytes)
        nothing = torch.zeros(1, dtype=torch.float64)
        forward = self.pass_of(
            forward_work, torch.cat([keys, nothing]), sent_forward, backward=False
        )
        keys, sent = self._stages(wanted, backward_stages, key_bytes)
        gradients, sent_back = self._stages(wanted, backward_stages, gradient_bytes, True)
        # Keys come beside the step before theirs, and gradients go home beside the step after it.
        beside = torch.maximum(
            torch.cat([keys, nothing, nothing]), torch.cat([nothing, nothing, gradients])
        )
        both = routing.Traffic(*(there + back for there, back in zip(sent, sent_back)))
        backward = self.pass_of(backward_work, beside, both, backward=True)
        return forward_work, forward, backward

    def _stages(
        self, wanted: Tensor, stages: int, block_bytes: int, backward: bool = False
    ) -> tuple[Tensor, routing.Traffic]:
        """Seconds of the exchange of each stage, float64 [stages], and bytes that each rank sends."""
        sent = group_cast_plan.traffic(wanted, stages, backward)
        received = group_cast_plan.traffic(wanted, stages, not backward)
        seconds = []
        for across, (there, back) in enumerate(zip(sent, received)):
            # A rank sends and receives at the same time.
            busiest = torch.maximum(there, back).amax(0)
            seconds.append(self.link_seconds(busiest * block_bytes, bool(across)))
        # Blocks from other nodes are handed on inside, and gradients are collected inside first.
        # The stages between hide one exchange behind the other.
        exchange = torch.maximum(*seconds)
        lone = -1 if backward else 0
        exchange[lone] = seconds[0][lone] + seconds[1][lone]
        total = routing.Traffic(*(blocks.sum(1) * block_bytes for blocks in sent))
        return exchange, total
