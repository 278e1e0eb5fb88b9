"""Build the decoder of a run: checkpointed, compiled and sharded, with its first weights.

In every mode of activation checkpointing attention's index, output and LSE are kept (SAVED_OPS):
computing them again would repeat the selection and the whole ring of collectives. Where their
memory is short, attend(recomputed=...) gives up output and LSE of the first part of each sequence,
which are the cheapest to compute again.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titan_sparse.attention import SAVED_OPS
from titan_sparse.config import ActivationCheckpoint, Compile, Config, Float8
from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.models.build import build_decoder
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.models.config import Adapters, DecoderConfig, adapter_elements
from titan_sparse.models.decoder import MLP, Attends, Decoder
from titan_sparse.models.flavours import choose_implementation
from titan_sparse.models.initialization import initialize, stable_seed
from titan_sparse.models.lora import add_adapters
from titan_sparse.training.offload import OffloadedBlocks

_MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
)


def model_line(config: Config, model: DecoderConfig, adapters: Adapters | None) -> str:
    """Name, size, and dtypes of the model, and whose code runs it."""
    initial_hf = config.model.initial_hf
    millions = model.number_of_parameters() / 1e6
    dtype = config.training.dtype
    if adapters:
        trained = adapter_elements(model, adapters) / 1e6
        dtype += (
            f", frozen, and {trained:,.1f} M that are trained: adapters of rank {adapters.rank} of "
            f"{', '.join(adapters.targets)}"
        )
        if adapters.tokens:
            dtype += f", and the rows of {len(adapters.tokens)} tokens"
    elif dtype != "float64":
        dtype += ", float32 weights and optimizer"
    line = f"{initial_hf or config.model.flavour}, {millions:,.1f} M parameters, {dtype}"
    if initial_hf:
        code, reason = choose_implementation(initial_hf, config.model.implementation)
        line += f"; {code} code ({reason})"
    return line


def build_model(
    config: Config,
    model_config: DecoderConfig,
    adapters: Adapters | None,
    attends: Attends,
    fsdp: DeviceMesh,
    device: torch.device,
) -> Decoder:
    """The decoder, sharded over `fsdp`, with random weights of training.seed. Collective.

    attends: of its layers. Weights that are trained are float32, in float64 runs float64. With
    adapters, all others are frozen in training.dtype.
    """
    dtype = getattr(torch, config.training.dtype)
    weights_dtype = dtype if adapters else torch.promote_types(dtype, torch.float32)
    mlp = MLP
    if chunk_tokens := config.training.mlp_chunk_tokens:
        backend = config.compile.backend if config.compile.enable else ""
        mlp = functools.partial(ChunkedMLP, chunk_tokens=chunk_tokens, compile_backend=backend)
    with torch.device("meta"):
        model = build_decoder(model_config, attends, mlp).to(weights_dtype)
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
    initialize(model, config.training.seed, model_config, device, adapters)
    return model


def parallelize(
    model: Decoder,
    fsdp: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward: bool,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    offload: bool = False,
) -> None:
    """Checkpoint, compile and shard every block, then shard the rest. In place; parameter
    names do not change.

    dtype: of the forward and backward. Gradients are reduced in fp32 (fp64 for fp64) and
    summed: the loss is already divided by the number of tokens. offload: parameters and
    gradients on the CPU.
    """
    policy = CPUOffloadPolicy(pin_memory=fsdp.device_type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=accumulation_dtype(dtype),
        cast_forward_inputs=False,  # the RoPE tables stay fp32
    )
    for name, block in model.layers.items():
        block = checkpointed(block, activation_checkpoint.mode)
        if compile.enable:
            compile_layer(block, compile.backend)
        model.layers[name] = fully_shard(
            block,
            mesh=fsdp,
            mp_policy=mixed,
            offload_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
    # Embedding, norm and head belong to the root: the head's weight is read in the root's forward,
    # tied or not.
    fully_shard(model, mesh=fsdp, mp_policy=mixed, offload_policy=policy)
    for module in model.modules():
        # On one rank FSDP would divide all gradients by it.
        if isinstance(module, FSDPModule) and fsdp.size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


def compile_layer(layer: nn.Module, backend: str) -> None:
    """layer.compile() as one graph, in place, without fusions that make gradients wrong. Only
    linear attention breaks the graph."""
    # Only where asked for: it loads inductor, which takes a second.
    from titan_sparse.attention.compiling import switch_wrong_fusions_off

    switch_wrong_fusions_off()
    is_linear = any(name.endswith("linear_attn") for name, _ in layer.named_modules())
    layer.compile(backend=backend, fullgraph=not is_linear)


def checkpointed(block: nn.Module, mode: str) -> nn.Module:
    """The block under `mode`: "none" keeps all activations, "full" attention's results and the
    block's input, "selective" also every second matmul. Parameter names stay as they are."""
    if mode == "none":
        return block
    contexts = functools.partial(checkpoint_contexts, keeps_matmuls=mode == "selective")
    # Nothing in a block draws random numbers but the dropout of adapters.
    draws = any(isinstance(module, nn.Dropout) for module in block.modules())
    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=draws)


def checkpoint_contexts(keeps_matmuls: bool = False):
    """The parts of a block that are kept: attention's results, and where asked for every second
    matmul, which is half of their memory for half of their recomputation."""
    matmuls_seen: Counter[bool] = Counter()

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        if op in SAVED_OPS:
            return CheckpointPolicy.MUST_SAVE
        if keeps_matmuls and op in _MATMULS:
            # Forward and recomputation are counted apart, so that both choose the same matmuls.
            matmuls_seen[context.is_recompute] += 1
            if matmuls_seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def draw_dropout(config: Config, step: int) -> None:
    """Seed the dropout of adapters: the same in a resumed run, and different on each rank."""
    if config.lora.dropout:
        name = f"dropout of step {step} on rank {dist.get_rank()}"
        torch.manual_seed(stable_seed(config.training.seed, name))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop nothing within the block. Afterwards each module drops as before."""
    dropouts = [
        module for module in model.modules() if isinstance(module, nn.Dropout) and module.training
    ]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


def check_float8(device: torch.device) -> None:
    """Raises ValueError unless it is a GPU that multiplies float8 with a scale per row."""
    is_gpu = device.type == "cuda"
    if not is_gpu or torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device) if is_gpu else "a CPU"
        raise ValueError(
            f"float8.enable = true needs a Hopper GPU or a newer one, not {name}; write float8.enable = false"
        )


def convert_to_float8(model: Decoder, section: Float8, emulate: bool = False) -> int:
    """Make the blocks' nn.Linear layers torchao's Float8Linear, in place. Returns how many.

    Call it before the blocks are checkpointed. Layers whose name (layers.N.self_attn.q_proj)
    contains one of section.filter stay. emulate: the same rounding in matmuls of training.dtype, on
    any device, for tests. Raises ValueError for a filter that matches nothing or everything.
    """
    import torchao.float8 as torchao_float8  # only where asked for: it loads slowly

    excluded = [name.strip() for name in section.filter.split(",") if name.strip()]
    linears = [
        name
        for name, module in model.layers.named_modules(prefix="layers")
        if isinstance(module, nn.Linear)
    ]
    chosen = {linear for linear in linears if not any(name in linear for name in excluded)}
    if not chosen or not all(any(name in linear for linear in linears) for name in excluded):
        raise ValueError(
            f'float8.filter = "{section.filter}" must name parts of some of the layers; write for '
            'example "o_proj, layers.0.mlp"'
        )
    recipe = torchao_float8.Float8LinearConfig.from_recipe_name(section.recipe)
    torchao_float8.convert_to_float8_training(
        model.layers,
        config=dataclasses.replace(recipe, emulate=emulate),
        module_filter_fn=lambda module, name: f"layers.{name}" in chosen,
    )
    if section.recipe == "rowwise":
        import torch._inductor.config  # only here: it takes a second to load

        # github.com/pytorch/pytorch/issues/150859
        torch._inductor.config.emulate_precision_casts = True
    return len(chosen)
