"""What benchmarks of attention time, on which tensors, and whether it computes what it should.

Random patterns, our attention, its dense peers, and errors in bf16 against fp32.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_sparse.attention import attend, backends
from titan_sparse.attention.masks.ranges import Causal, Documents, MaskRanges
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash
from titan_sparse.estimate import synthetic

CUDNN, FLASH4 = "cudnn", "flash-attn-4"
"""Names of others' dense attention in rows and on the command line."""
OURS_DENSE = {"ours, dense": "flex", "ours, cudnn": "cudnn", "ours, triton": "triton"}
"""{name in rows and on the command line: backend} of our own dense attention."""
LIMIT = 5e-3
"""The largest error of anything that is right."""
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
    """The backend that "auto" selects for this shape. Any other name is returned unchanged.

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """attend(). With a ready_index() it leaves out the selection."""
    return attend(q, k, v, ranges, pattern, backend=backend, block_size=block_size)


def sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA on one of its kernels, causal; on cuDNN the denominator of `ratio_to_cudnn`."""
    with sdpa_kernel(kernel):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


def flash4(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """FlashAttention-4 (CuTe) called directly, causal. options: its own, as window_size."""
    from flash_attn.cute import flash_attn_func

    # Its tensors are [B, S, H, D].
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = flash_attn_func(q, k, v, causal=True, **options)
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
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]  # query heads of a KV head
    outs = []
    dq, dk, dv = (torch.zeros_like(x) for x in qkv)
    for head in range(q.shape[1]):
        kv_head = head // group
        q_head = q[:, head].clone().requires_grad_()  # [B, S, D]
        k_head = k[:, kv_head].clone().requires_grad_()
        v_head = v[:, kv_head].clone().requires_grad_()
        scores = (q_head @ k_head.mT * q.shape[-1] ** -0.5).masked_fill(~seen[head], -torch.inf)
        # Padding sees nothing: the softmax of its rows is NaN and has to be 0.
        out = scores.softmax(-1).nan_to_num() @ v_head
        gradients = torch.autograd.grad(out, (q_head, k_head, v_head), d_out[:, head])
        outs.append(out.detach())
        dq[:, head] = gradients[0]
        dk[:, kv_head] += gradients[1]
        dv[:, kv_head] += gradients[2]
    return [torch.stack(outs, 1), dq, dk, dv]


def ragged(seq_len: int) -> list[int]:
    """Document lengths: two long ones, which a selection is made for, two short ones, and padding."""
    return [3 * seq_len // 8 - 5, 9, 7 * seq_len // 16 + 3, seq_len // 8 + 1]


def by_document(call: Attention, lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention inside each document, one call a document; 0 for the padding."""
    outs = []
    start = 0
    for length in lengths:
        end = start + length
        outs.append(call(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end]))
        start = end
    outs.append(q[:, :, start:] * 0)
    return torch.cat(outs, dim=2)


def cases_to_check(
    shape: Shape, names: list[str], peers: list[str]
) -> Iterator[tuple[str, str, Attention, Tensor]]:
    """(mask, name, attention, bool `seen` [Hq, S, S]) of everything that is timed.

    For each mask the first is torch's flash kernel, named "yardstick". names: our backends. Their
    index is chosen by our selection, with caps that make it sparse. Budgets are independent: prices of
    random inputs are alike, and most would be left out under a cap.
    """
    # Documents and caps give tables and verticals of the same shapes for both masks, so that flex
    # compiles once.
    seq_len = shape.seq_len
    block_size = shape.block_size
    pattern = VerticalSlash(
        recall=0.9,
        max_verticals=seq_len * 3 // 100,
        max_slashes=8,
        dense_below=seq_len // 4,
        budget="independent",
        probe_rows="last",
        count_sinks=True,
    )
    torch_flash = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)
    for mask, lengths in ((Causal(), [seq_len]), (Documents(ragged(seq_len)), ragged(seq_len))):
        kind = type(mask).__name__.lower()
        ranges = mask.rows(seq_len, shape.device)
        allowed = mask.dense(seq_len, shape.device)[0].expand(shape.heads, -1, -1)  # [Hq, S, S]
        yield kind, "yardstick", functools.partial(by_document, torch_flash, lengths), allowed
        for name, call in dense_peers(peers, ranges, block_size).items():
            if kind == "causal" or name in OURS_DENSE:
                yield kind, name, call, allowed
        q, k, _, _ = draw(shape)
        index = pattern.select(q, k, ranges, block_size=block_size)
        ready = ready_index(pattern, index.tensors())
        seen = index.dense(mask)[0]
        for name in names:
            yield kind, name, functools.partial(ours, name, ready, ranges, block_size), seen


def check(cases: Iterator[tuple[str, str, Attention, Tensor]], shape: Shape) -> dict[str, dict]:
    """{mask: {name: errors()}}.

    RuntimeError if an error is above LIMIT, or above twice that of the yardstick before it.
    """
    results: dict[str, dict] = {}
    for kind, name, call, seen in cases:
        of_mask = results.setdefault(kind, {})
        of_mask[name] = errors(call, shape, seen)
        worse = too_large(of_mask[name], of_mask["yardstick"])
        if worse and name != "yardstick":
            raise RuntimeError(f"{name} is wrong at {shape.seq_len} tokens, {kind} mask: {worse}")
    return results


def too_large(found: dict[str, float], yardstick: dict[str, float]) -> dict[str, float]:
    """The entries of errors() above LIMIT or above twice the yardstick's. NaN counts as too large."""
    return {
        name: error
        for name, error in found.items()
        if not (error <= LIMIT and error <= 2 * yardstick[name])
    }
