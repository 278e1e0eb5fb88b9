"""Adapters of a checkpoint as PEFT keeps them, or merged into the weights that they were trained on."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from safetensors.torch import save_file
from torch import Tensor

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.huggingface import (
    check_weights,
    copy_tokenizer,
    huggingface_name,
    new_folder,
    open_tensors,
    tensor_shapes,
)
from titan_sparse.models.huggingface_layout import stored_tensors
from titan_sparse.models.lora import NAME, peft_config
from titan_sparse.models.lora_config import Adapters, linear_sizes

ADAPTER_FILE = "adapter_model.safetensors"

Read = Callable[[dict[str, Tensor]], None]
"""Fills tensors of these names from a checkpoint, whatever their dtype."""


def export_adapter(
    checkpoint: str,
    read: Read,
    folder: str,
    config: DecoderConfig,
    adapters: Adapters,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Write the adapters of a checkpoint to a new `folder`, in `dtype`, so that
    PeftModel.from_pretrained() loads them on the model of `source`.

    checkpoint: a folder step-N. Raises ValueError as export_weights() does.
    """
    state = {}
    for layer in _adapted_layers(config, adapters):
        state |= _empty_adapter(layer, config, adapters, dtype)
    with new_folder(folder, checkpoint) as incomplete:
        read(state)
        tensors = {_name_in_peft(name): tensor for name, tensor in state.items()}
        save_file(tensors, incomplete / ADAPTER_FILE, metadata={"format": "pt"})
        settings = peft_config(adapters, source)
        settings.inference_mode = True
        settings.save_pretrained(incomplete)
        copy_tokenizer(source, incomplete)


def merged(read: Read, config: DecoderConfig, adapters: Adapters, source: str) -> Read:
    """What fills tensors with the weights of the folder `source`, with a checkpoint's adapters
    merged into them, as export_weights() wants it.

    W + scale * B A is computed in float32 (float64 for float64).
    """
    check_weights(source, config)
    adapted = {f"{layer}.weight": layer for layer in _adapted_layers(config, adapters)}

    def fill(state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            weight = _read_base(name, tensor.shape, wide, config, source)
            if name in adapted:
                state_of_adapter = _empty_adapter(adapted[name], config, adapters, wide)
                read(state_of_adapter)
                a, b = state_of_adapter.values()
                weight += (b @ a) * adapters.scale
            tensor.copy_(weight)

    return fill


def adapter_shapes(config: DecoderConfig, adapters: Adapters) -> dict[str, torch.Size]:
    """Shape of every tensor of the adapters, by its name in a checkpoint."""
    shapes = {}
    with torch.device("meta"):
        for layer in _adapted_layers(config, adapters):
            empty = _empty_adapter(layer, config, adapters, torch.float32)
            shapes |= {name: tensor.shape for name, tensor in empty.items()}
    return shapes


def _adapted_layers(config: DecoderConfig, adapters: Adapters) -> list[str]:
    """Names of the linear layers that have adapters."""
    names = []
    for name in tensor_shapes(config):
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in adapters.targets:
            names.append(layer)
    return names


def _empty_adapter(
    layer: str, config: DecoderConfig, adapters: Adapters, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A and B of a linear layer, by their names in a checkpoint."""
    size = linear_sizes(config)[layer.rpartition(".")[2]]
    return {
        f"{layer}.lora_A.{NAME}.weight": torch.empty(adapters.rank, size.inputs, dtype=dtype),
        f"{layer}.lora_B.{NAME}.weight": torch.empty(size.outputs, adapters.rank, dtype=dtype),
    }


def _name_in_peft(name: str) -> str:
    """PEFT leaves the adapter's name out, and puts its own wrappers in front of transformers' names."""
    return "base_model.model." + huggingface_name(name).replace(f".{NAME}.", ".")


def _read_base(
    name: str, shape: torch.Size, dtype: torch.dtype, config: DecoderConfig, source: str
) -> Tensor:
    """A parameter of the decoder, read from a folder of Hugging Face."""
    weight = torch.empty(shape, dtype=dtype)
    with ExitStack() as stack:
        file_of_tensor = open_tensors(source, stack)
        for stored in stored_tensors(name, shape, config):
            part = weight
            for dim, (first, count) in enumerate(zip(stored.begin, stored.size, strict=True)):
                part = part.narrow(dim, first, count)
            part.view(stored.shape).copy_(file_of_tensor[stored.name].get_tensor(stored.name))
    return weight
