"""Build attention's objects from the [attention] section of a configuration.

This is the only bridge between the two: the configuration does not import torch, and attention does
not know the configuration.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_sparse.attention import ContextParallel, attend, backends
from titan_sparse.attention.context_parallel.layouts import Costs
from titan_sparse.attention.context_parallel.linear_attention import Move
from titan_sparse.attention.context_parallel.schedules import choose
from titan_sparse.attention.linear import gated_delta_net, split_documents
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, MaskRanges, SlidingWindow
from titan_sparse.attention.masks.slices import Slices, sliding_window
from titan_sparse.attention.patterns import PATTERNS, Pattern
from titan_sparse.config import Attention, Config, resolve_overlap_stages
from titan_sparse.config.reading import dense_layers
from titan_sparse.models.decoder import Attends, LayerMasks
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.options.values import show

_STEPS_APART = 1_000_003
"""Steps after which a run would look at the rows of a run with the next training.seed."""


def probe_seed(training_seed: int, step: int) -> int:
    """From which probes draw their rows in this step, the same on all ranks
    and in a resumed run."""
    return (training_seed * _STEPS_APART + step) % 2**32


def build_mask(attention: Attention, lengths: list[list[int]]) -> Mask:
    """The mask of one batch. lengths: of the documents in each sequence, in tokens."""
    is_causal = attention.mask != "documents"
    tokens = [sum(sequence) for sequence in lengths]
    if attention.window_sinks:
        documents = [[count] for count in tokens] if is_causal else lengths
        window = (attention.sliding_window, attention.window_sinks)
        return Slices.batch([sliding_window(sequence, *window) for sequence in documents])
    mask = Causal(valid=tuple(tokens)) if is_causal else Documents(lengths)
    if attention.sliding_window:
        mask = mask & SlidingWindow(attention.sliding_window)
    return mask


def backend_case(
    attention: Attention, device_type: str, dtype: torch.dtype, head_dim: int, seq_len: int
) -> dict[str, Any]:
    """The arguments of backends.choose() and backends.explain() for the section's attention."""
    recall = getattr(attention, attention.pattern).recall_like()
    return {
        "name": attention.backend,
        "device_type": device_type,
        "dtype": dtype,
        "head_dim": head_dim,
        "block_size": attention.block_size,
        # build_mask() makes a mask of Slices, which not every backend computes.
        "slices": attention.window_sinks > 0,
        "dynamic": attention.pattern != "dense",
        "is_short": seq_len < backends.short_below(recall, head_dim),
    }


def choose_backend(config: Config, model: DecoderConfig, device: torch.device) -> tuple[str, str]:
    """The backend of attention with "auto" decided, and what the banner says of it."""
    dtype = getattr(torch, config.training.dtype)
    shape = model.head_dim, config.training.seq_len
    case = backend_case(config.attention, device.type, dtype, *shape)
    return backends.choose(**case), backends.explain(**case)


def build_pattern(attention: Attention) -> Pattern:
    """The pattern that the section names, with the options of its sub-table."""
    options = getattr(attention, attention.pattern)
    return PATTERNS[attention.pattern](**dataclasses.asdict(options))


def attention_line(attention: Attention) -> str:
    """The mask, the pattern with the options that differ from their
    defaults, and the block size."""
    changed = getattr(attention, attention.pattern).changed()
    if attention.dense_layers:
        changed["dense_layers"] = attention.dense_layers
    options = [f"{name} = {show(value)}" for name, value in changed.items()]
    pattern = " with ".join(filter(None, [attention.pattern, ", ".join(options)]))
    return f"{attention.mask} mask, {pattern}, blocks of {attention.block_size}"


def schedule_named(attention: Attention, inter: int, intra: int) -> str:
    """The schedule for `inter` nodes of `intra` ranks each, with "auto"
    decided (schedule.choose)."""
    if attention.schedule != "auto":
        return attention.schedule
    # It leaves most blocks of other ranks unneeded, and the layout "balanced" is made for that.
    has_local_mask = attention.mask == "documents" or attention.sliding_window > 0
    needs_few_blocks = (
        attention.layout == "balanced" and attention.pattern == "dense" and has_local_mask
    )
    return choose(inter, intra, attention.backward_circulates, needs_few_blocks).name


def build_context_parallel(
    attention: Attention, mesh: DeviceMesh, costs: Costs | None = None
) -> ContextParallel:
    """The section's context parallelism. mesh: of the ranks that share a sequence, with axes
    ("cp_inter", "cp_intra") or ("cp",). costs: what attention.balance_costs holds. Collective
    over the mesh.
    """
    inter, intra = mesh.shape if mesh.ndim == 2 else (1, mesh.size())
    # "float32" is also what a configuration that says nothing holds. Gradients then travel in the
    # dtype in which they are summed, so that float64 runs send float64.
    gradient_dtype = None
    if attention.gradient_dtype != "float32":
        gradient_dtype = getattr(torch, attention.gradient_dtype)
    schedule = schedule_named(attention, inter, intra)
    is_group_cast = schedule == "group_cast"
    return ContextParallel(
        mesh,
        layout=attention.layout,
        schedule=schedule,
        block_size=attention.block_size,
        backward_circulates=attention.backward_circulates,
        gradient_dtype=gradient_dtype,
        overlap_stages=resolve_overlap_stages(attention, inter) if is_group_cast else None,
        route_by=attention.route_by,
        costs=costs,
    )


def build_layer_masks(
    attention: Attention,
    model: DecoderConfig,
    lengths: list[list[int]],
    seq_len: int,
    cp: ContextParallel,
    device: torch.device,
    table: Tensor | None,
    probe_seed: Tensor | None = None,
) -> MaskRanges | LayerMasks:
    """The masks of the decoder, for one batch of sequences of `seq_len` tokens.

    LayerMasks for a model that has windows, routers or linear attention of its own. lengths: as for
    build_mask(). table: of the layout "balanced", the same for all layers. probe_seed: as in
    MaskRanges.
    """
    linear, move = None, None
    if model.linear_layers:
        is_causal = attention.mask != "documents"
        documents = [[sum(sequence)] for sequence in lengths] if is_causal else lengths
        linear = split_documents(documents, seq_len, model.convolution, cp, device)
        if cp.size > 1 and cp.layout != "contiguous":
            blocks = cp.block_table(seq_len) if table is None else table.cpu()
            move = Move(blocks, cp.block_size, cp, device)
    if table is not None:
        table = table.to(device)

    def resolved(mask: Mask) -> MaskRanges:
        return mask.rows(seq_len, device)._replace(table=table, probe_seed=probe_seed)

    mask = build_mask(attention, lengths)
    if not model.runs_in_transformers:
        return resolved(mask)
    window = resolved(mask & SlidingWindow(model.window)) if model.window else None
    tokens = None
    if model.router_loss:
        counts = torch.tensor([sum(sequence) for sequence in lengths])
        is_token = torch.arange(seq_len) < counts[:, None]
        tokens = build_shard(model, cp)(is_token.to(device), 1, table)
    return LayerMasks(resolved(mask), window, tokens, linear, move)


def build_shard(model: DecoderConfig, cp: ContextParallel) -> Callable[..., Tensor]:
    """shard(x, dim, table): this rank's part of what goes into the model.

    Linear attention keeps hidden states as contiguous tokens, which move around attention.
    """
    if not model.linear_layers:
        return cp.shard
    return lambda x, dim, table=None: x.chunk(cp.size, dim)[cp.rank].contiguous()


def build_attends(attention: Attention, cp: ContextParallel, recomputed: float = 0.0) -> Attends:
    """The attention functions of a decoder's layers. Patterns apply to layers that see everything
    and are none of attention.dense_layers: a window is dense."""
    dense = dataclasses.replace(attention, pattern="dense")
    return Attends(
        full=build_attend(attention, cp, recomputed),
        window=build_attend(dense, cp, recomputed),
        dense_layers=frozenset(dense_layers(attention)),
        linear=gated_delta_net,
    )


def selecting_layers(attention: Attention, model: DecoderConfig) -> list[int]:
    """The layers that the pattern applies to."""
    others = {*dense_layers(attention), *model.linear_layers}
    others.update(layer for layer, window in enumerate(model.windows) if window)
    return [layer for layer in range(model.layers) if layer not in others]


def sparse_from(attention: Attention) -> int:
    """Tokens of the shortest document in which the section's pattern can leave out pairs."""
    options = getattr(attention, attention.pattern)
    return options.sparse_from(attention.block_size, packed=attention.mask == "documents")


def why_dense(
    config: Config, model: DecoderConfig, longest: int | None = None, data: str = "data.source"
) -> str:
    """The reason why nothing is sparse although a pattern is set, and what to write; empty if
    something may be.

    longest: tokens of the longest document, if that is known. data: whose documents these are.
    """
    attention = config.attention
    pattern = attention.pattern
    if pattern == "dense":
        return ""
    if not selecting_layers(attention, model):
        advice = 'attention.pattern = "dense"'
        if attention.dense_layers:
            advice = "fewer layers in attention.dense_layers"
        return (
            f"nothing is sparse: no layer of this model has the pattern {pattern} (others are those of "
            f"attention.dense_layers, windows, and linear attention); write {advice}"
        )
    least = sparse_from(attention)
    tokens = config.training.seq_len
    what = f"training.seq_len = {tokens}"
    longer = f"training.seq_len = {least} or more"
    if longest is not None and longest < min(tokens, least):
        tokens = longest
        what = f"no document of {data} has more than {tokens} tokens"
        longer = "a data.source with longer documents"
    if tokens >= least:
        return ""
    advice = [longer, *_shorter(attention, tokens), 'attention.pattern = "dense"']
    return (
        f"nothing is sparse: {what}, but {pattern} leaves out pairs only in documents of {least} tokens "
        f"or more; write {', or '.join(advice)}"
    )


def _shorter(attention: Attention, tokens: int) -> list[str]:
    """The option of the pattern that makes documents of so many tokens sparse, if there is one."""
    options = getattr(attention, attention.pattern)
    name, most = options.sparse_with(tokens)
    try:
        changed = dataclasses.replace(options, **{name: most})
        changed.check()
        changed.check_block_size(attention.block_size)
    except ValueError:
        return []
    packed = attention.mask == "documents"
    if changed.sparse_from(attention.block_size, packed) > tokens:
        return []
    return [f"attention.{attention.pattern}.{name} = {most} or less"]


def build_attend(
    attention: Attention, cp: ContextParallel, recomputed: float = 0.0
) -> Callable[..., Tensor]:
    """attend(q, k, v, mask) with the section's choices, as a decoder takes it. recomputed: the
    share of each sequence whose attention is computed again in the backward."""
    pattern = build_pattern(attention)
    return functools.partial(
        attend, pattern=pattern, cp=cp, backend=attention.backend, recomputed=recomputed
    )


def block_table(
    attention: Attention, cp: ContextParallel, lengths: list[list[int]], seq_len: int
) -> Tensor | None:
    """int64 [ranks, n]: the blocks of every rank for one batch, if the layout depends on the mask.
    lengths: as for build_mask()."""
    return cp.balance(build_mask(attention, lengths).rows(seq_len)).table
