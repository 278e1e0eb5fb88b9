"""What the memory of a training step depends on, and how a configuration becomes that."""

from dataclasses import dataclass
from operator import attrgetter

import torch

from titan_sparse.attention.context_parallel.schedule import (
    LOCAL,
    SCHEDULES,
    Moves,
    Schedule,
    circulates_queries,
)
from titan_sparse.attention.patterns import MoBA, Pattern
from titan_sparse.config import (
    Config,
    padding_multiple,
    resolve_cp_intra,
    resolve_overlap_stages,
)
from titan_sparse.config.reading import KINDS
from titan_sparse.from_config import schedule_named
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.models.lora_config import Adapters, resolve_adapters

LEVERS = {
    "attention_recompute": "activation_checkpoint.attention_recompute",
    "offload": "activation_checkpoint.offload",
    "mlp_chunk_tokens": "training.mlp_chunk_tokens",
    "offload_optimizer": "optimizer.offload",
    "float8": "float8.enable",
    "float8_recipe": "float8.recipe",
}
"""Fields of Step that are configuration options of their own. A field whose option the
configuration does not have keeps its default."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What memory depends on. Sizes are those of one rank.

    sequences: of one forward. seq_len: the padded global length.
    width: bytes of an element in training.dtype.
    shards: ranks that parameters are sharded over. cp: context-parallel ranks.
    inter: nodes that the context-parallel ranks are on.
    overlap_stages: of the schedule group_cast, forward and backward. Its ranks are taken to need
        every block.
    gradient_width: bytes of an element of dK and dV as they are sent.
    circulates_queries: whether queries go around a ring in the backward, not keys and values.
    gathers_queries: whether queries are gathered by the chunks that they chose.
    mode: of activation checkpointing.
    index_bytes: what one layer's selection keeps. verticals: gathered verticals a head, of one
        layer. most_blocks: bound on the KV blocks that a query block meets.
    optimizer_states: copies of the parameters that the optimizer keeps. optimizer_scratch: whether
        its step needs one more for a moment.
    accumulates: whether gradients are summed over several forwards.
    adapters: what is trained in place of the model's own weights.
    """

    model: DecoderConfig
    sequences: int
    seq_len: int
    width: int = 2
    shards: int = 1
    cp: int = 1
    schedule: Schedule = LOCAL
    inter: int = 1
    overlap_stages: tuple[int, int] = (2, 2)
    gradient_width: int = 4
    circulates_queries: bool = False
    gathers_queries: bool = False
    mode: str = "full"
    compiled: bool = False
    backend: str = "eager"
    block_size: int = 128
    index_bytes: int = 0
    verticals: int = 0
    most_blocks: int = 0
    optimizer_states: int = 2
    optimizer_scratch: bool = False
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
        tokens = self.sequences * self.seq_len
        return tokens // self.cp

    @property
    def wide(self) -> int:
        """Bytes of an element of weights, gradients, optimizer states and sums.

        fp32, or fp64 where training.dtype is fp64.
        """
        return max(self.width, 4)


def step_of(
    config: Config,
    model: DecoderConfig,
    pattern: Pattern,
    backend: str,
    world_size: int,
    local_world_size: int,
) -> Step:
    """The step that a checked configuration runs on `world_size` ranks.

    backend: of attention, with "auto" resolved. local_world_size: ranks of a node.
    """
    training = config.training
    attention = config.attention
    parallelism = config.parallelism
    dtype = getattr(torch, training.dtype)
    intra = resolve_cp_intra(parallelism, local_world_size)
    inter = parallelism.cp // intra
    schedule = SCHEDULES[schedule_named(attention, inter, intra)]
    multiple = padding_multiple(config)
    seq_len = -(-training.seq_len // multiple) * multiple

    # torch's optimizers take the foreach implementation by themselves where there is no fused one.
    foreach = config.optimizer.implementation == "foreach"
    foreach_by_default = config.optimizer.implementation == "auto" and training.device == "cpu"
    if attention.gradient_dtype == "bfloat16":
        gradient_width = 2
    else:
        gradient_width = max(dtype.itemsize, 4)
    levers = {field: attrgetter(key)(config) for field, key in LEVERS.items() if key in KINDS}
    return Step(
        model=model,
        sequences=training.local_batch_size,
        seq_len=seq_len,
        width=dtype.itemsize,
        shards=world_size // parallelism.dp_replicate,
        cp=parallelism.cp,
        schedule=schedule,
        inter=inter,
        overlap_stages=resolve_overlap_stages(attention, inter),
        gradient_width=gradient_width,
        circulates_queries=circulates_queries(
            attention.backward_circulates,
            model.heads,
            model.kv_heads,
            model.head_dim,
            dtype.itemsize,
            gradient_width,
        ),
        gathers_queries=_gathers_queries(config, pattern, backend),
        mode=config.activation_checkpoint.mode,
        compiled=config.compile.enable,
        backend=_computing_backend(config, backend, schedule),
        block_size=attention.block_size,
        optimizer_states=0 if config.optimizer.name == "SGD" else 2,
        optimizer_scratch=foreach or foreach_by_default,
        accumulates=training.gradient_accumulation_steps > 1,
        reshard_after_forward=parallelism.reshard_after_forward,
        loss_chunk_tokens=training.loss_chunk_tokens,
        adapters=resolve_adapters(model, **vars(config.lora)),
        **_selection(config, model, pattern, seq_len),
        **levers,
    )


def _computing_backend(config: Config, backend: str, schedule: Schedule) -> str:
    """The backend whose memory counts: cudnn leaves everything but squares and rectangles to triton."""
    if backend != "cudnn":
        return backend
    attention = config.attention
    is_plain = attention.mask != "documents" and attention.sliding_window == 0
    in_runs = attention.layout in ("contiguous", "zigzag")
    makes_rectangles = schedule.moves in (Moves.CHUNKS, Moves.HEADS) and in_runs
    if is_plain and (config.parallelism.cp == 1 or makes_rectangles):
        return "cudnn"
    return "triton"


def _gathers_queries(config: Config, pattern: Pattern, backend: str) -> bool:
    """As attention/schedules/gathered.py decides."""
    return (
        isinstance(pattern, MoBA)
        and backend in ("triton", "flex")
        and config.parallelism.cp == 1
        and config.attention.sliding_window == 0
    )


def _selection(
    config: Config, model: DecoderConfig, pattern: Pattern, seq_len: int
) -> dict[str, int]:
    """index_bytes, verticals and most_blocks of Step."""
    block_size = config.attention.block_size
    packed = config.attention.mask == "documents"
    blocks = -(-seq_len // block_size)
    if not pattern.dynamic:
        return {"most_blocks": blocks}
    # Shapes are all that is asked for: a tensor on "meta" has no memory.
    q = torch.empty(config.training.local_batch_size, model.heads, 1, model.head_dim, device="meta")
    kept_tensors = pattern.empty_tensors(q, seq_len, block_size, packed)
    most_blocks = blocks
    if hasattr(pattern, "most_blocks"):
        most_blocks = pattern.most_blocks(seq_len, block_size, packed)
    return {
        "index_bytes": sum(tensor.nbytes for tensor in kept_tensors),
        "verticals": pattern.vertical_count(kept_tensors),
        "most_blocks": most_blocks,
    }
