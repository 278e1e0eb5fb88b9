"""XAttention's scores and choice by Triton kernels.

Sums along antidiagonals of q k: softmax sums by block of keys; scores stay in registers. A pair of
cells scores one dot product: all tokens of the key cell, with those of the query cell in reverse
order. So tiles of the query cells are read backwards, and nothing is turned around in memory. A
tile is M query cells x N key cells. Sums over its blocks of keys are relative to each row's maximum
in the tile; the reader combines the maxima. This takes one pass. Computing normalizers first
would compute the product twice.

With 16 query heads of 128 at 524,288 tokens and stride 16, the product takes 35 TFLOP: S^2 D
heads / stride. Tiles of 128 x 256 take 85 FLOP for each byte from the L2 cache, those of 128 x
128 take 64.

The choice: the fewest blocks of keys that hold the threshold's share of a query block's mass. A
program has all masses of a query block in registers. It finds the smallest mass that is wanted by
bisection over the bits of a float, which are ordered like floats that are not negative. So nothing
is sorted, and nothing but the bits of the choice is written.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_sparse.kernels.block_sparse.piece import INTERPRETED


class QueryBlocks(NamedTuple):
    """m blocks of queries, cut into c cells each. T = 1 or 2 documents touch a block.

    first, stop: int32 [B, m, c], the range of key cells that each query cell
    sees; 0 and 0 for none.
    slot: int32 [B, m, c], which of its block's documents each cell that sees anything belongs to.
    number: int32 [m], global numbers of the blocks.
    first_block: int32 [B, m, T], the first block of each of these documents, -1 for no document.
    dense_from: int32 [B, m], from this block of keys up to its own a block takes all.
    """

    first: Tensor
    stop: Tensor
    slot: Tensor
    number: Tensor
    first_block: Tensor
    dense_from: Tensor

    def part(self, part: slice) -> "QueryBlocks":
        """The blocks that the slice names."""
        return QueryBlocks._make(
            field[part] if field is self.number else field[:, part] for field in self
        )

    def contiguous(self) -> "QueryBlocks":
        """As kernels take them."""
        return QueryBlocks._make(field.contiguous() for field in self)


class BlockSums(NamedTuple):
    """Softmax sums of query cells over blocks of keys, relative to maxima of several blocks.

    weight: [B, G, m c, blocks], the sums of 2^(score - top). Blocks of which a cell sees nothing
        may hold anything.
    top: [B, G, m c, runs], a maximum of the scores for each run of neighboring blocks, base 2.
    run: blocks that share a maximum.
    """

    weight: Tensor
    top: Tensor
    run: int


class TileShape(NamedTuple):
    """Tile sizes: M query cells, N key cells, and K of their numbers at a time; launch options.

    Sizes are powers of two; key_cells are no fewer than the cells of a block. programs: that
    share a multiprocessor.
    """

    query_cells: int = 128
    key_cells: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 1


HOPPER = TileShape()
"""Takes 144 KiB of shared memory."""

SMALLER = TileShape(key_cells=128)
"""For GPUs that have less."""

_HOPPER_SHARED_MEMORY = 232448
_HEADS_TOGETHER = 8
"""Tiles of query cells that go along the keys together, so that they share the keys they read."""


class VisibleTiles(NamedTuple):
    """The tiles in which anything is seen.

    number: int32 [n], their indices in [B, M tiles, N tiles], followed by any others.
    count: int32 [1], their number.
    """

    number: Tensor
    count: Tensor  # type: ignore[assignment]
    shape: TileShape


def shape_for(device: torch.device) -> TileShape:
    """The shape of tiles that fits the device."""
    if device.type != "cuda":
        # Triton's interpreter.
        return TileShape(query_cells=32, key_cells=64, depth=16, warps=1, stages=1)
    # Before torch 2.15 its type does not list this attribute.
    properties: Any = torch.cuda.get_device_properties(device)
    has_room = properties.shared_memory_per_block_optin >= _HOPPER_SHARED_MEMORY
    return HOPPER if has_room else SMALLER


def visible_tiles(
    blocks: QueryBlocks, key_cells: int, group: int, shape: TileShape
) -> VisibleTiles:
    """Tiles of these query blocks with `key_cells` key cells, for `group` query heads a KV head.

    A tile counts if it lies between the first and the last key cell that one of its rows sees.
    """
    device = blocks.first.device
    # [B, M tiles, M]
    first = _by_tile(blocks.first.flatten(1), shape.query_cells)
    stop = _by_tile(blocks.stop.flatten(1), shape.query_cells)
    # [B, M tiles, 1]: rows that see nothing do not count.
    first = torch.where(first < stop, first, key_cells).amin(-1, keepdim=True)
    stop = stop.amax(-1, keepdim=True)
    begin = torch.arange(0, key_cells, shape.key_cells, device=device)
    # [B, M tiles, N tiles]
    visible = (begin < stop) & (begin + shape.key_cells > first)
    number = torch.arange(visible.numel(), device=device).view_as(visible)

    # Those that count first, without a wait for how many they are.
    together = max(1, _HEADS_TOGETHER // group)
    visible = _side_by_side(visible, together)
    order = torch.argsort((~visible).int(), stable=True)
    number = _side_by_side(number, together)[order].int()
    return VisibleTiles(number, visible.sum(dtype=torch.int32), shape)


def _by_tile(cells: Tensor, size: int) -> Tensor:
    """[B, n] -> [B, tiles, size], filled up with zeros."""
    missing = -cells.shape[1] % size
    return F.pad(cells, (0, missing)).unflatten(1, (-1, size))


def _side_by_side(tiles: Tensor, together: int) -> Tensor:
    """[B, M tiles, N tiles] in an order in which `together` rows go along the keys side by side.

    Zeros fill up the last rows.
    """
    missing = -tiles.shape[1] % together
    # [B, M tiles / together, together, N tiles]
    rows = F.pad(tiles, (0, 0, 0, missing)).unflatten(1, (-1, together))
    return rows.transpose(2, 3).flatten()


@triton.jit
def _store_sums(
    scores, blocks, weight, top, row, i_b, i_m, i_n, rows, width, runs,
    M: tl.constexpr, N: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile's scores [M, N] by blocks of CELLS key cells, and the maxima of its rows.

    row: number of the head's first row.
    """
    BLOCKS: tl.constexpr = N // CELLS
    o_m = i_m * M + tl.arange(0, M)
    o_n = i_n * N + tl.arange(0, N)
    m_m = o_m < rows
    b_first = tl.load(blocks.first + i_b * rows + o_m, mask=m_m, other=0)
    b_stop = tl.load(blocks.stop + i_b * rows + o_m, mask=m_m, other=0)
    if (tl.max(b_first, 0) > i_n * N) | (tl.min(b_stop, 0) < i_n * N + N):
        seen = (o_n[None, :] >= b_first[:, None]) & (o_n[None, :] < b_stop[:, None])
        scores = tl.where(seen, scores, float("-inf"))

    # [M], finite also for rows that see nothing of the tile: their weights are 0, not NaN.
    b_top = tl.maximum(tl.max(scores, 1), -3.0e38)
    b_weight = tl.math.exp2(scores - b_top[:, None])
    # [M, BLOCKS]
    b_sum = tl.sum(tl.reshape(b_weight, [M, BLOCKS, CELLS]), 2)
    o_row = row.to(tl.int64) + o_m
    o_block = i_n * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(weight + o_row[:, None] * width + o_block[None, :], b_sum, mask=m_m[:, None])
    tl.store(top + o_row * runs + i_n, b_top, mask=m_m)


@triton.jit
def _sums_kernel(
    q, k, blocks, tiles, count, weight, top, scale,
    rows, keys, group, row_tiles, runs, width, programs,
    STRIDE: tl.constexpr, DIM: tl.constexpr, CELLS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th tile of every head, one after the other.

    q, k: descriptors of [B G rows, STRIDE DIM] and [B keys, STRIDE DIM]. runs: tiles of key cells.

    Tiles and the steps of their products are one loop, so that the next tile's loads are on their
    way while a tile's sums are stored.
    """
    STEPS: tl.constexpr = STRIDE * DIM // K
    STEPS_A_TOKEN: tl.constexpr = DIM // K
    i_program = tl.program_id(0)
    total = tl.load(count) * group
    mine = tl.cdiv(tl.maximum(total - i_program, 0), programs)
    number = i_program - programs
    step = STEPS - 1
    i_b = 0
    i_m = 0
    i_n = 0
    row = 0
    acc = tl.zeros([M, N], tl.float32)
    for _ in range(mine * STEPS):
        step = tl.where(step == STEPS - 1, 0, step + 1)
        if step == 0:
            number += programs
            tile = tl.load(tiles + number // group)
            i_n = tile % runs
            i_m = tile // runs % row_tiles
            i_b = tile // (runs * row_tiles)
            row = (i_b * group + number % group) * rows
        # The last token of a query cell meets the first one of a key cell.
        token = STRIDE - 1 - step // STEPS_A_TOKEN
        b_q = q.load([row + i_m * M, token * DIM + step % STEPS_A_TOKEN * K])
        b_k = k.load([i_b * keys + i_n * N, step * K])
        if UPCAST:
            b_q = b_q.to(tl.float32)
            b_k = b_k.to(tl.float32)
        acc = tl.dot(b_q, tl.trans(b_k), acc, input_precision="ieee")
        if step == STEPS - 1:
            # Nothing but this product touches acc, or the steps would wait for each other.
            scores = acc * scale
            _store_sums(
                scores, blocks, weight, top, row, i_b, i_m, i_n, rows, width, runs,
                M, N, CELLS,
            )  # fmt: skip
            acc = tl.zeros([M, N], tl.float32)


def block_sums(
    q: Tensor, k: Tensor, blocks: QueryBlocks, stride: int, scale: float, tiles: VisibleTiles
) -> BlockSums:
    """Softmax sums of the antidiagonals' scores, of each query cell over each block of keys, fp32.

    q: [B, G, m block, D], the query heads of a KV head. k: [B, S, D], of one dtype, no fp64, all
    whole blocks. Tokens that do not count in their cell are 0. D is a multiple of 16, and a block
    has a power of two of cells. stride: tokens of a cell. scale: of the scores, above 0.
    tiles: of visible_tiles() for these blocks.
    """
    batch, group, tokens, dim = q.shape
    shape = tiles.shape
    cells = blocks.first.shape[2]
    rows = tokens // stride
    keys = k.shape[1] // stride
    row_tiles = triton.cdiv(rows, shape.query_cells)
    runs = triton.cdiv(keys, shape.key_cells)
    # Blocks of keys, those behind the last one with them that its tile has.
    width = runs * (shape.key_cells // cells)
    weight = q.new_empty(batch, group, rows, width, dtype=torch.float32)
    top = q.new_empty(batch, group, rows, runs, dtype=torch.float32)
    depth = math.gcd(dim, shape.depth)
    programs = _programs(q.device, shape)
    _sums_kernel[(programs,)](
        _descriptor(q, stride * dim, shape.query_cells, depth),
        _descriptor(k, stride * dim, shape.key_cells, depth),
        blocks.contiguous(), tiles.number, tiles.count, weight, top, scale * math.log2(math.e),
        rows, keys, group, row_tiles, runs, width, programs,
        STRIDE=stride, DIM=dim, CELLS=cells, M=shape.query_cells, N=shape.key_cells, K=depth,
        UPCAST=INTERPRETED, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return BlockSums(weight, top, shape.key_cells // cells)


def _descriptor(x: Tensor, length: int, rows: int, depth: int) -> TensorDescriptor:
    """A descriptor of the cells in x, `length` numbers each, for tiles of `rows` x `depth`."""
    cells = x.contiguous().view(-1, length)
    return TensorDescriptor.from_tensor(cells, [rows, depth])


def _programs(device: torch.device, shape: TileShape) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * shape.programs


MOST_BLOCKS = 1 << 15
"""Of keys, that the registers of a program hold."""


@triton.jit
def _document_mass(
    weight, top, blocks, row, i_t, width, runs,
    RUN: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Masses [BLOCKS] that the CELLS cells of a query block hold, those of its document i_t.

    weight, top: of the block's first cell. row: of that cell in `blocks`.
    """
    o = tl.arange(0, BLOCKS)
    mass = tl.zeros([BLOCKS], tl.float32)
    for cell in range(CELLS):
        b_first = tl.load(blocks.first + row + cell)
        b_stop = tl.load(blocks.stop + row + cell)
        # A cell of the block's other document holds nothing here.
        b_stop = tl.where(tl.load(blocks.slot + row + cell) == i_t, b_stop, 0)
        seen = (o >= b_first // CELLS) & (o * CELLS < b_stop)
        b_weight = tl.load(weight + cell * width + o, mask=seen, other=0.0)
        b_top = tl.load(top + cell * runs + o // RUN, mask=seen, other=-3.0e38)
        b_weight *= tl.math.exp2(b_top - tl.max(b_top, 0))
        total = tl.sum(b_weight, 0)
        mass += b_weight * (1.0 / tl.where(total > 0, total, 1.0))
    return mass


@triton.jit
def _wanted(mass, spare):
    """The fewest of the masses [BLOCKS] that leave no more than `spare`.

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
    weight, top, blocks, words,
    rest, group, count, width, runs, words_a_row,
    T: tl.constexpr, RUN: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The bits of one query block of one head. rest: 1 - threshold. count: m."""
    i_block = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // group
    block = i_b * count + i_block
    row = (i_bh * count + i_block) * CELLS
    own = tl.load(blocks.number + i_block)
    o = tl.arange(0, BLOCKS)
    selected = (o >= tl.load(blocks.dense_from + block)) & (o <= own)
    for i_t in tl.static_range(T):
        b_first = tl.load(blocks.first_block + block * T + i_t)
        if b_first >= 0:
            mass = _document_mass(
                weight + row * width, top + row * runs, blocks, block * CELLS, i_t,
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
    """Bits (kernels/compact.py) of the blocks of keys that each query block chooses.

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
    widths = (sums.weight.shape[-1], sums.top.shape[-1], words.shape[-1])
    options = dict(RUN=sums.run, CELLS=cells, BLOCKS=size, num_warps=min(32, max(4, size // 512)))
    _choice_kernel[(m, batch * group)](
        sums.weight, sums.top, blocks.contiguous(), words, 1 - threshold, group, m, *widths,
        T=blocks.first_block.shape[2], **options,
    )  # fmt: skip
    return words
