"""Forward over gathered queries: a dense tile of a chunk's queries goes over the chunk's keys.

A launch computes one slot of the choices, in which no query appears twice. So a program reads the
sums of its queries, continues from them, and writes them back.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.block_sparse.piece import LOG2_E, load_rows, rows_of, slice_of
from titan_sparse.kernels.gathered.launch import forward_keys, row_options, row_tile
from titan_sparse.kernels.gathered.lists import Work


@triton.jit
def gather_rows(pointer, stride, rows, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[M, D]: the rows with these numbers [M], 0 where not `inside`.

    D is HEAD_DIM padded with zeros to a power of two.
    """
    dims = tl.arange(0, D)[None, :]
    at = pointer + rows.to(tl.int64)[:, None] * stride + dims
    wanted = inside[:, None]
    if D != HEAD_DIM:
        wanted = wanted & (dims < HEAD_DIM)
    return tl.load(at, mask=wanted, other=0.0)


@triton.jit
def scatter_rows(pointer, x, rows, inside, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Write [M, D] to the rows with these numbers, of HEAD_DIM elements, where `inside`."""
    dims = tl.arange(0, D)[None, :]
    at = pointer + rows.to(tl.int64)[:, None] * HEAD_DIM + dims
    tl.store(at, x.to(pointer.dtype.element_ty), mask=inside[:, None] & (dims < HEAD_DIM))


@triton.jit
def load_keys(
    pointer, stride, first, left,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """[N, D] keys from `first` on; if CUT only `left` of them are of the chunk, then 0."""
    if CUT:
        # Fewer than N keys may be left.
        rows = tl.arange(0, N)
        return gather_rows(pointer, stride, first + rows, rows < left, HEAD_DIM, D)
    return load_rows(pointer, stride, first, N, HEAD_DIM, D)


@triton.jit
def tile_rows(met, tiles, head_row, slot, ROWS: tl.constexpr):
    """The rows of this program's tile: numbers of its queries, which of them exist, and the
    chunk."""
    entry = (head_row * met.slots + slot) * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, ROWS)
    inside = place < tl.load(tiles.count + entry)
    first = met.queries + head_row * met.slots * met.q_len + tl.load(tiles.first + entry)
    return tl.load(first + place, mask=inside, other=0), inside, tl.load(tiles.chunk + entry)


@triton.jit
def _meet(
    acc, weight, top, q_tile, k, k_step, v, v_step, first, left, scale,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Online softmax (base 2) over N keys from `first` on, or over the `left` of them if CUT."""
    k_tile = load_keys(k, k_step, first, left, N, HEAD_DIM, D, CUT)
    # [M, N]
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if CUT:
        scores = tl.where((tl.arange(0, N) < left)[None, :], scores, float("-inf"))
    # Every query sees some key of every tile, so that the top is finite.
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.math.exp2(scores * scale - new_top[:, None])
    rescale = tl.math.exp2(top - new_top)
    weight = weight * rescale + tl.sum(p, 1)
    v_tile = load_keys(v, v_step, first, left, N, HEAD_DIM, D, CUT)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
    return acc, weight, new_top


@triton.jit(do_not_specialize=["slot"])
def _forward_kernel(
    q, met, tiles, out, lse, slot, scale,
    CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    LOG2_E: tl.constexpr,
):  # fmt: skip
    """M gathered queries of one head over the CHUNK keys that they chose, added to out and lse."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    head_row = batch.to(tl.int64) * met.heads + head
    entry = (head_row * met.slots + slot) * tl.num_programs(0) + tl.program_id(0)
    if tl.load(tiles.count + entry) > 0:
        rows, inside, chunk = tile_rows(met, tiles, head_row, slot, M)
        first = tl.load(met.begin + batch * met.chunks + chunk)
        q_head = slice_of(q, batch, head)
        k_head = slice_of(met.k, batch, head // met.group)
        v_head = slice_of(met.v, batch, head // met.group)
        out_head = out + head_row * met.q_len * HEAD_DIM
        lse_rows = lse + head_row * met.q_len + rows
        # [M, D]
        q_tile = gather_rows(q_head, q.stride[2], rows, inside, HEAD_DIM, D)
        # A finished softmax is one whose weights add up to 1 at top = lse. Where nothing was met, lse
        # is -inf, and what was there is forgotten at the first tile.
        acc = gather_rows(out_head, HEAD_DIM, rows, inside, HEAD_DIM, D)
        top = tl.load(lse_rows, mask=inside, other=0.0) * LOG2_E
        weight = tl.full([M], 1.0, tl.float32)

        for done in range(0, CHUNK // N * N, N):
            acc, weight, top = _meet(
                acc, weight, top, q_tile, k_head, met.k.stride[2], v_head, met.v.stride[2],
                first + done, N, scale, N, HEAD_DIM, D, CUT=False,
            )  # fmt: skip
        if CHUNK % N:
            acc, weight, top = _meet(
                acc, weight, top, q_tile, k_head, met.k.stride[2], v_head, met.v.stride[2],
                first + CHUNK // N * N, CHUNK % N, scale, N, HEAD_DIM, D, CUT=True,
            )  # fmt: skip

        scatter_rows(out_head, acc / weight[:, None], rows, inside, HEAD_DIM, D)
        # ln 2 makes a natural logarithm of it.
        tl.store(lse_rows, (top + tl.math.log2(weight)) * 0.6931471805599453, mask=inside)


def add_attention(q: Tensor, work: Work, total: tuple[Tensor, Tensor]) -> None:
    """Attention of the gathered pairs, added to `total` in place.

    q: [B, Hq, S, D], of the work's share. total: contiguous out [B, Hq, S, D] and natural-log lse
    [B, Hq, S] over other keys, fp32; 0 and -inf where a query has met none.
    """
    choices = work.plan.choices
    batch, heads, _, dim = q.shape
    padded_dim = triton.next_power_of_2(dim)
    block_size = work.plan.own.tiles.block_size
    m = work.tiles.rows
    n = forward_keys(row_tile(dim, block_size, q.element_size(), choices.tokens), dim)
    sizes = dict(CHUNK=choices.tokens, M=m, N=n, HEAD_DIM=dim, D=padded_dim, LOG2_E=LOG2_E)
    options = sizes | row_options(m, n, padded_dim, q.device)
    operands = (rows_of(q), work.operand(), work.tiles, *total)
    for slot in range(choices.slots):
        _forward_kernel[work.tiles.count.shape[-1], heads, batch](
            *operands, slot, work.plan.scale * LOG2_E, **options
        )
