"""attend(): mask, pattern, layout, schedule and backend put together, as custom ops that torch.compile sees as one node.

Three ops: select (no gradient), forward, backward. Activation checkpointing keeps the outputs of the first two
(SAVED_OPS), so that index, out and lse survive recomputation and no collective runs twice. Ops take tensors and strings
only; pattern and context-parallel group are handed over by their keys.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import backends, gathered, ring, statistics
from titan_sparse.attention.context_parallel import ContextParallel, context_by_key, single_key
from titan_sparse.attention.masks import Causal, Mask, Rows
from titan_sparse.attention.patterns import BlockIndex, Dense, Pattern, pattern_by_key
from titan_sparse.attention.run import Run

DEFAULT_BLOCK_SIZE = 128


class Auxiliary(NamedTuple):
    """lse: natural-log normaliser [B, Hq, S_local], fp32 (fp64 for fp64). index: what was selected."""

    lse: Tensor
    index: BlockIndex


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | Rows = Causal(), pattern: Pattern = Dense(),
           cp: ContextParallel | None = None, backend: str = "auto", scale: float | None = None,
           block_size: int | None = None, return_aux: bool = False) -> Tensor | tuple[Tensor, Auxiliary]:
    """Attention over what `mask` allows and `pattern` selects.

    q [B, Hq, S_local, D]; k, v [B, Hkv, S_local, D] with Hq a multiple of Hkv; fp64, fp32, fp16 or bf16, all alike. With
    `cp` they are this rank's blocks of a longer sequence and the call is collective; mask and positions are global.
    mask: a Mask, or mask.rows(S) once computed. scale defaults to D ** -0.5. block_size is for cp=None (default 128).
    Returns out, shaped and typed like q; with return_aux also Auxiliary(lse, index). Rows that see nothing: out 0,
    lse -inf, zero gradients. Raises ValueError for shapes, dtypes or options that do not fit together.
    """
    world = _world(cp, block_size)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check_tensors(q, k, v)
    rows = _rows(mask, q, world, pattern)
    backend = backends.choose(backend, q.device.type, q.dtype, q.shape[-1], world.block_size, rows.slices is not None)
    tensors = _select_tensors(q, k, rows, pattern, world, scale)
    out, lse, _ = torch.ops.titan_sparse.attend_forward(q, k, v, tensors, *rows[:3], pattern.key, world.key, backend, scale,
                                                        rows.plain, rows.slices)
    if not return_aux:
        return out
    return out, Auxiliary(lse, pattern.index(tensors, rows, *q.shape[:2], world.block_size))


def select(q: Tensor, k: Tensor, mask: Mask | Rows, pattern: Pattern, cp: ContextParallel | None, scale: float | None,
           block_size: int | None) -> BlockIndex:
    """Pattern.select(): the BlockIndex that attend() would compute with."""
    world = _world(cp, block_size)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _check_tensors(q, k, k)
    rows = _rows(mask, q, world, pattern)
    return pattern.index(_select_tensors(q, k, rows, pattern, world, scale), rows, *q.shape[:2], world.block_size)


class _World(NamedTuple):
    """What tracing may know of a ContextParallel, or of its absence."""

    key: str
    size: int
    block_size: int


def _world(cp: ContextParallel | None, block_size: int | None) -> _World:
    if cp is None:
        size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
        if size < 1:
            raise ValueError(f"block_size={size}: a block holds at least one token")
        return _World(single_key(size), 1, size)
    if block_size not in (None, cp.block_size):
        raise ValueError(f"block_size={block_size} differs from that of cp ({cp.block_size}); leave it out")
    return _World(cp.key, cp.size, cp.block_size)


def _select_tensors(q: Tensor, k: Tensor, rows: Rows, pattern: Pattern, world: _World, scale: float) -> list[Tensor]:
    if not pattern.dynamic:
        return []
    return torch.ops.titan_sparse.select(q.detach(), k.detach(), *rows[:3], pattern.key, world.key, scale)


def _rows(mask: Mask | Rows, q: Tensor, cp: _World, pattern: Pattern) -> Rows:
    seq_len = q.shape[2] * cp.size
    pattern.check_block_size(cp.block_size)
    rows = mask.rows(seq_len, q.device) if isinstance(mask, Mask) else mask
    if rows.slices is not None and not pattern.takes_slices:
        raise ValueError(f'pattern "{pattern.name}" needs a mask of one range of keys a query, not Slices; write '
                         'pattern=Dense(), or a mask of Causal, SlidingWindow and Documents')
    if pattern.dynamic and not rows.causal:
        raise ValueError(f'pattern "{pattern.name}" needs a causal mask; write mask=Causal() & ... or pattern=Dense()')
    if rows.start.shape[1] != seq_len:
        raise ValueError(f"the mask is for {rows.start.shape[1]} tokens, q and cp make {seq_len}")
    if rows.start.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"the mask is for {rows.start.shape[0]} sequences, q holds {q.shape[0]}")
    if cp.size > 1 and q.shape[2] % cp.block_size:
        raise ValueError(f"{q.shape[2]} local tokens are not whole blocks of {cp.block_size}; pad the sequence")
    return rows


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"attend() needs q [B, Hq, S, D] and k, v [B, Hkv, S, D], not {_shapes(q, k, v)}")
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        raise ValueError(f"Hq must be a multiple of Hkv and B, S, D be equal: {_shapes(q, k, v)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v must share one floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(x.shape)) for x in tensors)


# Custom ops ---------------------------------------------------------------------------------------------------------


def _whole_blocks(x: Tensor, dim: int, block_size: int, value: int = 0) -> Tensor:
    """Pad `dim` to whole blocks: only without context parallelism can a length be ragged."""
    missing = -x.shape[dim] % block_size
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing], value=value) if missing else x


def _padded_rows(rows: Rows, block_size: int) -> Rows:
    """Padding tokens see nothing: start = stop, and at the end of the padded sequence to stay nondecreasing.

    A mask with padding is no longer plain."""
    missing = -rows.start.shape[1] % block_size
    if missing == 0:
        return rows
    length, documents = rows.start.shape[1] + missing, rows.document_start
    return Rows(_whole_blocks(rows.start, 1, block_size, length), _whole_blocks(rows.stop, 1, block_size, length),
                None if documents is None else _whole_blocks(documents, 1, block_size, -1), slices=rows.slices)


@torch.library.custom_op("titan_sparse::select", mutates_args=())
def _select(q: Tensor, k: Tensor, start: Tensor, stop: Tensor, document_start: Tensor | None, pattern: str, cp: str,
            scale: float) -> list[Tensor]:
    world = context_by_key(cp)
    rows = _padded_rows(Rows(start, stop, document_start), world.block_size)
    q, k = (_whole_blocks(x, 2, world.block_size) for x in (q, k))
    return pattern_by_key(pattern).select_tensors(q, k, rows, world, scale)


@_select.register_fake
def _(q, k, start, stop, document_start, pattern, cp, scale):
    world = context_by_key(cp)
    seq_len = start.shape[1] + -start.shape[1] % world.block_size
    return pattern_by_key(pattern).empty_tensors(q, seq_len, world.block_size, document_start is not None)


def _run(q: Tensor, index: list[Tensor], rows: Rows, pattern: str, cp: str, backend: str, scale: float) -> Run:
    world = context_by_key(cp)
    rows = _padded_rows(rows, world.block_size)
    plain = rows.plain and not pattern_by_key(pattern).dynamic
    chosen = pattern_by_key(pattern).index(index, rows, *q.shape[:2], world.block_size)
    return Run(rows, pattern, chosen, world, backends.BACKENDS[backend], scale, plain)


def _executor(run: Run) -> ModuleType:
    """The module whose forward() and backward() carry out the schedule."""
    return gathered if run.cp.schedule == "all_gather" and run.cp.size > 1 else ring


@torch.library.custom_op("titan_sparse::attend_forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, index: list[Tensor], start: Tensor, stop: Tensor,
             document_start: Tensor | None, pattern: str, cp: str, backend: str, scale: float, plain: bool,
             slices: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    run = _run(q, index, Rows(start, stop, document_start, plain=plain, slices=slices), pattern, cp, backend, scale)
    padded = [_whole_blocks(x, 2, run.cp.block_size) for x in (q, k, v)]
    out, lse, column_kv = _executor(run).forward(run, *padded)
    statistics.observe(run, padded[0], padded[1], lse)
    length = q.shape[2]
    return out[:, :, :length].to(q.dtype).contiguous(), lse[:, :, :length].contiguous(), column_kv


@_forward.register_fake
def _(q, k, v, index, start, stop, document_start, pattern, cp, backend, scale, plain, slices):
    dtype = torch.promote_types(q.dtype, torch.float32)
    capacity = pattern_by_key(pattern).column_count(index)
    return (torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:-1], dtype=dtype),
            q.new_empty(2, *q.shape[:2], capacity, q.shape[-1]))


@torch.library.custom_op("titan_sparse::attend_backward", mutates_args=())
def _backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, column_kv: Tensor,
              index: list[Tensor], start: Tensor, stop: Tensor, document_start: Tensor | None, pattern: str, cp: str,
              backend: str, scale: float, plain: bool, slices: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    run = _run(q, index, Rows(start, stop, document_start, plain=plain, slices=slices), pattern, cp, backend, scale)
    size, length = run.cp.block_size, q.shape[2]
    d_out, q, k, v, out = (_whole_blocks(x, 2, size) for x in (d_out, q, k, v, out))
    lse = torch.nn.functional.pad(lse, (0, -length % size), value=-torch.inf)
    gradients = _executor(run).backward(run, d_out, q, k, v, out, lse, column_kv)
    return tuple(g[:, :, :length].to(q.dtype).contiguous() for g in gradients)


@_backward.register_fake
def _(d_out, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output) -> None:
    q, k, v, index, start, stop, document_start, *ctx.options, slices = inputs
    out, lse, column_kv = output
    ctx.index_size = len(index)
    ctx.save_for_backward(q, k, v, out, lse, column_kv, start, stop, document_start, slices, *index)
    ctx.mark_non_differentiable(lse, column_kv)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 13
    q, k, v, out, lse, column_kv, *rows = ctx.saved_tensors
    rows, slices, index = rows[:3], rows[3], rows[4:]
    gradients = torch.ops.titan_sparse.attend_backward(
        d_out.contiguous(), q, k, v, out, lse, column_kv, index, *rows, *ctx.options, slices
    )
    return (*gradients, [None] * ctx.index_size, *(None,) * 9)


_forward.register_autograd(_differentiate, setup_context=_save)

SAVED_OPS = (torch.ops.titan_sparse.select.default, torch.ops.titan_sparse.attend_forward.default)
"""What activation checkpointing must keep: recomputing them would repeat collectives and selection."""
