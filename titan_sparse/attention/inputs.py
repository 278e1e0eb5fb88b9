"""Check the inputs of attend() and pattern.select(), pad them, and pack them for the custom ops."""

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor, is_legacy_batchedtensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor

from titan_sparse.attention.context_parallel.group import (
    ONE_RANK,
    ContextParallel,
    whole_block_size,
)
from titan_sparse.attention.masks.ranges import Mask, MaskRanges, once_per_mask, rows_once

DEFAULT_BLOCK_SIZE = 128
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def constant(x: float) -> float:
    """x, as a constant of a compiled graph.

    torch.compile makes a symbol of a float that changes, and a symbol cannot be part of a key. The
    two integers of a fraction are constants, and so is their quotient.
    """
    numerator, denominator = x.as_integer_ratio()
    return operator.index(numerator) / denominator


class Ranks(NamedTuple):
    """The facts that torch.compile may know about a ContextParallel, or about its absence.

    key: names the ContextParallel in custom ops (context_parallel/group.py).
    """

    key: str
    size: int
    block_size: int
    layout: str = "contiguous"


def ranks_of(cp: ContextParallel | None, block_size: int | None) -> Ranks:
    """The ranks that share the sequence; one without `cp`, in blocks of block_size (default 128).

    Raises ValueError for a block size below 1, and for one that differs from that of `cp`, and for
    a `cp` of another type.
    """
    if cp is None:
        size = whole_block_size(DEFAULT_BLOCK_SIZE if block_size is None else block_size)
        # A constant of a compiled graph, also where it changes from call to call.
        size = operator.index(size)
        return Ranks(f"{ONE_RANK}:{size}", 1, size)
    if not isinstance(cp, ContextParallel):
        raise ValueError(
            f"cp={type(cp).__name__} is not a ContextParallel; write cp=ContextParallel(mesh), made once"
        )
    if block_size not in (None, cp.block_size):
        raise ValueError(
            f"block_size={block_size} differs from that of cp ({cp.block_size}); leave it out"
        )
    # Constants of a compiled graph, as the key is.
    return Ranks(cp.key, operator.index(cp.size), operator.index(cp.block_size), cp.layout)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError for shapes, dtypes and devices that do not fit together.

    Also under forward-mode AD, whose tangents the ops would drop. No batch (B = 0) and no tokens
    (S = 0) are fine; no heads and no dimensions are not.
    """
    check_plain(q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attend() needs q [B, Hq, S, D] and k, v [B, Hkv, S, D], not {_shapes(q, k, v)}"
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[3]):
        raise ValueError(f"Hq, Hkv and D must be 1 or more: {_shapes(q, k, v)}")
    same_batch = q.shape[0] == k.shape[0]
    same_length_and_dim = q.shape[2:] == k.shape[2:]
    if not same_batch or not same_length_and_dim or q.shape[1] % k.shape[1]:
        raise ValueError(f"Hq must be a multiple of Hkv and B, S, D be equal: {_shapes(q, k, v)}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ValueError(
            "q, k and v must share one dtype, bfloat16, float16, float32 or float64, "
            f"not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, not {q.device}, {k.device}, {v.device}; "
            f'write k.to("{q.device}") and v.to("{q.device}")'
        )


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raises ValueError for sinks that are not one logit for each head of q [B, Hq, S, D]."""
    check_plain(sinks=sinks)
    heads = q.shape[1]
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks has shape {list(sinks.shape)}; write one logit a query head, [{heads}]"
        )
    if sinks.dtype not in (torch.float32, q.dtype):
        raise ValueError(
            f"sinks is {sinks.dtype}; write sinks.float(), or the dtype of q ({q.dtype})"
        )
    if sinks.device != q.device:
        raise ValueError(
            f'sinks is on {sinks.device}, q on {q.device}; write sinks.to("{q.device}")'
        )


def check_scale(scale: float) -> None:
    """Raises ValueError unless it is a finite number above 0: of a row's largest product, kernels
    make the largest score. A tensor would get no gradient."""
    if isinstance(scale, Tensor):
        raise ValueError("scale is a tensor; write scale=1.0, and multiply q by the tensor")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} is not a finite number above 0; write -q for another sign")


def check_plain(**tensors: Tensor) -> None:
    """Raises ValueError for what is not a dense tensor, for a DTensor, and under forward-mode AD,
    vmap, and other transforms of torch.func."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.layout != torch.strided:
            raise ValueError(
                f"{name} is not a dense torch.Tensor; write one, and ragged lengths as a mask of Documents"
            )
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor; write {name}.to_local(), with all tokens of this rank's heads"
            )
        # Outside of forward-mode AD this compares one number.
        has_tangent = unpack_dual(tensor).tangent is not None
        # A tangent of an outer jvp shows only so. torch.compile cannot trace it, and has no need.
        if not torch.compiler.is_compiling():
            has_tangent = has_tangent or is_gradtrackingtensor(tensor)
            if is_batchedtensor(tensor) or is_legacy_batchedtensor(tensor):
                raise ValueError(
                    f"{name} is inside of torch.vmap, which attend() does not have; write what is mapped "
                    "as the batch of q, k and v, and derivatives one after the other"
                )
        if has_tangent:
            raise ValueError(
                f"{name} has a tangent of forward-mode AD or is inside of torch.func (jvp, grad); "
                "attend() has neither: write out.backward() or torch.autograd.grad()"
            )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(x.shape)) for x in tensors)


def resolve_mask(mask: Mask | MaskRanges, q: Tensor, ranks: Ranks) -> MaskRanges:
    """The mask for the whole sequence of which q [B, Hq, S_local, D] is this rank's share.

    Raises ValueError for what is not a mask, for a mask of another length or batch, on another
    device, or of another layout, and on a CPU for one whose tensors are not as MaskRanges says.
    """
    seq_len = q.shape[2] * ranks.size
    if isinstance(mask, Mask):
        name = type(mask).__name__
        mask = rows_once(mask, seq_len, q)
        if not isinstance(mask, MaskRanges):
            raise ValueError(
                f"{name}.rows() returned {type(mask).__name__}; write MaskRanges(start, stop) of "
                "titan_sparse.attention.masks"
            )
    elif not isinstance(mask, MaskRanges):
        raise ValueError(
            f"mask={type(mask).__name__} is not a mask; write a mask of titan_sparse.attention.masks, "
            "for example Causal(), or what its rows(seq_len) returned"
        )
    for tensor in mask.tensors().values():
        if tensor.device != q.device:
            raise ValueError(
                f"the mask is on {tensor.device}, q on {q.device}; "
                f'write mask.rows(seq_len, device="{q.device}")'
            )
    if mask.start.ndim != 2 or mask.stop.shape != mask.start.shape:
        shapes = _shapes(mask.start, mask.stop)
        raise ValueError(f"start and stop of the mask are {shapes}; write [batch or 1, S] for both")
    if mask.start.shape[1] != seq_len:
        raise ValueError(
            f"the mask is for {mask.start.shape[1]} tokens, q and cp make {seq_len}; "
            f"write mask.rows({seq_len})"
        )
    if mask.start.shape[0] not in (1, q.shape[0]):
        raise ValueError(
            f"the mask is for {mask.start.shape[0]} sequences, q holds {q.shape[0]}; write a mask "
            "for one, which holds for all, or for as many"
        )
    # A host does not wait for a GPU here, and traced tensors have no numbers.
    has_numbers = type(mask.start) is Tensor and mask.start.is_cpu
    if has_numbers and mask.slices is None and not torch.compiler.is_compiling():
        key = ("checked", mask.causal, mask.plain)
        once_per_mask(mask, key, lambda: _check_ranges(mask))
    if ranks.size > 1:
        if q.shape[2] % ranks.block_size:
            raise ValueError(
                f"{q.shape[2]} local tokens are not whole blocks of {ranks.block_size}; "
                f"pad the sequence to a multiple of {ranks.block_size * ranks.size} tokens"
            )
        _check_table(mask.table, ranks, q.shape[2] // ranks.block_size)
    return mask


def _check_ranges(ranges: MaskRanges) -> None:
    """Raises ValueError for a mask of ranges, made by hand, that is not as MaskRanges says."""
    start, stop = ranges.start, ranges.stop
    seq_len = start.shape[1]
    if not start.dtype == stop.dtype == torch.int32:
        raise ValueError(
            f"start and stop of the mask are {start.dtype} and {stop.dtype}; write start.int() and "
            "stop.int()"
        )
    if ((start < 0) | (stop < start) | (stop > seq_len)).any():
        raise ValueError(
            f"the mask has a query that sees keys which do not exist; write 0 <= start <= stop <= {seq_len}"
        )
    if (start.diff() < 0).any() or (stop.diff() < 0).any():
        raise ValueError(
            "start or stop of the mask is lower for a later query; write what one range a query that "
            "moves forward cannot express as Slices"
        )
    position = torch.arange(seq_len, device=start.device)
    sees_later = (stop > position + 1) & (start < stop)
    if ranges.causal and sees_later.any():
        raise ValueError(
            "the mask lets a query see a later key, but says that it is causal; write "
            "MaskRanges(start, stop, causal=False)"
        )
    if ranges.plain and not bool(((start == 0) & (stop == position + 1)).all()):
        raise ValueError(
            "the mask says that it is plain, and hides earlier keys; write plain=False"
        )


def _check_table(table: Tensor | None, ranks: Ranks, blocks: int) -> None:
    """Raises ValueError if the layout needs a table of blocks that is not there, or the reverse."""
    if ranks.layout == "balanced" and (table is None or table.shape != (ranks.size, blocks)):
        raise ValueError(
            'layout "balanced" needs a mask with a table of blocks: write '
            "rows = cp.balance(mask.rows(seq_len)), "
            "shard q, k and v with rows.table, and give attend() mask=rows"
        )
    if ranks.layout != "balanced" and table is not None:
        raise ValueError(
            f'the mask has a table of layout "balanced", cp the layout "{ranks.layout}"; '
            'write mask=mask.rows(seq_len), or ContextParallel(..., layout="balanced")'
        )


MaskFacts = tuple[str, bool, int]
"""The names of a mask's tensors, with a space between, and MaskRanges.plain and .window: constants
of a compiled graph, which torch.compile knows as a tuple only without names."""


def mask_tensors(ranges: MaskRanges) -> tuple[MaskFacts, list[Tensor]]:
    """The facts and the tensors of a mask, as ops get them."""
    tensors = ranges.tensors()
    # torch.compile knows the branch, and not a comparison with a length that changes.
    plain = True if ranges.plain else False
    facts = (" ".join(tensors), plain, operator.index(ranges.window))
    return facts, list(tensors.values())


def mask_of_tensors(facts: MaskFacts, tensors: list[Tensor]) -> MaskRanges:
    """The inverse of mask_tensors()."""
    names, plain, window = facts
    named: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
    return MaskRanges(**named, plain=plain, window=window)


def whole_blocks(x: Tensor, dim: int, block_size: int, value: float = 0) -> Tensor:
    """x, padded along `dim` with `value` to whole blocks.

    Only without context parallelism can a length be ragged.
    """
    missing = -x.shape[dim] % block_size
    if missing == 0:
        return x
    # pad() counts dims from the last one, with two numbers each: before and behind.
    padding = [0, 0] * (x.ndim - 1 - dim) + [0, missing]
    return torch.nn.functional.pad(x, padding, value=value)


def mask_of_whole_blocks(ranges: MaskRanges, block_size: int) -> MaskRanges:
    """The mask of a sequence padded to whole blocks. The padding sees nothing.

    A mask with padding is no longer plain. All layers get the same tensors, so what is remembered
    for a mask is computed once.
    """
    missing = -ranges.start.shape[1] % block_size
    if missing == 0:
        return ranges

    def padded() -> MaskRanges:
        # start = stop means "sees nothing". At the padded length both stay nondecreasing.
        padded_length = ranges.start.shape[1] + missing
        document_start = ranges.document_start
        if document_start is not None:
            document_start = whole_blocks(document_start, 1, block_size, -1)
        return MaskRanges(
            start=whole_blocks(ranges.start, 1, block_size, padded_length),
            stop=whole_blocks(ranges.stop, 1, block_size, padded_length),
            document_start=document_start,
            slices=ranges.slices,
            probe_seed=ranges.probe_seed,
        )

    return once_per_mask(ranges, ("whole blocks", block_size), padded)
