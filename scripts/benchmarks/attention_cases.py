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
    """A pattern whose caps hold the index, and the index as VerticalSlashIndex.tensors().

    density: share of the causal pairs, reached per head by random block diagonals beside the two
    local ones. vertical_share: verticals per token of the sequence, the `sinks` first tokens
    included.
    """
    generator = torch.Generator().manual_seed(0)
    heads = shape.heads
    seq_len = shape.seq_len
    blocks = seq_len // shape.block_size
    all_tiles = blocks * (blocks + 1) / 2
    verticals = max(sinks, round(vertical_share * seq_len))

    slashes = torch.zeros(heads, blocks, dtype=torch.bool)  # [Hq, diagonals]
    picked = []  # verticals of each head
    for head in range(heads):
        shuffled = torch.randperm(seq_len - sinks, generator=generator)
        random_verticals = shuffled[: verticals - sinks] + sinks
        picked.append(torch.cat([torch.arange(sinks), random_verticals.sort().values]))
        slashes[head, :2] = True
        tiles = 2 * blocks - 1
        for delta in (torch.randperm(blocks - 2, generator=generator) + 2).tolist():
            # Verticals add their share of what the diagonals leave out.
            covered = tiles / all_tiles
            if covered + (1 - covered) * verticals / seq_len >= density:
                break
            slashes[head, delta] = True
            tiles += blocks - delta

    pattern = VerticalSlash(
        sinks=sinks, max_columns=verticals, max_slashes=int(slashes.sum(-1).max())
    )
    # Unused places hold seq_len, which is no token.
    capacity = pattern.vertical_capacity(seq_len, shape.block_size, False)
    padded = torch.full((heads, capacity), seq_len, dtype=torch.int32)
    padded[:, :verticals] = torch.stack(picked)
    capped = torch.zeros(heads, 2, dtype=torch.bool)
    return pattern, [tensor[None].to(shape.device) for tensor in (slashes, padded, capped)]


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
