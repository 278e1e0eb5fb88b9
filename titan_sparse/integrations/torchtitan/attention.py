"""torchtitan's attention with attend() inside."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import spmd_types as spmd
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import BaseAttention, GQAttention
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.inputs import ranks_of
from titan_sparse.attention.patterns import Dense, Pattern
from titan_sparse.integrations.torchtitan.core import layout_of, mask_of_positions


class SparseAttention(Module):
    """Inner attention that computes what a pattern selects, with the keys and values of all ranks.

    It gets positions where torchtitan's own gets a BlockMask.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """pattern: of layers without a window. window: keys that a query sees; None for all.

        load_balancer: that of torchtitan's parallelism. backend, schedule, block_size: as in attend()
        and ContextParallel.
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


class PositionsForMasks:
    """Put before an attention module: hands positions to the inner attention in the place of masks."""

    def _with_positions(
        self, x: Tensor, attention_masks: object, positions: Tensor | None
    ) -> Tensor:
        if attention_masks is not None or positions is None:
            raise ValueError(
                "titan_sparse reads documents from positions, not from attention_masks; write a data "
                'loader that yields "positions" beside "input", and no attention_masks'
            )
        return super().forward(x, positions, positions)


# torchtitan finds the arguments of forward() by their names.


class SparseGQAttention(PositionsForMasks, GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(
        self, x_BLD: Tensor, attention_masks: None, positions: Tensor | None = None
    ) -> Tensor:
        return self._with_positions(x_BLD, attention_masks, positions)


class SparseGptOssAttention(PositionsForMasks, GptOssAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        pass

    def forward(self, x: Tensor, attention_masks: None, positions: Tensor | None = None) -> Tensor:
        return self._with_positions(x, attention_masks, positions)


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
