"""Attention by the schedule ulysses: the ranks of a node trade tokens for heads
(DeepSpeed-Ulysses).

Before attention every rank has all heads of its own tokens. One all-to-all of q, k and v gives it
all tokens of its node, in global order, of some heads. These it attends to as one rank does,
selection included, or as one rank of a ring between nodes (USP). A second all-to-all brings `out`
back. The backward trades the gradients in the same way.

KV heads are sent once for each run of a rank's query heads that share one, so that there may be
fewer of them than ranks (schedules.kv_copies).

The trades are ops of their own, before and after those of ops.py. Activation checkpointing keeps
none of their results, and repeats the trades: what they give is as large as q, k, v and out.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.context_parallel.schedules import kv_copies
from titan_sparse.kernels.dtypes import accumulation_dtype


def check(cp: ContextParallel, q: Tensor, k: Tensor, recomputed: float) -> None:
    """Raises ValueError for heads that the ranks cannot share, and for what
    nodes cannot recompute."""
    copies_of(cp, q, k)
    if cp.inter > 1 and 0 < recomputed < 1:
        raise ValueError(
            f'recomputed={recomputed} is impossible with schedule "ulysses" between nodes; write '
            'recomputed=0 or 1, or schedule "double_ring"'
        )


def copies_of(cp: ContextParallel, q: Tensor, k: Tensor) -> int:
    """kv_copies() of these tensors, as a constant of a compiled graph."""
    sizes = (q.shape[1], k.shape[1], cp.intra)
    heads, kv_heads, ranks = (operator.index(size) for size in sizes)
    return kv_copies(heads, kv_heads, ranks)


def own_heads(sinks: Tensor, cp: ContextParallel) -> Tensor:
    """The sinks, of all [Hq], of the heads that this rank computes."""
    count = len(sinks) // cp.intra
    first = cp.rank % cp.intra * count
    return sinks[first : first + count]


def trade_tokens(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, cp: ContextParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens of all heads for its heads of all tokens of the node, in global order.

    q: [B, Hq, S_local, D] -> [B, Hq / ranks, ranks * S_local, D]. k, v: [B, Hkv, S_local, D] -> the
    KV heads of these query heads. table: int64 [W, n], of the layout "balanced"; else None.
    """
    copies = copies_of(cp, q, k)
    q, k, v = _trade([q, k, v], copies, True, table, cp.key)
    return q, k, v


def trade_heads(out: Tensor, table: Tensor | None, cp: ContextParallel) -> Tensor:
    """[B, H / ranks, ranks * S_local, D] of this rank's heads -> [B, H,
    S_local, D] of its tokens."""
    [of_tokens] = _trade([out], 1, False, table, cp.key)
    return of_tokens


@torch.library.custom_op("titan_sparse::trade", mutates_args=())
def _trade(
    tensors: list[Tensor], copies: int, to_heads: bool, table: Tensor | None, cp: str
) -> list[Tensor]:
    """Either trade, of one tensor or of q, k and v. Its gradient is the trade back.

    copies: how often each KV head is sent. Coming back, gradients of copies are summed in fp32.
    """
    if tensors[0].numel() == 0:
        # No batch or no tokens: nothing travels, as nothing is computed (ops.py).
        return _fake_trade(tensors, copies, to_heads, table, cp)
    group = context_of(cp)
    device = tensors[0].device
    # Nothing is recorded in a backward. Under autocast, torch.cat() refuses the other 16-bit dtype.
    with (
        torch.autocast(device.type, enabled=False),
        recorder.trading(group, device, before=to_heads),
    ):
        q, *kv = tensors
        if to_heads:
            found = _to_heads(group, [q, *(_repeated(x, copies) for x in kv)], table)
        else:
            q, *kv = _to_tokens(group, tensors, table)
            kv = [_sums_of_copies(x, copies) for x in kv]
            found = [q, *kv]
        if kv:
            group.count_plain_ring(kv[0], backward=not to_heads)
        return found


@_trade.register_fake
def _fake_trade(tensors, copies, to_heads, table, cp):
    """By token in memory: [B, S, H, D], transposed."""
    ranks = context_of(cp).intra
    found = []
    for number, x in enumerate(tensors):
        batch, heads, length, dim = x.shape
        times = 1 if number == 0 else copies
        if to_heads:
            heads, length = heads * times // ranks, length * ranks
        else:
            heads, length = heads * ranks // times, length // ranks
        found.append(x.new_empty(batch, length, heads, dim).transpose(1, 2))
    return found


def _save(ctx, inputs: tuple, output: list[Tensor]) -> None:
    _, *ctx.options = inputs
    # Keys hold nothing: until the backward this graph holds it.
    ctx.cp = context_of(ctx.options[-1])


def _differentiate(ctx, gradients: list[Tensor]) -> tuple:
    copies, to_heads, table, cp = ctx.options
    return _trade(gradients, copies, not to_heads, table, cp), None, None, None, None


_trade.register_autograd(_differentiate, setup_context=_save)


def index_of_all_heads(index: list[Tensor], by_heads: str) -> list[Tensor]:
    """The tensors of an index, [B, H / ranks, ...] each, of the heads of all ranks: [B, H, ...].

    by_heads: the key of the ContextParallel that attended to this rank's.
    """
    return [_of_all_heads(x, by_heads) for x in index]


@torch.library.custom_op("titan_sparse::of_all_heads", mutates_args=())
def _of_all_heads(x: Tensor, cp: str) -> Tensor:
    return context_of(cp).of_all_heads(x, 1)


@_of_all_heads.register_fake
def _fake_of_all_heads(x, cp):
    batch, heads, *others = x.shape
    return x.new_empty(batch, heads * context_of(cp).whole.intra, *others)


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
    blocks = (
        cp.all_to_all(sent, "inner").unflatten(2, (-1, cp.block_size)).transpose(0, 1).flatten(1, 2)
    )
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
    for part in cp.all_to_all(sent, "inner").split(counts, dim=3):
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
