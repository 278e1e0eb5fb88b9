"""Learned sinks: one logit a query head that takes part in the softmax and has no value (GPT-OSS).

Attention over the keys gives out and lse. With L' = logaddexp(lse, sink), out' = out exp(lse - L')
and L' are those of the softmax over the keys and the sink: the probability of a key is
exp(score - L'). The backward of plain attention reads only out' and L', and so gives the right
gradients of q, k and v.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out' and L' of the keys and the sinks. out' is written to the memory of `out`.

    out: [B, Hq, S, D]. lse: natural log [B, Hq, S], fp32 (fp64 for fp64). sinks: [Hq]; -inf for a
    head without a sink. A row that sees no key leaves all to the sink: out' is 0, L' the sink.
    """
    sink = sinks.to(lse.dtype)[:, None]
    lse_with_sink = torch.logaddexp(lse, sink)
    # [B, Hq, S]: the keys' share of each row.
    kept = (lse - lse_with_sink).exp()
    # Neither a key nor a sink: -inf - -inf would be NaN.
    kept = kept.masked_fill(lse == -torch.inf, 0)
    out.mul_(kept[..., None])
    return out, lse_with_sink


def sinks_gradient_naive(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The twin of sinks_gradient() in plain torch, for any floating dtype."""
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    share = share.masked_fill(lse == -torch.inf, 0)
    gradient = -(share * delta).sum(dim=(0, 2))
    return gradient.to(sinks.dtype)


@triton.jit
def _gradient_kernel(
    d_out, out, lse, sinks, partial, length, dim, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """The sum over ROWS rows of one head: the sink's share of the softmax times d_out . out."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    batch = tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    inside_row = rows < length
    # [ROWS, DIM]
    inside = inside_row[:, None] & (dims < dim)[None, :]
    begin = (batch.to(tl.int64) * heads + head) * length
    at = begin * dim + (rows.to(tl.int64)[:, None] * dim + dims[None, :])
    d_tile = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    out_tile = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(d_tile * out_tile, 1)
    natural = tl.load(lse + begin + rows, mask=inside_row, other=float("-inf"))
    sink = tl.load(sinks + head).to(tl.float32)
    # Rows with neither a key nor a sink have no share; -inf - -inf would be NaN.
    natural = tl.where(natural == float("-inf"), float("inf"), natural)
    share = tl.exp(sink - natural)
    at_partial = (batch.to(tl.int64) * heads + head) * tl.num_programs(0) + tile
    tl.store(partial + at_partial, tl.sum(share * delta, 0))


def sinks_gradient(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks: -sum over a head's rows of exp(sink - L') (d_out . out').

    d_out, out: [B, Hq, S, D], fp32 or narrower. lse: fp32 [B, Hq, S]. out and lse are those of
    add_sinks(). sinks: [Hq]. Returns [Hq] in the dtype of `sinks`, the same bits every time.
    """
    batch, heads, length, dim = out.shape
    tiles = triton.cdiv(length, _ROWS)
    partial = lse.new_empty(batch, heads, tiles)
    if partial.numel() > 0:
        inputs = [x.contiguous() for x in (d_out, out, lse, sinks)]
        options = dict(ROWS=_ROWS, DIM=triton.next_power_of_2(dim))
        _gradient_kernel[tiles, heads, batch](*inputs, partial, length, dim, **options)
    gradient = -partial.sum(dim=(0, 2))
    return gradient.to(sinks.dtype)
