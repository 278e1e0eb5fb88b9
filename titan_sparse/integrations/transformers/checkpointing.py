"""Activation checkpointing of a transformers decoder that keeps what attention computed."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from titan_sparse.attention import SAVED_OPS


def checkpoint_layers(model: PreTrainedModel) -> None:
    """From here on, each layer keeps its input and attention's results, and computes the rest again.

    transformers' own checkpointing repeats attention too: the selection, and under context
    parallelism every collective. Leave `activation_checkpointing` (`gradient_checkpointing`) of
    TrainingArguments False, which would put its own in place of this.
    """
    # Renamed in transformers 5.2x, where the older name warns.
    renamed = getattr(model, "activation_checkpointing_enable", None)
    enable = renamed or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": _contexts})


def _contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_keep_attention)


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in SAVED_OPS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
