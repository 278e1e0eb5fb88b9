"""Attention as custom ops, which torch.compile sees as one node each.

select (patterns/base.py) has no gradient. Activation checkpointing keeps the results of select
and attend_forward (SAVED_OPS), so that index, out and lse survive recomputation and no collective
runs twice. What may be computed twice to save memory goes through attend_recomputed, which is
attend_forward by another name (recomputed.py).

A forward takes (q, k, v, sinks, index, mask, call): learned sinks or None, the tensors of the index
and of the mask, and the key of CallOptions (patterns/base.py). It adds the sinks at its end, so that out and
lse, as they are returned and kept for the backward, count them (kernels/sinks.py). Schedules,
backends and observers know nothing of sinks.
"""

import torch
from torch import Tensor

from titan_sparse.attention import recorder, registry
from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import bind
from titan_sparse.attention.context_parallel import loop
from titan_sparse.attention.inputs import check_tangents, whole_blocks
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.kernels.sinks import add_sinks, sinks_gradient, sinks_gradient_naive


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    index: list[Tensor],
    mask: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the gathered verticals' keys and values [2, B, Hq, C, D].

    The verticals are not returned again where they came as the last of `index`. A part of a
    sequence is given no sinks: they are added to the whole.
    """
    # A graph that torch.compile made without tangents may be called with them.
    check_tangents(q=q, k=k, v=v)
    if q.numel() == 0:
        # No batch or no tokens: nothing to compute, and the verticals are never read.
        return _fake_forward(q, k, v, sinks, index, mask, call)
    bound = bind(call, q, index, mask)
    size = bound.cp.block_size
    # Everything below works on whole blocks; [B, H, padded S_local, D].
    q_share, k_share, v_share = bound.take(*(whole_blocks(x, 2, size) for x in (q, k, v)))
    # Other calls do not enter recorder.py.
    observer = recorder.listening and recorder.observer()
    if observer:
        observer.begin(bound)
    out, lse, vertical_kv = loop.forward(bound, q_share, k_share, v_share)
    if observer:
        observer.forward(bound, q_share, k_share)
        # Parts of a sequence are reported as a layer once they are joined.
        if not bound.is_partial:
            observer.layer(bound, q_share, k_share, lse)
    if bound.vertical_kv is not None:
        vertical_kv = q.new_empty(0)
    # Without the padding: [B, Hq, length, D] and [B, Hq, length].
    length = q.shape[2] - bound.first * size
    out = out[:, :, :length]
    lse = lse[:, :, :length].contiguous()
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return _laid_out_like(q, out.to(q.dtype)), lse, vertical_kv


def _laid_out_like(other: Tensor, x: Tensor) -> Tensor:
    """x [B, H, S, D] by token in memory if `other` is, else by head.

    Models give and take tensors by token, and dense kernels compute in either layout.
    """
    if not other.is_contiguous() and other.transpose(1, 2).is_contiguous():
        # By [B, S, H, D] and back.
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()


def _fake_forward(q, k, v, sinks, index, mask, call) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of what _forward() returns, for torch.compile."""
    options = registry.lookup(call)
    size = options.cp().block_size
    batch, heads, seq_len, head_dim = q.shape
    first, last = options.block_range(seq_len)
    # The last block may be ragged.
    end = seq_len if last is None else min(last * size, seq_len)
    length = end - first * size
    vertical_kv = q.new_empty(0)
    if options.end == 1:
        verticals = options.pattern.vertical_count(index)
        vertical_kv = q.new_empty(2, batch, heads, verticals, head_dim)
    out = q.new_empty(batch, heads, length, head_dim)
    lse = q.new_empty(batch, heads, length, dtype=accumulation_dtype(q.dtype))
    return _laid_out_like(q, out), lse, vertical_kv


@torch.library.custom_op("titan_sparse::attend_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: list[Tensor],
    index: list[Tensor],
    mask: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, in the dtype of q.

    results: out, lse and the verticals' keys and values, as the forward gave them.
    """
    out, lse, vertical_kv = results
    if q.numel() == 0:
        return _fake_backward(d_out, q, k, v, results, index, mask, call)
    bound = bind(call, q, index, mask)
    size = bound.cp.block_size
    queries = Queries(
        q=whole_blocks(q, 2, size),
        d_out=whole_blocks(_laid_out_like(q, d_out), 2, size),
        out=whole_blocks(out, 2, size),
        lse=whole_blocks(lse, 2, size, -torch.inf),
    )
    keys_and_values = (whole_blocks(x, 2, size) for x in (k, v))
    gradients = loop.backward(bound, queries, *keys_and_values, vertical_kv)
    # Without the padding: [B, H, S_local, D].
    cut = (x[:, :, : q.shape[2]].to(q.dtype) for x in gradients)
    return tuple(map(_laid_out_like, (q, k, v), cut))


@_backward.register_fake
def _fake_backward(d_out, q, k, v, results, index, mask, call):
    return tuple(_laid_out_like(x, x.new_empty(x.shape)) for x in (q, k, v))


@torch.library.custom_op("titan_sparse::attend_sinks_backward", mutates_args=())
def _sinks_backward(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [Hq], over this rank's rows; out and lse as the forward gave them."""
    if out.is_cuda and lse.dtype == torch.float32:
        return sinks_gradient(d_out, out, lse, sinks)
    return sinks_gradient_naive(d_out, out, lse, sinks)


@_sinks_backward.register_fake
def _fake_sinks_backward(d_out, out, lse, sinks):
    return torch.empty_like(sinks, memory_format=torch.contiguous_format)


def _save_forward(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep for the backward what the whole attention needs; a part of one has no backward."""
    q, k, v, sinks, index, mask, call = inputs
    options = registry.lookup(call)
    if options.is_partial:
        raise ValueError(
            "a part of attention has no gradient of its own; detach its inputs and join the parts"
        )
    save(ctx, q, k, v, sinks, index, mask, call, output)
    _, lse, vertical_kv = output
    ctx.mark_non_differentiable(lse, vertical_kv)


def save(ctx, q, k, v, sinks, index, mask, call, results) -> None:
    """results: out, lse and the verticals' keys and values."""
    # Only tensors can be saved; their numbers say where the lists begin and end.
    ctx.call = call
    # The registry holds the ContextParallel weakly: until the backward this graph holds it.
    ctx.cp = registry.lookup(call).cp()
    ctx.index_count = len(index)
    ctx.mask_count = len(mask)
    ctx.save_for_backward(q, k, v, sinks, *results, *index, *mask)
    # A missing gradient stays None, instead of becoming a tensor of zeros.
    ctx.set_materialize_grads(False)


def differentiate(ctx, d_out: Tensor | None, *_) -> tuple:
    """Gradients of the seven inputs; those of index and mask are lists of None."""
    no_index = [None] * ctx.index_count
    no_mask = [None] * ctx.mask_count
    if d_out is None:
        return None, None, None, None, no_index, no_mask, None
    q, k, v, sinks, out, lse, vertical_kv, *rest = ctx.saved_tensors
    index = rest[: ctx.index_count]
    mask = rest[ctx.index_count :]
    ops = torch.ops.titan_sparse
    results = [out, lse, vertical_kv]
    dq, dk, dv = ops.attend_backward(d_out, q, k, v, results, index, mask, ctx.call)
    d_sinks = None
    if sinks is not None:
        d_sinks = ops.attend_sinks_backward(d_out, out, lse, sinks)
    return dq, dk, dv, d_sinks, no_index, no_mask, None


for _name in ("attend_forward", "attend_recomputed"):
    _op = torch.library.custom_op(f"titan_sparse::{_name}", _forward, mutates_args=())
    _op.register_fake(_fake_forward)
    _op.register_autograd(differentiate, setup_context=_save_forward)

SAVED_OPS = (
    torch.ops.titan_sparse.select.default,
    torch.ops.titan_sparse.attend_forward.default,
)
"""What activation checkpointing must keep: recomputing them would repeat collectives and selection.

attend_recomputed, which attend(recomputed=...) calls for the first part of each sequence, is not
among them."""
