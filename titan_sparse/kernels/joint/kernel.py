"""The cheapest union of verticals and diagonals: the last steps, and the call of all of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.budget import Segments, smallest_cuts
from titan_sparse.kernels.budget.kernel import above_cut, key_of
from titan_sparse.kernels.joint.incidence import VERTICAL_COST, Incidence
from titan_sparse.kernels.joint.shared import diagonals_met, free_units, make_problem
from titan_sparse.kernels.joint.walk import choose_diagonals

_CHUNK = 1024
"""Verticals and diagonals that a program of the last kernel marks."""


def smallest_union(
    verticals: Tensor, segments: Segments, incidence: Incidence, recall: float, most_mass: float
) -> tuple[Tensor, Tensor]:
    """For each span of each row, verticals and diagonals of least cost that hold a share together.

    verticals: fp32 [N, K, U, b], b a power of 2, masses by block back, not negative, at most
        most_mass in a span.
    segments: n spans' verticals, then their diagonals.
    recall: the share.
    Returns selected bool [N, S + E] and capped bool [N, 2 n]: whether the most verticals, and the
    most diagonals, kept a span below its target.

    Masses are integers in units of most_mass * 2**-52 (or up to twice as much), so that a span
    holds no more than 2**53.
    Launches: 7 here and one a round of ROUNDS, 7 in each of two calls of smallest_cuts() (short
    spans: 9 or 17), and 7 of torch: memory to clear, `sequence` twice, capped. Memory: 13 bytes a
    vertical and row, and the histograms.
    """
    problem = make_problem(verticals, segments, incidence, most_mass)
    rows = problem.rows
    length = problem.length
    entries = problem.entries
    n = problem.n

    # Two choices of diagonals, and the verticals that reach the target beside each: 2 N rows.
    diagonals = choose_diagonals(problem, recall)
    rest = verticals.new_empty(2 * rows, length)
    _rest_kernel[problem.block_grid](
        **problem.block_arguments(), on=diagonals.on, rest=rest, rows=rows
    )
    rest_segments = Segments(problem.sequence.repeat(2), problem.segment, problem.free_verticals)
    cut = smallest_cuts(rest, rest_segments, 1.0, spare=diagonals.spare)

    selected = torch.empty(rows, length + entries, dtype=torch.bool, device=verticals.device)
    _mark_kernel[(triton.cdiv(length + entries, _CHUNK), rows)](
        rest,
        diagonals.on,
        problem.sequence,
        problem.segment,
        problem.always,
        cut.at,
        cut.capped.view(torch.int8),
        diagonals.count,
        selected.view(torch.int8),
        rows,
        length,
        entries,
        n,
        problem.block_size,
        VERTICAL_COST=VERTICAL_COST,
        CHUNK=_CHUNK,
    )
    # The choice with the last diagonal decides: the other one holds less.
    short = cut.capped[:rows]
    return selected, torch.cat([short, short & diagonals.more.view(torch.bool)], dim=1)


@triton.jit
def _rest_kernel(
    verticals,
    sequence,
    diagonal,
    slot,
    always,
    on,
    rest,
    rows,
    blocks,
    entries,
    scale,
    T: tl.constexpr,
    U: tl.constexpr,
    U2: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Masses of a block's verticals that each choice of diagonals leaves, fp32 [2, N, S]."""
    i_c = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    # [U2, SIZE]
    units, slots, i_b = free_units(
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
        T,
        U,
        U2,
        SIZE,
    )
    for i in tl.static_range(2):
        row = i * rows + i_row
        left = units
        for i_t in tl.static_range(T):
            entry, known = diagonals_met(diagonal, i_b, i_c, i_t, blocks, entries, T, U, U2)
            b_on = tl.load(on + row * entries + entry, mask=known, other=0) != 0
            left = tl.where(b_on[:, None] & (slots == i_t)[None, :], 0, left)
        at = (row * blocks + i_c) * SIZE + tl.arange(0, SIZE)
        tl.store(rest + at, tl.sum(left, 0).to(tl.float32))


@triton.jit
def _mark_kernel(
    rest,
    on,
    sequence,
    segment,
    always,
    cut,
    short,
    count,
    selected,
    rows,
    length,
    entries,
    n,
    size,
    VERTICAL_COST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of each span the cheaper of the two choices that reaches its target.

    The first, if both do at the same cost.
    rest, on, cut, short, count: of both choices, 2 N rows.
    """
    i_row = tl.program_id(1).to(tl.int64)
    i_b = tl.load(sequence + i_row).to(tl.int64)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    # [CHUNK], here and below.
    is_vertical = o < length
    inside = o < length + entries
    b_segment = tl.load(segment + i_b * (length + entries) + o, mask=inside, other=2 * n)
    known = b_segment < 2 * n

    # How much more the second choice of the element's span takes than the first.
    first = i_row * n + b_segment % n
    second = first + rows * n
    verticals_of_first = tl.load(cut + first * 3 + 2, mask=known, other=0)
    verticals_of_second = tl.load(cut + second * 3 + 2, mask=known, other=0)
    verticals = verticals_of_second - verticals_of_first
    diagonals_of_first = tl.load(count + first, mask=known, other=0)
    diagonals_of_second = tl.load(count + second, mask=known, other=0)
    diagonals = diagonals_of_second - diagonals_of_first
    more_cost = verticals.to(tl.float64) * VERTICAL_COST + (diagonals * size).to(tl.float64)
    second_reaches = tl.load(short + second, mask=known, other=1) == 0
    cheaper = (more_cost < 0) & second_reaches

    row = tl.where(cheaper, i_row + rows, i_row)
    choice = tl.where(cheaper, second, first)
    key = key_of(tl.load(rest + row * length + o, mask=known & is_vertical, other=0.0))
    on_vertical = above_cut(key, o, cut + choice * 3, known & is_vertical)
    is_diagonal = known & (o >= length)
    on_diagonal = tl.load(on + row * entries + o - length, mask=is_diagonal, other=0) != 0
    b_always = tl.load(always + i_b * (length + entries) + o, mask=known, other=0) != 0
    b_on = known & (b_always | (is_vertical & on_vertical) | on_diagonal)
    tl.store(selected + i_row * (length + entries) + o, b_on.to(tl.int8), mask=inside)
