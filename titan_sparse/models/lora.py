"""LoRA through PEFT: adapters in a decoder's linear layers, on disk, and merged into its weights.

PEFT's layers replace linear layers before the decoder is sharded. PEFT keeps a layer's own weights
as `base_layer`, so q_proj.weight becomes q_proj.base_layer.weight, next to
q_proj.lora_A.default.weight and q_proj.lora_B.default.weight. PEFT misreads the sizes of sharded
weights, because it mistakes the names of our mesh's axes for tensor parallelism. So adapters are
added first, on the meta device.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.models.build import build_decoder
from titan_sparse.models.config import Adapters, DecoderConfig, is_adapter
from titan_sparse.models.huggingface import (
    check_weights,
    copy_rows,
    huggingface_name,
    new_folder,
    save_tensors,
    stored_tensors,
)
from titan_sparse.models.huggingface_files import open_tensors, write_files
from titan_sparse.options.extras import is_installed

NAME = "default"
"""The adapter's name in PEFT, a part of its parameters' names."""

_BY_TOKEN = ("embed_tokens", "lm_head")
"""Modules with a row for each token."""

ADAPTER_FILE = "adapter_model.safetensors"

Read = Callable[[dict[str, Tensor]], None]
"""Fills tensors of these names from a checkpoint, whatever their dtype."""


def peft_config(adapters: Adapters, tied: bool, base_model: str = "") -> Any:
    """The adapters as PEFT's configuration. tied: whether the embedding is also the head.
    base_model: the folder of the frozen weights.

    Raises ValueError if PEFT is missing.
    """
    if not is_installed("peft"):
        raise ValueError(
            f"adapters (lora.rank = {adapters.rank}) need PEFT, which is not installed; "
            'write pip install "titan-sparse[huggingface]"'
        )
    # Imported only when needed: it is optional, and loads slowly.
    from peft import LoraConfig

    ids = list(adapters.token_ids)
    assert len(ids) == len(adapters.tokens), "preflight.build_adapters() finds the ids"
    return LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets),
        init_lora_weights="gaussian" if adapters.init == "gaussian" else True,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model or None,
        # A list is that of the embedding, and of a head that is tied to it.
        trainable_token_indices=(ids if tied else dict.fromkeys(_BY_TOKEN, ids)) if ids else None,
    )


def add_adapters(model: nn.Module, adapters: Adapters) -> None:
    """Give a decoder on the meta device its adapters, in place, and freeze everything else.

    Call it before the decoder is checkpointed, compiled and sharded. Adapters are float32, or
    float64 in a float64 decoder.
    """
    settings = peft_config(adapters, tied=getattr(model, "lm_head", None) is None)
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    wide = accumulation_dtype(next(model.parameters()).dtype)
    inject_adapter_in_model(settings, model, adapter_name=NAME, low_cpu_mem_usage=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_A.to(wide)
            module.lora_B.to(wide)
        if isinstance(module, TrainableTokensLayer):
            module.trainable_tokens_delta.to(wide)
            # A buffer, for unmerging, which to_empty() would fill with anything.
            module.trainable_tokens_original.clear()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def export_adapter(
    checkpoint: str,
    read: Read,
    folder: str,
    config: DecoderConfig,
    adapters: Adapters,
    dtype: torch.dtype,
    source: str,
    files: dict[str, bytes],
) -> None:
    """Write the adapters of a checkpoint to a new `folder`, in `dtype`, so that
    PeftModel.from_pretrained() loads them on the model of `source`.

    checkpoint: a folder step-N. files: as in export_weights(). Raises ValueError as
    export_weights() does.
    """
    shapes = adapter_shapes(config, adapters)
    state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    with new_folder(folder, checkpoint) as incomplete:
        read(state)
        tensors = {}
        for name, tensor in state.items():
            # PEFT leaves out the adapter's name, and puts its wrappers before transformers' names.
            own_name = huggingface_name(name).replace(f".{NAME}.", ".").removesuffix(f".{NAME}")
            tensors[f"base_model.model.{own_name}"] = tensor
        save_tensors(tensors, incomplete / ADAPTER_FILE)
        settings = peft_config(adapters, config.tied_embeddings, source)
        settings.inference_mode = True
        settings.save_pretrained(incomplete)
        write_files(files, incomplete)


def merged(
    read: Read,
    saved: dict[str, TensorStorageMetadata],
    config: DecoderConfig,
    adapters: Adapters,
    source: str,
) -> Read:
    """A function that fills tensors with the weights of the folder `source`, with a checkpoint's
    adapters merged into them. export_weights() takes it as `read`.

    saved: what the checkpoint holds, by name. W + scale * B A is computed in float32 (float64 for
    float64). It does not need PEFT.
    """
    check_weights(source, config)
    trained = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in saved.items()
        # The optimizer's states have these names too.
        if is_adapter(name) and not name.startswith("optimizer.")
    }
    # All at once, because each read looks through the whole checkpoint.
    read(trained)

    def fill(state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            wide = accumulation_dtype(tensor.dtype)
            weight = torch.empty(tensor.shape, dtype=wide)
            with ExitStack() as stack:
                tensors = open_tensors(source, stack)
                for stored in stored_tensors(name, tensor.shape, config):
                    part = tensors[stored.name]()
                    copy_rows(part, 0, weight[stored.index])
            layer = name.removesuffix(".weight")
            sides = [trained.get(f"{layer}.lora_{side}.{NAME}.weight") for side in "AB"]
            if sides[0] is not None:
                a, b = (side.to(wide) for side in sides)
                weight += (b @ a) * adapters.scale
            rows = trained.get(f"{layer}.token_adapter.trainable_tokens_delta.{NAME}")
            if rows is not None:
                weight[list(adapters.token_ids)] = rows.to(wide)
            tensor.copy_(weight)

    return fill


def adapter_shapes(config: DecoderConfig, adapters: Adapters) -> dict[str, torch.Size]:
    """Shape of every tensor of the adapters, by its name in a checkpoint."""
    with torch.device("meta"):
        # Shapes without memory.
        model = build_decoder(config)
        add_adapters(model, adapters)
    return {name: x.shape for name, x in model.named_parameters() if is_adapter(name)}
