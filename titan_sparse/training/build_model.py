"""The decoder of a run: with its levers, on the devices that it is sharded over, with its first weights."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_sparse.config import Config
from titan_sparse.models.build import build_decoder
from titan_sparse.models.chunked_lora_mlp import ChunkedLoraMLP
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.models.decoder import MLP, Decoder
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.models.initialization import initialize
from titan_sparse.models.layer_masks import Attends
from titan_sparse.models.lora import add_adapters, initialize_adapters
from titan_sparse.models.lora_config import resolve_adapters
from titan_sparse.training.float8 import convert_to_float8
from titan_sparse.training.offload import OffloadedBlocks
from titan_sparse.training.parallelize import parallelize


def build_model(
    config: Config,
    model_config: DecoderConfig,
    attends: Attends,
    fsdp: DeviceMesh,
    device: torch.device,
) -> Decoder:
    """The decoder, sharded over `fsdp`, with random weights of training.seed. Collective.

    attends: of its layers. Weights that are trained are float32, in float64 runs float64. With
    adapters, all others are frozen in training.dtype.
    """
    dtype = getattr(torch, config.training.dtype)
    adapters = resolve_adapters(model_config, **vars(config.lora))
    weights_dtype = dtype if adapters else torch.promote_types(dtype, torch.float32)
    with torch.device("meta"):
        model = build_decoder(model_config, attends, _mlp(config)).to(weights_dtype)
        if adapters:
            add_adapters(model, adapters)
    if config.float8.enable:
        convert_to_float8(model, config.float8)
    if config.activation_checkpoint.offload:
        model.run_blocks = OffloadedBlocks(device)
    parallelize(
        model,
        fsdp,
        dtype,
        config.parallelism.reshard_after_forward,
        config.activation_checkpoint,
        config.compile,
        config.optimizer.offload,
    )
    model.to_empty(device="cpu" if config.optimizer.offload else device)
    initialize(model, config.training.seed, model_config, device)
    if adapters:
        initialize_adapters(model, config.training.seed, adapters, device)
    return model


def _mlp(config: Config) -> Callable[[DecoderConfig], nn.Module]:
    """What makes a layer's MLP."""
    chunk_tokens = config.training.mlp_chunk_tokens
    if not chunk_tokens:
        return MLP
    backend = config.compile.backend if config.compile.enable else ""
    mlp = ChunkedLoraMLP if config.lora.rank else ChunkedMLP
    return functools.partial(mlp, chunk_tokens=chunk_tokens, compile_backend=backend)
