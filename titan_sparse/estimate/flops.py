"""FLOPs of a training step: what MFU sets against the chip's peak.

Counted are the multiplications and additions a step has to do: forward 1x and backward 2x, recomputation not, attention only
over the pairs visited (causal and sparse), the embedding lookup not. What a dense model would have needed for the same
tokens is another number (dense-equivalent) and never part of MFU.
"""

from titan_sparse.models.flavours import DecoderConfig

# Dense bf16 peak by the name that the driver gives, TFLOP/s without structured sparsity, from the vendors' datasheets.
PEAK_TFLOPS = {
    "H200": 989.5,
    "H100": 989.5,
    "A100": 312.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "L40S": 362.0,
}

FLOAT8_SPEEDUP = 2.0
"""Peak of float8 matmuls over that of bf16, the same on all chips that have them."""


def peak_flops(device_name: str, peak_tflops: float) -> float | None:
    """bf16 FLOP/s of one device: metrics.peak_tflops if given, else by name; None if the name is unknown."""
    if peak_tflops > 0:
        return peak_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if name in device_name:
            return PEAK_TFLOPS[name] * 1e12
    return None


def linear_flops_per_token(config: DecoderConfig) -> float:
    """Training FLOPs of one token in the blocks' linear layers: 6 per weight; biases and norms are not matmuls."""
    query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return (
        6.0
        * config.layers
        * config.hidden_size
        * (2 * (query_size + kv_size) + 3 * config.intermediate_size)
    )


def head_flops_per_token(config: DecoderConfig) -> float:
    """Training FLOPs of one token in the LM head, tied or not."""
    return 6.0 * config.vocab_size * config.hidden_size


def attention_flops(config: DecoderConfig, visited_pairs: float) -> float:
    """Training FLOPs of attention over `visited_pairs`, summed over layers and heads: QK^T and PV, 3 x 4 D a pair."""
    return 12.0 * config.head_dim * visited_pairs


def causal_pairs(seq_len: int, window: int = 0, sinks: int = 0) -> float:
    """Pairs of tokens that one head sees in a sequence of `seq_len` tokens; window: last tokens seen, 0: all; sinks: first
    tokens seen besides."""
    inside = min(window or seq_len, seq_len)
    # The sinks before the window grow with the distance, as a window from the sequence's start does.
    before = causal_pairs(seq_len - inside, sinks) if sinks else 0
    return inside * (inside + 1) / 2 + (seq_len - inside) * inside + before


def flops_per_token(config: DecoderConfig, pairs_per_token: float) -> float:
    """All training FLOPs of one token; pairs_per_token: visited, summed over layers and heads."""
    return (
        linear_flops_per_token(config)
        + head_flops_per_token(config)
        + attention_flops(config, pairs_per_token)
    )


def utilization(
    config: DecoderConfig,
    pairs_per_token: float,
    tokens_per_second: float,
    peak: float,
    float8: bool = False,
) -> float:
    """MFU of one device: the seconds that a token takes at the peak, over those that it took.

    peak: bf16 FLOP/s. float8: linear layers are set against the float8 peak, head and attention still against bf16's, so
    that no speed-up of float8 counts as utilization.
    """
    linear = linear_flops_per_token(config)
    rest = flops_per_token(config, pairs_per_token) - linear
    return (linear / (FLOAT8_SPEEDUP if float8 else 1.0) + rest) / peak * tokens_per_second
