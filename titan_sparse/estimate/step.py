"""What the memory of a training step depends on, and how a configuration becomes that."""

from dataclasses import dataclass

import torch

from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.schedules import (
    LOCAL,
    SCHEDULES,
    Moves,
    Schedule,
    circulates_queries,
)
from titan_sparse.attention.patterns import Pattern
from titan_sparse.config import Config, padding_multiple, resolve_cp_intra, resolve_overlap_stages
from titan_sparse.estimate.constants import shape_of
from titan_sparse.from_config import schedule_named
from titan_sparse.models.config import Adapters, DecoderConfig, resolve_adapters


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What memory depends on. Sizes are those of one rank; fields named as keys are those keys."""

    model: DecoderConfig
    sequences: int
    """of one forward"""
    seq_len: int
    """the padded global length"""
    width: int = 2
    """bytes of an element in training.dtype"""
    shards: int = 1
    """ranks that parameters are sharded over"""
    cp: int = 1
    schedule: Schedule = LOCAL
    inter: int = 1
    """nodes that the context-parallel ranks are on"""
    overlap_stages: tuple[int, int] = (2, 2)
    """forward and backward; each rank is assumed to need every block"""
    gradient_width: int = 4
    """bytes of an element of dK and dV as they are sent"""
    circulates_queries: bool = False
    gathers_queries: bool = False
    """whether queries are gathered by the chunks that they chose"""
    mode: str = "full"
    compiled: bool = False
    backend: str = "eager"
    block_size: int = 128
    index_bytes: int = 0
    """what one layer's selection keeps"""
    verticals: int = 0
    """gathered verticals of a head in one layer"""
    most_blocks: int = 0
    """the most KV blocks that a query block can meet"""
    optimizer_states: int = 2
    """copies of the parameters that the optimizer keeps"""
    optimizer_scratch: bool = False
    """whether its step needs one more copy for a moment"""
    accumulates: bool = False
    reshard_after_forward: bool = True
    loss_chunk_tokens: int = 2048
    attention_recompute: float = 0.0
    offload: bool = False
    mlp_chunk_tokens: int = 0
    offload_optimizer: bool = False
    float8: bool = False
    float8_recipe: str = "rowwise"
    adapters: Adapters | None = None

    @property
    def tokens(self) -> int:
        """Tokens of this rank in one forward."""
        return self.sequences * self.seq_len // self.cp

    @property
    def blocks(self) -> int:
        """Blocks of those tokens."""
        return -(-self.tokens // self.block_size)

    @property
    def query(self) -> int:
        """Elements of q on this rank."""
        return self.tokens * self.model.heads * self.model.head_dim

    @property
    def kv(self) -> int:
        """Elements of K on this rank. V has as many."""
        return self.tokens * self.model.kv_heads * self.model.head_dim

    @property
    def wide(self) -> int:
        """Bytes of an element of weights, gradients, optimizer states, and sums: fp32, or fp64."""
        return max(self.width, 4)

    @property
    def recomputed(self) -> float:
        """Share of attention's results that the backward computes again; all if the run decides."""
        return 1.0 if self.attention_recompute < 0 else self.attention_recompute

    @property
    def has_adapters_in_mlp(self) -> bool:
        in_mlp = {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
        return self.adapters is not None and not in_mlp.isdisjoint(self.adapters.targets)


def step_of(
    config: Config,
    model: DecoderConfig,
    pattern: Pattern,
    backend: str,
    world_size: int,
    local_world_size: int,
) -> StepShape:
    """The step that a checked configuration runs on `world_size` ranks.

    backend: of attention, with "auto" resolved. local_world_size: ranks of a node.
    """
    training = config.training
    attention = config.attention
    checkpointing = config.activation_checkpoint
    cp = config.parallelism.cp
    sent = shape_of(config, model)
    intra = resolve_cp_intra(config.parallelism, local_world_size)
    inter = cp // intra
    schedule = SCHEDULES[schedule_named(attention, inter, intra)]
    multiple = padding_multiple(config)
    seq_len = -(-training.seq_len // multiple) * multiple

    gathers_queries = (
        pattern.gathers_queries
        and BACKENDS[backend].GATHERS_QUERIES
        and cp == 1
        and attention.sliding_window == 0
    )
    # cudnn leaves all but squares and rectangles to triton.
    is_plain = attention.mask != "documents" and attention.sliding_window == 0
    in_runs = attention.layout in ("contiguous", "zigzag")
    makes_rectangles = schedule.moves in (Moves.CHUNKS, Moves.HEADS) and in_runs
    if backend == "cudnn" and not (is_plain and (cp == 1 or makes_rectangles)):
        backend = "triton"

    # torch's optimizers choose the foreach implementation where there is no fused one.
    implementation = config.optimizer.implementation
    foreach = implementation == "foreach" or (implementation == "auto" and training.device == "cpu")
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
        circulates_queries=circulates_queries(attention.backward_circulates, model.heads, *sent),
        gathers_queries=gathers_queries,
        mode=checkpointing.mode,
        compiled=config.compile.enable,
        backend=backend,
        block_size=attention.block_size,
        **_selected(config, model, pattern, seq_len),
        optimizer_states=0 if config.optimizer.name == "SGD" else 2,
        optimizer_scratch=foreach,
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


def _selected(
    config: Config, model: DecoderConfig, pattern: Pattern, seq_len: int
) -> dict[str, int]:
    """The fields of a StepShape that follow from what one layer selects."""
    size = config.attention.block_size
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
