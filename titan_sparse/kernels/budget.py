"""The smallest sets that hold a share of a mass, and their positions, without a sort: a radix selection.

Elements are ordered by mass descending, then position ascending. As masses are not negative, their float bits order
them: 31 bits, looked at in digits from the highest. At each digit the elements that may hold the cut are counted and
weighed by their digit, and the digit that holds the cut is found in that histogram. Elements of exactly the mass at the
cut are then told apart by position.

Masses are summed as integers, so that no order of additions shows: every run chooses the same, to the bit. The
plain-torch twins are in titan_sparse/attention/patterns/budget.py, which calls these on a GPU.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
_MASS_BITS = 31
_RECALL_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def units_of(mass, scale):
    """Fixed point, rounded up: any mass above 0 weighs something, so that recall 1 takes all of them."""
    return tl.ceil(mass.to(tl.float64) * scale).to(tl.int64)


@triton.jit
def key_of(mass):
    """Bits of a mass, ordered like the masses; -0 is 0."""
    return mass.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["shift", "width"])
def _histogram_kernel(
    mass,
    sequence,
    segment,
    state,
    count,
    weight,
    length,
    stride,
    n,
    scale,
    shift,
    width,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    b_segment = tl.load(
        segment + tl.load(sequence + i_row).to(tl.int64) * stride + o, mask=o < length, other=n
    )
    known = b_segment < n
    b_mass = tl.load(mass + i_row * length + o, mask=known, other=0.0)
    at = i_row * n + b_segment
    key = key_of(b_mass)
    higher = tl.load(state + at * 5, mask=known, other=-1)
    # Elements without mass can be many (a window): one address would take all of their additions.
    counted = known & (b_mass > 0) & ((key >> (shift + width)) == higher)
    place = at * BINS + (BINS - 1 - ((key >> shift) & ((1 << width) - 1)))
    tl.atomic_add(count + place, 1, mask=counted, sem="relaxed")
    tl.atomic_add(weight + place, units_of(b_mass, scale), mask=counted, sem="relaxed")


@triton.jit
def target_of(total, recall):
    """The fewest units that are `recall` (a share times 2**53) of the total."""
    share = tl.ceil(total.to(tl.float64) * (recall.to(tl.float64) * _RECALL_UNIT)).to(tl.int64)
    return tl.where(recall.to(tl.float64) * _RECALL_UNIT >= 1.0, total, tl.minimum(share, total))


@triton.jit(do_not_specialize=["width"])
def _digit_kernel(
    sequence,
    bounds,
    state,
    count,
    weight,
    recall,
    spare,
    n,
    width,
    FIRST: tl.constexpr,
    BINS: tl.constexpr,
):
    """Find the digit of the cut in the histogram, and leave the histogram empty for the next digit.

    state: int64 [N, n, 5]: digits known so far, elements above them, their units, elements with them, target in units.
    """
    i = tl.program_id(0).to(tl.int64)
    bound = bounds + (tl.load(sequence + i // n).to(tl.int64) * n + i % n) * 5
    least, most = tl.load(bound + 2), tl.load(bound + 3)
    state += i * 5
    digits, above, units_above = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    o = tl.arange(0, BINS)
    b_count, b_units = tl.load(count + i * BINS + o).to(tl.int64), tl.load(weight + i * BINS + o)
    if FIRST:
        inside = (tl.load(bound + 1) - tl.load(bound)).to(tl.int64)
        target = (
            target_of(tl.sum(b_units, 0), recall)
            if spare is None
            else tl.sum(b_units, 0) - tl.load(spare + i)
        )
    else:
        inside, target = tl.load(state + 3), tl.load(state + 4)
    # What was not counted has no mass: digit 0, the last bin.
    b_count += tl.where(o == BINS - 1, inside - tl.sum(b_count, 0), 0)
    b_above, b_units_above = (
        above + tl.cumsum(b_count, 0) - b_count,
        units_above + tl.cumsum(b_units, 0) - b_units,
    )
    first_is_chosen = ((b_units_above < target) | (b_above < least)) & (b_above < most)
    last = tl.max(tl.where((b_count > 0) & first_is_chosen, o, -1), 0)
    # If nothing is chosen, the largest element stands for the cut.
    last = tl.where(last < 0, tl.min(tl.where(b_count > 0, o, BINS - 1), 0), last)
    here = o == last
    tl.debug_barrier()  # everybody has read
    tl.store(count + i * BINS + o, tl.zeros([BINS], tl.int32))
    tl.store(weight + i * BINS + o, tl.zeros([BINS], tl.int64))
    tl.store(state, (digits << width) | (BINS - 1 - last))
    tl.store(state + 1, tl.sum(tl.where(here, b_above, 0), 0))
    tl.store(state + 2, tl.sum(tl.where(here, b_units_above, 0), 0))
    tl.store(state + 3, tl.sum(tl.where(here, b_count, 0), 0))
    tl.store(state + 4, target)


@triton.jit
def _tie_kernel(mass, sequence, bounds, state, cut, capped, length, n, scale, CHUNK: tl.constexpr):
    """cut: as Cut holds it."""
    i = tl.program_id(0).to(tl.int64)
    bound = bounds + (tl.load(sequence + i // n).to(tl.int64) * n + i % n) * 5
    begin, stop, least, most = (
        tl.load(bound),
        tl.load(bound + 1),
        tl.load(bound + 2),
        tl.load(bound + 3),
    )
    state += i * 5
    key, above, units_above = tl.load(state).to(tl.int32), tl.load(state + 1), tl.load(state + 2)
    ties, target = tl.load(state + 3), tl.load(state + 4)
    units = units_of(key.to(tl.float32, bitcast=True), scale)
    # Tie j is wanted while units_above + j * units < target.
    wanted = (tl.maximum(target - units_above, 0) + units - 1) // tl.maximum(units, 1)
    taken = tl.minimum(tl.maximum(wanted, least - above), tl.minimum(most - above, ties))
    tl.store(
        capped + i, ((above + taken >= most) & (units_above + taken * units < target)).to(tl.int8)
    )
    position = tl.where(taken == ties, stop, begin)
    left = tl.where(taken == ties, 0, taken)
    start = begin
    while left > 0:
        o = start + tl.arange(0, CHUNK)
        b_mass = tl.load(mass + i // n * length + o, mask=o < stop, other=0.0)
        tied = (o < stop) & (key_of(b_mass) == key)
        rank = tl.cumsum(tied.to(tl.int32), 0)
        position = tl.maximum(position, tl.max(tl.where(tied & (rank == left), o + 1, 0), 0))
        start += CHUNK
        left = tl.where(start < stop, left - tl.max(rank, 0), 0)
    tl.store(cut + i * 3, key)
    tl.store(cut + i * 3 + 1, position)
    tl.store(cut + i * 3 + 2, above + taken)


@triton.jit
def above_cut(key, position, cut, mask):
    """Whether elements of these mass bits and positions are in the set that these cuts (pointers) end."""
    last = tl.load(cut, mask=mask, other=0)
    return (key > last) | ((key == last) & (position < tl.load(cut + 1, mask=mask, other=0)))


@triton.jit
def _mark_kernel(mass, sequence, segment, bounds, cut, selected, length, n, CHUNK: tl.constexpr):
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    b_segment = tl.load(segment + i_b * length + o, mask=o < length, other=n)
    known = b_segment < n
    key = key_of(tl.load(mass + i_row * length + o, mask=known, other=0.0))
    bound = bounds + (i_b * n + b_segment) * 5
    always = tl.load(bound, mask=known, other=0) + tl.load(bound + 4, mask=known, other=0)
    on = known & (above_cut(key, o, cut + (i_row * n + b_segment) * 3, known) | (o < always))
    tl.store(selected + i_row * length + o, on.to(tl.int8), mask=o < length)


class Cut(NamedTuple):
    """Where the chosen end. at: int32 [N, n, 3], bits of the last mass, the position from which on elements of that mass
    are left out, how many are chosen. capped: bool [N, n], whether the most kept a segment below its target."""

    at: Tensor
    capped: Tensor


def smallest_cuts(
    mass: Tensor,
    sequence: Tensor,
    segment: Tensor,
    bounds: Tensor,
    scale: float,
    recall: float = 1.0,
    spare: Tensor | None = None,
) -> Cut:
    """For each of n segments of N rows, where the fewest elements end that hold `recall` of its mass or, if spare is
    given, all of it but that much: int64 [N, n], not negative, in units of 1 / scale.

    The rest as in smallest_sets(), but nothing is always on, and rows of `segment` may be longer than those of mass.
    Launches: 7, for short segments 9 or 17, and a memset.
    """
    rows, length = mass.shape
    n, bits = bounds.shape[1], _digit_bits(length, bounds.shape[1])
    memory = mass.new_zeros(rows * n * (5 + (1 << bits) * 3 // 2), dtype=torch.int64)
    weight, count, state = memory.split([rows * n << bits, rows * n << bits - 1, rows * n * 5])
    count = count.view(torch.int32)
    for top in range(_MASS_BITS, 0, -bits):
        shift = max(top - bits, 0)
        width = top - shift
        _histogram_kernel[(triton.cdiv(length, _CHUNK), rows)](
            mass,
            sequence,
            segment,
            state,
            count,
            weight,
            length,
            segment.stride(0),
            n,
            scale,
            shift,
            width,
            BINS=1 << bits,
            CHUNK=_CHUNK,
        )
        _digit_kernel[(rows * n,)](
            sequence,
            bounds,
            state,
            count,
            weight,
            round(recall * 2**53),
            spare,
            n,
            width,
            FIRST=top == _MASS_BITS,
            BINS=1 << bits,
            num_warps=8 if bits > 8 else 1,
        )
    at, capped = (
        mass.new_empty(rows, n, 3, dtype=torch.int32),
        mass.new_empty(rows, n, dtype=torch.int8),
    )
    _tie_kernel[(rows * n,)](
        mass, sequence, bounds, state, at, capped, length, n, scale, CHUNK=4096, num_warps=8
    )
    return Cut(at, capped.view(torch.bool))


def smallest_sets(
    mass: Tensor, sequence: Tensor, segment: Tensor, bounds: Tensor, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each of n segments of N rows, the fewest elements that hold `recall` of its mass (MTraining, B.1 i).

    mass: fp32 [N, L], not negative, at most most_mass (1 or more) in a segment. sequence: int32 [N], which of B
    sequences a row belongs to. segment: int32 [B, L], which segment an element belongs to, n for none; a segment is a
    run of neighbours. bounds: int32 [B, n, 5]: its first position and the one behind its last, the least and the most
    elements (the most wins), and how many of its first elements are on whatever their mass.
    Returns selected bool [N, L] and capped bool [N, n]: whether the most kept it below its target.

    Sums are integers in units of most_mass * 2**-61 (or up to twice as much), each mass rounded up: with L = 2**20 a
    sum is off by less than most_mass * 2**-40. The histograms take 12 bytes a bin, at most 3 times the memory of mass
    unless segments are shorter than 16 elements on average. Launches: those of smallest_cuts() and one.
    """
    (rows, length), mass = mass.shape, mass.contiguous()
    scale = 2.0 ** (61 - math.ceil(math.log2(most_mass)))
    cut = smallest_cuts(mass, sequence, segment, bounds, scale, recall)
    selected = torch.empty_like(mass, dtype=torch.int8)
    _mark_kernel[(triton.cdiv(length, _CHUNK), rows)](
        mass, sequence, segment, bounds, cut.at, selected, length, bounds.shape[1], CHUNK=_CHUNK
    )
    return selected.view(torch.bool), cut.capped


def _digit_bits(length: int, n: int) -> int:
    """Bits of a digit: the fewer digits the better, but no more bins than elements."""
    return next((bits for bits in (11, 8) if n << bits <= length), 4)


@triton.jit
def _count_kernel(selected, count, length, stride, CHUNK: tl.constexpr):
    i_chunk, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o = i_chunk * CHUNK + tl.arange(0, CHUNK)
    on = tl.load(selected + i_row * stride + o, mask=o < length, other=0)
    tl.store(count + i_row * tl.num_programs(0) + i_chunk, tl.sum(on.to(tl.int32), 0))


@triton.jit
def _write_kernel(
    selected,
    count,
    positions,
    length,
    stride,
    capacity,
    fill,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_chunk, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o, o_chunk = i_chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, CHUNKS)
    b_count = tl.load(
        count + i_row * tl.num_programs(0) + o_chunk, mask=o_chunk < tl.num_programs(0), other=0
    )
    on = tl.load(selected + i_row * stride + o, mask=o < length, other=0).to(tl.int32)
    rank = tl.sum(tl.where(o_chunk < i_chunk, b_count, 0), 0) + tl.cumsum(on, 0) - 1
    positions += i_row * capacity
    tl.store(positions + rank, o, mask=(on != 0) & (rank < capacity))
    tl.store(
        positions + o, tl.zeros_like(o) + fill, mask=(o >= tl.sum(b_count, 0)) & (o < capacity)
    )


def compact(selected: Tensor, capacity: int, fill: int) -> Tensor:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending, filled up with `fill`.

    Rows of `selected` may be slices of longer ones. Positions beyond the capacity are left out. Two launches.
    """
    rows, length = selected.shape
    if selected.stride(1) != 1:  # a transposed table
        selected = selected.contiguous()
    chunks = triton.cdiv(max(length, capacity, 1), _CHUNK)
    count = selected.new_empty(rows, chunks, dtype=torch.int32)
    positions = selected.new_empty(rows, capacity, dtype=torch.int32)
    flags, stride = selected.view(torch.int8), selected.stride(0)
    _count_kernel[(chunks, rows)](flags, count, length, stride, CHUNK=_CHUNK)
    _write_kernel[(chunks, rows)](
        flags,
        count,
        positions,
        length,
        stride,
        capacity,
        fill,
        CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=_CHUNK,
    )
    return positions
