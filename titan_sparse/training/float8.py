"""The blocks' linear layers in float8, through torchao.

Operands are scaled and cast in each forward and backward. Weights, gradients and optimizer states
stay as they are, and FSDP gathers training.dtype. torchtitan's own component wants torchtitan's
whole configuration, and silently skips layers that do not fit. The conversion itself is one call.
"""

import dataclasses

import torch
from torch import nn

from titan_sparse.config import Float8
from titan_sparse.models.decoder import Decoder


def check_device(device: torch.device) -> None:
    """Raises ValueError unless it is a GPU of the Hopper generation or newer.

    Only these multiply float8 with a scale per row.
    """
    is_gpu = device.type == "cuda"
    if not is_gpu or torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device) if is_gpu else "a CPU"
        raise ValueError(
            f"float8.enable = true needs a Hopper GPU or a newer one, not {name}; write float8.enable = false"
        )


def convert_to_float8(model: Decoder, section: Float8, emulate: bool = False) -> int:
    """Make the blocks' nn.Linear layers torchao's Float8Linear, in place. Returns how many.

    Names do not change. Call it before the blocks are checkpointed, compiled and sharded. Layers
    whose name (layers.N.self_attn.q_proj) contains one of section.filter stay as they are.
    emulate: the same rounding in matmuls of training.dtype, on any device, not compiled; for tests.
    Raises ValueError for a filter that matches nothing or everything.
    """
    import torchao.float8 as torchao_float8  # only where asked for: it loads slowly

    excluded = [name.strip() for name in section.filter.split(",") if name.strip()]
    linears = [
        name
        for name, module in model.layers.named_modules(prefix="layers")
        if isinstance(module, nn.Linear)
    ]
    for name in excluded:
        if not any(name in linear for linear in linears):
            raise ValueError(
                f'float8.filter: "{name}" is part of no layer\'s name; write for example "o_proj" or "mlp"'
            )
    chosen = {linear for linear in linears if not any(name in linear for name in excluded)}
    if not chosen:
        raise ValueError(
            f'float8.filter = "{section.filter}" leaves no layer; write float8.enable = false'
        )
    torchao_float8.convert_to_float8_training(
        model.layers,
        config=_recipe(torchao_float8, section.recipe, emulate),
        module_filter_fn=lambda module, name: f"layers.{name}" in chosen,
    )
    if section.recipe == "rowwise":
        import torch._inductor.config  # only here: it takes a second to load

        # github.com/pytorch/pytorch/issues/150859
        torch._inductor.config.emulate_precision_casts = True
    return len(chosen)


def _recipe(torchao_float8, name: str, emulate: bool):
    config = torchao_float8.Float8LinearConfig.from_recipe_name(name)
    return dataclasses.replace(config, emulate=emulate)
