"""budget = "joint": the cheapest verticals and diagonals that hold the target together.

That is the union of verticals and block diagonals of least cost whose mass reaches the recall
target.

MTraining's budgets (B.1) let verticals, and diagonals, each reach the target alone; together they
hold more than was asked for. Here mass counts once, whoever computes it. It is weighed against the
time that it costs a block of queries: 1 for a diagonal, VERTICAL_COST / block_size for a vertical.
If costs were counted over the whole sequence instead, verticals near its end would cost next to
nothing, and the choice would hold the probe's mass with verticals that no other query wants
(docs/masks_and_patterns.md).

For each vertical the probe tells which diagonals hold its mass too: one for each block that the
probe's rows lie in, so mostly one. titan_sparse/kernels/joint tells how the choice is made, by
prices.

On a GPU, fp32 masses go to the kernels of titan_sparse/kernels/joint, which sort no verticals. All
others go to their plain-torch twin there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.attention.patterns.spans import (
    Spans,
    lookup,
    span_of_tokens,
    spans_of_blocks,
)
from titan_sparse.attention.patterns.vertical_slash.probe import tiles_of_diagonals
from titan_sparse.kernels import joint as kernels
from titan_sparse.kernels.budget import Segments
from titan_sparse.kernels.joint import Incidence


def incidence(
    spans: Spans, segments: Segments, seq_len: int, back: int, block_size: int
) -> Incidence:
    """Which diagonals each vertical meets.

    segments: n spans' verticals, then their diagonals.
    back: U, blocks that the probe's rows lie in.
    """
    n = spans.start.shape[1]
    device = spans.start.device
    count = segments.segment.shape[1]  # S + E
    segment = segments.segment.long()

    # [B, K, T]: the spans at each block.
    block = torch.arange(seq_len // block_size, device=device)
    touching = spans_of_blocks(spans, block, block_size)
    known = touching.clamp(min=0)
    last_block = lookup(spans.last_block, known)
    offset = lookup(spans.offset, known)

    # [B, K, T, U]: how far apart the block is from each of the probe's blocks.
    delta = (last_block - block[:, None])[..., None] - torch.arange(back, device=device)
    met = (touching >= 0)[..., None] & (delta >= 0)
    diagonal = torch.where(met, offset[..., None] + delta, count - seq_len)

    # [B, K, b]: slots that touch a block are consecutive, so a vertical's place among them is a
    # difference.
    vertical_span = span_of_tokens(spans.start, spans.stop, seq_len)
    vertical_span = vertical_span.unflatten(1, (-1, block_size))
    slot = vertical_span - touching[:, :, :1]

    # [B, S + E]; diagonals are segments n .. 2 n - 1 there.
    span = torch.where(segment < 2 * n, segment % n, n)
    bounds = F.pad(segments.bounds.long(), (0, 0, 0, 1))
    begin = bounds[..., 0].gather(1, segment)
    always = bounds[..., 4].gather(1, segment)
    place = torch.arange(count, device=device)

    # [B, n, 5]: sinks are the first verticals of a span.
    first, stop, least, most, sinks = segments.bounds[:, :n].unbind(-1)
    first_free = torch.minimum(first + sinks, stop)
    free_bounds = [first_free, stop, least, most, torch.zeros_like(sinks)]
    return Incidence(
        tile=tiles_of_diagonals(spans, len(block), back, block_size),
        diagonal=diagonal,
        slot=slot.clamp(0, touching.shape[2] - 1),
        segment=span,
        always=(span < n) & (place < begin + always),
        free_verticals=torch.stack(free_bounds, dim=-1),
    )


def smallest_union(
    verticals: Tensor, segments: Segments, of: Incidence, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each span of each row, the cheapest union of verticals and diagonals.

    It is the one of least cost that holds `recall` of the span's mass.

    verticals: float [N, K, U, b], masses by block back, at most most_mass in a span. of: which
    diagonals hold them too. Elements that are always on count as held; the bounds on counts are on
    what comes in addition. Equal prices are taken in order of position and sums are integers, so
    that every run and world size chooses the same. Units are most_mass * 2**-52 (or up to twice as
    much).
    Returns selected bool [N, S + E] and capped bool [N, 2 n]: whether the cap on verticals, and the
    cap on diagonals, kept a span below its target.
    """
    if verticals.is_cuda and verticals.dtype == torch.float32:
        return kernels.smallest_union(verticals, segments, of, recall, most_mass)
    return kernels.smallest_union_naive(verticals, segments, of, recall, most_mass)
