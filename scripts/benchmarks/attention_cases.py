"""What scripts.benchmarks.attention times, and on which tensors.

Random patterns, our attention, and its dense peers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_sparse.attention import attend, backends
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash
from titan_sparse.estimate import synthetic

CUDNN, FLASH4 = "cudnn", "flash-attn-4"
"""Names of others' dense attention in rows and on the command line."""
OURS_DENSE = {"ours, dense": "flex", "ours, cudnn": "cudnn", "ours, triton": "triton"}
"""{name in rows and on the command line: backend} of our own dense attention."""
_numbers = itertools.count(1)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, Hq, S, D], k and v [B, Hkv, S, D] -> out [B, Hq, S, D]."""


class Shape(NamedTuple):
    """What attention is timed on: a batch of one sequence, in bf16."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    seq_len: int
    device: str = "cuda"


def chosen_backend(backend: str, shape: Shape, dynamic: bool) -> str:
    """What "auto" means for this shape; another name means itself.

    dynamic: whether the pattern is sparse.
    """
    if backend != "auto":
        return backend
    case = (shape.device, torch.bfloat16, shape.head_dim, shape.block_size)
    return backends.choose(backend, *case, dynamic=dynamic)


def ready_index(pattern: Pattern, tensors: list[Tensor]) -> Pattern:
    """A pattern like this one whose every selection is `tensors`.

    With it, attention can be timed without selection.
    """
    # The ops know patterns by name and fields. The number tells this one from others with the same
    # fields.
    members = {"name": f"ready_index {next(_numbers)}", "select_tensors": lambda self, *_: tensors}
    return type("ReadyIndex", (type(pattern),), members)(**dataclasses.asdict(pattern))


def random_index(
    shape: Shape, density: float, vertical_share: float, sinks: int
) -> tuple[VerticalSlash, list[Tensor]]:
    """synthetic.random_index() on the shape's device."""
    pattern, tensors = synthetic.random_index(
        shape.heads, shape.seq_len, shape.block_size, density, vertical_share, sinks
    )
    return pattern, [tensor.to(shape.device) for tensor in tensors]


def draw(shape: Shape) -> list[Tensor]:
    """q, k, v that want a gradient, and the upstream gradient, all bf16."""
    torch.manual_seed(1)

    def normal(heads: int) -> Tensor:  # [1, heads, S, D]
        size = (1, heads, shape.seq_len, shape.head_dim)
        return torch.randn(size, device=shape.device, dtype=torch.bfloat16)

    q = normal(shape.heads)
    k = normal(shape.kv_heads)
    v = normal(shape.kv_heads)
    d_out = normal(shape.heads)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out]


def ours(
    backend: str,
    pattern: Pattern,
    ranges: MaskRanges,
    block_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """attend(); with a ready_index() all of it but the selection."""
    return attend(q, k, v, ranges, pattern, backend=backend, block_size=block_size)


def sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA on one of its kernels, causal; on cuDNN the denominator of `ratio_to_cudnn`."""
    with sdpa_kernel(kernel):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4 (CuTe) called directly, causal."""
    from flash_attn.cute import flash_attn_func

    # Its tensors are [B, S, H, D].
    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    if isinstance(out, tuple):  # some versions return the LSE too
        out = out[0]
    return out.transpose(1, 2)


def dense_peers(names: list[str], ranges: MaskRanges, block_size: int) -> dict[str, Attention]:
    """The dense peers asked for, in the order in which they are timed."""
    peers = {
        CUDNN: functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        FLASH4: flash4,
    }
    for name, backend in OURS_DENSE.items():
        peers[name] = functools.partial(ours, backend, Dense(), ranges, block_size)
    return {name: call for name, call in peers.items() if name in names}
