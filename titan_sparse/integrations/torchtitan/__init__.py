"""attend() inside torchtitan's own trainer, with its models, parallelism, checkpoints, and data.

    python -m torchtitan.train --module qwen3 --config qwen3_1_7b --training.disable_cuda_graphs \
      --parallelism.context_parallel_degree 8 --override.imports \
      'titan_sparse.integrations.torchtitan.vertical_slash={"recall": 0.95}' \
      titan_sparse.integrations.torchtitan.save_attention \
      titan_sparse.integrations.torchtitan.log_attention

The functions below are overrides of torchtitan's configuration. Raises ImportError, in one line,
where torchtitan is missing or its version is another.
"""

from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def _check_version() -> None:
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        found = None
    if found is None or not found.startswith("0.3."):
        raise ImportError(
            f"titan_sparse.integrations.torchtitan needs torchtitan 0.3, not {found}; "
            "write pip install torchtitan==0.3.0"
        )


_check_version()

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.models.common.attention import BaseAttention, VarlenAttention

from titan_sparse.attention import patterns
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.schedules import SCHEDULES
from titan_sparse.integrations.torchtitan.attention import (
    SPARSE,
    SparseAttention,
    keep_sharded,
    layout_of,
)
from titan_sparse.integrations.torchtitan.training import (
    FullACWithAttention,
    MetricsWithAttention,
    SelectiveACWithAttention,
)
from titan_sparse.options.values import Positive, check_value, one_of

__all__ = ["dense", "log_attention", "moba", "save_attention", "vertical_slash", "xattention"]


def _attention_by(pattern: type[patterns.Pattern]) -> Callable[..., BaseAttention.Config]:
    """The override by which attention computes what a pattern selects."""

    def replace(cfg: BaseAttention.Config, **options: Any) -> BaseAttention.Config:
        """options: those of the pattern, and backend, schedule, block_size, load_balancer of
        SparseAttention."""
        return _sparse(cfg, pattern, options)

    # torchtitan finds it by this name.
    replace.__name__ = pattern.name
    description = f"{pattern.name} of titan_sparse"
    return override(target=BaseAttention.Config, description=description)(replace)


def _sparse(
    cfg: BaseAttention.Config, pattern: type[patterns.Pattern], options: dict[str, Any]
) -> BaseAttention.Config:
    target = SPARSE.get(type(cfg))
    name = type(cfg).__qualname__
    if target is None:
        raise ValueError(
            f"{type(cfg).__module__}.{name} is not attention that titan_sparse computes; "
            "leave out the override, or train a Llama 3, Qwen3 or GPT-OSS model"
        )
    own_window = getattr(cfg, "sliding_window_size", None)
    inner = cfg.inner_attention
    if isinstance(inner, VarlenAttention.Config):
        expected = (-1, 0) if own_window is None else (own_window - 1, 0)
        if inner.window_size != expected:
            raise ValueError(
                f"inner_attention.window_size = {inner.window_size} is not computed by titan_sparse; "
                f"write {expected}"
            )
    of_pattern = [item.name for item in fields(pattern)]
    of_call = ["backend", "schedule", "block_size", "load_balancer"]
    for key in options:
        one_of(f"option of {pattern.name}", key, of_pattern + of_call)
    chosen = pattern(**{key: value for key, value in options.items() if key in of_pattern})
    others = {key: value for key, value in options.items() if key in of_call}
    ours = SparseAttention.Config(pattern=chosen, window=own_window, **others)
    one_of("backend", ours.backend, ["auto", *BACKENDS])
    # torchtitan's mesh has one axis for context parallelism.
    schedules = [name for name, schedule in SCHEDULES.items() if not schedule.needs_node_axis]
    one_of("schedule", ours.schedule, ["auto", *schedules])
    check_value("block_size", Positive, ours.block_size)
    chosen.check_block_size(ours.block_size)
    layout_of(ours.load_balancer)
    ours.sharding_config = keep_sharded(inner.sharding_config)
    return derive(cfg, target, inner_attention=ours)


vertical_slash = _attention_by(patterns.VerticalSlash)
xattention = _attention_by(patterns.XAttention)
moba = _attention_by(patterns.MoBA)
dense = _attention_by(patterns.Dense)
"""Dense attention by the same kernels and transfers, the baseline of the others."""


@override(target=ActivationCheckpointing.Config, description="keeps attention of titan_sparse")
def save_attention(cfg: ActivationCheckpointing.Config) -> ActivationCheckpointing.Config:
    """Selective or full checkpointing that does not compute attention twice."""
    kinds = {
        SelectiveAC.Config: SelectiveACWithAttention.Config,
        FullAC.Config: FullACWithAttention.Config,
    }
    if type(cfg) not in kinds:
        raise ValueError(
            f"{type(cfg).__qualname__} cannot keep the attention of titan_sparse; write "
            "activation_checkpoint:selective or activation_checkpoint:full"
        )
    return derive(cfg, kinds[type(cfg)])


@override(target=MetricsProcessor.Config, description="logs attention of titan_sparse")
def log_attention(cfg: MetricsProcessor.Config, recall_rows: int = 64) -> MetricsProcessor.Config:
    """torchtitan's metrics with density, recall, and balance. recall_rows: MetricsWithAttention."""
    return derive(cfg, MetricsWithAttention.Config, recall_rows=recall_rows)
