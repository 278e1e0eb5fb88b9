"""The start-up banner: what is about to run, on what, with which attention kernel and why."""

from titan_sparse.attention import ContextParallel
from titan_sparse.build import Parts
from titan_sparse.config import Attention, Config
from titan_sparse.models.flavours import choose_implementation, number_of_parameters
from titan_sparse.models.lora_config import adapter_elements


def banner(parts: Parts, padded_seq_len: int, memory: dict[str, float]) -> str:
    """Several lines, each with its name to the left.

    padded_seq_len: tokens of a sequence, padded to whole blocks of every rank. memory: GiB a device
    by part, at the step's peak.
    """
    config = parts.config
    # Others would show as 0.00.
    parts_of_peak = [f"{name} {size:.2f}" for name, size in memory.items() if size >= 0.005]
    lines = {
        "model": _model(parts),
        "mesh": _mesh(parts),
        "data": _data(parts, padded_seq_len),
        "attention": _attention(config.attention, parts.cp),
        "layout": f"{parts.cp.layout}, schedule {parts.cp.schedule}",
        "kernel": parts.kernel,
        "blocks": _blocks(config, parts.recomputed),
        "memory": f"expect a peak of {sum(memory.values()):.2f} GiB a device: {', '.join(parts_of_peak)}",
        "timeouts": (
            f"collectives fail after {config.parallelism.first_step_timeout_seconds:,} s in the first step and in "
            f"saves, else after {config.parallelism.timeout_seconds:,} s"
        ),
        "output": config.training.output_dir,
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items())


def _model(parts: Parts) -> str:
    config = parts.config
    name = config.model.initial_hf or config.model.flavour
    millions = number_of_parameters(parts.model_config) / 1e6
    dtype = config.training.dtype
    adapters = parts.adapters
    if adapters:
        trained = adapter_elements(parts.model_config, adapters) / 1e6
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


def _mesh(parts: Parts) -> str:
    replicas = parts.config.parallelism.dp_replicate
    cp = parts.cp
    return (
        f"{replicas} dp_replicate x {parts.meshes.dp_size // replicas} dp_shard"
        f" x {cp.inter} cp_inter x {cp.intra} cp_intra on {parts.device.type}"
    )


def _data(parts: Parts, padded: int) -> str:
    config = parts.config
    training = config.training
    accumulated = training.local_batch_size * training.gradient_accumulation_steps
    sequences = accumulated * parts.meshes.dp_size
    return (
        f"{config.data.source}, tokenizer {config.data.tokenizer},"
        f" {sequences} sequences a step of {training.seq_len:,}"
        f" tokens (padded to {padded:,}, {padded // parts.cp.size:,} a rank)"
    )


def _attention(attention: Attention, cp: ContextParallel) -> str:
    mask = attention.mask
    if attention.sliding_window:
        mask += f", window {attention.sliding_window}"
    if attention.window_sinks:
        mask += f" and {attention.window_sinks} sinks"
    options = vars(getattr(attention, attention.pattern)).items()
    pattern = f"{attention.pattern} ({', '.join(f'{name} {value}' for name, value in options)})"
    if attention.dense_layers:
        pattern += f", layers {attention.dense_layers} dense"
    return f"{mask} mask, {pattern.removesuffix(' ()')}, blocks of {cp.block_size}"


def _blocks(config: Config, recomputed: float) -> str:
    kept = f"activation checkpointing {config.activation_checkpoint.mode}"
    if recomputed:
        kept += f" (attention of the first {100 * recomputed:g} % too)"
    compiled = f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
    return f"{kept}, {compiled}"
