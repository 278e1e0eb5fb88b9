"""Attention in two parts: activation checkpointing keeps one part and recomputes the other
(BurstEngine's sequence-level selective checkpointing).

The first blocks of each sequence are recomputed: under a causal mask they see the fewest keys. Two
calls compute the two parts, the second of which is among SAVED_OPS, and attend_join makes one
attention of them, which is differentiated as the whole.
"""

import torch
from torch import Tensor

from titan_sparse.attention import recorder
from titan_sparse.attention.inputs import Ranks, constant, whole_blocks
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.ops import (
    bind,
    blocks_before,
    differentiate,
    options_key,
    save,
)
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.kernels.sinks import add_sinks


def attend_in_parts(
    inputs: tuple, recomputed: float, ranges: MaskRanges, ranks: Ranks, options: tuple
) -> tuple[Tensor, Tensor]:
    """out and lse; the first `recomputed` of each sequence is left to be computed again.

    inputs: q, k, v, sinks, index and mask, as ops take them. options: what options_key() takes for
    the whole sequence.
    """
    ops = torch.ops.titan_sparse
    q, k, v, _, index, mask = inputs
    whole = options_key(*options)
    boundary, blocks = _boundary(recomputed, q, ranges, ranks)
    if boundary == 0:
        return ops.attend_forward(*inputs, whole)[:2]
    if boundary == blocks:
        return ops.attend_recomputed(*inputs, whole)[:2]
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
    """The number of a rank's query blocks in the first part, and the number of all.

    Raises ValueError for what cannot be recomputed in part.
    """
    if not 0 <= recomputed <= 1:
        raise ValueError(f"recomputed={recomputed} is not a share of a sequence; write 0 to 1")
    boundary, blocks = blocks_before(recomputed, q.shape[2], ranks.block_size)
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
    observer = recorder.listening and recorder.observer()
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
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


def _save_joined(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, index, mask, call, parts = inputs
    save(ctx, q, k, v, sinks, index, mask, call, (*output, parts[-1]))
    ctx.mark_non_differentiable(output[1])


def _differentiate_joined(ctx, d_out: Tensor | None, *_) -> tuple:
    """As differentiate(), with the five parts as an eighth input."""
    return *differentiate(ctx, d_out), [None] * 5


_join.register_autograd(_differentiate_joined, setup_context=_save_joined)
