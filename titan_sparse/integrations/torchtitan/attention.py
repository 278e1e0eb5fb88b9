"""torchtitan's attention with attend() inside.

torchtitan packs documents, and every token brings its position in its document. In the order of the
whole sequence, a document begins where the position is 0. So positions alone say what a token sees.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import BaseAttention, GQAttention
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.group import context_of
from titan_sparse.attention.context_parallel.layouts import block_multiple
from titan_sparse.attention.inputs import ranks_of
from titan_sparse.attention.masks import MaskRanges
from titan_sparse.attention.masks.ranges import once_per_mask
from titan_sparse.attention.patterns import Dense, Pattern


class SparseAttention(Module):
    """Inner attention that computes what a pattern selects, with the keys and values of all ranks.

    It gets positions where torchtitan's own gets a BlockMask.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """pattern: of layers without a window. window: keys that a query sees; None for all.

        load_balancer: that of torchtitan's parallelism. backend, schedule, block_size: as in
        attend() and ContextParallel.
        """

        pattern: Pattern = field(default_factory=Dense)
        window: int | None = None
        backend: str = "auto"
        schedule: str = "auto"
        block_size: int = 128
        load_balancer: str | None = "headtail"

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.cp: ContextParallel | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError(
                'titan_sparse does not compute on DTensors of parallelism.spmd_backend = "full_dtensor"; '
                'write "spmd_types"'
            )
        if parallel_dims.cp_enabled:
            self.cp = _context_parallel(parallel_dims, self.config)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable | None = None,
        **others,
    ) -> Tensor:
        """[B, L, N, H], as q. attention_masks: positions [B, L]."""
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"{name} is not computed by titan_sparse; leave it out")
        options = self.config
        ranks = ranks_of(self.cp, options.block_size)
        with spmd.no_typecheck():
            out = attend(
                *(x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)),
                mask=mask_of_positions(attention_masks, ranks.key, options.window),
                pattern=options.pattern if options.window is None else Dense(),
                cp=self.cp,
                backend=options.backend,
                scale=scale,
                block_size=options.block_size,
                sinks=None if out_transform is None else _sinks_of(out_transform),
            ).transpose(1, 2)
        if spmd.is_type_checking():
            spmd.assert_type_like(out, q_BLNH)
        return out


_shared: weakref.WeakValueDictionary[tuple, ContextParallel] = weakref.WeakValueDictionary()
"""All layers share one, so that compiled layers and what masks remember are shared too."""


def _context_parallel(
    parallel_dims: ParallelDims, options: SparseAttention.Config
) -> ContextParallel:
    mesh = parallel_dims.get_mesh("cp")
    layout = layout_of(options.load_balancer)
    ranks = tuple(mesh.mesh.tolist())
    key = (dist.group.WORLD, ranks, layout, options.schedule, options.block_size)
    cp = _shared.get(key)
    if cp is None:
        cp = ContextParallel(mesh, layout, options.schedule, options.block_size)
        _shared[key] = cp
    return cp


def _sinks_of(out_transform: Callable) -> Tensor:
    """GPT-OSS's learned logits of this rank's heads, fp32 [N].

    torchtitan would scale the output by our LSE, which has no gradient.
    """
    if getattr(out_transform, "__func__", None) is not GptOssAttention._apply_sinks:
        raise ValueError(
            f"out_transform = {out_transform} reads the LSE, which has no gradient in titan_sparse; "
            "use torchtitan's own attention for this model"
        )
    sinks = out_transform.__self__.sinks
    if isinstance(sinks, DTensor):
        sinks = sinks.to_local(grad_placements=sinks.placements)
    return sinks.float()


def positions_for_masks(attention_masks: object, positions: Tensor | None) -> Tensor:
    """The positions, which the inner attention gets in the place of masks."""
    if attention_masks is not None or positions is None:
        raise ValueError(
            "titan_sparse reads documents from positions, not from attention_masks; write a data "
            'loader that yields "positions" beside "input", and no attention_masks'
        )
    return positions


# torchtitan finds the arguments of forward() by their names.


class SparseGQAttention(GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(
        self, x_BLD: Tensor, attention_masks: None, positions: Tensor | None = None
    ) -> Tensor:
        positions = positions_for_masks(attention_masks, positions)
        return super().forward(x_BLD, positions, positions)


class SparseGptOssAttention(GptOssAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        pass

    def forward(self, x: Tensor, attention_masks: None, positions: Tensor | None = None) -> Tensor:
        positions = positions_for_masks(attention_masks, positions)
        return super().forward(x, positions, positions)


SPARSE: dict[type[BaseAttention.Config], type[BaseAttention.Config]] = {
    GQAttention.Config: SparseGQAttention.Config,
    GptOssAttention.Config: SparseGptOssAttention.Config,
}
"""The attention of torchtitan that we know, and what replaces it."""


def keep_sharded(sharding: ShardingConfig | None) -> ShardingConfig | None:
    """The sharding of inner attention without the all-gather of keys and values."""
    if sharding is None:
        return None
    arrives = sharding.in_src_shardings
    gradients = replace(sharding.local_map, in_grad_placements=tuple(arrives.values()))
    return replace(sharding, in_dst_shardings=arrives, local_map=gradients)


_LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


def layout_of(load_balancer: str | None) -> str:
    """Our name for the order in which one of torchtitan's load balancers deals out a sequence.

    Raises ValueError for one that follows from a BlockMask.
    """
    if load_balancer not in _LAYOUTS:
        raise ValueError(
            f'load_balancer = "{load_balancer}" deals out tokens by a BlockMask, which titan_sparse '
            'does not build; write "headtail" or null, also in '
            "--parallelism.context_parallel_load_balancer"
        )
    return _LAYOUTS[load_balancer]


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""From a batch's positions to its mask, which all layers share, by ContextParallel."""


def mask_of_positions(positions: Tensor, cp: str, window: int | None) -> MaskRanges:
    """The mask of the whole sequence. Collective over the context-parallel ranks.

    positions: int [B, S_local], of this rank's tokens in their documents. cp: the key of the
    ContextParallel. window: keys that a query sees, its own included; None for all.
    """
    if torch.compiler.is_compiling():
        # Each compiled layer makes its own mask, as tensors of its graph.
        ranges = _ranges(torch.ops.titan_sparse.document_starts(positions, cp))
        return ranges if window is None else _windowed(ranges, window)
    known = _known.setdefault(positions, {})
    key = (cp, positions._version)
    if key not in known:
        known[key] = _ranges(_find_document_starts(positions, cp))
    if window is None:
        return known[key]
    return once_per_mask(known[key], ("window", window), lambda: _windowed(known[key], window))


def _ranges(starts: Tensor) -> MaskRanges:
    """Causal inside of documents. starts: int32 [B, S], where the document of each token begins."""
    stop = torch.arange(1, starts.shape[1] + 1, dtype=torch.int32, device=starts.device)
    return MaskRanges(starts, stop.expand_as(starts), document_start=starts)


def _windowed(ranges: MaskRanges, window: int) -> MaskRanges:
    # Positions are int32, which a window without a bound need not fit into.
    first = ranges.stop - min(window, ranges.stop.shape[1])
    return ranges._replace(start=torch.maximum(ranges.start, first))


_checked: weakref.WeakSet[ContextParallel] = weakref.WeakSet()
"""Those whose order of tokens was compared with torchtitan's."""


def _find_document_starts(positions: Tensor, cp: str) -> Tensor:
    """int32 [B, S]: where the document of each token of the whole sequence begins.

    Raises ValueError for what would give wrong results, or is not known to work.
    """
    if positions.ndim != 2:
        raise ValueError(
            f"positions {list(positions.shape)} are not [batch, tokens]; titan_sparse needs a model "
            "with one position per token"
        )
    _check_step(positions)
    context = context_of(cp)
    whole = positions.int()
    if context.size > 1:
        whole = _in_order(whole, context)
    index = torch.arange(whole.shape[1], dtype=torch.int32, device=whole.device)
    return torch.where(whole == 0, index, 0).cummax(1).values


def _check_step(positions: Tensor) -> None:
    """Raises ValueError for ways to run a step in which attention is not known to work."""
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "titan_sparse is not known to work inside torchtitan's CUDA graphs; write "
            "--training.disable_cuda_graphs"
        )
    if torch._functorch.config.activation_memory_budget < 1:
        raise ValueError(
            "memory-budget checkpointing may repeat attention and its transfers in the backward; "
            "write activation_checkpoint:selective"
        )


def _in_order(positions: Tensor, cp: ContextParallel) -> Tensor:
    """The positions of all ranks [B, S] in the order of the sequence, from those of this rank."""
    length = positions.shape[1] * cp.size
    multiple = block_multiple(cp.layout, cp.size) * cp.block_size
    if length % multiple:
        raise ValueError(
            f"training.seq_len = {length} does not divide into blocks of {cp.block_size} tokens over "
            f"{cp.size} ranks; write a multiple of {multiple}, or a smaller block_size"
        )
    whole = cp.unshard(positions, 1)
    next_position = whole[:, 1:]
    continues = next_position == whole[:, :-1] + 1
    is_sequence = (continues | (next_position == 0)).all()
    balancer = {layout: name for name, layout in _LAYOUTS.items()}[cp.layout]
    refusal = (
        f'the positions of all ranks do not make a sequence in the order of load_balancer = "{balancer}"; '
        "write the same in the options of titan_sparse and in "
        "--parallelism.context_parallel_load_balancer"
    )
    if cp in _checked and whole.is_cuda:
        # The host does not wait.
        torch._assert_async(is_sequence, refusal)
    elif not is_sequence:
        raise ValueError(refusal)
    _checked.add(cp)
    return whole


@torch.library.custom_op("titan_sparse::document_starts", mutates_args=())
def _document_starts(positions: Tensor, cp: str) -> Tensor:
    return _find_document_starts(positions, cp)


@_document_starts.register_fake
def _fake_document_starts(positions: Tensor, cp: str) -> Tensor:
    batch, tokens = positions.shape
    return positions.new_empty(batch, tokens * context_of(cp).size, dtype=torch.int32)
