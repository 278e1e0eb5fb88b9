"""Which kernel computes a piece of attention. A backend is a module with these functions over Tiles:

forward(q, k, v, tiles, scale, dtype, total, into) -> out, lse       one piece: a KV chunk's blocks, or the gathered verticals;
                                                        out in dtype; total: out and lse of other pieces, to go on from
backward(d_out, q, k, v, out, lse, tiles, scale, dtype, dq, into) -> dq, dk, dv        with the global out and lse; dq: to add to
                                                        into: memory for out or dq, in its dtype. A first piece that a kernel
                                                        rounds is not widened to dtype
forward_with_verticals, backward_with_verticals             a chunk's blocks and the verticals, in the cheapest way
serves_causal(q) -> bool, forward_causal, backward_causal, forward_full, backward_full, forward_packed, backward_packed
                                                        dense attention without tiles, where it can
refusal(device_type, dtype, head_dim, block_size) -> str | None          why it cannot serve a case
describe() -> str                                       what computes, for the banner
READS_BY_KEY: bool                                      whether backward needs Tiles.by_key
SERVES_SLICES: bool                                     whether it takes Tiles of a mask of slices
COMPILES_BY_LENGTH: bool                                whether a number of keys that it has not seen takes seconds to compile
"""

from types import ModuleType

import torch

from titan_sparse.attention.backends import eager, flash, flex, triton

BACKENDS: dict[str, ModuleType] = {"eager": eager, "flex": flex, "triton": triton}


@torch.compiler.assume_constant_result
def choose(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    slices: bool = False,
) -> str:
    """The backend that `name` ("auto" or a backend) means for these inputs: the fastest that serves them. slices: whether the
    mask has Slices.

    Raises ValueError for an unknown name, and if the backend asked for cannot serve them, saying why.
    """
    case = (device_type, dtype, head_dim, block_size)
    if name == "auto":
        return next(
            backend for backend in _by_speed(*case[:3]) if _refusal(backend, case, slices) is None
        )
    if name not in BACKENDS:
        raise ValueError(
            f'attention.backend = "{name}" is unknown; write "auto" or one of {", ".join(BACKENDS)}'
        )
    refused = _refusal(name, case, slices)
    if refused:
        raise ValueError(refused)
    return name


def _refusal(name: str, case: tuple[str, torch.dtype, int, int], slices: bool) -> str | None:
    if slices and not BACKENDS[name].SERVES_SLICES:
        serving = [other for other, backend in BACKENDS.items() if backend.SERVES_SLICES]
        return f'attention.backend = "{name}" does not compute masks of Slices; write "auto" or one of {", ".join(serving)}'
    return BACKENDS[name].refusal(*case)


def explain(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    slices: bool = False,
) -> str:
    """What choose() gives and why, for the banner."""
    case = (device_type, dtype, head_dim, block_size)
    chosen = choose(name, *case, slices)
    if name != "auto":
        return f"{BACKENDS[chosen].describe()}; asked for"
    order = _by_speed(*case[:3])
    faster = order[: order.index(chosen)]
    refused = "".join(f"; not {other}, since {_refusal(other, case, slices)}" for other in faster)
    lacks_flash = chosen == "triton" and not slices and flash.missing()
    slower = f"; flex would be faster, but {flash.missing()}" if lacks_flash else ""
    return BACKENDS[chosen].describe() + refused + slower


def has_flash_attention_4() -> bool:
    """Whether FlashAttention-4 is installed and computes on this GPU."""
    return flash.missing() is None


def _by_speed(device_type: str, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """Fastest first, as measured on an H200 (docs/benchmarks.md). On the CPU kernels are for tests, by interpretation."""
    if device_type != "cuda":
        return ("eager",)
    return (
        ("flex", "triton", "eager")
        if flash.serves(dtype, head_dim)
        else ("triton", "flex", "eager")
    )
