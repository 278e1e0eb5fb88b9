"""The start-up banner: what is about to run, on what, with which attention kernel and why."""

from typing import TYPE_CHECKING

import torch

from titan_sparse.attention import ContextParallel
from titan_sparse.models.flavours import DecoderConfig, number_of_parameters
from titan_sparse.training.parallelize import Meshes

if TYPE_CHECKING:
    from titan_sparse.config import Attention, Config


def _pattern(attention: "Attention") -> str:
    """The pattern and its most important choices."""
    name, slash, cells = attention.pattern, attention.vertical_slash, attention.xattention
    joint = " jointly" if slash.budget == "joint" else ""
    if name == "moba":
        return f"moba (chunks of {attention.moba.chunk_size}, top {attention.moba.top_k})"
    if name == "xattention" or (name == "vertical_slash" and slash.index == "xattention"):
        return f"xattention (threshold {cells.threshold:g}, stride {cells.stride})"
    return name + (
        f" (recall {slash.recall:g}{joint}, at most {slash.max_columns} columns)"
        if name == "vertical_slash"
        else ""
    )


def banner(
    config: "Config",
    model: DecoderConfig,
    meshes: Meshes,
    cp: ContextParallel,
    kernel: str,
    device: torch.device,
    padded_seq_len: int,
    memory: dict[str, float],
    recomputed: float,
) -> str:
    """Several lines. kernel: what backends.explain() says; memory: GiB by part at the peak; recomputed: share of attention."""
    training, attention = config.training, config.attention
    dtype = training.dtype + (
        "" if training.dtype == "float64" else ", float32 weights and optimizer"
    )
    window = f", window {attention.sliding_window}" if attention.sliding_window else ""
    window += f" and {attention.window_sinks} sinks" if attention.window_sinks else ""
    kept = f"activation checkpointing {config.activation_checkpoint.mode}"
    kept += f" (attention of the first {100 * recomputed:g} % too)" if recomputed else ""
    compiled = f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
    sequences = training.local_batch_size * training.gradient_accumulation_steps * meshes.dp_size
    pattern = _pattern(attention)
    lines = [
        (
            "model",
            f"{config.model.initial_hf or config.model.flavour}, {number_of_parameters(model) / 1e6:,.1f} M parameters, "
            f"{dtype}",
        ),
        (
            "mesh",
            f"{config.parallelism.dp_replicate} dp_replicate x {meshes.dp_size // config.parallelism.dp_replicate} dp_shard"
            f" x {cp.inter} cp_inter x {cp.intra} cp_intra on {device.type}",
        ),
        (
            "data",
            f"{config.data.source}, tokenizer {config.data.tokenizer}, {sequences} sequences a step of {training.seq_len:,}"
            f" tokens (padded to {padded_seq_len:,}, {padded_seq_len // cp.size:,} a rank)",
        ),
        ("attention", f"{attention.mask}{window} mask, {pattern}, blocks of {cp.block_size}"),
        ("layout", f"{cp.layout}, schedule {cp.schedule}"),
        ("kernel", kernel),
        ("blocks", f"{kept}, {compiled}"),
        (
            "memory",
            f"expect a peak of {sum(memory.values()):.2f} GiB a device: "
            + ", ".join(f"{part} {size:.2f}" for part, size in memory.items() if size >= 0.005),
        ),
        (
            "timeouts",
            f"collectives fail after {config.parallelism.first_step_timeout_seconds:,} s in the first step and in "
            f"saves, else after {config.parallelism.timeout_seconds:,} s",
        ),
        ("output", training.output_dir),
    ]
    return "\n".join(f"{name:>10}  {text}" for name, text in lines)
