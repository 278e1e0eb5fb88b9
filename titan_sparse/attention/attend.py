"""attend(): mask, pattern, layout, schedule and backend put together, as custom ops that torch.compile sees as one node.

Ops: select (no gradient), forward, backward. Activation checkpointing keeps the outputs of the first two (SAVED_OPS), so
that index, out and lse survive recomputation and no collective runs twice. What may be computed twice to save memory goes
through `attend_recomputed`, which is forward by another name, and `attend_join`. Ops take tensors and strings only; pattern
and context-parallel group are handed over by their keys.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import backends
from titan_sparse.attention.call import Run
from titan_sparse.attention.context_parallel.group import (
    ContextParallel,
    context_by_key,
    single_key,
)
from titan_sparse.attention.masks.ranges import Causal, Mask, MaskRanges
from titan_sparse.attention.observe import statistics
from titan_sparse.attention.patterns import BlockIndex, Dense, Pattern, pattern_by_key
from titan_sparse.attention.schedules import all_gather as gathered
from titan_sparse.attention.schedules import group_cast, ring

DEFAULT_BLOCK_SIZE = 128


class Auxiliary(NamedTuple):
    """lse: natural-log normaliser [B, Hq, S_local], fp32 (fp64 for fp64). index: what was selected."""

    lse: Tensor
    index: BlockIndex


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
) -> Tensor | tuple[Tensor, Auxiliary]:
    """Attention over what `mask` allows and `pattern` selects.

    q [B, Hq, S_local, D]; k, v [B, Hkv, S_local, D] with Hq a multiple of Hkv; fp64, fp32, fp16 or bf16, all alike. With
    `cp` they are this rank's blocks of a longer sequence and the call is collective; mask and positions are global.
    mask: a Mask, or mask.rows(S) once computed. scale defaults to D ** -0.5. block_size is for cp=None (default 128).
    recomputed: under activation checkpointing that keeps SAVED_OPS, the share of each sequence, from its start and in global
    positions, whose out and lse are computed again in the backward rather than kept (BurstEngine's sequence-level selective
    checkpointing), rounded to a block of every rank; between 0 and 1 for a causal mask and one rank or layout "striped".
    Returns out, shaped and typed like q; with return_aux also Auxiliary(lse, index). Rows that see nothing: out 0,
    lse -inf, zero gradients. Raises ValueError for shapes, dtypes or options that do not fit together.
    """
    world = _world(cp, block_size)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check_tensors(q, k, v)
    rows = _rows(mask, q, world, pattern)
    backend = backends.choose(
        backend, q.device.type, q.dtype, q.shape[-1], world.block_size, rows.slices is not None
    )
    tensors = _select_tensors(q, k, rows, pattern, world, scale)
    blocks = _recomputed_blocks(recomputed, q, rows, world)
    options = (pattern.key, world.key, backend, scale, rows.plain, rows.slices, rows.table)
    out, lse = _attend_ops(q, k, v, *blocks, (tensors, *rows[:3], *options))
    if not return_aux:
        return out
    return out, Auxiliary(lse, pattern.index(tensors, rows, *q.shape[:2], world.block_size))


def select(
    q: Tensor,
    k: Tensor,
    mask: Mask | MaskRanges,
    pattern: Pattern,
    cp: ContextParallel | None,
    scale: float | None,
    block_size: int | None,
) -> BlockIndex:
    """Pattern.select(): the BlockIndex that attend() would compute with."""
    world = _world(cp, block_size)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check_tensors(q, k, k)
    rows = _rows(mask, q, world, pattern)
    return pattern.index(
        _select_tensors(q, k, rows, pattern, world, scale), rows, *q.shape[:2], world.block_size
    )


class _World(NamedTuple):
    """What tracing may know of a ContextParallel, or of its absence."""

    key: str
    size: int
    block_size: int
    layout: str = "contiguous"


def _world(cp: ContextParallel | None, block_size: int | None) -> _World:
    if cp is None:
        size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
        if size < 1:
            raise ValueError(f"block_size={size}: a block holds at least one token")
        return _World(single_key(size), 1, size)
    if block_size not in (None, cp.block_size):
        raise ValueError(
            f"block_size={block_size} differs from that of cp ({cp.block_size}); leave it out"
        )
    return _World(cp.key, cp.size, cp.block_size, cp.layout)


def _attend_ops(
    q: Tensor, k: Tensor, v: Tensor, boundary: int, blocks: int, rest: tuple
) -> tuple[Tensor, Tensor]:
    """out and lse. Of `blocks` local query blocks those before `boundary` are computed by the op that is not kept.

    rest: what the ops take after q, k and v."""
    ops = torch.ops.titan_sparse
    if boundary in (0, blocks):
        return (ops.attend_recomputed if boundary else ops.attend_forward)(q, k, v, *rest)[:2]
    inputs = [
        x.detach() for x in (q, k, v)
    ]  # the parts are differentiated together, by attend_join
    out, lse, vertical_kv = ops.attend_forward(*inputs, *rest, boundary, blocks)
    first_out, first_lse, _ = ops.attend_recomputed(*inputs, *rest, 0, boundary, vertical_kv)
    return ops.attend_join(q, k, v, *rest, [first_out, out], [first_lse, lse], vertical_kv)


def _recomputed_blocks(
    recomputed: float, q: Tensor, rows: MaskRanges, cp: _World
) -> tuple[int, int]:
    """Local query blocks that `recomputed` makes, and local query blocks; the same on every rank."""
    if not 0 <= recomputed <= 1:
        raise ValueError(f"recomputed={recomputed} is no share of a sequence; write 0 to 1")
    blocks = -(-q.shape[2] // cp.block_size)
    boundary = int(recomputed * blocks + 0.5)
    if boundary in (0, blocks):
        return boundary, blocks
    if not rows.causal:
        raise ValueError(f"recomputed={recomputed} needs a causal mask; write recomputed=0 or 1")
    if cp.size > 1 and cp.layout != "striped":
        # Only there the first blocks of all ranks are the first blocks of the sequence.
        raise ValueError(
            f'recomputed={recomputed} needs layout "striped", not "{cp.layout}"; write it, or recomputed=0 or 1'
        )
    return boundary, blocks


def _select_tensors(
    q: Tensor, k: Tensor, rows: MaskRanges, pattern: Pattern, world: _World, scale: float
) -> list[Tensor]:
    if not pattern.dynamic:
        return []
    return torch.ops.titan_sparse.select(
        q.detach(), k.detach(), *rows[:3], pattern.key, world.key, scale, rows.table
    )


def _rows(mask: Mask | MaskRanges, q: Tensor, cp: _World, pattern: Pattern) -> MaskRanges:
    seq_len = q.shape[2] * cp.size
    pattern.check_block_size(cp.block_size)
    rows = mask.rows(seq_len, q.device) if isinstance(mask, Mask) else mask
    if rows.slices is not None and not pattern.takes_slices:
        raise ValueError(
            f'pattern "{pattern.name}" needs a mask of one range of keys a query, not Slices; write '
            "pattern=Dense(), or a mask of Causal, SlidingWindow and Documents"
        )
    if pattern.dynamic and not rows.causal:
        raise ValueError(
            f'pattern "{pattern.name}" needs a causal mask; write mask=Causal() & ... or pattern=Dense()'
        )
    if rows.start.shape[1] != seq_len:
        raise ValueError(
            f"the mask is for {rows.start.shape[1]} tokens, q and cp make {seq_len}; write mask.rows({seq_len})"
        )
    if rows.start.shape[0] not in (1, q.shape[0]):
        raise ValueError(
            f"the mask is for {rows.start.shape[0]} sequences, q holds {q.shape[0]}; write a mask "
            "for one, which holds for all, or for as many"
        )
    if cp.size > 1 and q.shape[2] % cp.block_size:
        raise ValueError(
            f"{q.shape[2]} local tokens are not whole blocks of {cp.block_size}; pad the sequence to a multiple of "
            f"{cp.block_size * cp.size} tokens"
        )
    if cp.size > 1:
        _check_table(rows.table, cp, q.shape[2] // cp.block_size)
    return rows


def _check_table(table: Tensor | None, cp: _World, blocks: int) -> None:
    if cp.layout == "balanced" and (table is None or table.shape != (cp.size, blocks)):
        raise ValueError(
            'layout "balanced" needs a mask with a table of blocks: write rows = cp.balance(mask.rows(seq_len)), '
            "shard q, k and v with rows.table, and give attend() mask=rows"
        )
    if cp.layout != "balanced" and table is not None:
        raise ValueError(
            f'the mask has a table of layout "balanced", cp the layout "{cp.layout}"; write mask=mask.rows(seq_len), '
            'or ContextParallel(..., layout="balanced")'
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attend() needs q [B, Hq, S, D] and k, v [B, Hkv, S, D], not {_shapes(q, k, v)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise ValueError(f"Hq must be a multiple of Hkv and B, S, D be equal: {_shapes(q, k, v)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k and v must share one floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}"
        )


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(x.shape)) for x in tensors)


# Custom ops ---------------------------------------------------------------------------------------------------------


def _whole_blocks(x: Tensor, dim: int, block_size: int, value: int = 0) -> Tensor:
    """Pad `dim` to whole blocks: only without context parallelism can a length be ragged."""
    missing = -x.shape[dim] % block_size
    return (
        torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing], value=value)
        if missing
        else x
    )


def _padded_rows(rows: MaskRanges, block_size: int) -> MaskRanges:
    """Padding tokens see nothing: start = stop, and at the end of the padded sequence to stay nondecreasing.

    A mask with padding is no longer plain."""
    missing = -rows.start.shape[1] % block_size
    if missing == 0:
        return rows
    length, documents = rows.start.shape[1] + missing, rows.document_start
    return MaskRanges(
        _whole_blocks(rows.start, 1, block_size, length),
        _whole_blocks(rows.stop, 1, block_size, length),
        None if documents is None else _whole_blocks(documents, 1, block_size, -1),
        slices=rows.slices,
    )


@torch.library.custom_op("titan_sparse::select", mutates_args=())
def _select(
    q: Tensor,
    k: Tensor,
    start: Tensor,
    stop: Tensor,
    document_start: Tensor | None,
    pattern: str,
    cp: str,
    scale: float,
    table: Tensor | None = None,
) -> list[Tensor]:
    world = context_by_key(cp)
    rows = _padded_rows(MaskRanges(start, stop, document_start, table=table), world.block_size)
    q, k = (_whole_blocks(x, 2, world.block_size) for x in (q, k))
    before = world.sent["collectives"]
    chosen = pattern_by_key(pattern).select_tensors(q, k, rows, world, scale)
    statistics.observe_selection(world.sent["collectives"] - before)
    return chosen


@_select.register_fake
def _(q, k, start, stop, document_start, pattern, cp, scale, table=None):
    world = context_by_key(cp)
    seq_len = start.shape[1] + -start.shape[1] % world.block_size
    return pattern_by_key(pattern).empty_tensors(
        q, seq_len, world.block_size, document_start is not None
    )


def _run(
    q: Tensor,
    index: list[Tensor],
    rows: MaskRanges,
    pattern: str,
    cp: str,
    backend: str,
    scale: float,
    first: int = 0,
    last: int | None = None,
    vertical_kv: Tensor | None = None,
) -> Run:
    world = context_by_key(cp)
    rows = _padded_rows(rows, world.block_size)
    plain = rows.plain and not pattern_by_key(pattern).dynamic
    chosen = pattern_by_key(pattern).index(index, rows, *q.shape[:2], world.block_size)
    return Run(
        rows,
        pattern,
        chosen,
        world,
        backends.BACKENDS[backend],
        scale,
        plain,
        first,
        last,
        vertical_kv,
    )


def _executor(run: Run) -> ModuleType:
    """The module whose forward() and backward() carry out the schedule."""
    return (
        ring
        if run.cp.size == 1
        else {"all_gather": gathered, "group_cast": group_cast}.get(run.cp.schedule, ring)
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: list[Tensor],
    start: Tensor,
    stop: Tensor,
    document_start: Tensor | None,
    pattern: str,
    cp: str,
    backend: str,
    scale: float,
    plain: bool,
    slices: Tensor | None,
    table: Tensor | None,
    first: int = 0,
    last: int | None = None,
    vertical_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and gathered verticals' KV, of all queries or of a part, as Run has it; a part has no gradient.

    vertical_kv: from another part of the same attention, needed where this one does not reach the end. Not returned again."""
    rows = MaskRanges(start, stop, document_start, plain=plain, slices=slices, table=table)
    run = _run(q, index, rows, pattern, cp, backend, scale, first, last, vertical_kv)
    q_part, k_part, v_part = run.part(*(_whole_blocks(x, 2, run.cp.block_size) for x in (q, k, v)))
    out, lse, gathered_kv = _executor(run).forward(run, q_part, k_part, v_part)
    statistics.observe_call(run, q_part, k_part)
    if last is None:
        statistics.observe_layer(run, q_part, k_part, lse)
    length = q.shape[2] - first * run.cp.block_size
    return (
        out[:, :, :length].to(q.dtype).contiguous(),
        lse[:, :, :length].contiguous(),
        gathered_kv if vertical_kv is None else q.new_empty(0),
    )


def _fake_forward(
    q,
    k,
    v,
    index,
    start,
    stop,
    document_start,
    pattern,
    cp,
    backend,
    scale,
    plain,
    slices,
    table,
    first=0,
    last=None,
    vertical_kv=None,
):
    dtype, size = torch.promote_types(q.dtype, torch.float32), context_by_key(cp).block_size
    verticals = (
        (2, *q.shape[:2], pattern_by_key(pattern).vertical_count(index), q.shape[-1])
        if vertical_kv is None
        else (0,)
    )
    length = q.shape[2] if last is None else min(last * size, q.shape[2]) - first * size
    lse_shape = (*q.shape[:2], length)
    return (
        q.new_empty(*lse_shape, q.shape[-1]),
        q.new_empty(lse_shape, dtype=dtype),
        q.new_empty(verticals),
    )


@torch.library.custom_op("titan_sparse::attend_join", mutates_args=())
def _join(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: list[Tensor],
    start: Tensor,
    stop: Tensor,
    document_start: Tensor | None,
    pattern: str,
    cp: str,
    backend: str,
    scale: float,
    plain: bool,
    slices: Tensor | None,
    table: Tensor | None,
    outs: list[Tensor],
    lses: list[Tensor],
    vertical_kv: Tensor,
) -> tuple[Tensor, Tensor]:
    """out and lse of the whole from those of its parts; differentiated as the whole."""
    out, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)
    if statistics.is_recording():
        rows = MaskRanges(start, stop, document_start, plain=plain, slices=slices, table=table)
        run = _run(q, index, rows, pattern, cp, backend, scale)
        size = run.cp.block_size
        missing = (0, -q.shape[2] % size)
        statistics.observe_layer(
            run,
            *(_whole_blocks(x, 2, size) for x in (q, k)),
            torch.nn.functional.pad(lse, missing, value=-torch.inf),
        )
    return out, lse


@_join.register_fake
def _(q, *_):
    return q.new_empty(q.shape), q.new_empty(
        q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@torch.library.custom_op("titan_sparse::attend_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    vertical_kv: Tensor,
    index: list[Tensor],
    start: Tensor,
    stop: Tensor,
    document_start: Tensor | None,
    pattern: str,
    cp: str,
    backend: str,
    scale: float,
    plain: bool,
    slices: Tensor | None,
    table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = MaskRanges(start, stop, document_start, plain=plain, slices=slices, table=table)
    run = _run(q, index, rows, pattern, cp, backend, scale)
    size, length = run.cp.block_size, q.shape[2]
    d_out, q, k, v, out = (_whole_blocks(x, 2, size) for x in (d_out, q, k, v, out))
    lse = torch.nn.functional.pad(lse, (0, -length % size), value=-torch.inf)
    gradients = _executor(run).backward(run, d_out, q, k, v, out, lse, vertical_kv)
    return tuple(g[:, :, :length].to(q.dtype).contiguous() for g in gradients)


@_backward.register_fake
def _(d_out, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    if inputs[14:] != (0, None, None):
        raise ValueError(
            "a part of attention has no gradient of its own; detach its inputs and join the parts"
        )
    _save_whole(ctx, inputs, *output)
    ctx.mark_non_differentiable(*output[1:])


def _save_joined(ctx, inputs, output) -> None:
    _save_whole(ctx, inputs, *output, inputs[-1])
    ctx.mark_non_differentiable(output[1])


def _save_whole(ctx, inputs: tuple, out: Tensor, lse: Tensor, vertical_kv: Tensor) -> None:
    q, k, v, index, start, stop, document_start, *ctx.options, slices, table = inputs[:14]
    ctx.index_size = len(index)
    ctx.save_for_backward(
        q, k, v, out, lse, vertical_kv, start, stop, document_start, slices, table, *index
    )
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 3 + ([None] * ctx.index_size,) + (None,) * 10
    q, k, v, out, lse, vertical_kv, *rows = ctx.saved_tensors
    rows, (slices, table), index = rows[:3], rows[3:5], rows[5:]
    gradients = torch.ops.titan_sparse.attend_backward(
        d_out.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        vertical_kv,
        index,
        *rows,
        *ctx.options,
        slices,
        table,
    )
    return (*gradients, [None] * ctx.index_size, *(None,) * 10)


def _differentiate_joined(ctx, d_out, *_):
    return *_differentiate(ctx, d_out), [None, None], [None, None], None


for _name in ("attend_forward", "attend_recomputed"):
    _op = torch.library.custom_op(f"titan_sparse::{_name}", _forward, mutates_args=())
    _op.register_fake(_fake_forward)
    _op.register_autograd(_differentiate, setup_context=_save)
_join.register_autograd(_differentiate_joined, setup_context=_save_joined)

SAVED_OPS = (torch.ops.titan_sparse.select.default, torch.ops.titan_sparse.attend_forward.default)
"""What activation checkpointing must keep: recomputing them would repeat collectives and selection. `attend_recomputed`,
which attend(recomputed=...) calls for the first part of each sequence, is not among them."""
