"""The sizes on which the memory of a training step depends."""

from dataclasses import dataclass

from titan_sparse.attention.context_parallel.schedules import LOCAL, Moves, Schedule, kv_copies
from titan_sparse.models.config import Adapters, DecoderConfig


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The sizes on which memory depends. Sizes are those of one rank; fields named as keys are
    those keys."""

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
    def head_shares(self) -> int:
        """Ranks that share the heads: those of a node, if they trade tokens for heads."""
        return self.cp // self.inter if self.schedule.moves is Moves.TOKENS else 1

    @property
    def kv_copies(self) -> int:
        """The number of these ranks that each KV head is sent to."""
        return kv_copies(self.model.heads, self.model.kv_heads, self.head_shares)

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
