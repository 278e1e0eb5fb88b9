"""Time of attention with a given index on one GPU, all layers of the model as one batch."""

import bisect
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention_cases import Attention, ours, ready_index, sdpa
from scripts.benchmarks.timing import times, training_call
from scripts.study.density.mass import BLOCK, causal_mask
from titan_sparse.attention import backends
from titan_sparse.attention.patterns import Dense, Pattern

_WARM_UPS = 2


def names_of_backends() -> list[str]:
    """Those of ours that are fast here: flex is where FlashAttention-4 is installed."""
    if backends.has_flash_attention_4():
        return ["triton", "flex"]
    return ["triton"]


def draw(q: Tensor, k: Tensor) -> list[Tensor]:
    """q, k, v that want a gradient, and the upstream gradient, as timing wants them.

    q: [layers, Hq, S, D], k: [layers, Hkv, S, D]. The last two are random: what they hold changes
    no time.
    """
    torch.manual_seed(0)
    leaves = [q.detach().clone(), k.detach().clone(), torch.randn_like(k)]
    for leaf in leaves:
        leaf.requires_grad_()
    d_out = torch.randn_like(q)
    return [*leaves, d_out]


def dense_times(tensors: list[Tensor], repeats: int) -> dict[str, dict[str, float]]:
    """Of torch's SDPA on cuDNN and on FlashAttention-2, and of ours without a pattern."""
    mask = causal_mask(tensors[0].shape[2], tensors[0].device)
    calls: dict[str, Attention] = {
        "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    }
    for name in names_of_backends():
        calls[f"ours, {name}"] = functools.partial(ours, name, Dense(), mask, BLOCK)
    return {name: _times(call, tensors, repeats) for name, call in calls.items()}


def pattern_times(
    pattern: Pattern, index: list[Tensor], tensors: list[Tensor], repeats: int
) -> dict[str, dict[str, float]]:
    """Of each backend with this index, whose tables are made each time; the selection is given.

    index: tensors of the BlockIndex of all layers.
    """
    mask = causal_mask(tensors[0].shape[2], tensors[0].device)
    ready = ready_index(pattern, index)
    measured = {}
    for name in names_of_backends():
        call = functools.partial(ours, name, ready, mask, BLOCK)
        measured[name] = _times(call, tensors, repeats)
    return measured


def selection_time(pattern: Pattern, q: Tensor, k: Tensor, repeats: int) -> float:
    """Median milliseconds of choosing for all layers."""
    mask = causal_mask(q.shape[2], q.device)
    step = functools.partial(pattern.select, q, k, mask, block_size=BLOCK)
    times([step], _WARM_UPS, lead=False)
    return round(times([step], repeats, lead=True)[0], 3)


def worth_timing(recalls: Sequence[float], wanted: Sequence[float]) -> set[int]:
    """Which of the measured recalls lie next to the wanted ones, below and above."""
    order = sorted(range(len(recalls)), key=recalls.__getitem__)
    chosen = set()
    for recall in wanted:
        above = bisect.bisect_left(order, recall, key=recalls.__getitem__)
        if above < len(order):
            chosen.update(order[max(above - 1, 0) : above + 1])
    return chosen


def _times(call: Attention, tensors: list[Tensor], repeats: int) -> dict[str, float]:
    """Median milliseconds. tensors: of draw()."""
    steps = training_call(call, tensors[:3], tensors[3])
    times(steps, _WARM_UPS, lead=False)
    forward_ms, backward_ms = times(steps, repeats, lead=True)
    return {"forward_ms": round(forward_ms, 3), "backward_ms": round(backward_ms, 3)}
