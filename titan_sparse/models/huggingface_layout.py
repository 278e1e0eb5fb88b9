"""Where a parameter of the decoder lies among the tensors of a Hugging Face folder.

In most models a parameter is one tensor. Mixtral and Qwen3-MoE keep each matrix of each expert as a
tensor of its own, and transformers holds those of all experts of a layer as one: gate_up_proj
[E, 2 I, H] and down_proj [E, H, I].
"""

from typing import NamedTuple

import torch

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.transformers_config import TransformersConfig


class Stored(NamedTuple):
    """A tensor of the folder, and the part of a parameter that it is: `size` elements from `begin`
    on, along each dim. It may lack the first dim, where size is 1."""

    name: str
    begin: tuple[int, ...]
    size: tuple[int, ...]
    shape: torch.Size


class _Names(NamedTuple):
    """Names on disk, of a layer's mixture of experts."""

    block: str
    gate: str
    up: str
    down: str


_SPLIT = {
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _Names("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Families that keep experts apart, by model_type. In GPT-OSS a file's tensors are as in memory."""


def huggingface_name(name: str) -> str:
    """The name that transformers gives to a parameter of the decoder, in memory."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def stored_tensors(name: str, shape: torch.Size, config: DecoderConfig) -> list[Stored]:
    """The tensors of a folder that make up the parameter `name` of the decoder."""
    whole = Stored(huggingface_name(name), (0,) * len(shape), tuple(shape), shape)
    names = _SPLIT.get(config.model_type) if isinstance(config, TransformersConfig) else None
    if names is None or ".mlp." not in name:
        return [whole]
    layer, _, rest = huggingface_name(name).partition(".mlp.")
    prefix = f"{layer}.{names.block}"
    if rest == "experts.gate_up_proj":
        half = shape[1] // 2
        matrices = [(names.gate, 0, half), (names.up, half, half)]
    elif rest == "experts.down_proj":
        matrices = [(names.down, 0, shape[1])]
    else:
        # The router, or the MLP of a layer without experts.
        return [whole._replace(name=f"{prefix}.{rest}")]
    columns = shape[2]
    stored = []
    for expert in range(shape[0]):
        for matrix, first, rows in matrices:
            tensor_name = f"{prefix}.experts.{expert}.{matrix}.weight"
            begin, size = (expert, first, 0), (1, rows, columns)
            stored.append(Stored(tensor_name, begin, size, torch.Size([rows, columns])))
    return stored


def overlap(
    stored: Stored, begin: tuple[int, ...], size: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What of `stored` lies in the part of a parameter from `begin` on, of `size`; None if nothing.

    Returns the slices of the stored tensor, and those of that part.
    """
    of_stored = []
    of_part = []
    for first, count, part_first, part_count in zip(
        stored.begin, stored.size, begin, size, strict=True
    ):
        start = max(first, part_first)
        stop = min(first + count, part_first + part_count)
        if start >= stop:
            return None
        of_stored.append(slice(start - first, stop - first))
        of_part.append(slice(start - part_first, stop - part_first))
    missing_dims = len(stored.size) - len(stored.shape)
    return tuple(of_stored[missing_dims:]), tuple(of_part)
