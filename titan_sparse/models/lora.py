"""LoRA through PEFT: its layers take the place of a decoder's linear layers, before they are sharded.

PEFT keeps the layer's own weights as `base_layer`, so that q_proj.weight becomes
q_proj.base_layer.weight beside q_proj.lora_A.default.weight and q_proj.lora_B.default.weight. It
reads sizes off sharded weights wrongly: the names of our mesh's axes make it believe in tensor
parallelism. So adapters come first, on the meta device.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from titan_sparse.models.initialization import assign, canonical_name, stable_seed
from titan_sparse.models.lora_config import Adapters, is_adapter

NAME = "default"
"""The adapter's name in PEFT, a part of its parameters' names."""


def peft_config(adapters: Adapters, base_model: str = "") -> Any:
    """The adapters in PEFT's words. base_model: the folder of the frozen weights.

    Raises ValueError where PEFT is missing.
    """
    try:
        # Only where asked for: it is optional, and loads slowly.
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError(
            f"lora.rank = {adapters.rank} needs PEFT, which cannot be imported ({error}); "
            'pip install "peft>=0.21", or write lora.rank = 0'
        ) from error
    return LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        target_modules=list(adapters.targets),
        init_lora_weights="gaussian" if adapters.init == "gaussian" else True,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model or None,
    )


def add_adapters(model: nn.Module, adapters: Adapters) -> None:
    """Give a decoder on the meta device its adapters, in place, and freeze everything else.

    Call it before the decoder is checkpointed, compiled and sharded. Adapters are float32, of a
    float64 decoder float64.
    """
    settings = peft_config(adapters)
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    inject_adapter_in_model(settings, model, adapter_name=NAME, low_cpu_mem_usage=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_A.to(wide)
            module.lora_B.to(wide)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


@torch.no_grad()
def initialize_adapters(
    model: nn.Module, seed: int, adapters: Adapters, device: torch.device | None = None
) -> None:
    """Fill the adapters of a materialized decoder in place: A random, B zero, so that they change
    nothing at first.

    As initialize() draws: each rank on `device` (default: the parameter's), from the seed and the
    parameter's name alone.
    """
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            name = canonical_name(name)
            assign(
                parameter,
                _draw(name, parameter.shape, device or parameter.device, seed, adapters),
            )


def _draw(
    name: str, shape: torch.Size, device: torch.device, seed: int, adapters: Adapters
) -> Tensor:
    full = torch.empty(shape, dtype=torch.float32, device=device)
    if ".lora_B." in name:
        return full.zero_()
    generator = torch.Generator(device=device).manual_seed(stable_seed(seed, name))
    if adapters.init == "gaussian":
        return full.normal_(std=1 / adapters.rank, generator=generator)
    # As nn.Linear begins.
    return nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
