"""torchtitan's activation checkpointing that keeps attention, and its metrics with ours."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools.logging import logger

from titan_sparse.attention import SAVED_OPS
from titan_sparse.attention.observe import Recording, recording, worker_imbalance

_KEPT = [*SAVED_OPS, torch.ops.titan_sparse.document_starts.default]


class SelectiveACWithAttention(SelectiveAC):
    """SelectiveAC that also keeps what attention selected and computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | set(_KEPT)


class FullACWithAttention(FullAC):
    """FullAC that recomputes all of a block but what attention selected and computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        return checkpoint_wrapper(
            module,
            context_fn=functools.partial(create_selective_checkpoint_contexts, _KEPT),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )


class MetricsWithAttention(MetricsProcessor):
    """MetricsProcessor that also logs density, recall, and balance of the steps that it logs."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """recall_rows: query rows of a sequence on which recall is measured."""

        recall_rows: int = 64

    def __init__(self, config: Config, **others: Any):
        super().__init__(config, **others)
        self._recording = contextlib.ExitStack()
        self._recorded: Recording | None = None

    def should_log(self, step: int) -> bool:
        # torchtitan asks at the beginning of each step.
        self._recording.close()
        is_logged = super().should_log(step)
        if is_logged:
            listening = recording(recall_rows=self.config.recall_rows)
            self._recorded = self._recording.enter_context(listening)
        return is_logged

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        self._recording.close()
        device = torch.device(self.device_memory_monitor.device)
        found = averages(self._recorded, device)
        named = {f"titan_sparse/{name}": value for name, value in found.items()}
        extra_metrics = {**(extra_metrics or {}), **named}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        logger.info("  ".join(f"{name}: {value:.4f}" for name, value in found.items()))


def averages(recorded: Recording, device: torch.device) -> dict[str, float]:
    """Means over layers, heads, and all ranks of what was recorded. Collective over all processes.

    density: share of allowed pairs that were computed. recall: share of the attention mass
    that these hold. capped: share of budgets that a cap kept below the recall, where the
    pattern has budgets.
    imbalance: pairs of the busiest context-parallel rank over their mean, with several ranks.
    Raises ValueError if no attention ran.
    """
    by_layer = {
        "density": recorded.density().mean(1) if recorded.visited else [],
        "recall": [recall.mean() for recall in recorded.recall],
        "capped": [capped.mean() for capped in recorded.capped],
        "imbalance": worker_imbalance(recorded.by_rank().work) if recorded.calls else [],
    }
    sums = torch.zeros(len(by_layer), 2, dtype=torch.float64, device=device)
    for row, values in zip(sums, by_layer.values()):
        for value in values:
            row += torch.stack([value.to(row), row.new_ones(())])
    if dist.is_initialized():
        dist.all_reduce(sums)
    found = {}
    for name, (total, count) in zip(by_layer, sums.tolist()):
        if count:
            found[name] = total / count
    if "density" not in found:
        raise ValueError(
            "titan_sparse computed no attention in this step; add "
            "titan_sparse.integrations.torchtitan.vertical_slash to --override.imports"
        )
    return found
