"""FLOPs of a training step: what MFU divides by the chip's peak.

Counted are the multiplications a step has to do: forward 1x and backward 2x, recomputation not, attention only over
the pairs visited (causal and sparse), the embedding lookup not.
"""

from titan_sparse.models.flavours import DecoderConfig, number_of_parameters

# Dense bf16 peak by the name that the driver gives, TFLOP/s without structured sparsity, from the vendors' datasheets.
PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "A100": 312.0, "B200": 2250.0, "GB200": 2500.0, "L40S": 362.0}


def peak_flops(device_name: str, peak_tflops: float) -> float | None:
    """FLOP/s of one device: metrics.peak_tflops if given, else by name; None if the name is unknown."""
    if peak_tflops > 0:
        return peak_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if name in device_name:
            return PEAK_TFLOPS[name] * 1e12
    return None


def matmul_flops_per_token(config: DecoderConfig) -> float:
    """Training FLOPs of one token in all matmuls with weights: 6 per weight, the head's included once."""
    embedding = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tied_embeddings else embedding
    return 6.0 * (number_of_parameters(config) - looked_up)


def attention_flops(config: DecoderConfig, visited_pairs: float) -> float:
    """Training FLOPs of attention over `visited_pairs`, summed over layers and heads: QK^T and PV, 3 x 4 D a pair."""
    return 12.0 * config.head_dim * visited_pairs
