"""FLOPs of a training step: what MFU compares with the chip's peak.

Only the multiplications and additions that a step has to do are counted: forward 1x and backward
2x, or 1x for frozen weights. Recomputation and the embedding lookup are not counted. Attention
counts only the visited pairs (causal and sparse). What a dense model would have needed for the same
tokens is another number (dense-equivalent), which is never part of MFU.
"""

from titan_sparse.models.config import Adapters, DecoderConfig, block_adapter_elements

PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.5,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H200": 989.5,
    "H200 NVL": 835.5,
    "B200": 2250.0,
    "GB200": 2500.0,
    "L40S": 362.0,
}
"""Dense bf16 peak by a part of the name that the driver gives, TFLOP/s without structured sparsity,
from NVIDIA's datasheets. The longest part that fits counts."""

FLOAT8_SPEEDUP = 2.0
"""Peak of float8 matmuls over that of bf16, the same on all chips that have them."""


def peak_flops(device_name: str, peak_tflops: float) -> float | None:
    """bf16 FLOP/s of one device.

    peak_tflops: metrics.peak_tflops, which wins if it is above 0. Else the device's name decides;
    None if the name is unknown.
    """
    if peak_tflops > 0:
        return peak_tflops * 1e12
    # "GB200" contains "B200".
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if name in device_name:
            return PEAK_TFLOPS[name] * 1e12
    return None


def causal_pairs(seq_len: int, window: int = 0, sinks: int = 0) -> float:
    """Pairs of tokens that one head sees in a sequence of `seq_len` tokens.

    window: the last tokens that a query sees; 0 means all. sinks: the first tokens, which it sees
    too.
    """
    inside = min(window or seq_len, seq_len)
    # The first queries see a triangle, all later ones a full window.
    triangle = inside * (inside + 1) / 2
    pairs_in_window = triangle + (seq_len - inside) * inside
    if not sinks:
        return pairs_in_window
    # The sinks before the window grow with the distance, as a window from the
    # sequence's start does.
    return pairs_in_window + causal_pairs(seq_len - inside, sinks)


def windows_of(config: DecoderConfig, window: int = 0) -> list[int]:
    """Tokens that a query of each layer sees; 0 means all. Some models have windows of their own.

    window: attention.sliding_window, which applies to all layers.
    """
    own = config.windows or (0,) * config.layers
    return [min(window, of_layer) or window or of_layer for of_layer in own]


def linear_flops_per_token(config: DecoderConfig, adapters: Adapters | None = None) -> float:
    """Training FLOPs of one token in the blocks' linear layers.

    6 for each weight, and 4 for a frozen one. Biases and norms are not matmuls. In a mixture of
    experts, the router counts and the experts that a token is sent to.
    """
    flops_of_weight = 4.0 if adapters else 6.0
    return flops_of_weight * config.weights_per_token() + 6.0 * block_adapter_elements(
        config, adapters
    )


def flops_per_token(
    config: DecoderConfig,
    pairs_per_token: float,
    adapters: Adapters | None = None,
    linear_speedup: float = 1.0,
) -> float:
    """All training FLOPs of one token.

    pairs_per_token: pairs visited, summed over layers and heads. linear_speedup: by how much fewer
    FLOPs of linear layers count.
    """
    linear = linear_flops_per_token(config, adapters) / linear_speedup
    # The gradient of all rows is computed, also where only some of them are trained.
    is_frozen = adapters is not None and not adapters.tokens
    head = (4.0 if is_frozen else 6.0) * config.vocab_size * config.hidden_size
    # QK^T and PV are 3 x 4 D for each pair.
    attention = 12.0 * config.head_dim * pairs_per_token
    # A token reads the state of linear attention with its key, adds to it, and reads it with its
    # query: 2 each for an element of the state. Kernels compute more, in chunks of tokens.
    state = 3 * 6.0 * config.linear_state * len(config.linear_layers)
    return linear + head + attention + state


def utilization(
    config: DecoderConfig,
    pairs_per_token: float,
    tokens_per_second: float,
    peak: float,
    float8: bool = False,
    adapters: Adapters | None = None,
) -> float:
    """MFU of one device: the seconds that a token takes at the peak, divided by those that it took.

    peak: bf16 FLOP/s. float8: linear layers are compared with the float8 peak, head and attention
    with that of bf16. So a speed-up by float8 does not count as utilization.
    """
    # As many bf16 FLOPs would take as long.
    speedup = FLOAT8_SPEEDUP if float8 else 1.0
    return flops_per_token(config, pairs_per_token, adapters, speedup) / peak * tokens_per_second
