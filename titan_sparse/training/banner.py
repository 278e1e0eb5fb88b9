"""The lines in which a run says what it is, on what, and with which attention kernel."""

import torch

from titan_sparse.attention import ContextParallel
from titan_sparse.config import Attention, Config
from titan_sparse.config.sources import tokenizer_name
from titan_sparse.estimate.memory import estimate, peak_phase
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.config import Adapters, DecoderConfig, adapter_elements
from titan_sparse.models.flavours import choose_implementation
from titan_sparse.options.values import show
from titan_sparse.training.faults.process_groups import Meshes


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


def mesh_line(config: Config, meshes: Meshes, cp: ContextParallel, device: torch.device) -> str:
    replicas = config.parallelism.dp_replicate
    return (
        f"{replicas} dp_replicate x {meshes.dp_size // replicas} dp_shard"
        f" x {cp.inter} cp_inter x {cp.intra} cp_intra on {device.type}"
    )


def data_line(config: Config, dp_size: int, cp_size: int, padded_seq_len: int) -> str:
    """padded_seq_len: tokens of a sequence, padded to whole blocks of every rank."""
    training = config.training
    sequences = training.local_batch_size * training.gradient_accumulation_steps * dp_size
    return (
        f"{config.data.source}, tokenizer {tokenizer_name(config)},"
        f" {sequences} sequences a step of {training.seq_len:,} tokens"
        f" (padded to {padded_seq_len:,}, {padded_seq_len // cp_size:,} a rank)"
    )


def attention_line(attention: Attention) -> str:
    """The mask, the pattern with the options that differ from their defaults, and the block size."""
    changed = getattr(attention, attention.pattern).changed()
    if attention.dense_layers:
        changed["dense_layers"] = attention.dense_layers
    options = [f"{name} = {show(value)}" for name, value in changed.items()]
    pattern = " with ".join(filter(None, [attention.pattern, ", ".join(options)]))
    return f"{attention.mask} mask, {pattern}, blocks of {attention.block_size}"


def blocks_line(config: Config, recomputed: float) -> str:
    """recomputed: share of attention that the backward computes again."""
    blocks = f"activation checkpointing {config.activation_checkpoint.mode}"
    if recomputed:
        blocks += f" (attention of the first {100 * recomputed:g} % too)"
    compiled = f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
    return f"{blocks}, {compiled}"


def memory_line(step: StepShape, device: torch.device) -> str:
    """Estimated GiB a device by part, at the step's peak."""
    phases = estimate(step)
    memory = phases[peak_phase(phases)]
    # Others would show as 0.00.
    parts = [f"{name} {size:.2f}" for name, size in memory.items() if size >= 0.005]
    shown = f" ({', '.join(parts)})" if parts else ""
    line = f"expect tensors of at most {sum(memory.values()):.2f} GiB a device{shown}; steps log "
    if device.type == "cuda":
        return line + "the peak of PyTorch's allocator, which counts the same"
    return line + "the peak of the whole process, Python and libraries included"
