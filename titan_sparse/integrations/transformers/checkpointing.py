"""Activation checkpointing of transformers that does not compute attention twice."""

from collections.abc import Callable

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titan_sparse.attention import SAVED_OPS


def keep_attention() -> dict[str, object]:
    """gradient_checkpointing_kwargs with which a backward computes all of a layer again but attention.

        model.gradient_checkpointing_enable(keep_attention())

    Of each layer, attention's output and its LSE are kept besides the input, [B, S, Hq * D] and
    [B, Hq, S] in fp32. Selections and transfers between ranks are not repeated either.
    """
    return {"use_reentrant": False, "context_fn": _contexts}


def _contexts():
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: object, op: Callable, *args, **kwargs) -> CheckpointPolicy:
    if op in SAVED_OPS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
