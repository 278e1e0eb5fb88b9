"""The plain-torch twins of kernel.py, for any floating dtype."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.antidiagonals.kernel import BlockSums, QueryBlocks
from titan_sparse.kernels.compact import pack
from titan_sparse.kernels.dtypes import accumulation_dtype


def block_sums_naive(
    q: Tensor, k: Tensor, blocks: QueryBlocks, stride: int, scale: float
) -> BlockSums:
    """The twin of block_sums(): the scores of all cells at once, with one maximum a query cell.

    The sums are fp32, of fp64 inputs fp64. k may end behind the last block that anyone sees.
    """
    batch, group, _, dim = q.shape
    cells = blocks.first.shape[2]

    # [B, G m c, stride D], the tokens of each cell in reverse order, and [B, n, stride D].
    query_cells = q.unflatten(2, (-1, stride)).flip(3).reshape(batch, -1, stride * dim)
    key_cells = k.reshape(batch, -1, stride * dim)
    # [B, G, m c, n]
    scores = _products(query_cells, key_cells).unflatten(1, (group, -1))
    scores = scores * (scale * math.log2(math.e))

    # [B, 1, m c, n]
    number = torch.arange(key_cells.shape[1], device=k.device)
    seen = number >= blocks.first.flatten(1)[:, None, :, None]
    seen &= number < blocks.stop.flatten(1)[:, None, :, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    # Cells that see nothing have a finite maximum too, so that their weights are 0, not NaN.
    top = scores.amax(-1, keepdim=True)
    top = top.clamp(min=torch.finfo(scores.dtype).min)
    weight = (scores - top).exp2()
    by_block = weight.unflatten(-1, (-1, cells)).sum(-1)
    return BlockSums(by_block, top, by_block.shape[-1])


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of rows, [B, n, L] and [B, m, L] -> [B, n, m], fp32 (fp64 for fp64)."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        # Summed in fp32, and not rounded to 16 bits afterwards.
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    # CPUs have no product of 16-bit inputs with such sums.
    dtype = accumulation_dtype(a.dtype)
    a = a.to(dtype)
    b = b.to(dtype)
    return a @ b.mT


def chosen_blocks_naive(
    sums: BlockSums, blocks: QueryBlocks, threshold: float, visible: int, count: int
) -> Tensor:
    """The twin of chosen_blocks(): by sorting."""
    number = torch.arange(visible, device=sums.weight.device)
    # [B, G, m, T, visible]
    mass = document_masses(sums, blocks, visible)
    # [B, m, T, visible]: the first block of the document and the query's own are always on.
    forced = number == blocks.first_block[..., None]
    forced = forced | (number == blocks.number[:, None, None])
    picked = fewest(mass, forced[:, None], threshold)
    picked &= (blocks.first_block >= 0)[:, None, ..., None]

    # [B, m, visible]
    dense = number >= blocks.dense_from[..., None]
    dense &= number <= blocks.number[:, None]
    # [B, G, m, visible]
    selected = picked.any(3) | dense[:, None]
    return pack(F.pad(selected, (0, count - visible)))


def document_masses(sums: BlockSums, blocks: QueryBlocks, visible: int) -> Tensor:
    """Softmax masses of query blocks over the first `visible` blocks of keys:
    [B, G, m, T, visible].

    Each cell's softmax is taken over all that it sees. The masses are summed up over the cells of
    each of the T documents that touch a query block.
    """
    cells = blocks.first.shape[2]
    number = torch.arange(visible, device=sums.weight.device)
    # [B, 1, m c, visible]: whether a cell sees anything of a block.
    first = blocks.first.flatten(1)[:, None, :, None]
    stop = blocks.stop.flatten(1)[:, None, :, None]
    seen = (number >= first // cells) & (number * cells < stop)

    # [B, G, m c, visible], by the largest of all tops.
    top = sums.top[..., number // sums.run].masked_fill(~seen, torch.finfo(sums.top.dtype).min)
    relative = (top - top.amax(-1, keepdim=True)).exp2()
    weight = torch.where(seen, sums.weight[..., :visible], 0) * relative
    total = weight.sum(-1, keepdim=True)
    share = weight / torch.where(total > 0, total, 1)

    # [B, 1, m, T, c] @ [B, G, m, c, visible]
    document = torch.arange(blocks.first_block.shape[2], device=number.device)
    in_document = blocks.slot[:, None, :, None] == document[:, None]
    return in_document.to(share.dtype) @ share.unflatten(2, (-1, cells))


def fewest(mass: Tensor, forced: Tensor, threshold: float) -> Tensor:
    """bool like mass [..., n]: the forced elements and the fewest others that reach the target.

    The target is the threshold's share of the sum of all; equal elements are taken in order of
    position.
    """
    # [..., n]: the forced ones come first.
    ranked = mass.masked_fill(forced.expand_as(mass), torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices

    # In this order, each at its own mass: what all before it hold together.
    sorted_mass = mass.gather(-1, order)
    up_to = sorted_mass.cumsum(-1)
    before = F.pad(up_to[..., :-1], (1, 0))

    # [..., 1]
    target = threshold * up_to[..., -1:]
    wanted = (before < target) & (sorted_mass > 0)
    # Back in order of position.
    picked = torch.zeros_like(wanted).scatter_(-1, order, wanted)
    return picked | forced
