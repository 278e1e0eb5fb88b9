"""Thresholds from histograms of mass and number, and the candidates that reach them.

The score of a candidate is known by its bin (shared.py). All inputs are contiguous. In the kernels
i_bh is a query head of a sequence i_b.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.selection.shared import ALWAYS, BINS

_ALWAYS = tl.constexpr(ALWAYS)
_BINS = tl.constexpr(BINS)
MASS_UNITS = 2.0**40
"""Masses of slashes are summed as integers, so the order of additions does not matter. This many
units are a mass of 1."""
_UNITS = tl.constexpr(MASS_UNITS)
_PART = 64
"""Bins for which a program sums slashes."""
_CHUNK = 1024
"""Verticals or slashes that a program decides on."""


# Masses of slashes by bin


@triton.jit
def _add_kernel(
    mass, slash_mass, bins, span, offset, total, count, heads, entries,
    PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """PART of the bins of one span of one head."""
    i_span = tl.program_id(0)
    n = tl.num_programs(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    o_bin = tl.program_id(2) * PART + tl.arange(0, PART)
    # A span's slashes are neighbors in the list, and the next span's follow.
    begin = tl.load(offset + i_b * n + i_span)
    end = tl.load(offset + i_b * n + i_span + 1, mask=i_span + 1 < n, other=entries)
    units = tl.zeros([PART], tl.int64)
    b_count = tl.zeros([PART], tl.int32)
    for first in range(begin, end, CHUNK):
        # [CHUNK]
        o = first + tl.arange(0, CHUNK)
        inside = o < end
        is_mine = tl.load(span + i_b * entries + o, mask=inside, other=n) == i_span
        b_bin = tl.load(bins + i_bh * entries + o, mask=inside, other=0).to(tl.int32)
        b_mass = tl.load(slash_mass + i_bh * entries + o, mask=is_mine, other=0.0)
        rounded = tl.floor(b_mass.to(tl.float64) * _UNITS + 0.5).to(tl.int64)
        # [CHUNK, PART]
        in_bin = is_mine[:, None] & (b_bin[:, None] == o_bin[None, :])
        units += tl.sum(tl.where(in_bin, rounded[:, None], 0), 0)
        b_count += tl.sum(in_bin.to(tl.int32), 0)
    at = (i_bh * n + i_span) * _BINS + o_bin
    b_total = tl.load(mass + at).to(tl.float64) + units.to(tl.float64) / _UNITS
    tl.store(total + at, b_total.to(tl.float32))
    tl.store(count + at, tl.where(o_bin == _ALWAYS, 0, b_count).to(tl.float32))


def add_slashes(
    mass: Tensor, slash_mass: Tensor, bins: Tensor, span: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Histograms: the mass of verticals and slashes in each bin, and the number of slashes.

    Slashes that are always selected are not counted. Both are fp32 [B, Hq, n, BINS].
    mass: fp32 [B, Hq, n, BINS], of verticals. slash_mass: fp32 [B, Hq, E]. bins: uint8
    [B, Hq, E], of slashes.
    span: int64 [B, E], n for none. offset: int32 [B, n], where each span's slashes begin,
    ascending.
    """
    batch, heads, n, _ = mass.shape
    total = torch.empty_like(mass, memory_format=torch.contiguous_format)
    count = torch.empty_like(total)
    options = dict(PART=_PART, CHUNK=128, num_warps=8)
    arguments = (mass.contiguous(), slash_mass, bins, span, offset, total, count)
    _add_kernel[(n, batch * heads, BINS // _PART)](*arguments, heads, bins.shape[2], **options)
    return total, count


# Thresholds


def max_missed_mass(probed: Tensor, recall: float) -> Tensor:
    """The mass that a selection may miss in each span, float64 [B, n].

    probed: int64 [B, n], the number of rows of the probe in each span; each has a mass of 1.
    """
    if recall == 1:
        # Select everything, also keys on which the probe's rows put no mass: no missed mass is
        # negative.
        return torch.full_like(probed, -1, dtype=torch.float64)
    # Rounded to fp32: of ten rows a tenth is one, and in fp64 it would be a bit less.
    return (probed.float() * (1 - recall)).double()


class CountBounds(NamedTuple):
    """The number of candidates in each bin, and bounds on the number selected.

    Candidates that are always selected are left out.
    count: [B, Hq, n, BINS], below 2**24. least: of each span. most: int64 [B, n], which wins; None
    for no cap.
    """

    count: Tensor  # type: ignore[assignment]
    least: int
    most: Tensor | None


class Thresholds(NamedTuple):
    """The bins from which on up candidates are selected.

    verticals, slashes: int [B, Hq, n]. capped: bool [B, Hq, 2], whether their caps raised one.
    """

    verticals: Tensor
    slashes: Tensor
    capped: Tensor


@triton.jit
def _bounded(threshold, bounds, at, span):
    """naive.bounded() for one span. at: of its bins."""
    # [BINS]: how many each bin selects as the threshold.
    b_count = tl.load(bounds.count + at)
    selected = tl.sum(b_count, 0) - tl.cumsum(b_count, 0) + b_count
    low_enough = tl.maximum(tl.sum((selected >= bounds.least).to(tl.int32), 0) - 1, 0)
    low = tl.minimum(threshold, low_enough)
    high_enough = low
    if bounds.most is not None:
        high_enough = tl.sum((selected > tl.load(bounds.most + span)).to(tl.int32), 0)
    return tl.maximum(low, high_enough), high_enough > low


@triton.jit
def _threshold_kernel(mass, max_missed, verticals, slashes, thresholds, heads):
    """One span of one head."""
    i_span = tl.program_id(0)
    n = tl.num_programs(0)
    i_bh = tl.program_id(1).to(tl.int64)
    span = i_bh // heads * n + i_span
    row = i_bh * n + i_span
    at = row * _BINS + tl.arange(0, _BINS)

    # [BINS]: the mass that each bin misses as the threshold.
    b_mass = tl.load(mass + at).to(tl.float64)
    missed = tl.cumsum(b_mass, 0) - b_mass
    may_miss = missed <= tl.load(max_missed + span)
    # Masses that are NaN are below nothing.
    threshold = tl.maximum(tl.sum(may_miss.to(tl.int32), 0) - 1, 0)

    kept, is_capped = _bounded(threshold, verticals, at, span)
    tl.store(thresholds.verticals + row, kept)
    # Another span of the head may write the same.
    tl.store(thresholds.capped + i_bh * 2, 1, mask=is_capped)
    kept, is_capped = _bounded(threshold, slashes, at, span)
    tl.store(thresholds.slashes + row, kept)
    tl.store(thresholds.capped + i_bh * 2 + 1, 1, mask=is_capped)


def head_thresholds(
    mass: Tensor, max_missed: Tensor, verticals: CountBounds, slashes: CountBounds
) -> Thresholds:
    """recall_thresholds() for each head of its own, within the bounds of its verticals and slashes.

    mass: fp32 or float64 [B, Hq, n, BINS]. max_missed: of max_missed_mass(). Counts
    are fp32 or float64.
    """
    batch, heads, n, _ = mass.shape
    new_thresholds = torch.empty(2, batch, heads, n, dtype=torch.int32, device=mass.device)
    capped = torch.zeros(batch, heads, 2, dtype=torch.bool, device=mass.device)
    thresholds = Thresholds(new_thresholds[0], new_thresholds[1], capped)
    bounds = [of._replace(count=of.count.contiguous()) for of in (verticals, slashes)]
    results = thresholds._replace(capped=capped.view(torch.int8))
    _threshold_kernel[(n, batch * heads)](
        mass.contiguous(), max_missed, *bounds, results, heads, num_warps=1
    )
    return thresholds


# The selection


class Candidates(NamedTuple):
    """Bins of all verticals and slashes, and the spans that they are in, n for none.

    verticals: uint8 [B, Hq, blocks, b], in any order of blocks. order: int64 [blocks], where each
    block of the sequence is in it. is_sink: bool [B, S], verticals that are always selected.
    slashes: uint8 [B, Hq, E].
    span_of_token, span_of_entry: int64 [B, S] and [B, E].
    """

    verticals: Tensor
    order: Tensor
    is_sink: Tensor
    slashes: Tensor
    span_of_token: Tensor
    span_of_entry: Tensor


@triton.jit
def _threshold_of(thresholds, spans, n, inside):
    """Thresholds of the spans of some candidates; BINS for no span, which no bin reaches."""
    in_span = inside & (spans < n)
    return tl.load(thresholds + spans, mask=in_span, other=_BINS).to(tl.int32)


@triton.jit
def _select_kernel(
    candidates, vertical_threshold, slash_threshold, is_vertical, is_slash, heads, n, seq_len, entries,
    SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of one head's verticals, or behind them of its slashes."""
    i_chunk = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    chunks = tl.cdiv(seq_len, CHUNK)
    if i_chunk < chunks:
        o = i_chunk * CHUNK + tl.arange(0, CHUNK)
        inside = o < seq_len
        place = tl.load(candidates.order + o // SIZE, mask=inside, other=0) * SIZE + o % SIZE
        bin_at = candidates.verticals + i_bh * seq_len + place
        b_bin = tl.load(bin_at, mask=inside, other=0).to(tl.int32)
        span = tl.load(candidates.span_of_token + i_b * seq_len + o, mask=inside, other=n)
        threshold = _threshold_of(vertical_threshold + i_bh * n, span, n, inside)
        always = tl.load(candidates.is_sink + i_b * seq_len + o, mask=inside, other=0) != 0
        is_selected = (b_bin >= tl.maximum(threshold, 1)) | always
        tl.store(is_vertical + i_bh * seq_len + o, is_selected.to(tl.int8), mask=inside)
    else:
        o = (i_chunk - chunks) * CHUNK + tl.arange(0, CHUNK)
        inside = o < entries
        bin_at = candidates.slashes + i_bh * entries + o
        b_bin = tl.load(bin_at, mask=inside, other=0).to(tl.int32)
        span = tl.load(candidates.span_of_entry + i_b * entries + o, mask=inside, other=n)
        threshold = _threshold_of(slash_threshold + i_bh * n, span, n, inside)
        tl.store(is_slash + i_bh * entries + o, (b_bin >= threshold).to(tl.int8), mask=inside)


def select(
    candidates: Candidates, vertical_threshold: Tensor, slash_threshold: Tensor
) -> tuple[Tensor, Tensor]:
    """The verticals and the slashes from the thresholds on up: bool [B, Hq, S] and [B, Hq, E].

    Sinks are selected too. Verticals of bin 0 are not counted, so a cap would not hold for
    them, and they are never selected. This loses nothing: where the threshold is 0, all slashes
    are selected.
    vertical_threshold, slash_threshold: int [B, Hq, n].
    """
    batch, heads, n = vertical_threshold.shape
    bins = candidates.verticals.contiguous()
    seq_len = bins.shape[2] * bins.shape[3]
    entries = candidates.slashes.shape[2]
    is_vertical = bins.new_empty(batch, heads, seq_len, dtype=torch.bool)
    is_slash = bins.new_empty(batch, heads, entries, dtype=torch.bool)
    chunks = triton.cdiv(seq_len, _CHUNK) + triton.cdiv(entries, _CHUNK)
    contiguous = candidates._replace(
        verticals=bins,
        is_sink=candidates.is_sink.view(torch.int8),
        slashes=candidates.slashes.contiguous(),
    )
    thresholds = (vertical_threshold.contiguous(), slash_threshold.contiguous())
    results = (is_vertical.view(torch.int8), is_slash.view(torch.int8))
    options = dict(SIZE=bins.shape[3], CHUNK=_CHUNK, num_warps=4)
    _select_kernel[(chunks, batch * heads)](
        contiguous, *thresholds, *results, heads, n, seq_len, entries, **options
    )
    return is_vertical, is_slash
