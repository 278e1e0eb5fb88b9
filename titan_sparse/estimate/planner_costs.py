"""What the planner is asked about, and the bytes and seconds that its parts cost."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.context_parallel import balanced, layouts, routing
from titan_sparse.attention.context_parallel.schedule import Schedule, vertical_steps
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.estimate.constants import Constants
from titan_sparse.estimate.timeline import RingTransfers, Timeline, VerticalExchange, previous_ranks

FORWARD_FLOPS = 4
"""Per visited pair of tokens, query head and element of D: 2 products, as in the benchmark."""
BACKWARD_FLOPS = 10
"""The same in the backward: 5 products."""


class Shape(NamedTuple):
    """Shape of K and V.

    element_bytes: of an element of K and V as they are sent. gradient_bytes: of dK and dV.
    """

    kv_heads: int
    head_dim: int
    element_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Layer:
    """Attention of one layer: what it chose, under which mask, and the shape of K and V."""

    index: BlockIndex
    ranges: MaskRanges
    shape: Shape

    @property
    def vertical_blocks(self) -> int:
        """Blocks of gathered verticals."""
        index = self.index
        capacity = index.verticals.shape[-1]
        return capacity // index.block_size


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


class Passes(NamedTuple):
    """A forward and a backward played through.

    traffic: bytes that each rank sends, int64 [W], by name: forward_ and backward_, inside a node
    and across.
    """

    traffic: dict[str, Tensor]
    forward: Timeline
    backward: Timeline


class Played(NamedTuple):
    """A schedule played through.

    work: pairs of tokens, float64 [W, steps], in the forward. everything: where every rank is sent
    everything. only_needed: where things go only as far as they are needed.
    """

    work: Tensor
    everything: Passes
    only_needed: Passes


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of a layer under a setting, on a machine with these constants."""

    layer: Layer
    setting: Setting
    constants: Constants

    @property
    def _chunk_elements(self) -> int:
        """Elements of K and V of one rank."""
        layer = self.layer
        shape = layer.shape
        sequences = len(layer.index.verticals)
        seq_len = layer.ranges.start.shape[1]
        # One vector of D elements for each token and KV head, of K and of V.
        vectors = 2 * sequences * shape.kv_heads * seq_len
        vectors_of_rank = vectors // self.setting.ranks
        return vectors_of_rank * shape.head_dim

    @property
    def chunk_bytes(self) -> int:
        """Bytes of K and V of one rank."""
        element_bytes = self.layer.shape.element_bytes
        return self._chunk_elements * element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of dK and dV of one rank."""
        element_bytes = self.layer.shape.gradient_bytes
        return self._chunk_elements * element_bytes

    def forward_seconds(self, pairs: Tensor) -> Tensor:
        """Seconds that the forward takes for pairs of tokens; a step without any is not launched."""
        tflops = self.constants.forward_tflops
        return self._kernel_seconds(pairs, FORWARD_FLOPS, tflops)

    def backward_seconds(self, pairs: Tensor) -> Tensor:
        """As forward_seconds()."""
        tflops = self.constants.backward_tflops
        return self._kernel_seconds(pairs, BACKWARD_FLOPS, tflops)

    def _kernel_seconds(self, pairs: Tensor, flops_per_element: int, tflops: float) -> Tensor:
        """Seconds of kernels that compute these pairs of tokens, and of their launches.

        flops_per_element: for each pair of tokens and element of D.
        """
        flops_per_pair = flops_per_element * self.layer.shape.head_dim
        flops_per_second = tflops * 1e12
        launched = pairs > 0
        # A launch costs the same however little it computes.
        launch_seconds = launched * self.constants.launch_ms / 1e3
        return pairs * flops_per_pair / flops_per_second + launch_seconds

    def vertical_seconds(self) -> tuple[float, float]:
        """Seconds of the verticals' all-reduce: K and V in the forward, dK and dV in the backward."""
        shape = self.layer.shape
        ranks = self.setting.ranks
        verticals = self.layer.index.verticals.numel()
        elements = 2 * verticals * shape.head_dim
        if ranks == 1 or not elements:
            return 0.0, 0.0
        # An all-reduce is a reduce-scatter and an all-gather of 1 / ranks of the whole.
        sent = routing.all_gather_traffic(ranks, self.setting.intra)
        key_bytes = elements * shape.element_bytes / ranks
        gradient_bytes = elements * shape.gradient_bytes / ranks
        forward = 2 * self.collective_seconds(sent, key_bytes)
        backward = 2 * self.collective_seconds(sent, gradient_bytes)
        return forward, backward

    def vertical_exchanges(
        self,
        forward_computes: list[list[bool]],
        backward_computes: list[list[bool]],
        windows: int = 1,
    ) -> tuple[VerticalExchange | None, VerticalExchange | None]:
        """The verticals' exchanges of the forward and of the backward; None without verticals.

        forward_computes, backward_computes: by rank and step, whether the rank computes.
        windows: of the schedule.
        """
        blocks = self.layer.vertical_blocks
        if not blocks:
            return None, None
        # The forward waits before the first step that meets verticals. In the backward their
        # gradients are complete after the last one.
        first_steps = []
        for computes in forward_computes:
            first_steps.append(vertical_steps(computes, blocks, False, windows)[0])
        last_steps = []
        for computes in backward_computes:
            last_steps.append(vertical_steps(computes, blocks, True, windows)[-1])
        forward_seconds, backward_seconds = self.vertical_seconds()
        return (
            VerticalExchange(forward_seconds, torch.tensor(first_steps)),
            VerticalExchange(backward_seconds, torch.tensor(last_steps)),
        )

    def collective_seconds(self, sent: routing.Traffic, size: float) -> float:
        """Seconds until every rank has sent its chunks of `size` bytes.

        What goes inside nodes and what goes across them goes at the same time.
        """
        constants = self.constants
        # The busiest rank decides.
        inside_chunks = sent.inside.max().item()
        across_chunks = sent.across.max().item()
        inside_gb = inside_chunks * size / 1e9
        across_gb = across_chunks * size / 1e9
        inside_latency = (inside_gb > 0) * constants.inside_latency_ms / 1e3
        across_latency = (across_gb > 0) * constants.across_latency_ms / 1e3
        inside_seconds = inside_gb / constants.inside_gb_s + inside_latency
        across_seconds = across_gb / constants.across_gb_s + across_latency
        return max(inside_seconds, across_seconds)

    def ring_transfers(self, hops: routing.Hops, size: float) -> RingTransfers:
        """Transfers of `size` bytes each around the inner and the outer ring."""
        constants = self.constants
        node_size = self.setting.intra
        ranks, inter = hops.inner_to.shape
        inside_bytes_s = constants.inside_gb_s * 1e9
        across_bytes_s = constants.across_gb_s * 1e9
        inside = constants.inside_latency_ms / 1e3 + size / inside_bytes_s
        across = constants.across_latency_ms / 1e3 + size / across_bytes_s
        # A plain ring is one inner ring over all nodes, so its hops may cross between nodes too.
        node = torch.arange(ranks) // node_size
        inner_previous, outer_previous = previous_ranks(inter, ranks // inter)
        inner_is_inside = node == inner_previous // node_size
        outer_is_inside = node == outer_previous // node_size
        # [W]
        inner_seconds = torch.where(inner_is_inside, inside, across)
        outer_seconds = torch.where(outer_is_inside, inside, across)
        return RingTransfers(hops, inner_seconds.double(), outer_seconds.double())

    def traffic(self, keys: routing.Traffic, gradients: routing.Traffic) -> dict[str, Tensor]:
        """Bytes of Passes.traffic. keys, gradients: chunks that each rank sends in one pass."""
        return {
            "forward_inside": keys.inside * self.chunk_bytes,
            "forward_across": keys.across * self.chunk_bytes,
            "backward_inside": (
                keys.inside * self.chunk_bytes + gradients.inside * self.gradient_bytes
            ),
            "backward_across": (
                keys.across * self.chunk_bytes + gradients.across * self.gradient_bytes
            ),
        }


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
