"""Attention as custom ops, which torch.compile sees as one node each, with the key that names what
they cannot take, and the call that it stands for.

Custom ops take tensors, numbers, and strings, but no pattern and no group of ranks. Torch's own
way, opaque types, is private in the versions that we support, and torch.compile wants such an
object rebuilt from text or as an input of every graph. Here a key, which is a constant of the
graph, names CallOptions. A ContextParallel owns the options of its calls, and is itself found by a
weak reference, so that no process group outlives the ContextParallel that made it.

`select` has no gradient. Activation checkpointing keeps the results of select and attend_forward
(SAVED_OPS), so that index, out and lse survive recomputation and no collective runs twice. What may
be computed twice to save memory goes through attend_recomputed, which is attend_forward by another
name. run_forward() computes the first part of each sequence by it and the rest by attend_forward.

A forward takes (q, k, v, sinks, index, mask, call): learned sinks or None, the tensors of the index
and of the mask, and the key of CallOptions. It adds the sinks at its end, so that out and lse, as
they are returned and kept for the backward, count them (kernels/sinks.py). Schedules, backends and
observers know nothing of sinks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import Queries
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import loop
from titan_sparse.attention.context_parallel.all_gather import AllGather
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.context_parallel.group_cast import GroupCast
from titan_sparse.attention.context_parallel.ring import Ring
from titan_sparse.attention.context_parallel.schedules import Moves
from titan_sparse.attention.inputs import (
    MaskFacts,
    Ranks,
    check_plain,
    constant,
    mask_of_tensors,
    mask_of_whole_blocks,
    whole_blocks,
)
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns.base import Pattern, pattern_of
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.kernels.sinks import add_sinks, sinks_gradient, sinks_gradient_naive

_TRANSPORTS: dict[Moves, type[loop.Transport]] = {
    Moves.NOTHING: loop.OneRank,
    Moves.CHUNKS: Ring,
    Moves.HEADS: AllGather,
    Moves.BLOCKS: GroupCast,
}


@dataclass(frozen=True)
class CallOptions:
    """Options of the ops, which look them up by a key.

    cp_key: of the ContextParallel, which owns this object.
    mask: what is to be known of the mask in addition to its tensors (inputs.mask_tensors).
    The select op does not read the rest.
    begin, end: the call is about the query blocks of this range alone, as shares of the sequence.
    A range that ends before the sequence does is given the verticals' keys and values.
    """

    pattern: Pattern
    cp_key: str
    mask: MaskFacts
    scale: float
    backend: str = ""
    begin: float = 0.0
    end: float = 1.0

    @property
    def cp(self) -> ContextParallel:
        return context_of(self.cp_key)

    def block_range(self, seq_len: int) -> tuple[int, int | None]:
        """The range of local query blocks that the call is about: first, and last + 1.

        seq_len: local tokens. The last + 1 is None for the end of the sequence.
        """
        block_size = self.cp.block_size
        first = _blocks_before(self.begin, seq_len, block_size) if self.begin > 0 else 0
        last = _blocks_before(self.end, seq_len, block_size) if self.end < 1 else None
        return first, last


def _blocks_before(share: float, seq_len: int, block_size: int) -> int:
    """The number of a rank's blocks before this share of the sequence, the same on every rank.

    seq_len: tokens of the rank.
    """
    blocks = -(-seq_len // block_size)
    return int(share * blocks + 0.5)


@torch.compiler.assume_constant_result
def options_key(pattern: str, cp: str, *options) -> str:
    """The key of CallOptions, for a pattern and a ContextParallel named by their keys.

    options: the other fields of CallOptions.
    """
    key = " | ".join(map(str, (cp, pattern, *options)))
    calls = context_of(cp).calls
    if key not in calls:
        calls[key] = CallOptions(pattern_of(pattern), cp, *options)
    return key


def lookup(key: str) -> CallOptions:
    """The options of this key.

    Raises RuntimeError if they are not there: in a backward, or a compiled call, of a
    ContextParallel that no longer exists, and in what torch.export has saved in another process.
    """
    cp_key, _, _ = key.partition(" | ")
    options = context_of(cp_key).calls.get(key)
    if options is None:
        raise RuntimeError(
            "this call of attend() was traced in another process, and its options stayed there; "
            "trace the model where it runs (torch.compile, or torch.export without saving)"
        )
    return options


def bind(key: str, q: Tensor, index: list[Tensor], mask: list[Tensor]) -> AttentionCall:
    """Rebuild the call from the key and the tensors that an op receives.

    q: [B, Hq, S_local, D]. index, mask: the tensors of the index and of the mask. For the first of
    two shares the keys and values of the verticals are the last tensor of `index`.
    """
    options = lookup(key)
    cp = options.cp
    vertical_kv = None
    if options.end < 1:
        *index, vertical_kv = index
    batch, heads, seq_len, _ = q.shape
    first, last = options.block_range(seq_len)
    ranges = mask_of_whole_blocks(mask_of_tensors(options.mask, mask), cp.block_size)
    return AttentionCall(
        mask=ranges,
        index=options.pattern.index(index, ranges, batch, heads, cp.block_size),
        pattern=options.pattern,
        cp=cp,
        backend=BACKENDS[options.backend],
        transport=_TRANSPORTS[cp.moves],
        scale=options.scale,
        plain=ranges.plain and not options.pattern.dynamic,
        first=first,
        last=last,
        vertical_kv=vertical_kv,
    )


def _outside_autocast(op: Callable) -> Callable:
    """The op, of which the first argument is a tensor, outside of torch.autocast, which would round
    the factors of its products to 16 bits, also of sums in fp32 and in a backward."""

    @functools.wraps(op)
    def run(tensor: Tensor, *others: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False):
            return op(tensor, *others)

    return run


@torch.library.custom_op("titan_sparse::select", mutates_args=())
def _select(q: Tensor, k: Tensor, mask: list[Tensor], call: str) -> list[Tensor]:
    """The tensors of a dynamic pattern's index. No gradient. Collective over the ranks."""
    options = lookup(call)
    ranges = mask_of_tensors(options.mask, mask)
    return options.pattern.choose(q, k, ranges, options.cp, options.scale)


@_select.register_fake
def _fake_select(q: Tensor, k: Tensor, mask: list[Tensor], call: str) -> list[Tensor]:
    options = lookup(call)
    block_size = options.cp.block_size
    # Up to whole blocks.
    seq_len = mask[0].shape[1]
    seq_len += -seq_len % block_size
    names, _, _ = options.mask
    return options.pattern.empty_tensors(q, seq_len, block_size, "document_start" in names)


@_outside_autocast
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
    check_plain(q=q, k=k, v=v)
    if q.numel() == 0:
        # No batch or no tokens: nothing to compute, and the verticals are never read.
        return _fake_forward(q, k, v, sinks, index, mask, call)
    bound = bind(call, q, index, mask)
    size = bound.cp.block_size
    # Everything below works on whole blocks; [B, H, padded S_local, D].
    q_share, k_share, v_share = bound.take(*(whole_blocks(x, 2, size) for x in (q, k, v)))
    # Other calls do not enter recorder.py.
    observer = recorder.listeners.recording and recorder.observer()
    if observer:
        observer.begin(bound)
    out, lse, vertical_kv = loop.forward(bound, q_share, k_share, v_share)
    if observer:
        observer.forward(bound)
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
    options = lookup(call)
    size = options.cp.block_size
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
@_outside_autocast
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
    keys, values = (whole_blocks(x, 2, size) for x in (k, v))
    gradients = loop.backward(bound, queries, keys, values, vertical_kv)
    # Without the padding: [B, H, S_local, D].
    cut = (x[:, :, : q.shape[2]].to(q.dtype) for x in gradients)
    dq, dk, dv = map(_laid_out_like, (q, k, v), cut)
    return dq, dk, dv


@_backward.register_fake
def _fake_backward(d_out, q, k, v, results, index, mask, call):
    return tuple(_laid_out_like(x, x.new_empty(x.shape)) for x in (q, k, v))


def _refuse_second_derivatives(ctx, *gradients: Any) -> None:
    raise ValueError(
        "attend() has no second derivative; write create_graph=False, or take another attention for "
        "what is differentiated twice"
    )


_backward.register_autograd(_refuse_second_derivatives)


@torch.library.custom_op("titan_sparse::attend_sinks_backward", mutates_args=())
@_outside_autocast
def _sinks_backward(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [Hq], over this rank's rows; out and lse as
    the forward gave them."""
    if out.is_cuda and lse.dtype == torch.float32:
        return sinks_gradient(d_out, out, lse, sinks)
    return sinks_gradient_naive(d_out, out, lse, sinks)


_sinks_backward.register_autograd(_refuse_second_derivatives)


@_sinks_backward.register_fake
def _fake_sinks_backward(d_out, out, lse, sinks):
    return torch.empty_like(sinks, memory_format=torch.contiguous_format)


def _save_forward(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep for the backward what the whole attention needs; a part of one has no backward."""
    options = lookup(inputs[-1])
    if options.begin > 0 or options.end < 1:
        raise ValueError(
            "a part of attention has no gradient of its own; detach its inputs and join the parts"
        )
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _save(ctx, inputs: tuple, results: tuple[Tensor, Tensor, Tensor]) -> None:
    """results: out, lse and the verticals' keys and values."""
    q, k, v, sinks, index, mask, call = inputs
    ctx.call = call
    # The table holds the ContextParallel weakly: until the backward this graph holds it.
    ctx.cp = lookup(call).cp
    # Only tensors can be saved; their numbers say where the lists begin and end.
    ctx.index_count = len(index)
    ctx.mask_count = len(mask)
    ctx.save_for_backward(q, k, v, sinks, *results, *index, *mask)
    # A missing gradient stays None, instead of becoming a tensor of zeros.
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_out: Tensor | None, *_) -> tuple:
    """Gradients of the seven inputs; those of index and mask are lists of None."""
    no_index = [None] * ctx.index_count
    no_mask = [None] * ctx.mask_count
    if d_out is None:
        return None, None, None, None, no_index, no_mask, None
    check_plain(d_out=d_out)
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
    _op.register_autograd(_differentiate, setup_context=_save_forward)

SAVED_OPS = (
    torch.ops.titan_sparse.select.default,
    torch.ops.titan_sparse.attend_forward.default,
)
"""What activation checkpointing must keep: recomputing them would repeat collectives and selection.

attend_recomputed, which attend(recomputed=...) calls for the first part of each sequence, is not
among them."""


def run_forward(
    inputs: tuple, recomputed: float, ranges: MaskRanges, ranks: Ranks, options: tuple
) -> tuple[Tensor, Tensor]:
    """out and lse. Activation checkpointing recomputes the first `recomputed` of each sequence and
    keeps the rest (BurstEngine's sequence-level selective checkpointing).

    Under a causal mask the first part sees the fewest keys. If there are two parts, two calls
    compute them, and attend_join makes one attention of them, which is differentiated as the whole.

    inputs: q, k, v, sinks, index and mask, as ops take them. options: what options_key() takes for
    the whole sequence.
    """
    ops = torch.ops.titan_sparse
    q, k, v, _, index, mask = inputs
    whole = options_key(*options)
    boundary, blocks = _boundary(recomputed, q, ranges, ranks)
    if boundary in (0, blocks):
        forward = ops.attend_recomputed if boundary else ops.attend_forward
        return forward(*inputs, whole)[:2]
    # Both parts are differentiated together, by attend_join, which also adds the sinks.
    qkv = (q.detach(), k.detach(), v.detach(), None)
    share = constant(recomputed)
    second = options_key(*options, share, 1.0)
    out, lse, vertical_kv = ops.attend_forward(*qkv, index, mask, second)
    index = [*index, vertical_kv]
    first = options_key(*options, 0.0, share)
    first_out, first_lse, _ = ops.attend_recomputed(*qkv, index, mask, first)
    return ops.attend_join(*inputs, whole, [first_out, out, first_lse, lse, vertical_kv])


def _boundary(recomputed: float, q: Tensor, ranges: MaskRanges, ranks: Ranks) -> tuple[int, int]:
    """The number of a rank's query blocks in the first part, and the number of all. Shares of 0 and
    1 are 0 and 1 of 1: torch.compile may not know the number.

    Raises ValueError for what cannot be recomputed in part.
    """
    if recomputed in (0, 1):
        return int(recomputed), 1
    if not 0 <= recomputed <= 1:
        raise ValueError(f"recomputed={recomputed} is not a share of a sequence; write 0 to 1")
    blocks = -(-q.shape[2] // ranks.block_size)
    boundary = _blocks_before(recomputed, q.shape[2], ranks.block_size)
    if boundary in (0, blocks):
        return boundary, blocks
    if not ranges.causal:
        raise ValueError(f"recomputed={recomputed} needs a causal mask; write recomputed=0 or 1")
    if ranks.size > 1 and ranks.layout != "striped":
        # Only there are the first blocks of all ranks the first blocks of the sequence.
        raise ValueError(
            f'recomputed={recomputed} needs layout "striped", not "{ranks.layout}"; '
            "write it, or recomputed=0 or 1"
        )
    return boundary, blocks


@torch.library.custom_op("titan_sparse::attend_join", mutates_args=())
@_outside_autocast
def _join(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    index: list[Tensor],
    mask: list[Tensor],
    call: str,
    parts: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """out and lse of the whole from those of its two parts; differentiated as the whole.

    parts: out of the first and of the second part, lse of both, and the verticals' keys and
    values; all without sinks, which are added here.
    """
    first_out, second_out, first_lse, second_lse, _ = parts
    out = torch.cat([first_out, second_out], dim=2)
    lse = torch.cat([first_lse, second_lse], dim=2)
    observer = recorder.listeners.recording and recorder.observer()
    if observer and q.numel() > 0:
        bound = bind(call, q, index, mask)
        size = bound.cp.block_size
        padded_lse = whole_blocks(lse, 2, size, -torch.inf)
        observer.layer(bound, whole_blocks(q, 2, size), whole_blocks(k, 2, size), padded_lse)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out, lse


@_join.register_fake
def _fake_join(q, k, v, sinks, index, mask, call, parts):
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def _save_joined(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *inputs_of_whole, parts = inputs
    _save(ctx, tuple(inputs_of_whole), (*output, parts[-1]))
    ctx.mark_non_differentiable(output[1])


def _differentiate_joined(ctx, d_out: Tensor | None, *_) -> tuple:
    """As _differentiate(), with the five parts as an eighth input."""
    return *_differentiate(ctx, d_out), [None] * 5


_join.register_autograd(_differentiate_joined, setup_context=_save_joined)
