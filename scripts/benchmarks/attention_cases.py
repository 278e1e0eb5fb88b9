"""What scripts.benchmarks.attention times, and on which tensors: random patterns, our attention, its dense peers."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash

CUDNN, FLASH4, OURS_DENSE = "cudnn", "flash-attn-4", "ours, dense"
"""Names of the dense peers in rows and on the command line."""
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


# Inputs -------------------------------------------------------------------------------------------------------------


def ready_index(pattern: Pattern, tensors: list[Tensor]) -> Pattern:
    """A pattern like this one whose every selection is `tensors`, so that attention can be timed without selection."""
    # The ops know patterns by name and fields: the number tells this one from others with the same fields.
    members = {"name": f"ready_index {next(_numbers)}", "select_tensors": lambda self, *_: tensors}
    return type("ReadyIndex", (type(pattern),), members)(**dataclasses.asdict(pattern))


def random_index(
    shape: Shape, density: float, vertical_share: float, sinks: int
) -> tuple[VerticalSlash, list[Tensor]]:
    """A pattern whose caps hold the index, and the index as tensors: VerticalSlashIndex.tensors().

    density: share of the causal pairs, to be reached per head by random block diagonals beside the two local ones.
    vertical_share: verticals per token of the sequence, the `sinks` first tokens included.
    """
    g = torch.Generator().manual_seed(0)
    heads, seq_len, blocks = shape.heads, shape.seq_len, shape.seq_len // shape.block_size
    verticals = max(sinks, round(vertical_share * seq_len))
    slashes, picked = torch.zeros(heads, blocks, dtype=torch.bool), []
    for head in range(heads):
        random = torch.randperm(seq_len - sinks, generator=g)[: verticals - sinks] + sinks
        picked.append(torch.cat([torch.arange(sinks), random.sort().values]))
        slashes[head, :2] = True
        area, total = 2 * blocks - 1, blocks * (blocks + 1) / 2
        for delta in (torch.randperm(blocks - 2, generator=g) + 2).tolist():
            if area / total + (1 - area / total) * verticals / seq_len >= density:
                break
            slashes[head, delta], area = True, area + blocks - delta
    pattern = VerticalSlash(
        sinks=sinks, max_columns=verticals, max_slashes=int(slashes.sum(-1).max())
    )
    padded = torch.full(
        (heads, pattern.vertical_capacity(seq_len, shape.block_size, False)),
        seq_len,
        dtype=torch.int32,
    )
    padded[:, :verticals] = torch.stack(picked)
    return pattern, [
        x[None].to(shape.device) for x in (slashes, padded, torch.zeros(heads, 2, dtype=torch.bool))
    ]


def draw(shape: Shape) -> list[Tensor]:
    """q, k, v that want a gradient, and the upstream gradient, all bf16."""
    torch.manual_seed(1)
    q, k, v, d_out = (
        torch.randn(
            1, heads, shape.seq_len, shape.head_dim, device=shape.device, dtype=torch.bfloat16
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    )
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out]


# What is timed ------------------------------------------------------------------------------------------------------


def ours(
    backend: str,
    pattern: Pattern,
    rows: MaskRanges,
    block_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """attend(); with a ready_index() all of it but the selection."""
    return attend(q, k, v, rows, pattern, backend=backend, block_size=block_size)


def sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA on one of its kernels, causal; on cuDNN the denominator of `ratio_to_cudnn`."""
    with sdpa_kernel(kernel):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4 (CuTe) called directly, causal."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def dense_peers(names: list[str], rows: MaskRanges, block_size: int) -> dict[str, Attention]:
    """The dense peers asked for, in the order in which they are timed."""
    peers = {
        CUDNN: functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        FLASH4: flash4,
        OURS_DENSE: functools.partial(ours, "flex", Dense(), rows, block_size),
    }
    return {name: call for name, call in peers.items() if name in names}
