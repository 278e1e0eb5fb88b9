"""What the kernels share: a problem's arguments, and a program's view of one block of verticals.

In the kernels i_row is a row's number, i_b its sequence's, i_c a block of keys, and i_t one of the
spans that touch the block. Loops over i_t are unrolled: mostly there is one span, or there are two.
U2 is U, the blocks back, rounded up to a power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.budget import Segments
from titan_sparse.kernels.budget.kernel import units_of
from titan_sparse.kernels.joint.incidence import Incidence, mass_scale


class Problem(NamedTuple):
    """What is chosen from, in contiguous memory.

    N rows of masses of B sequences, K blocks of b tokens, T spans at a block, U blocks back, n
    spans, E diagonals, S = K b verticals.
    verticals: fp32 [N, K, U, b], masses by block back.
    sequence: int32 [N].
    segment: int32 [B, S + E], d for a vertical of span d, n + d for a diagonal, 2 n for none.
    bounds: int32 [B, 2 n, 5].
    diagonal: int64 [B, K, T, U].
    slot: int64 [B, K, b].
    always: int8 [B, S + E].
    free_verticals: int32 [B, n, 5].
    scale: units in a mass of 1.
    """

    verticals: Tensor
    sequence: Tensor
    segment: Tensor
    bounds: Tensor
    diagonal: Tensor
    slot: Tensor
    always: Tensor
    free_verticals: Tensor
    scale: float

    @property
    def rows(self) -> int:
        """N."""
        return self.verticals.shape[0]

    @property
    def blocks(self) -> int:
        """K."""
        return self.verticals.shape[1]

    @property
    def block_size(self) -> int:
        """b, a power of two."""
        return self.verticals.shape[3]

    @property
    def length(self) -> int:
        """S: how many verticals there are."""
        return self.blocks * self.block_size

    @property
    def entries(self) -> int:
        """E: how many diagonals all spans have."""
        return self.segment.shape[1] - self.length

    @property
    def n(self) -> int:
        """n: how many spans a sequence has at most."""
        return self.free_verticals.shape[1]

    @property
    def block_grid(self) -> tuple[int, int]:
        """Programs of the kernels that look at one block of verticals of one row."""
        return self.blocks, self.rows

    def block_arguments(self) -> dict:
        """What all kernels take that look at blocks of verticals, and how many warps they get."""
        back = self.verticals.shape[2]
        padded_back = triton.next_power_of_2(back)
        return dict(
            verticals=self.verticals,
            sequence=self.sequence,
            diagonal=self.diagonal,
            slot=self.slot,
            always=self.always,
            blocks=self.blocks,
            entries=self.entries,
            scale=self.scale,
            T=self.diagonal.shape[2],
            U=back,
            U2=padded_back,
            SIZE=self.block_size,
            num_warps=min(max(padded_back * self.block_size // 256, 1), 8),
        )


def make_problem(
    verticals: Tensor, segments: Segments, incidence: Incidence, most_mass: float
) -> Problem:
    """The Problem of smallest_union()'s arguments."""
    return Problem(
        verticals=verticals.contiguous(),
        sequence=segments.sequence.contiguous(),
        segment=segments.segment.contiguous(),
        bounds=segments.bounds.contiguous(),
        diagonal=incidence.diagonal.contiguous(),
        slot=incidence.slot.contiguous(),
        always=incidence.always.contiguous().view(torch.int8),
        free_verticals=incidence.free_verticals.contiguous(),
        scale=mass_scale(most_mass),
    )


@triton.jit
def units_of_block(
    verticals, i_row, i_c, blocks, scale, U: tl.constexpr, U2: tl.constexpr, SIZE: tl.constexpr
):
    """Masses of a block's verticals in units, int64 [U2, SIZE]."""
    o_u = tl.arange(0, U2)
    o = tl.arange(0, SIZE)
    row = (i_row * blocks + i_c) * U + o_u
    at = row[:, None] * SIZE + o[None, :]
    mass = tl.load(verticals + at, mask=(o_u < U)[:, None], other=0.0)
    return units_of(mass, scale)


@triton.jit
def slots_of_block(slot, i_b, i_c, blocks, T: tl.constexpr, SIZE: tl.constexpr):
    """Which of the block's spans holds each vertical, [SIZE]."""
    if T == 1:
        return tl.zeros([SIZE], tl.int64)
    else:
        return tl.load(slot + (i_b * blocks + i_c) * SIZE + tl.arange(0, SIZE))


@triton.jit
def diagonals_met(
    diagonal, i_b, i_c, i_t, blocks, entries, T: tl.constexpr, U: tl.constexpr, U2: tl.constexpr
):
    """The diagonals, [U2], that the block's verticals of its span i_t meet.

    And whether there are any, [U2].
    """
    o_u = tl.arange(0, U2)
    at = ((i_b * blocks + i_c) * T + i_t) * U + o_u
    entry = tl.load(diagonal + at, mask=o_u < U, other=entries)
    return entry, entry < entries


@triton.jit
def without_always(
    units,
    slots,
    diagonal,
    always,
    i_b,
    i_c,
    blocks,
    entries,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The units [U2, SIZE] of a block, 0 for what is on in any case."""
    length = blocks * SIZE
    always += i_b * (length + entries)
    # By a diagonal, ...
    for i_t in tl.static_range(T):
        entry, known = diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
        on = tl.load(always + length + entry, mask=known, other=0) != 0
        units = tl.where(on[:, None] & (slots == i_t)[None, :], 0, units)
    # ... or as a vertical.
    on = tl.load(always + i_c * SIZE + tl.arange(0, SIZE)) != 0
    return tl.where(on[None, :], 0, units)


@triton.jit
def free_units(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    i_row,
    i_c,
    blocks,
    entries,
    scale,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A block's masses in units [U2, SIZE], 0 for what is on in any case.

    And its verticals' slots [SIZE], and the row's sequence.
    """
    i_b = tl.load(sequence + i_row).to(tl.int64)
    units = units_of_block(verticals, i_row, i_c, blocks, scale, U, U2, SIZE)
    slots = slots_of_block(slot, i_b, i_c, blocks, T, SIZE)
    units = without_always(
        units, slots, diagonal, always, i_b, i_c, blocks, entries, T, U, U2, SIZE
    )
    return units, slots, i_b


@triton.jit
def vertical_prices(vertical, VERTICAL_COST: tl.constexpr, SIZE: tl.constexpr):
    """Mass for cost, fp32, of verticals in units."""
    return (vertical.to(tl.float64) * (SIZE / VERTICAL_COST)).to(tl.float32)


@triton.jit
def free_diagonals(bounds, i_b, span, length, n, mask):
    """From where to where a span's diagonals that are not always on lie among all E."""
    bound = bounds + (i_b * 2 * n + n + span) * 5
    # Positions in `bounds` count the verticals first.
    begin = tl.load(bound, mask=mask, other=0) - length
    stop = tl.load(bound + 1, mask=mask, other=0) - length
    always_count = tl.load(bound + 4, mask=mask, other=0)
    return tl.minimum(begin + always_count, stop), stop
