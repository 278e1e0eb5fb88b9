"""The cases that benchmarks of attention time, their tensors, and checks of the results.

Random patterns, our attention, its dense peers, and errors in bf16 against fp32.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import flex
from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.patterns import BlockIndex, Dense, Pattern, VerticalSlash
from titan_sparse.estimate.indexes import random_index

CUDNN, FLASH4 = "cudnn", "flash-attn-4"
"""Names of others' dense attention in rows."""


LIMIT = 5e-3
"""The largest error of anything that is right."""
_numbers = itertools.count(1)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, Hq, S, D], k and v [B, Hkv, S, D] -> out [B, Hq, S, D]."""


class Shape(NamedTuple):
    """The inputs of timed attention: a batch of one sequence, in bf16."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    seq_len: int
    device: str = "cuda"


def ready_index(pattern: Pattern, tensors: list[Tensor]) -> Pattern:
    """A pattern like this one whose every selection is `tensors`.

    With it, attention can be timed without selection.
    """
    # The ops know patterns by name and fields. The number tells this one from others with the same
    # fields.

    def select_tensors(_, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, *__):
        # Under the schedule ulysses a rank selects for its own heads.
        number = cp.whole.rank % cp.whole.intra if cp.whole is not cp else 0
        return [x.narrow(1, number * q.shape[1], q.shape[1]) for x in tensors]

    members = {"name": f"ready_index {next(_numbers)}", "select_tensors": select_tensors}
    return type("ReadyIndex", (type(pattern),), members)(**dataclasses.asdict(pattern))


def sparse(
    shape: Shape,
    density: float,
    args: argparse.Namespace,
    cp: ContextParallel | None = None,
) -> tuple[Pattern, list[Tensor], Callable[[], BlockIndex]]:
    """A pattern with a random index of this density, of --verticals and --sinks.

    Also q, k, v and d_out (this rank's), and a selection with the same caps.
    """
    pattern, index = random_index(
        shape.heads, shape.seq_len, shape.block_size, density, args.verticals, args.sinks
    )
    ranges = Causal().rows(shape.seq_len, shape.device)
    tensors = draw(shape._replace(seq_len=shape.seq_len // (cp.size if cp else 1)))
    q, k = (tensor.detach() for tensor in tensors[:2])
    block_size = shape.block_size if cp is None else None
    select = functools.partial(pattern.select, q, k, ranges, cp, block_size=block_size)
    return ready_index(pattern, [tensor.to(shape.device) for tensor in index]), tensors, select


def draw(shape: Shape) -> list[Tensor]:
    """q, k, v that require gradients, and the upstream gradient, all bf16."""
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
    cp: ContextParallel | None = None,
) -> Attention:
    """attend() as a function of q, k, v. With a ready_index() it leaves out the selection."""
    return functools.partial(
        attend,
        mask=ranges,
        pattern=pattern,
        cp=cp,
        backend=backend,
        block_size=block_size if cp is None else None,
    )


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA on cuDNN, causal: the denominator of `ratio_to_cudnn`."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4 (CuTe) called directly, causal."""
    from flash_attn.cute import flash_attn_func

    # Its tensors are [B, S, H, D].
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = flash_attn_func(q, k, v, causal=True)
    if isinstance(out, tuple):  # some versions return the LSE too
        out = out[0]
    return out.transpose(1, 2)


def dense_peers(ranges: MaskRanges, shape: Shape) -> dict[str, Attention]:
    """The dense peers that run here, in the order in which they are timed; none on a CPU."""
    if shape.device == "cpu":
        return {}
    peers = {CUDNN: cudnn}
    if flex.missing() is None:
        peers[FLASH4] = flash4
    return peers | {"ours, dense": ours("auto", Dense(), ranges, shape.block_size)}


# Errors -------------------------------------------------------------------------------------------


def errors(call: Attention, shape: Shape, seen: Tensor) -> dict[str, float]:
    """Relative Frobenius errors of out, dq, dk and dv against fp32 over bool `seen` [Hq, S, S]."""
    q, k, v, d_out = draw(shape)
    out = call(q, k, v)
    computed = [out, *torch.autograd.grad(out, (q, k, v), d_out)]
    exact = _reference([x.detach().float() for x in (q, k, v)], d_out.float(), seen)
    found = {}
    for name, value, reference in zip(("out", "dq", "dk", "dv"), computed, exact):
        found[name] = ((value.float() - reference).norm() / reference.norm()).item()
    return found


def _reference(qkv: list[Tensor], d_out: Tensor, seen: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in the dtype of the inputs, head by head: the scores of one fit in memory."""
    q, k, v = leaves = [x.requires_grad_() for x in qkv]
    group = q.shape[1] // k.shape[1]  # query heads of a KV head
    outs = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].mT * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen[head], -torch.inf).softmax(-1)
        out = weights @ v[:, head // group]
        out.backward(d_out[:, head])
        outs.append(out.detach())
    return [torch.stack(outs, 1), *(leaf.grad for leaf in leaves)]


def cases_to_check(shape: Shape, names: list[str]) -> Iterator[tuple[str, Attention, Tensor]]:
    """(name, attention, bool `seen` [Hq, S, S]) of everything that is timed.

    names: our backends. Their index is chosen by our selection.
    """
    # Caps make it sparse on random inputs. The budget is independent: with joint scores, most
    # candidates of random inputs have equal scores, and a cap would drop them together.
    pattern = VerticalSlash(
        recall=0.9,
        max_verticals=shape.seq_len * 3 // 100,
        max_slashes=8,
        budget="independent",
        probe_rows="last",
        count_sinks=True,
        dense_below=shape.seq_len // 4,
    )
    ranges = Causal().rows(shape.seq_len, shape.device)
    causal = Causal().dense(shape.seq_len, shape.device)[0]
    for name, call in dense_peers(ranges, shape).items():
        yield name, call, causal.expand(shape.heads, -1, -1)
    q, k, _, _ = draw(shape)
    index = pattern.select(q, k, ranges, block_size=shape.block_size)
    ready = ready_index(pattern, index.tensors())
    seen = index.dense(Causal())[0]
    for name in names:
        yield name, ours(name, ready, ranges, shape.block_size), seen


def check(cases: Iterator[tuple[str, Attention, Tensor]], shape: Shape) -> dict[str, dict]:
    """errors() by name. RuntimeError if an error is above LIMIT."""
    results = {}
    for name, call, seen in cases:
        results[name] = errors(call, shape, seen)
        # NaN is too large as well.
        wrong = {tensor: error for tensor, error in results[name].items() if not error <= LIMIT}
        if wrong:
            raise RuntimeError(f"{name} is wrong at {shape.seq_len} tokens: {wrong}")
    return results
