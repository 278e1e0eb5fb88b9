"""Initial weights. They depend only on the seed and the parameter's name, and not on the
sharding."""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_sparse.models.config import Adapters, DecoderConfig, is_adapter
from titan_sparse.models.huggingface_config import FAMILIES

_STD = 0.02
_DECAY_RATES = (0.01, 16.0)
_WRAPPERS = (
    "_checkpoint_wrapped_module.",
    "token_adapter.base_layer.",
    "base_layer.",
)
_TOKENS = ".token_adapter.trainable_tokens_delta."
"""In PEFT's name of the parameter that holds the rows of some tokens of an embedding or a head."""


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    config: DecoderConfig,
    device: torch.device | None = None,
    adapters: Adapters | None = None,
) -> None:
    """Fill every parameter of a materialized (to_empty) decoder in place, except adapters if
    `adapters` is None.

    Parameters are plain or DTensor, of any dtype. Of adapters, A is random and B is zero, and the
    rows of trained tokens are those of the frozen weights, so that they change nothing at first.

    Each full tensor is drawn in fp32 on `device` (default: the parameter's), one at a time, and
    each rank keeps its local shard without communication. Another kind of device draws other
    numbers. Raises ValueError for a parameter still on the meta device.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(
                f"parameter {name} is on the meta device; call model.to_empty(device=...) first."
            )
        if is_adapter(name) and adapters is None:
            continue
        where = device or parameter.device
        tokens = trained_tokens(model, name)
        if tokens:
            shape = torch.Size([config.vocab_size, config.hidden_size])
            full = _draw(whole_name(name), shape, where, seed, config, adapters)[tokens]
        else:
            full = _draw(canonical_name(name), parameter.shape, where, seed, config, adapters)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has drawn the same tensor and cuts its own
            # shard; nothing is sent.
            full = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(full)


def canonical_name(name: str) -> str:
    """The name without the parts that activation checkpointing and PEFT add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def trained_tokens(model: nn.Module, name: str) -> list[int]:
    """The tokens whose rows the parameter `name` holds; empty for other parameters."""
    module, found, adapter = name.rpartition(_TOKENS)
    return model.get_submodule(f"{module}.token_adapter").token_indices[adapter] if found else []


def whole_name(name: str) -> str:
    """The name of the embedding or head that the rows of trained tokens belong to."""
    return name.partition(_TOKENS)[0] + ".weight"


def _draw(
    name: str,
    shape: torch.Size,
    device: torch.device,
    seed: int,
    config: DecoderConfig,
    adapters: Adapters | None,
) -> Tensor:
    full = torch.empty(shape, dtype=torch.float32, device=device)
    generator = torch.Generator(device=device).manual_seed(stable_seed(seed, name))
    if ".lora_B." in name:
        return full.zero_()
    if ".lora_A." in name and adapters.init == "gaussian":
        return full.normal_(std=1 / adapters.rank, generator=generator)
    if ".lora_A." in name:
        # The initial values of nn.Linear.
        return nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
    if name.endswith(".A_log"):
        # Rates of decay in linear attention.
        return full.uniform_(*_DECAY_RATES, generator=generator).log_()
    if name.endswith((".linear_attn.norm.weight", ".dt_bias")):
        return full.fill_(1.0)
    # Biases of experts are parameters of their own, such as gate_up_proj_bias.
    if name.endswith((".bias", "_bias")):
        return full.zero_()
    # Of the other vectors, all but learned sinks are norm weights. They begin with the value with
    # which a norm does not scale.
    if len(shape) == 1 and not name.endswith(".sinks"):
        family = FAMILIES.get(config.model_type)
        return full.fill_(family.norm_starts_at if family else 1.0)
    # Each layer adds two residual branches. Scale down their outputs, so that the residual stream
    # keeps its variance.
    writes_residual = name.endswith(
        ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
    )
    std = _STD / math.sqrt(2 * config.layers) if writes_residual else _STD
    return nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)


def stable_seed(seed: int, name: str) -> int:
    """A seed of 63 bits for one parameter, as manual_seed takes an int64.

    It comes from hashlib, because hash() of a string differs from process to process.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
