"""Activation checkpointing: what a decoder block keeps for its backward and what it computes again.

In every mode attention's index, output and LSE are kept (SAVED_OPS): computing them again would
repeat the selection and the whole ring of collectives. Where their memory is short,
attend(recomputed=...) gives up output and LSE of the first part of each sequence, which are the
cheapest to compute again (docs/memory.md).
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titan_sparse.attention import SAVED_OPS

AUTO = -1.0
"""activation_checkpoint.attention_recompute: as much as memory requires."""

_MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
)
_STEPS = 16
"""attention_recompute is chosen in so many steps, so that a little more or less free memory does not
change a run."""


def checkpointed(block: nn.Module, mode: str) -> nn.Module:
    """The block under `mode`. Parameter names in state dicts stay as they are.

    mode: "none" keeps all activations, "full" attention's results and the block's input, "selective"
    every second matmul besides.
    """
    if mode == "none":
        return block
    contexts = {"full": _full_contexts, "selective": _selective_contexts}[mode]
    # Nothing in a block draws random numbers but the dropout of adapters.
    draws = any(isinstance(module, nn.Dropout) for module in block.modules())
    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=draws)


def _full_contexts():
    return create_selective_checkpoint_contexts(_attention_only)


def _selective_contexts():
    return create_selective_checkpoint_contexts(_attention_and_matmuls())


def _attention_only(context, op, *args, **kwargs) -> CheckpointPolicy:
    if op in SAVED_OPS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _attention_and_matmuls():
    """A policy that keeps every second matmul too: half of their memory for half of their
    recomputation."""
    matmuls_seen: Counter[bool] = Counter()

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        if op not in _MATMULS:
            return _attention_only(context, op)
        # Forward and recomputation are counted apart, so that both choose the same matmuls.
        matmuls_seen[context.is_recompute] += 1
        if matmuls_seen[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def choose_recompute(peak_gib: Callable[[float], float], free_gib: float) -> float:
    """The smallest attention_recompute with which the peak fits into what is free; 1 if none does.

    peak_gib(share): the estimated peak with that attention_recompute. The result is a multiple of a
    sixteenth.
    """
    for step in range(_STEPS):
        share = step / _STEPS
        if peak_gib(share) <= free_gib:
            return share
    return 1.0
