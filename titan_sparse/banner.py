"""The start-up banner: what is about to run, on what, with which attention kernel and why."""

from titan_sparse.build import Parts
from titan_sparse.models.flavours import choose_implementation, number_of_parameters
from titan_sparse.models.lora_config import adapter_elements


def banner(parts: Parts, padded_seq_len: int, memory: dict[str, float]) -> str:
    """Several lines, each with its name to the left.

    padded_seq_len: tokens of a sequence, padded to whole blocks of every rank. memory: GiB a device
    by part, at the step's peak.
    """
    config, cp = parts.config, parts.cp
    training, parallelism, attention = config.training, config.parallelism, config.attention
    replicas, dp_size = parallelism.dp_replicate, parts.meshes.dp_size
    sequences = training.local_batch_size * training.gradient_accumulation_steps * dp_size
    blocks = f"activation checkpointing {config.activation_checkpoint.mode}"
    if parts.recomputed:
        blocks += f" (attention of the first {100 * parts.recomputed:g} % too)"
    compiled = f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
    # Others would show as 0.00.
    parts_of_peak = [f"{name} {size:.2f}" for name, size in memory.items() if size >= 0.005]
    lines = {
        "model": _model(parts),
        "mesh": (
            f"{replicas} dp_replicate x {dp_size // replicas} dp_shard"
            f" x {cp.inter} cp_inter x {cp.intra} cp_intra on {parts.device.type}"
        ),
        "data": (
            f"{config.data.source}, tokenizer {config.data.tokenizer},"
            f" {sequences} sequences a step of {training.seq_len:,} tokens"
            f" (padded to {padded_seq_len:,}, {padded_seq_len // cp.size:,} a rank)"
        ),
        "attention": (
            f"{attention.mask} mask, {attention.pattern}"
            f" {vars(getattr(attention, attention.pattern)) or ''}, blocks of {cp.block_size}"
        ),
        "layout": f"{cp.layout}, schedule {cp.schedule}",
        "kernel": parts.kernel,
        "blocks": f"{blocks}, {compiled}",
        "memory": f"expect a peak of {sum(memory.values()):.2f} GiB a device: {', '.join(parts_of_peak)}",
        "output": training.output_dir,
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items())


def _model(parts: Parts) -> str:
    config, adapters = parts.config, parts.adapters
    initial_hf = config.model.initial_hf
    millions = number_of_parameters(parts.model_config) / 1e6
    dtype = config.training.dtype
    if adapters:
        trained = adapter_elements(parts.model_config, adapters) / 1e6
        dtype += (
            f", frozen, and {trained:,.1f} M that are trained: adapters of rank {adapters.rank} of "
            f"{', '.join(adapters.targets)}"
        )
    elif dtype != "float64":
        dtype += ", float32 weights and optimizer"
    line = f"{initial_hf or config.model.flavour}, {millions:,.1f} M parameters, {dtype}"
    if not initial_hf:
        return line
    code, reason = choose_implementation(initial_hf, config.model.implementation)
    return f"{line}; {code} code ({reason})"
