"""From masses and counts by code to the codes from which on up a head takes elements, and to these.

The price of an element is known by its code (shared.py). All inputs are contiguous. In the kernels
i_bh is a query head of a sequence i_b.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.prices.shared import ALWAYS, CODES

_ALWAYS = tl.constexpr(ALWAYS)
_CODES = tl.constexpr(CODES)
MASS_UNITS = 2.0**40
"""Masses of slashes are summed as integers, so the order of additions does not matter. This many
units are a mass of 1."""
_UNITS = tl.constexpr(MASS_UNITS)
_PART = 64
"""Codes for which a program sums diagonals."""
_CHUNK = 1024
"""Verticals or diagonals that a program decides on."""


# Masses of diagonals by code


@triton.jit
def _add_kernel(
    mass, on_diagonals, codes, span, offset, total, count, heads, entries,
    PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """PART of the codes of one span of one head."""
    i_span = tl.program_id(0)
    n = tl.num_programs(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    o_code = tl.program_id(2) * PART + tl.arange(0, PART)
    # A span's diagonals are neighbors in the list, and the next span's follow.
    begin = tl.load(offset + i_b * n + i_span)
    end = tl.load(offset + i_b * n + i_span + 1, mask=i_span + 1 < n, other=entries)
    units = tl.zeros([PART], tl.int64)
    b_count = tl.zeros([PART], tl.int32)
    for first in range(begin, end, CHUNK):
        # [CHUNK]
        o = first + tl.arange(0, CHUNK)
        inside = o < end
        is_mine = tl.load(span + i_b * entries + o, mask=inside, other=n) == i_span
        code = tl.load(codes + i_bh * entries + o, mask=inside, other=0).to(tl.int32)
        held = tl.load(on_diagonals + i_bh * entries + o, mask=is_mine, other=0.0)
        rounded = tl.floor(held.to(tl.float64) * _UNITS + 0.5).to(tl.int64)
        # [CHUNK, PART]
        has_code = is_mine[:, None] & (code[:, None] == o_code[None, :])
        units += tl.sum(tl.where(has_code, rounded[:, None], 0), 0)
        b_count += tl.sum(has_code.to(tl.int32), 0)
    at = (i_bh * n + i_span) * _CODES + o_code
    b_total = tl.load(mass + at).to(tl.float64) + units.to(tl.float64) / _UNITS
    tl.store(total + at, b_total.to(tl.float32))
    tl.store(count + at, tl.where(o_code == _ALWAYS, 0, b_count).to(tl.float32))


def add_diagonals(
    mass: Tensor, on_diagonals: Tensor, codes: Tensor, span: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """What verticals and the diagonals of each code hold, and how many diagonals have it.

    Those that are always on are not counted. Both are fp32 [B, Hq, n, CODES].
    mass: fp32 [B, Hq, n, CODES], of verticals. on_diagonals: fp32 [B, Hq, E]. codes: uint8
    [B, Hq, E], of diagonals.
    span: int64 [B, E], n for none. offset: int32 [B, n], where each span's diagonals begin,
    ascending.
    """
    batch, heads, n, _ = mass.shape
    total = torch.empty_like(mass, memory_format=torch.contiguous_format)
    count = torch.empty_like(total)
    options = dict(PART=_PART, CHUNK=128, num_warps=8)
    arguments = (mass.contiguous(), on_diagonals, codes, span, offset, total, count)
    _add_kernel[(n, batch * heads, CODES // _PART)](*arguments, heads, codes.shape[2], **options)
    return total, count


# Limits


def loss_allowed(probed: Tensor, recall: float) -> Tensor:
    """How much of each span's mass may be lost, float64 [B, n].

    probed: int64 [B, n], rows that the probe has of each span; each has a mass of 1.
    """
    if recall == 1:
        # Everything is taken, not only what the probe's rows give mass to: no loss is as small.
        return torch.full_like(probed, -1, dtype=torch.float64)
    # Rounded to fp32: of ten rows a tenth is one, and in fp64 it would be a bit less.
    return (probed.float() * (1 - recall)).double()


class Counted(NamedTuple):
    """How many elements of each code there are, and how many may be taken.

    Those that are always on are left out.
    count: [B, Hq, n, CODES], below 2**24. least: of each span. most: int64 [B, n], which wins; None
    for no cap.
    """

    count: Tensor
    least: int
    most: Tensor | None


class HeadLimits(NamedTuple):
    """The codes from which on up elements are taken.

    verticals, diagonals: int [B, Hq, n]. capped: bool [B, Hq, 2], whether their caps raised one.
    """

    verticals: Tensor
    diagonals: Tensor
    capped: Tensor


@triton.jit
def _limited(limit, counted, at, span):
    """naive.limited() for one span. at: of its codes."""
    # [CODES]: how many are taken if a code is the lowest one.
    b_count = tl.load(counted.count + at)
    taken = tl.sum(b_count, 0) - tl.cumsum(b_count, 0) + b_count
    low_enough = tl.maximum(tl.sum((taken >= counted.least).to(tl.int32), 0) - 1, 0)
    low = tl.minimum(limit, low_enough)
    high_enough = low
    if counted.most is not None:
        high_enough = tl.sum((taken > tl.load(counted.most + span)).to(tl.int32), 0)
    return tl.maximum(low, high_enough), high_enough > low


@triton.jit
def _limits_kernel(mass, allowed, verticals, diagonals, limits, heads):
    """One span of one head."""
    i_span = tl.program_id(0)
    n = tl.num_programs(0)
    i_bh = tl.program_id(1).to(tl.int64)
    span = i_bh // heads * n + i_span
    row = i_bh * n + i_span
    at = row * _CODES + tl.arange(0, _CODES)

    # [CODES]: what is lost if a code is the lowest one taken.
    b_mass = tl.load(mass + at).to(tl.float64)
    lost = tl.cumsum(b_mass, 0) - b_mass
    is_spared = lost <= tl.load(allowed + span)
    # Masses that are NaN are below nothing.
    limit = tl.maximum(tl.sum(is_spared.to(tl.int32), 0) - 1, 0)

    kept, is_capped = _limited(limit, verticals, at, span)
    tl.store(limits.verticals + row, kept)
    # Another span of the head may write the same.
    tl.store(limits.capped + i_bh * 2, 1, mask=is_capped)
    kept, is_capped = _limited(limit, diagonals, at, span)
    tl.store(limits.diagonals + row, kept)
    tl.store(limits.capped + i_bh * 2 + 1, 1, mask=is_capped)


def head_limits(
    mass: Tensor, allowed: Tensor, verticals: Counted, diagonals: Counted
) -> HeadLimits:
    """price_limits() for each head of its own, within the bounds of its verticals and diagonals.

    mass: fp32 or float64 [B, Hq, n, CODES]. allowed: of loss_allowed(). Counts are fp32 or float64.
    """
    batch, heads, n, _ = mass.shape
    new_limits = torch.empty(2, batch, heads, n, dtype=torch.int32, device=mass.device)
    capped = torch.zeros(batch, heads, 2, dtype=torch.bool, device=mass.device)
    limits = HeadLimits(*new_limits, capped)
    counted = [of._replace(count=of.count.contiguous()) for of in (verticals, diagonals)]
    results = limits._replace(capped=capped.view(torch.int8))
    _limits_kernel[(n, batch * heads)](
        mass.contiguous(), allowed, *counted, results, heads, num_warps=1
    )
    return limits


# What is taken


class Elements(NamedTuple):
    """Codes of all verticals and diagonals, and which spans these are of, n for none.

    verticals: uint8 [B, Hq, blocks, b], in any order of blocks. order: int64 [blocks], where each
    block of the sequence is in it. is_sink: bool [B, S], verticals that are always selected.
    diagonals: uint8 [B, Hq, E].
    span_of_token, span_of_entry: int64 [B, S] and [B, E].
    """

    verticals: Tensor
    order: Tensor
    is_sink: Tensor
    diagonals: Tensor
    span_of_token: Tensor
    span_of_entry: Tensor


@triton.jit
def _limit_of(limits, spans, n, inside):
    """Limits of the spans of some elements; CODES for no span, which no code reaches."""
    in_span = inside & (spans < n)
    return tl.load(limits + spans, mask=in_span, other=_CODES).to(tl.int32)


@triton.jit
def _taken_kernel(
    elements, vertical_limit, diagonal_limit, is_vertical, is_diagonal, heads, n, seq_len, entries,
    SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of one head's verticals, or behind them of its diagonals."""
    i_chunk = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // heads
    chunks = tl.cdiv(seq_len, CHUNK)
    if i_chunk < chunks:
        o = i_chunk * CHUNK + tl.arange(0, CHUNK)
        inside = o < seq_len
        place = tl.load(elements.order + o // SIZE, mask=inside, other=0) * SIZE + o % SIZE
        code_at = elements.verticals + i_bh * seq_len + place
        code = tl.load(code_at, mask=inside, other=0).to(tl.int32)
        span = tl.load(elements.span_of_token + i_b * seq_len + o, mask=inside, other=n)
        limit = _limit_of(vertical_limit + i_bh * n, span, n, inside)
        always = tl.load(elements.is_sink + i_b * seq_len + o, mask=inside, other=0) != 0
        is_taken = (code >= tl.maximum(limit, 1)) | always
        tl.store(is_vertical + i_bh * seq_len + o, is_taken.to(tl.int8), mask=inside)
    else:
        o = (i_chunk - chunks) * CHUNK + tl.arange(0, CHUNK)
        inside = o < entries
        code_at = elements.diagonals + i_bh * entries + o
        code = tl.load(code_at, mask=inside, other=0).to(tl.int32)
        span = tl.load(elements.span_of_entry + i_b * entries + o, mask=inside, other=n)
        limit = _limit_of(diagonal_limit + i_bh * n, span, n, inside)
        tl.store(is_diagonal + i_bh * entries + o, (code >= limit).to(tl.int8), mask=inside)


def taken(
    elements: Elements, vertical_limit: Tensor, diagonal_limit: Tensor
) -> tuple[Tensor, Tensor]:
    """The verticals and the diagonals from the limits on up: bool [B, Hq, S] and [B, Hq, E].

    Sinks are taken too. Verticals of code 0 are not counted, so no cap would hold them, and they
    are never taken. They are not missed: where the limit is 0, all diagonals are on.
    vertical_limit, diagonal_limit: int [B, Hq, n].
    """
    batch, heads, n = vertical_limit.shape
    codes = elements.verticals.contiguous()
    seq_len = codes.shape[2] * codes.shape[3]
    entries = elements.diagonals.shape[2]
    is_vertical = codes.new_empty(batch, heads, seq_len, dtype=torch.bool)
    is_diagonal = codes.new_empty(batch, heads, entries, dtype=torch.bool)
    chunks = triton.cdiv(seq_len, _CHUNK) + triton.cdiv(entries, _CHUNK)
    contiguous = elements._replace(
        verticals=codes,
        is_sink=elements.is_sink.view(torch.int8),
        diagonals=elements.diagonals.contiguous(),
    )
    limits = (vertical_limit.contiguous(), diagonal_limit.contiguous())
    results = (is_vertical.view(torch.int8), is_diagonal.view(torch.int8))
    options = dict(SIZE=codes.shape[3], CHUNK=_CHUNK, num_warps=4)
    _taken_kernel[(chunks, batch * heads)](
        contiguous, *limits, *results, heads, n, seq_len, entries, **options
    )
    return is_vertical, is_diagonal
