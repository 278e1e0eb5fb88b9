"""The fewest blocks of keys that hold the threshold's share of a query block's mass.

A program has all masses of a query block in registers. It finds the smallest mass that is wanted by
bisection over the bits of a float, which are ordered like floats that are not negative. So nothing
is sorted, and nothing but the bits of the choice is written.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.antidiagonals.inputs import BlockSums, QueryBlocks

MOST_BLOCKS = 1 << 15
"""Of keys, that the registers of a program hold."""


@triton.jit
def _document_mass(
    weight, top, first, stop, slot, row, i_t, width, runs,
    RUN: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Masses [BLOCKS] that the CELLS cells of a query block hold, those of its document i_t.

    weight, top: of the block's first cell. row: of that cell in first, stop and slot.
    """
    o = tl.arange(0, BLOCKS)
    mass = tl.zeros([BLOCKS], tl.float32)
    for cell in range(CELLS):
        b_first = tl.load(first + row + cell)
        b_stop = tl.load(stop + row + cell)
        # A cell of the block's other document holds nothing here.
        b_stop = tl.where(tl.load(slot + row + cell) == i_t, b_stop, 0)
        seen = (o >= b_first // CELLS) & (o * CELLS < b_stop)
        b_weight = tl.load(weight + cell * width + o, mask=seen, other=0.0)
        b_top = tl.load(top + cell * runs + o // RUN, mask=seen, other=-3.0e38)
        b_weight *= tl.math.exp2(b_top - tl.max(b_top, 0))
        total = tl.sum(b_weight, 0)
        mass += b_weight * (1.0 / tl.where(total > 0, total, 1.0))
    return mass


@triton.jit
def _wanted(mass, spare):
    """Which of the masses [BLOCKS] are the fewest that leave no more than `spare`.

    Equal ones are taken in order of position.
    """
    key = mass.to(tl.int32, bitcast=True)
    # The smallest key such that it and those below hold more than `spare`; above all if none does.
    # Sums of small masses are exact where those of nearly all of them would be rounded.
    low = tl.max(key, 0) * 0
    cut = tl.max(key, 0) + 1
    while cut - low > 1:
        middle = low + (cut - low) // 2
        below = tl.sum(tl.where(key <= middle, mass, 0.0), 0)
        is_more = below > spare
        cut = tl.where(is_more, middle, cut)
        low = tl.where(is_more, low, middle)

    # Of equal ones each is taken while it and those behind it hold more than `spare`.
    value = cut.to(tl.float32, bitcast=True)
    left = tl.sum(tl.where(key <= cut, mass, 0.0), 0)
    is_tie = key == cut
    before = tl.cumsum(is_tie.to(tl.float32), 0) - 1
    return (key > cut) | (is_tie & (before * value < left - spare))


@triton.jit
def _choice_kernel(
    weight, top, first, stop, slot, number, first_block, dense_from, words,
    rest, group, count, width, runs, words_a_row,
    T: tl.constexpr, RUN: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The bits of one query block of one head. rest: 1 - threshold. count: m."""
    i_block = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // group
    block = i_b * count + i_block
    row = (i_bh * count + i_block) * CELLS
    own = tl.load(number + i_block)
    o = tl.arange(0, BLOCKS)
    selected = (o >= tl.load(dense_from + block)) & (o <= own)
    for i_t in tl.static_range(T):
        b_first = tl.load(first_block + block * T + i_t)
        if b_first >= 0:
            mass = _document_mass(
                weight + row * width, top + row * runs, first, stop, slot, block * CELLS, i_t,
                width, runs, RUN, CELLS, BLOCKS,
            )  # fmt: skip
            is_forced = (o == b_first) | (o == own)
            free = tl.where(is_forced, 0.0, mass)
            wanted = _wanted(free, tl.sum(mass, 0) * rest)
            selected = selected | is_forced | wanted

    # [BLOCKS / 32]
    bits = tl.reshape(selected.to(tl.int32) << (o % 32), [BLOCKS // 32, 32])
    o_word = tl.arange(0, BLOCKS // 32)
    word_at = words + (i_bh * count + i_block) * words_a_row + o_word
    tl.store(word_at, tl.sum(bits, 1), mask=o_word < words_a_row)


def chosen_blocks(
    sums: BlockSums, blocks: QueryBlocks, threshold: float, visible: int, count: int
) -> Tensor:
    """Bits (kernels/bits.py) of the blocks of keys that each query block chooses.

    Each of the documents that touch a query block takes the fewest blocks that hold `threshold` of
    its cells' mass; its first block and the query's own are always on, and count first.
    sums: fp32, of block_sums(). visible: none chooses a block of this number or above; MOST_BLOCKS
    at most. count: of blocks of keys in the sequence.
    Returns int32 [B, G, m, ceil(count / 32)].
    """
    batch, group = sums.weight.shape[:2]
    _, m, cells = blocks.first.shape
    words = blocks.first.new_zeros(batch, group, m, triton.cdiv(count, 32))
    size = max(32, triton.next_power_of_2(visible))
    _choice_kernel[(m, batch * group)](
        sums.weight,
        sums.top,
        blocks.first.contiguous(),
        blocks.stop.contiguous(),
        blocks.slot.contiguous(),
        blocks.number.contiguous(),
        blocks.first_block.contiguous(),
        blocks.dense_from.contiguous(),
        words,
        1 - threshold,
        group,
        m,
        sums.weight.shape[-1],
        sums.top.shape[-1],
        words.shape[-1],
        T=blocks.first_block.shape[2],
        RUN=sums.run,
        CELLS=cells,
        BLOCKS=size,
        num_warps=min(32, max(4, size // 512)),
    )
    return words
