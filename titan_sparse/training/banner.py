"""The start-up banner: what is about to run, on what, with which attention kernel and why."""

from dataclasses import dataclass

import torch

from titan_sparse.attention import ContextParallel
from titan_sparse.config import Attention, Config
from titan_sparse.models.flavours import (
    DecoderConfig,
    choose_implementation,
    number_of_parameters,
)
from titan_sparse.models.lora_config import adapter_elements, resolve_adapters
from titan_sparse.training.distributed import Meshes

_REACHES_RECALL = {
    "joint": "a head",
    "independent": "of verticals and of slashes",
}
"""What reaches the recall, by attention.vertical_slash.budget."""


@dataclass(frozen=True)
class Resolved:
    """What the banner reports in addition to the configuration: what it means on these devices."""

    model: DecoderConfig
    meshes: Meshes
    cp: ContextParallel
    kernel: str
    """What backends.explain() says."""
    device: torch.device
    padded_seq_len: int
    """Tokens of a sequence, padded to whole blocks of every rank."""
    memory: dict[str, float]
    """GiB a device by part, at the step's peak."""
    recomputed: float
    """Share of attention that is computed again in the backward."""


def banner(config: Config, resolved: Resolved) -> str:
    """Several lines, each with its name to the left."""
    lines = {
        "model": _model(config, resolved),
        "mesh": _mesh(config, resolved),
        "data": _data(config, resolved),
        "attention": _attention(config.attention, resolved.cp),
        "layout": f"{resolved.cp.layout}, schedule {resolved.cp.schedule}",
        "kernel": resolved.kernel,
        "blocks": _blocks(config, resolved.recomputed),
        "memory": _memory(resolved.memory),
        "timeouts": (
            f"collectives fail after {config.parallelism.first_step_timeout_seconds:,} s in the first step and in "
            f"saves, else after {config.parallelism.timeout_seconds:,} s"
        ),
        "output": config.training.output_dir,
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items())


def _model(config: Config, resolved: Resolved) -> str:
    name = config.model.initial_hf or config.model.flavour
    millions = number_of_parameters(resolved.model) / 1e6
    dtype = config.training.dtype
    adapters = resolve_adapters(resolved.model, **vars(config.lora))
    if adapters:
        trained = adapter_elements(resolved.model, adapters) / 1e6
        dtype += (
            f", frozen, and {trained:,.1f} M that are trained: adapters of rank {adapters.rank} of "
            f"{', '.join(adapters.targets)}"
        )
    elif dtype != "float64":
        dtype += ", float32 weights and optimizer"
    line = f"{name}, {millions:,.1f} M parameters, {dtype}"
    if not config.model.initial_hf:
        return line
    code, reason = choose_implementation(config.model.initial_hf, config.model.implementation)
    return f"{line}; {code} code ({reason})"


def _mesh(config: Config, resolved: Resolved) -> str:
    replicas = config.parallelism.dp_replicate
    shards = resolved.meshes.dp_size // replicas
    cp = resolved.cp
    return (
        f"{replicas} dp_replicate x {shards} dp_shard"
        f" x {cp.inter} cp_inter x {cp.intra} cp_intra on {resolved.device.type}"
    )


def _data(config: Config, resolved: Resolved) -> str:
    training = config.training
    accumulated = training.local_batch_size * training.gradient_accumulation_steps
    sequences = accumulated * resolved.meshes.dp_size
    padded = resolved.padded_seq_len
    return (
        f"{config.data.source}, tokenizer {config.data.tokenizer},"
        f" {sequences} sequences a step of {training.seq_len:,}"
        f" tokens (padded to {padded:,}, {padded // resolved.cp.size:,} a rank)"
    )


def _attention(attention: Attention, cp: ContextParallel) -> str:
    mask = attention.mask
    if attention.sliding_window:
        mask += f", window {attention.sliding_window}"
    if attention.window_sinks:
        mask += f" and {attention.window_sinks} sinks"
    return f"{mask} mask, {_pattern(attention)}, blocks of {cp.block_size}"


def _pattern(attention: Attention) -> str:
    """The pattern and its most important choices."""
    if attention.pattern == "moba":
        return f"moba (chunks of {attention.moba.chunk_size}, top {attention.moba.top_k})"
    if attention.pattern == "xattention":
        section = attention.xattention
        return f"xattention (threshold {section.threshold:g}, stride {section.stride})"
    if attention.pattern == "vertical_slash":
        section = attention.vertical_slash
        recall = f"recall {section.recall:g} {_REACHES_RECALL[section.budget]}"
        return f"vertical_slash ({recall}, at most {section.max_verticals} verticals)"
    return attention.pattern


def _blocks(config: Config, recomputed: float) -> str:
    kept = f"activation checkpointing {config.activation_checkpoint.mode}"
    if recomputed:
        kept += f" (attention of the first {100 * recomputed:g} % too)"
    compiled = f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
    return f"{kept}, {compiled}"


def _memory(memory: dict[str, float]) -> str:
    total = sum(memory.values())
    parts = []
    for name, size in memory.items():
        # Others would show as 0.00.
        if size >= 0.005:
            parts.append(f"{name} {size:.2f}")
    return f"expect a peak of {total:.2f} GiB a device: {', '.join(parts)}"
