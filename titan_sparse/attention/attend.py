"""attend() combines mask, pattern, layout, schedule and backend."""

import operator
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from titan_sparse.attention import backends
from titan_sparse.attention.compiling import switch_wrong_fusions_off
from titan_sparse.attention.context_parallel import ulysses
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.inputs import (
    check_scale,
    check_sinks,
    check_tensors,
    constant,
    mask_tensors,
    ranks_of,
    resolve_mask,
)
from titan_sparse.attention.masks.ranges import Causal, Mask, MaskRanges
from titan_sparse.attention.ops import options_key, run_forward
from titan_sparse.attention.patterns.base import BlockIndex, Dense, Pattern, check_pattern


class Auxiliary(NamedTuple):
    """The second result of attend() with return_aux=True.

    lse: natural-log normalizer [B, Hq, S_local], fp32 (fp64 for fp64); it counts the sinks, if
    there are any, and has no gradient. index: what was selected.
    """

    lse: Tensor
    index: BlockIndex  # type: ignore[assignment]


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | MaskRanges = ...,
    pattern: Pattern = ...,
    cp: ContextParallel | None = ...,
    backend: str = ...,
    scale: float | None = ...,
    block_size: int | None = ...,
    return_aux: Literal[False] = ...,
    recomputed: float = ...,
    sinks: Tensor | None = ...,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | MaskRanges = ...,
    pattern: Pattern = ...,
    cp: ContextParallel | None = ...,
    backend: str = ...,
    scale: float | None = ...,
    block_size: int | None = ...,
    *,
    return_aux: Literal[True],
    recomputed: float = ...,
    sinks: Tensor | None = ...,
) -> tuple[Tensor, Auxiliary]: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | MaskRanges = Causal(),
    pattern: Pattern = Dense(),
    cp: ContextParallel | None = None,
    backend: str = "auto",
    scale: float | None = None,
    block_size: int | None = None,
    return_aux: bool = False,
    recomputed: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Auxiliary]:
    """Attention over what `mask` allows and `pattern` selects.

    q: [B, Hq, S_local, D]. k, v: [B, Hkv, S_local, D], Hq a multiple of Hkv. All three share one
    dtype: fp64, fp32, fp16 or bf16.
    mask: a Mask, or mask.rows(S) once computed. Its positions are global.
    cp: the ranks that share the sequence. q, k and v are then this rank's blocks of it, and the
    call is collective.
    backend: "auto", or a name of titan_sparse.attention.backends.
    scale: of the scores, above 0; default D ** -0.5.
    block_size: tokens, for cp=None only; default 128.
    recomputed: for activation checkpointing that keeps SAVED_OPS. The share of each sequence, from
    its start, whose out and lse are computed again in the backward rather than kept (BurstEngine's
    sequence-level selective checkpointing), rounded to a block of every rank. A share between 0
    and 1 needs a causal mask, and one rank, the layout "striped", or the schedule "ulysses" inside
    of one node.
    sinks: [Hq], fp32 or the dtype of q. A learned logit of each query head that takes part in the
    softmax of every row and has no value (GPT-OSS); -inf for a head without one. `scale` does not
    apply to it. Patterns select, and density and recall count, by the softmax over keys alone.
    Every rank of `cp` gives the same sinks and gets the gradient through its own rows: their sum
    over the ranks is the whole, as for any parameter that ranks share.

    Returns out, shaped and typed like q; with return_aux also Auxiliary(lse, index). Rows that
    see nothing, such as padding, have out 0, lse -inf (with sinks: the sink) and zero gradients.
    No batch or no tokens give an empty out and empty gradients; `meta` tensors give `meta`
    tensors. Raises ValueError for shapes, dtypes, devices or options that do not fit together,
    for a DTensor, and under forward-mode AD, torch.func, and vmap; its backward does for a
    second derivative.
    """
    if torch.compiler.is_compiling():
        switch_wrong_fusions_off()
    if not isinstance(pattern, Pattern):
        raise ValueError(
            f"pattern={type(pattern).__name__} is not a pattern; write one of "
            "titan_sparse.attention.patterns, for example Dense()"
        )
    ranks = ranks_of(cp, block_size)
    check_tensors(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q)
    ranges = resolve_mask(mask, q, ranks)
    if scale is not None:
        check_scale(scale)
    has_slices = ranges.slices is not None
    if pattern.dynamic or has_slices:
        check_pattern(pattern, ranges, ranks)
    # Constants of a compiled graph: for another D torch.compile compiles anew, as kernels do.
    head_dim = operator.index(q.shape[-1])
    scale = head_dim**-0.5 if scale is None else constant(scale)
    is_short = False
    if pattern.dynamic:
        short = backends.short_below(constant(pattern.recall_like()), head_dim)
        # torch.compile knows the branch, and not a comparison of lengths that change.
        is_short = True if q.shape[2] * ranks.size < short else False
    case = (q.device.type, q.dtype, head_dim, ranks.block_size)
    backend = backends.choose(backend, *case, has_slices, pattern.dynamic, is_short)
    # The ranks that trade tokens for heads, and back.
    trading = None if cp is None or cp.by_heads is None else cp
    if trading is not None:
        # From here on, this rank has all tokens of its node and its share of the heads.
        ulysses.check(trading, q, k, recomputed)
        q, k, v = ulysses.trade_tokens(q, k, v, ranges.table, trading)
        sinks = None if sinks is None else ulysses.own_heads(sinks, trading)
        ranks = ranks_of(trading.by_heads, None)
    facts, tensors = mask_tensors(ranges)
    options = (pattern.key, ranks.key, facts, scale)
    index = []
    if pattern.dynamic:
        select = torch.ops.titan_sparse.select
        index = select(q.detach(), k.detach(), tensors, options_key(*options))
    inputs = (q, k, v, sinks, index, tensors)
    out, lse = run_forward(inputs, recomputed, ranges, ranks, (*options, backend))
    if trading is not None:
        out = ulysses.trade_heads(out, ranges.table, trading)
    if not return_aux:
        return out
    if trading is not None:
        lse = ulysses.trade_heads(lse[..., None], ranges.table, trading)[..., 0].contiguous()
        index = ulysses.index_of_all_heads(index, ranks.key)
    batch, heads = out.shape[:2]
    return out, Auxiliary(lse, pattern.index(index, ranges, batch, heads, ranks.block_size))
