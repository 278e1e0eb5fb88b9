"""The decoder. Its modules have the names that Hugging Face uses, so that weights map by name.

A token goes through Decoder.forward: embedding, then each Block (attention, MLP), then the final
norm and the head. The model does not know about parallelism or kernels. It receives attention as a
function, and training/model.py shards it from outside.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.loss import linear_cross_entropy
from titan_sparse.models.config import DecoderConfig, RopeConfig


class LayerMasks(NamedTuple):
    """The masks that a model passes to attention, by kind of layer. The model does not look into
    them.

    full: for layers that see everything. window: for layers with a window. tokens: bool [B, S],
    false for padding; None if no token is padding. linear: for layers with linear attention. move:
    between the tokens of these and those of attention; None where they are the same.
    """

    full: Any
    window: Any = None
    tokens: Tensor | None = None
    linear: Any = None
    move: Any = None


class Attends(NamedTuple):
    """Attention functions by kind of layer, each called like Attend. Models of transformers also
    pass scale=, and sinks= if they have them.

    full: for layers that a pattern applies to. window: for layers with a window, and dense_layers.
    linear: the forward of transformers' linear attention, called with the module first.
    """

    full: Callable[..., Tensor]
    window: Callable[..., Tensor]
    dense_layers: frozenset[int] = frozenset()
    linear: Callable[..., Tensor] = nn.Module.forward


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per token for every pair of dims, and the factor that multiplies cos and sin.

    The frequencies are fp32 [head_dim / 2] on the CPU.
    """
    # Name the device, because under torch.device("meta") there would be no numbers.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.scaling == "none":
        return inv_freq, 1.0
    if rope.scaling == "llama3":
        # Slow frequencies are divided by `factor`, fast ones kept, and those in between blended
        # linearly in frequency.
        wavelengths = 2 * math.pi / inv_freq
        rotations = rope.original_length / wavelengths
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        attention_factor = 1.0
    else:
        # Pairs that turn more than beta_fast times in the training length are kept, those that turn
        # less than beta_slow times are divided by `factor`, and those in between are blended
        # linearly by index.
        fast, slow = (
            # The pair that turns this many times, as a fraction.
            head_dim
            * math.log(rope.original_length / (beta * 2 * math.pi))
            / (2 * math.log(rope.theta))
            for beta in (rope.beta_fast, rope.beta_slow)
        )
        low = max(math.floor(fast), 0)
        high = min(math.ceil(slow), head_dim - 1)
        # The reference widens an empty ramp by this much, and published checkpoints were trained
        # with it.
        width = (high - low) if high != low else 0.001
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        kept = 1 - ((pairs - low) / width).clamp(0, 1)
        attention_factor = 0.1 * math.log(rope.factor) + 1.0
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor, attention_factor


def rope_tables(
    inv_freq: Tensor, attention_factor: float, positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [B, 1, S, D] in `dtype` (float32, or float64 for fp64 models).

    inv_freq fp32 [D / 2] radians per token, positions int [B, S] in tokens; both on one device.
    """
    # [B, 1, S, 1] * [D / 2] -> [B, 1, S, D / 2]
    angles = positions.to(dtype)[:, None, :, None] * inv_freq.to(dtype)
    # [B, 1, S, D]: the two halves of a head turn by the same angles.
    angles = torch.cat((angles, angles), dim=-1)
    # YaRN scales queries and keys by the factor.
    cos = angles.cos() * attention_factor
    sin = angles.sin() * attention_factor
    return cos, sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, S, D] by the tables [B, 1, S, D].

    Computed in the tables' precision or better, and returned as x.dtype. Raises ValueError for
    tables in half precision, which cannot distinguish distant positions.
    """
    if cos.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"rope tables are {cos.dtype} and must stay float32; "
            "with FSDP write MixedPrecisionPolicy(cast_forward_inputs=False)."
        )
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    # [B, H, S, D / 2] each
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos + rotated * sin).to(x.dtype)


Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""attend(q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, D], mask) -> [B, Hq, S, D].

The model passes the mask on without looking into it.
"""


class Attention(nn.Module):
    """Grouped-query self-attention around `attend`; x [B, S, hidden_size] in and out."""

    def __init__(self, config: DecoderConfig, attend: Attend) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = attend
        query_size = config.heads * config.head_dim
        kv_size = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        else:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x [B, S, hidden_size], cos and sin [B, 1, S, D] fp32 or fp64 -> [B, S, hidden_size]."""
        # [B, S, Hq, D] and twice [B, S, Hkv, D]. Qwen3 normalizes each head of q and k separately.
        q = self.q_norm(self._split_heads(self.q_proj(x)))
        k = self.k_norm(self._split_heads(self.k_proj(x)))
        v = self._split_heads(self.v_proj(x))

        # [B, H, S, D], as attend and the rope tables expect it.
        q = apply_rope(q.transpose(1, 2), cos, sin)
        k = apply_rope(k.transpose(1, 2), cos, sin)
        v = v.transpose(1, 2)

        # [B, Hq, S, D]
        out = self.attend(q, k, v, mask)
        # [B, S, Hq * D] -> [B, S, hidden_size]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU; x [B, S, hidden_size] in and out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] -> [B, S, hidden_size]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm decoder layer. It traces with torch.compile(fullgraph=True) if `attend` does."""

    def __init__(
        self, config: DecoderConfig, attend: Attend, mlp: Callable[[DecoderConfig], nn.Module] = MLP
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x [B, S, hidden_size], cos and sin [B, 1, S, D] fp32 or fp64 -> [B, S, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def run_blocks(blocks: Iterable[Callable[..., Tensor]], x: Tensor, *shared: Any) -> Tensor:
    """Pass x [B, S, hidden_size] through all blocks in order. Each is called with (x, *shared)."""
    for block in blocks:
        x = block(x, *shared)
    return x


class Decoder(nn.Module):
    """Embedding, `config.layers` blocks, final norm and head; with tied embeddings `lm_head` is
    None.

    `attend` computes attention for every layer; see `Attend` for its shapes. `mlp` makes the MLP of
    a layer.
    """

    def __init__(
        self, config: DecoderConfig, attend: Attend, mlp: Callable[[DecoderConfig], nn.Module] = MLP
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict()
        for layer in range(config.layers):
            self.layers[str(layer)] = Block(config, attend, mlp)
        # With activation offloading, training.offload.OffloadedBlocks replaces this function.
        self.run_blocks = run_blocks
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Plain attributes, not buffers: to_empty() after a meta-device construction would wipe a
        # buffer, and .double() or .bfloat16() would convert it.
        self.inv_freq, self.attention_factor = inverse_frequencies(config.rope, config.head_dim)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Any,
        labels: Tensor | None = None,
        loss_chunk_tokens: int = 4096,
        z_loss: float = 0.0,
        loss: Callable[..., Tensor] = linear_cross_entropy,
    ) -> Tensor:
        """Loss sum over labels != -100, scalar fp32 (fp64 for fp64 weights). Without labels, logits
        [B, S, V].

        tokens, positions and labels are int [B, S], and labels are already shifted. `mask` is
        passed to attend unchanged. The loss never holds more than `loss_chunk_tokens` rows of
        logits. z_loss is the weight of lse^2 in the loss. `loss` may be another function of
        titan_sparse.loss with the same arguments. Its result is returned.
        """
        # [B, S, hidden_size]
        x = self.embed_tokens(tokens)

        # The angles of all layers, computed once: [B, 1, S, D] each, never in half precision.
        table_dtype = accumulation_dtype(x.dtype)
        if self.inv_freq.device != x.device:
            # Once. In every step, the host would wait for the copy.
            self.inv_freq = self.inv_freq.to(x.device)
        cos, sin = rope_tables(self.inv_freq, self.attention_factor, positions, table_dtype)

        x = self.run_blocks(self.layers.values(), x, cos, sin, mask)
        hidden = self.norm(x)

        # The head is not called as a module, because the loss reads its weight chunk by chunk. The
        # weight is read inside forward because a sharded head is unsharded only here.
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if labels is None:
            return F.linear(hidden, head.weight)
        return loss(hidden, head.weight, labels, loss_chunk_tokens, z_loss)
