"""The smallest sets that hold a share of a mass, without a sort: a radix selection.

Elements are ordered by mass descending, then position ascending. As masses are not negative, their
float bits order them: 31 bits, looked at in digits from the highest. At each digit the elements
that may hold the cut are counted and weighed by their digit, and the digit that holds the cut is
found in that histogram. Ties at the cut are then broken by position.

Masses are summed as integers, so the order of additions does not matter, and every run makes
exactly the same choice.

In the kernels a row's number is i_row, its sequence's i_b. `bounds` are those of Segments, five
numbers a segment: 0 its first position, 1 the one behind its last, 2 the least and 3 the most
elements, 4 how many of its first are always on. `state` is [N, n, 5], what is known of each
segment's cut after some digits: 0 those digits, 1 the elements above them, 2 their units, 3 the
elements with these digits, 4 the target in units.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


class Segments(NamedTuple):
    """What is chosen from: n runs of neighbors among the L elements of each of B sequences.

    There are N rows of masses.
    sequence: int32 [N], the sequence of each row.
    segment: int32 [B, L], the segment of each element, n for none.
    bounds: int32 [B, n, 5]: the segment's first position, the one behind its last, the least and
        the most elements chosen, and how many of its first elements are always on. Of the two
        bounds on the count the most wins. Elements that are always on are chosen in addition.
    """

    sequence: Tensor
    segment: Tensor
    bounds: Tensor


_CHUNK = 1024
"""Elements that a program looks at."""

_MASS_BITS = 31
"""Bits of an fp32 mass without its sign."""

_RECALL_UNIT = tl.constexpr(2.0**-53)
"""Kernels get the recall as an integer, in these units: fp64 would reach them as fp32."""


class Cut(NamedTuple):
    """Where the chosen elements end, in the order of mass descending, then position ascending.

    at: int32 [N, n, 3]: bits of the last mass, the position from which on elements of that mass are
        left out, and how many elements are chosen.
    capped: bool [N, n], whether the most kept a segment below its target.
    """

    at: Tensor
    capped: Tensor


@triton.jit
def units_of(mass, scale):
    """Fixed point, rounded up: any mass above 0 weighs something, so that recall 1 takes all."""
    scaled = mass.to(tl.float64) * scale
    return tl.ceil(scaled).to(tl.int64)


@triton.jit
def key_of(mass):
    """Bits of a mass, ordered like the masses; -0 is 0."""
    return mass.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def target_of(total, recall):
    """The fewest units that are `recall` (a share times 2**53) of the total."""
    fraction = recall.to(tl.float64) * _RECALL_UNIT
    share = tl.ceil(total.to(tl.float64) * fraction).to(tl.int64)
    # fp64 rounds large totals, so that the share may come out above the total, or below it at 1.
    return tl.where(fraction >= 1.0, total, tl.minimum(share, total))


@triton.jit
def above_cut(key, position, cut, mask):
    """Whether elements of these mass bits and positions are in the sets that these cuts end.

    cut: pointers to entries of Cut.at.
    """
    last_key = tl.load(cut, mask=mask, other=0)
    end = tl.load(cut + 1, mask=mask, other=0)
    return (key > last_key) | ((key == last_key) & (position < end))


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
    """Count and weigh a chunk's elements by a digit, the `width` bits from bit `shift` on.

    Only those count that begin with the digits known so far. count: int32 [N, n, BINS], weight:
    int64 [N, n, BINS]. Bins stand in descending order of the digit. stride: of a row of `segment`.
    """
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    # [CHUNK]
    b_segment = tl.load(segment + i_b * stride + o, mask=o < length, other=n)
    known = b_segment < n
    b_mass = tl.load(mass + i_row * length + o, mask=known, other=0.0)
    i_segment = i_row * n + b_segment
    key = key_of(b_mass)
    higher_digits = tl.load(state + i_segment * 5, mask=known, other=-1)
    # Elements without mass can be many (a window): one address would take all of their additions.
    counted = known & (b_mass > 0) & ((key >> (shift + width)) == higher_digits)
    digit = (key >> shift) & ((1 << width) - 1)
    place = i_segment * BINS + (BINS - 1 - digit)
    tl.atomic_add(count + place, 1, mask=counted, sem="relaxed")
    tl.atomic_add(weight + place, units_of(b_mass, scale), mask=counted, sem="relaxed")


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
    """Find the digit of a segment's cut in its histogram, and empty the histogram for the next.

    spare: int64 [N, n], the mass that may be missing, or None: what the recall leaves.
    FIRST: whether this is the first digit, when only `bounds` describe the segment.
    """
    i_segment = tl.program_id(0).to(tl.int64)
    i_b = tl.load(sequence + i_segment // n).to(tl.int64)
    bound = bounds + (i_b * n + i_segment % n) * 5
    least = tl.load(bound + 2)
    most = tl.load(bound + 3)
    state += i_segment * 5
    digits = tl.load(state)
    above = tl.load(state + 1)
    units_above = tl.load(state + 2)

    # [BINS], the highest digit first.
    o = tl.arange(0, BINS)
    b_count = tl.load(count + i_segment * BINS + o).to(tl.int64)
    b_units = tl.load(weight + i_segment * BINS + o)
    if FIRST:
        inside = (tl.load(bound + 1) - tl.load(bound)).to(tl.int64)
        total = tl.sum(b_units, 0)
        if spare is None:
            target = target_of(total, recall)
        else:
            target = total - tl.load(spare + i_segment)
    else:
        inside = tl.load(state + 3)
        target = tl.load(state + 4)

    # What was not counted has no mass: digit 0, the last bin.
    b_count += tl.where(o == BINS - 1, inside - tl.sum(b_count, 0), 0)
    # Elements and units in front of each bin.
    b_above = above + tl.cumsum(b_count, 0) - b_count
    b_units_above = units_above + tl.cumsum(b_units, 0) - b_units
    # The cut lies in the last bin whose first element is chosen.
    first_is_chosen = ((b_units_above < target) | (b_above < least)) & (b_above < most)
    last = tl.max(tl.where((b_count > 0) & first_is_chosen, o, -1), 0)
    # If nothing is chosen, the largest element stands for the cut.
    largest = tl.min(tl.where(b_count > 0, o, BINS - 1), 0)
    last = tl.where(last < 0, largest, last)
    here = o == last

    # Nobody may empty the histogram before everybody has read it.
    tl.debug_barrier()
    tl.store(count + i_segment * BINS + o, tl.zeros([BINS], tl.int32))
    tl.store(weight + i_segment * BINS + o, tl.zeros([BINS], tl.int64))
    tl.store(state, (digits << width) | (BINS - 1 - last))
    tl.store(state + 1, tl.sum(tl.where(here, b_above, 0), 0))
    tl.store(state + 2, tl.sum(tl.where(here, b_units_above, 0), 0))
    tl.store(state + 3, tl.sum(tl.where(here, b_count, 0), 0))
    tl.store(state + 4, target)


@triton.jit
def _tie_kernel(mass, sequence, bounds, state, cut, capped, length, n, scale, CHUNK: tl.constexpr):
    """How many elements of exactly the mass at the cut are chosen, and where they end.

    All digits are known: they are the bits of that mass. cut, capped: as Cut holds them.
    """
    i_segment = tl.program_id(0).to(tl.int64)
    i_row = i_segment // n
    i_b = tl.load(sequence + i_row).to(tl.int64)
    bound = bounds + (i_b * n + i_segment % n) * 5
    begin = tl.load(bound)
    stop = tl.load(bound + 1)
    least = tl.load(bound + 2)
    most = tl.load(bound + 3)
    state += i_segment * 5
    key = tl.load(state).to(tl.int32)
    above = tl.load(state + 1)
    units_above = tl.load(state + 2)
    ties = tl.load(state + 3)
    target = tl.load(state + 4)

    # Tie j is wanted while units_above + j * units < target.
    units = units_of(key.to(tl.float32, bitcast=True), scale)
    missing = tl.maximum(target - units_above, 0)
    wanted = (missing + units - 1) // tl.maximum(units, 1)
    taken = tl.minimum(tl.maximum(wanted, least - above), tl.minimum(most - above, ties))
    is_capped = (above + taken >= most) & (units_above + taken * units < target)
    tl.store(capped + i_segment, is_capped.to(tl.int8))

    # Where all are taken, or none, the position does not matter.
    position = tl.where(taken == ties, stop, begin)
    left = tl.where(taken == ties, 0, taken)
    start = begin
    while left > 0:
        o = start + tl.arange(0, CHUNK)
        b_mass = tl.load(mass + i_row * length + o, mask=o < stop, other=0.0)
        tied = (o < stop) & (key_of(b_mass) == key)
        rank = tl.cumsum(tied.to(tl.int32), 0)
        behind_last = tl.max(tl.where(tied & (rank == left), o + 1, 0), 0)
        position = tl.maximum(position, behind_last)
        start += CHUNK
        left = tl.where(start < stop, left - tl.max(rank, 0), 0)
    tl.store(cut + i_segment * 3, key)
    tl.store(cut + i_segment * 3 + 1, position)
    tl.store(cut + i_segment * 3 + 2, above + taken)


@triton.jit
def _mark_kernel(mass, sequence, segment, bounds, cut, selected, length, n, CHUNK: tl.constexpr):
    """Flags of a chunk's elements: above the cut of their segment, or always on."""
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    # [CHUNK]
    b_segment = tl.load(segment + i_b * length + o, mask=o < length, other=n)
    known = b_segment < n
    key = key_of(tl.load(mass + i_row * length + o, mask=known, other=0.0))
    bound = bounds + (i_b * n + b_segment) * 5
    begin = tl.load(bound, mask=known, other=0)
    always_end = begin + tl.load(bound + 4, mask=known, other=0)
    chosen = above_cut(key, o, cut + (i_row * n + b_segment) * 3, known)
    on = known & (chosen | (o < always_end))
    tl.store(selected + i_row * length + o, on.to(tl.int8), mask=o < length)


def smallest_cuts(
    mass: Tensor,
    segments: Segments,
    scale: float,
    recall: float = 1.0,
    spare: Tensor | None = None,
) -> Cut:
    """For each of n segments of N rows, where the fewest elements end that hold a share of its mass.

    The share is `recall`. If spare is given, it is all of the mass but that much: int64 [N, n], not
    negative, in units of 1 / scale.
    mass: as in smallest_sets(). segments: nothing is always on; rows of `segment` may be longer
    than those of mass.

    Launches: 7, for short segments 9 or 17, and a memset.
    """
    rows, length = mass.shape
    sequence, segment, bounds = segments
    n = bounds.shape[1]
    bits = _digit_bits(length, n)
    bins = 1 << bits

    # One memset clears all three: weight int64 [N, n, bins], count int32 [N, n, bins] and state
    # int64 [N, n, 5].
    cuts = rows * n
    memory = mass.new_zeros(cuts * (5 + bins * 3 // 2), dtype=torch.int64)
    weight, count, state = memory.split([cuts * bins, cuts * bins // 2, cuts * 5])
    count = count.view(torch.int32)

    for top in range(_MASS_BITS, 0, -bits):
        # The last digit may be narrower.
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
            BINS=bins,
            CHUNK=_CHUNK,
        )
        _digit_kernel[(cuts,)](
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
            BINS=bins,
            num_warps=8 if bits > 8 else 1,
        )
    at = mass.new_empty(rows, n, 3, dtype=torch.int32)
    capped = mass.new_empty(rows, n, dtype=torch.int8)
    _tie_kernel[(cuts,)](
        mass, sequence, bounds, state, at, capped, length, n, scale, CHUNK=4096, num_warps=8
    )
    return Cut(at, capped.view(torch.bool))


def smallest_sets(
    mass: Tensor, segments: Segments, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each of n segments of N rows, the fewest elements that hold `recall` of its mass.

    MTraining, appendix B.1 i.
    mass: fp32 [N, L], not negative, at most most_mass (1 or more) in a segment.
    Returns selected bool [N, L] and capped bool [N, n]: whether the most kept a segment below its
    target.

    Sums are integers in units of most_mass * 2**-61 (or up to twice as much), each mass rounded up:
    with L = 2**20 a sum is off by less than most_mass * 2**-40. The histograms take 12 bytes a bin,
    at most 3 times the memory of mass unless segments are shorter than 16 elements on average.
    Launches: those of smallest_cuts() and one.
    """
    mass = mass.contiguous()
    rows, length = mass.shape
    sequence, segment, bounds = segments
    scale = 2.0 ** (61 - math.ceil(math.log2(most_mass)))
    cut = smallest_cuts(mass, segments, scale, recall)
    selected = torch.empty_like(mass, dtype=torch.int8)
    _mark_kernel[(triton.cdiv(length, _CHUNK), rows)](
        mass, sequence, segment, bounds, cut.at, selected, length, bounds.shape[1], CHUNK=_CHUNK
    )
    return selected.view(torch.bool), cut.capped


def _digit_bits(length: int, n: int) -> int:
    """Bits of a digit: the fewer digits the better, but no more bins than elements."""
    for bits in (11, 8):
        if n << bits <= length:
            return bits
    return 4


def smallest_sets_naive(mass: Tensor, segments: Segments, recall: float) -> tuple[Tensor, Tensor]:
    """The twin of smallest_sets(): by sorting, sums in fp64, of masses of any floating dtype.

    It needs no bound on the masses.
    """
    n = segments.bounds.shape[1]
    # [N, L]
    row_segment = segments.segment.long()[segments.sequence]
    # [N, n + 1, 5]: the last segment is that of elements without one.
    bounds = F.pad(segments.bounds.long(), (0, 0, 0, 1))
    bounds = bounds[segments.sequence]

    # By mass, then stably by segment: each segment's elements lie together, the largest first. All
    # [N, L].
    by_mass = mass.sort(dim=-1, descending=True, stable=True).indices
    by_segment = row_segment.gather(1, by_mass).sort(dim=-1, stable=True)
    order = by_mass.gather(1, by_segment.indices)
    segment = by_segment.values

    # [N, L]: where each element's segment begins and ends in this order.
    first = torch.searchsorted(segment, segment)
    last = torch.searchsorted(segment, segment, right=True) - 1
    rank = torch.arange(mass.shape[1], device=mass.device) - first

    # [N, L]: the mass up to each element, and in front of its segment.
    sorted_mass = mass.gather(1, order).double()
    up_to = sorted_mass.cumsum(-1)
    base = (up_to - sorted_mass).gather(1, first)
    # The total is read off the same running sum, so that elements without mass never look as if
    # they were missing.
    total = up_to.gather(1, last) - base
    target = recall * total
    wanted = (up_to - sorted_mass - base < target) & (sorted_mass > 0)

    # [N, L]: the bounds of each element's segment.
    begin = bounds[..., 0].gather(1, segment)
    least = bounds[..., 2].gather(1, segment)
    most = bounds[..., 3].gather(1, segment)
    always = bounds[..., 4].gather(1, segment)
    chosen = (wanted | (rank < least)) & (rank < most)
    chosen |= order < begin + always
    chosen &= segment < n
    # In order of position again.
    selected = torch.zeros_like(chosen).scatter_(1, order, chosen)

    # [N, n + 1]: how many wanted elements the cap left out.
    left_out = torch.zeros_like(bounds[..., 0])
    left_out.scatter_add_(1, segment, (wanted & (rank >= most)).long())
    return selected, left_out[:, :n] > 0
