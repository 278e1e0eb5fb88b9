"""Attention by the schedule ulysses: the ranks of a node trade tokens for heads (DeepSpeed-Ulysses).

Before attention every rank has all heads of its own tokens. One all-to-all of q, k and v gives it all
tokens of its node, in global order, of some heads. These it attends to as one rank does, selection
included, or as one rank of a ring between nodes (USP). A second all-to-all brings `out` back. The
backward trades the gradients in the same way.

KV heads are sent once for each run of a rank's query heads that share one, so that there may be fewer
of them than ranks (schedules.kv_copies).

The trades are ops of their own, before and after those of ops.py. Activation checkpointing keeps
none of their results, and repeats the trades: what they give is as large as q, k, v and out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.context_parallel.schedules import kv_copies
from titan_sparse.kernels.dtypes import accumulation_dtype


def check(cp: ContextParallel, q: Tensor, k: Tensor, recomputed: float) -> None:
    """Raises ValueError for heads that the ranks cannot share, and for what nodes cannot recompute."""
    kv_copies(q.shape[1], k.shape[1], cp.intra)
    if cp.inter > 1 and 0 < recomputed < 1:
        raise ValueError(
            f'recomputed={recomputed} is impossible with schedule "ulysses" between nodes; write '
            'recomputed=0 or 1, or schedule "double_ring"'
        )


def own_heads(sinks: Tensor, cp: ContextParallel) -> Tensor:
    """The sinks, of all [Hq], of the heads that this rank computes."""
    count = len(sinks) // cp.intra
    first = cp.rank % cp.intra * count
    return sinks[first : first + count]


@torch.library.custom_op("titan_sparse::trade_tokens", mutates_args=())
def trade_tokens(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, cp: str
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens of all heads for its heads of all tokens of the node, in global order.

    q: [B, Hq, S_local, D] -> [B, Hq / ranks, ranks * S_local, D]. k, v: [B, Hkv, S_local, D] -> the
    KV heads of these query heads. table: int64 [W, n], of the layout "balanced"; else None. cp: its
    key.
    """
    if q.numel() == 0:
        # No batch or no tokens: nothing travels, as nothing is computed (ops.py).
        return _fake_trade_tokens(q, k, v, table, cp)
    group = context_of(cp)
    with recorder.trading(group, q.device, before=True):
        copies = kv_copies(q.shape[1], k.shape[1], group.intra)
        group.count_plain_ring(k)
        q, k, v = _to_heads(group, [q, _repeated(k, copies), _repeated(v, copies)], table)
        return q, k, v


@trade_tokens.register_fake
def _fake_trade_tokens(q, k, v, table, cp):
    ranks = context_of(cp).intra
    copies = kv_copies(q.shape[1], k.shape[1], ranks)
    heads = (q.shape[1] // ranks, *[k.shape[1] * copies // ranks] * 2)
    return tuple(_by_token(x, count, x.shape[2] * ranks) for x, count in zip((q, k, v), heads))


@torch.library.custom_op("titan_sparse::trade_tokens_backward", mutates_args=())
def _trade_tokens_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, table: Tensor | None, cp: str, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v [B, Hkv = kv_heads, S_local, D]. Those of copies are summed in fp32."""
    if dq.numel() == 0:
        return _fake_trade_tokens_backward(dq, dk, dv, table, cp, kv_heads)
    group = context_of(cp)
    dq, dk, dv = _to_tokens(group, [dq, dk, dv], table)
    copies = dk.shape[1] // kv_heads
    dk, dv = _sums_of_copies(dk, copies), _sums_of_copies(dv, copies)
    group.count_plain_ring(dk, backward=True)
    return dq, dk, dv


@_trade_tokens_backward.register_fake
def _fake_trade_tokens_backward(dq, dk, dv, table, cp, kv_heads):
    ranks = context_of(cp).intra
    heads = (dq.shape[1] * ranks, kv_heads, kv_heads)
    gradients = zip((dq, dk, dv), heads)
    return tuple(_by_token(x, count, x.shape[2] // ranks) for x, count in gradients)


@torch.library.custom_op("titan_sparse::trade_heads", mutates_args=())
def trade_heads(out: Tensor, table: Tensor | None, cp: str) -> Tensor:
    """[B, H / ranks, ranks * S_local, D] of this rank's heads -> [B, H, S_local, D] of its tokens."""
    if out.numel() == 0:
        return _fake_trade_heads(out, table, cp)
    group = context_of(cp)
    with recorder.trading(group, out.device, before=False):
        [of_tokens] = _to_tokens(group, [out], table)
        return of_tokens


@trade_heads.register_fake
def _fake_trade_heads(out, table, cp):
    ranks = context_of(cp).intra
    return _by_token(out, out.shape[1] * ranks, out.shape[2] // ranks)


@torch.library.custom_op("titan_sparse::trade_heads_backward", mutates_args=())
def _trade_heads_backward(d_out: Tensor, table: Tensor | None, cp: str) -> Tensor:
    if d_out.numel() == 0:
        return _fake_trade_heads_backward(d_out, table, cp)
    [of_heads] = _to_heads(context_of(cp), [d_out], table)
    return of_heads


@_trade_heads_backward.register_fake
def _fake_trade_heads_backward(d_out, table, cp):
    ranks = context_of(cp).intra
    return _by_token(d_out, d_out.shape[1] // ranks, d_out.shape[2] * ranks)


def _save_tokens(ctx, inputs: tuple, output: tuple) -> None:
    _, k, _, ctx.table, ctx.key = inputs
    ctx.kv_heads = k.shape[1]
    # Keys hold nothing: until the backward this graph holds it.
    ctx.cp = context_of(ctx.key)


def _differentiate_tokens(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
    backward = torch.ops.titan_sparse.trade_tokens_backward
    return *backward(dq, dk, dv, ctx.table, ctx.key, ctx.kv_heads), None, None


def _save_heads(ctx, inputs: tuple, output: Tensor) -> None:
    _, ctx.table, ctx.key = inputs
    ctx.cp = context_of(ctx.key)


def _differentiate_heads(ctx, d_out: Tensor) -> tuple:
    return torch.ops.titan_sparse.trade_heads_backward(d_out, ctx.table, ctx.key), None, None


trade_tokens.register_autograd(_differentiate_tokens, setup_context=_save_tokens)
trade_heads.register_autograd(_differentiate_heads, setup_context=_save_heads)


def _to_heads(cp: ContextParallel, tensors: Sequence[Tensor], table: Tensor | None) -> list[Tensor]:
    """[B, H, S_local, D] each -> [B, H / ranks, ranks * S_local, D], in one all-to-all."""
    ranks = cp.intra
    batch, _, length, dim = tensors[0].shape
    counts = [x.shape[1] // ranks for x in tensors]
    sent = tensors[0].new_empty(ranks, batch, length, sum(counts), dim)
    for x, part in zip(tensors, sent.split(counts, dim=3)):
        # [B, ranks, h, S_local, D] -> [ranks, B, S_local, h, D]
        part.copy_(x.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4))
    # By the rank that has the tokens: [B, ranks, n, block, heads, D], then [B, ranks * n, ...].
    blocks = cp.trade(sent).unflatten(2, (-1, cp.block_size)).transpose(0, 1).flatten(1, 2)
    order = cp.order_in_node(length, table, sent.device)
    found = []
    for part in blocks.split(counts, dim=3):
        # [B, ranks * S_local, h, D]
        in_order = part.index_select(1, order).flatten(1, 2)
        found.append(in_order.transpose(1, 2))
    return found


def _to_tokens(
    cp: ContextParallel, tensors: Sequence[Tensor], table: Tensor | None
) -> list[Tensor]:
    """[B, H / ranks, ranks * S_local, D] each -> [B, H, S_local, D], in one all-to-all."""
    ranks = cp.intra
    counts = [x.shape[1] for x in tensors]
    # [B, ranks * S_local, heads, D]
    by_token = torch.cat([x.transpose(1, 2) for x in tensors], dim=2)
    length = by_token.shape[1] // ranks
    order = cp.order_in_node(length, table, by_token.device)
    # By the rank that gets the tokens: [B, ranks, S_local, heads, D].
    blocks = by_token.unflatten(1, (-1, cp.block_size)).index_select(1, order.argsort())
    sent = blocks.flatten(1, 2).unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    found = []
    for part in cp.trade(sent).split(counts, dim=3):
        # By the rank that has the heads: [ranks, B, S_local, h, D] -> [B, S_local, ranks * h, D].
        of_all = part.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
        found.append(of_all.transpose(1, 2))
    return found


def _repeated(x: Tensor, copies: int) -> Tensor:
    """Every KV head of [B, Hkv, S, D] `copies` times, one after the other."""
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def _sums_of_copies(x: Tensor, copies: int) -> Tensor:
    """The inverse for gradients; by token, like x."""
    if copies == 1:
        return x
    # [B, S, Hkv, copies, D]
    of_copies = x.transpose(1, 2).unflatten(2, (-1, copies))
    total = of_copies.sum(3, dtype=accumulation_dtype(x.dtype)).to(x.dtype)
    return total.transpose(1, 2)


def _by_token(like: Tensor, heads: int, length: int) -> Tensor:
    """An empty [B, heads, length, D] that is [B, length, heads, D] in memory."""
    return like.new_empty(like.shape[0], length, heads, like.shape[3]).transpose(1, 2)
