"""Which kernel computes a piece of attention. A backend is a module with these functions over Tiles:

forward(q, k, v, tiles, scale) -> out, lse              one piece: a KV chunk's blocks, or the gathered columns
backward(d_out, q, k, v, out, lse, tiles, scale) -> dq, dk, dv           with the global out and lse
forward_with_columns, backward_with_columns             both pieces in one launch, where the backend can (triton)
refusal(device_type, dtype, head_dim, block_size) -> str | None          why it cannot serve a case
describe() -> str                                       what computes, for the banner
READS_BY_KEY: bool                                      whether backward needs Tiles.by_key
"""

from types import ModuleType

import torch

from titan_sparse.attention.backends import eager, flex, triton

BACKENDS: dict[str, ModuleType] = {"eager": eager, "flex": flex, "triton": triton}


@torch.compiler.assume_constant_result
def choose(name: str, device_type: str, dtype: torch.dtype, head_dim: int, block_size: int, dense: bool) -> str:
    """The backend that `name` ("auto" or a backend) means for these inputs: the fastest that serves them.

    dense: whether the pattern is dense.

    Raises ValueError for an unknown name, and if the backend asked for cannot serve them, saying why.
    """
    case = (device_type, dtype, head_dim, block_size)
    if name == "auto":
        return next(backend for backend in _by_speed(device_type, dense) if BACKENDS[backend].refusal(*case) is None)
    if name not in BACKENDS:
        raise ValueError(f'attention.backend = "{name}" is unknown; write "auto" or one of {", ".join(BACKENDS)}')
    refused = BACKENDS[name].refusal(*case)
    if refused:
        raise ValueError(refused)
    return name


def explain(name: str, device_type: str, dtype: torch.dtype, head_dim: int, block_size: int, dense: bool) -> str:
    """What choose() gives and why, for the banner."""
    case = (device_type, dtype, head_dim, block_size)
    chosen = choose(name, *case, dense)
    if name != "auto":
        return f"{BACKENDS[chosen].describe()}; asked for"
    order = _by_speed(device_type, dense)
    faster = order[: order.index(chosen)]
    refused = "".join(f"; not {other}, since {BACKENDS[other].refusal(*case)}" for other in faster)
    return BACKENDS[chosen].describe() + refused


def has_flash_attention_4() -> bool:
    """Whether flex computes with FlashAttention-4 here."""
    return flex._flash_missing() is None


def _by_speed(device_type: str, dense: bool) -> tuple[str, ...]:
    """Fastest first, as measured on an H200 (docs/benchmarks.md): FlashAttention-4 where everything is computed, our
    fused kernels where little is. On the CPU kernels are for tests, by interpretation."""
    if device_type != "cuda":
        return ("eager",)
    return ("flex", "triton", "eager") if dense and has_flash_attention_4() else ("triton", "flex", "eager")
