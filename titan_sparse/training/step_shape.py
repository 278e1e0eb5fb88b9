"""The step that a configuration runs, as estimate/memory.py counts its bytes."""

import torch

from titan_sparse.attention import backends
from titan_sparse.attention.context_parallel import schedules
from titan_sparse.config import (
    Config,
    padding_multiple,
    resolve_cp_intra,
    resolve_overlap_stages,
)
from titan_sparse.estimate.constants import shape_of
from titan_sparse.estimate.memory import estimate, peak_phase
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.config import DecoderConfig, resolve_adapters
from titan_sparse.training.attention import build_pattern, schedule_named


def step_of(
    config: Config, model: DecoderConfig, backend: str, world_size: int, local_world_size: int
) -> StepShape:
    """The step that a checked configuration runs on `world_size` ranks.

    backend: of attention, with "auto" resolved. local_world_size: ranks of a node.
    """
    training = config.training
    attention = config.attention
    checkpointing = config.activation_checkpoint
    cp = config.parallelism.cp
    sent = shape_of(config, model)
    pattern = build_pattern(attention)
    intra = resolve_cp_intra(config.parallelism, local_world_size)
    inter = cp // intra
    schedule = schedules.SCHEDULES[schedule_named(attention, inter, intra)]
    multiple = padding_multiple(config)
    seq_len = -(-training.seq_len // multiple) * multiple

    shares_heads = schedule.moves is schedules.Moves.TOKENS
    # Raises ValueError for heads that the ranks cannot share.
    copies = schedules.kv_copies(model.heads, model.kv_heads, intra) if shares_heads else 1
    has_whole_sequences = cp == 1 or (shares_heads and inter == 1)
    gathers_queries = (
        pattern.gathers_queries
        and backends.BACKENDS[backend].GATHERS_QUERIES
        and has_whole_sequences
        and attention.sliding_window == 0
    )
    # cudnn leaves all but squares and rectangles to triton.
    is_plain = attention.mask != "documents" and attention.sliding_window == 0
    in_runs = attention.layout in ("contiguous", "zigzag")
    makes_rectangles = schedule.moves is not schedules.Moves.BLOCKS and in_runs
    if backend == "cudnn" and not (is_plain and (has_whole_sequences or makes_rectangles)):
        backend = "triton"

    implementation = config.optimizer.implementation
    if implementation == "auto" and training.device == "cpu":
        # torch's optimizers choose it where there is no fused one.
        implementation = "foreach"
    return StepShape(
        model=model,
        sequences=training.local_batch_size,
        seq_len=seq_len,
        width=sent.element_bytes,
        shards=world_size // config.parallelism.dp_replicate,
        cp=cp,
        schedule=schedule,
        inter=inter,
        overlap_stages=resolve_overlap_stages(attention, inter),
        gradient_width=sent.gradient_bytes,
        circulates_queries=schedules.circulates_queries(
            attention.backward_circulates,
            model.heads,
            *sent._replace(kv_heads=sent.kv_heads * copies),
        ),
        gathers_queries=gathers_queries,
        mode=checkpointing.mode,
        compiled=config.compile.enable,
        backend=backend,
        block_size=attention.block_size,
        **_selected(config, model, seq_len),
        optimizer_states=0 if config.optimizer.name == "SGD" else 2,
        optimizer_scratch=implementation == "foreach",
        accumulates=training.gradient_accumulation_steps > 1,
        reshard_after_forward=config.parallelism.reshard_after_forward,
        loss_chunk_tokens=training.loss_chunk_tokens,
        attention_recompute=checkpointing.attention_recompute,
        offload=checkpointing.offload,
        mlp_chunk_tokens=training.mlp_chunk_tokens,
        offload_optimizer=config.optimizer.offload,
        float8=config.float8.enable,
        float8_recipe=config.float8.recipe,
        adapters=resolve_adapters(model, **vars(config.lora)),
    )


def _selected(config: Config, model: DecoderConfig, seq_len: int) -> dict[str, int]:
    """The fields of a StepShape that follow from what one layer selects."""
    size = config.attention.block_size
    pattern = build_pattern(config.attention)
    fields = {"most_blocks": -(-seq_len // size)}
    if pattern.dynamic:
        # Only shapes matter: a tensor on "meta" has no memory.
        sequences = config.training.local_batch_size
        q = torch.empty(sequences, model.heads, 1, model.head_dim, device="meta")
        packed = config.attention.mask == "documents"
        kept = pattern.empty_tensors(q, seq_len, size, packed)
        fields["index_bytes"] = sum(tensor.nbytes for tensor in kept)
        fields["verticals"] = pattern.vertical_count(kept)
        if hasattr(pattern, "most_blocks"):
            fields["most_blocks"] = pattern.most_blocks(seq_len, size, packed)
    return fields


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
