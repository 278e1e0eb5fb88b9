"""Softmax sums along antidiagonals by block of keys; scores stay in registers.

A pair of cells scores one dot product: all tokens of the key cell, with those of the query cell in
reverse order. So tiles of the query cells are read backwards, and nothing is turned around in
memory. A tile is M query cells x N key cells. Sums over its blocks of keys are relative to each
row's maximum in the tile; whoever reads them brings the maxima together. That takes one pass, where
normalizers first would take the product twice.

With 16 query heads of 128 at 524,288 tokens and stride 16, the product takes 35 TFLOP: S^2 D heads /
stride. Tiles of 128 x 256 take 85 FLOP for each byte from the L2 cache, those of 128 x 128 take 64.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_sparse.kernels.antidiagonals.inputs import BlockSums, QueryBlocks
from titan_sparse.kernels.block_sparse.piece import INTERPRETED


class Shape(NamedTuple):
    """Of a tile: M query cells, N key cells, and K of their numbers at a time; launch options.

    Sizes are powers of two; key_cells are no fewer than the cells of a block. programs: that share a
    multiprocessor.
    """

    query_cells: int = 128
    key_cells: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 1


HOPPER = Shape()
"""Takes 144 KiB of shared memory."""

SMALLER = Shape(key_cells=128)
"""For GPUs that have less."""

_HOPPER_SHARED_MEMORY = 232448
_HEADS_TOGETHER = 8
"""Tiles of query cells that go along the keys side by side, and share what they read of them."""


class Tiles(NamedTuple):
    """The tiles in which anything is seen.

    number: int32 [n], their numbers in [B, M tiles, N tiles], and then any others.
    count: int32 [1], how many they are.
    """

    number: Tensor
    count: Tensor
    shape: Shape


def shape_for(device: torch.device) -> Shape:
    """The shape of tiles that fits the device."""
    if device.type != "cuda":
        # Triton's interpreter.
        return Shape(query_cells=32, key_cells=64, depth=16, warps=1, stages=1)
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return HOPPER if memory >= _HOPPER_SHARED_MEMORY else SMALLER


def visible_tiles(blocks: QueryBlocks, key_cells: int, group: int, shape: Shape) -> Tiles:
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
    return Tiles(number, visible.sum(dtype=torch.int32), shape)


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
    scores, first, stop, weight, top, row, i_b, i_m, i_n, rows, width, runs,
    M: tl.constexpr, N: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile's scores [M, N] by blocks of CELLS key cells, and the maxima of its rows.

    row: number of the head's first row.
    """
    BLOCKS: tl.constexpr = N // CELLS
    o_m = i_m * M + tl.arange(0, M)
    o_n = i_n * N + tl.arange(0, N)
    m_m = o_m < rows
    b_first = tl.load(first + i_b * rows + o_m, mask=m_m, other=0)
    b_stop = tl.load(stop + i_b * rows + o_m, mask=m_m, other=0)
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
    q, k, first, stop, tiles, count, weight, top, scale,
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
                scores, first, stop, weight, top, row, i_b, i_m, i_n, rows, width, runs,
                M, N, CELLS,
            )  # fmt: skip
            acc = tl.zeros([M, N], tl.float32)


def block_sums(
    q: Tensor, k: Tensor, blocks: QueryBlocks, stride: int, scale: float, tiles: Tiles
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
        blocks.first.contiguous(),
        blocks.stop.contiguous(),
        tiles.number,
        tiles.count,
        weight,
        top,
        scale * math.log2(math.e),
        rows,
        keys,
        group,
        row_tiles,
        runs,
        width,
        programs,
        STRIDE=stride,
        DIM=dim,
        CELLS=cells,
        M=shape.query_cells,
        N=shape.key_cells,
        K=depth,
        UPCAST=INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return BlockSums(weight, top, shape.key_cells // cells)


def _descriptor(x: Tensor, length: int, rows: int, depth: int) -> TensorDescriptor:
    """Of the cells in x, `length` numbers each, for tiles of `rows` x `depth`."""
    cells = x.contiguous().view(-1, length)
    return TensorDescriptor.from_tensor(cells, [rows, depth])


def _programs(device: torch.device, shape: Shape) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * shape.programs
