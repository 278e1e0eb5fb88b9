"""The cases that benchmarks of attention time, their tensors, and checks of the results.

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

from titan_sparse.attention import ContextParallel, attend, backends
from titan_sparse.attention.backends import flex
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, MaskRanges
from titan_sparse.attention.patterns import BlockIndex, Dense, Pattern, VerticalSlash
from titan_sparse.attention.tiles import block_tiles
from titan_sparse.estimate import indexes

CUDNN, FLASH4 = "cudnn", "flash-attn-4"
"""Names of others' dense attention in rows."""
CUDNN_BLOCKS = "cudnn-frontend, blocks"
OURS_DENSE = "ours, dense"
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


def chosen_backend(backend: str, shape: Shape, dynamic: bool) -> str:
    """The backend that "auto" selects for this shape. Any other name is returned unchanged.

    dynamic: whether the pattern is sparse.
    """
    if backend != "auto":
        return backend
    return backends.choose(
        backend,
        shape.device,
        torch.bfloat16,
        shape.head_dim,
        shape.block_size,
        dynamic=dynamic,
        is_short=shape.seq_len < backends.short_below(0.95, shape.head_dim),
    )


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


def random_index(
    shape: Shape, density: float, vertical_share: float, sinks: int
) -> tuple[VerticalSlash, list[Tensor]]:
    """indexes.random_index() on the shape's device."""
    pattern, tensors = indexes.random_index(
        shape.heads, shape.seq_len, shape.block_size, density, vertical_share, sinks
    )
    on_device = [tensor.to(shape.device) for tensor in tensors]
    return pattern, on_device


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


def dense_peers(ranges: MaskRanges, shape: Shape) -> dict[str, Attention]:
    """The dense peers that run here, in the order in which they are timed; none on a CPU."""
    if shape.device == "cpu":
        return {}
    peers = {CUDNN: functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)}
    if flex.missing() is None:
        peers[FLASH4] = flash4
    return peers | {OURS_DENSE: ours("auto", Dense(), ranges, shape.block_size)}


class _CudnnBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, numbers, counts):
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        ctx.lists = {"q2k_block_nums": counts, "sparse_block_size": 128}
        found = block_sparse_attention_forward(q, k, v, numbers, **ctx.lists)
        ctx.save_for_backward(q, k, v, found["o_tensor"], found["lse_tensor"], numbers)
        return found["o_tensor"]

    @staticmethod
    def backward(ctx, d_out):
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        found = block_sparse_attention_backward(d_out, *ctx.saved_tensors, **ctx.lists)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None


def cudnn_blocks(index: BlockIndex, ranges: MaskRanges) -> Attention:
    """cudnn-frontend's block-sparse attention over the blocks of an index, without its verticals. It
    knows no causal mask: it sees the whole diagonal blocks. Its backward takes no grouped heads."""
    blocks = torch.arange(index.seq_len // index.block_size, device=ranges.start.device)
    lists = block_tiles(ranges, index, blocks, blocks, 1, transpose=False).by_query
    slots = torch.arange(lists.full.shape[-1], device=blocks.device)
    is_full = slots < lists.full_count[..., None]
    is_partial = slots < lists.partial_count[..., None]
    # [1, Hq, nq, 2 K], ascending; what is behind the count is never read.
    numbers = torch.cat([lists.full, lists.partial], -1)
    numbers = numbers.where(torch.cat([is_full, is_partial], -1), len(blocks))
    numbers = numbers.sort(-1).values.clamp(max=len(blocks) - 1).int()
    counts = lists.full_count + lists.partial_count
    numbers = numbers[..., : counts.max()].contiguous()
    return lambda q, k, v: _CudnnBlocks.apply(q, k, v, numbers, counts)


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
        # Padding sees nothing: the softmax of its rows is NaN and has to be 0.
        out = weights.nan_to_num() @ v[:, head // group]
        out.backward(d_out[:, head])
        outs.append(out.detach())
    return [torch.stack(outs, 1), *(leaf.grad for leaf in leaves)]


def wrong(found: dict[str, float]) -> dict[str, float]:
    """The entries of errors() above LIMIT."""
    # NaN is too large as well.
    return {name: error for name, error in found.items() if not error <= LIMIT}


def all_pairs(mask: Mask, shape: Shape) -> Tensor:
    """bool [Hq, S, S]: which keys each query sees."""
    seen = mask.dense(shape.seq_len, shape.device)
    return seen[0].expand(shape.heads, -1, -1)


def cases_to_check(shape: Shape, names: list[str]) -> Iterator[tuple[str, str, Attention, Tensor]]:
    """(mask, name, attention, bool `seen` [Hq, S, S]) of everything that is timed.

    names: our backends. Their index is chosen by our selection.
    """
    seq_len = shape.seq_len
    # Caps make it sparse on random inputs. The budget is independent: with joint scores, most
    # candidates of random inputs have equal scores, and a cap would drop them together. Documents
    # and caps give tables and verticals of the same shapes for both masks, so that flex compiles
    # once.
    pattern = VerticalSlash(
        recall=0.9,
        max_verticals=seq_len * 3 // 100,
        max_slashes=8,
        budget="independent",
        probe_rows="last",
        count_sinks=True,
        dense_below=seq_len // 4,
    )
    # Two long documents, which a selection is made for, two short ones, and padding.
    lengths = [3 * seq_len // 8 - 5, 9, 7 * seq_len // 16 + 3, seq_len // 8 + 1]
    for mask in (Causal(), Documents(lengths)):
        kind = type(mask).__name__.lower()
        ranges = mask.rows(shape.seq_len, shape.device)
        for name, call in dense_peers(ranges, shape).items():
            if kind == "causal" or name == OURS_DENSE:
                yield kind, name, call, all_pairs(mask, shape)
        q, k, _, _ = draw(shape)
        index = pattern.select(q, k, ranges, block_size=shape.block_size)
        ready = ready_index(pattern, index.tensors())
        seen = index.dense(mask)[0]
        for name in names:
            yield kind, name, ours(name, ready, ranges, shape.block_size), seen


def check(cases: Iterator[tuple[str, str, Attention, Tensor]], shape: Shape) -> dict[str, dict]:
    """{mask: {name: errors()}}. RuntimeError if an error is above LIMIT."""
    results: dict[str, dict] = {}
    for kind, name, call, seen in cases:
        found = errors(call, shape, seen)
        results.setdefault(kind, {})[name] = found
        if wrong(found):
            raise RuntimeError(
                f"{name} is wrong at {shape.seq_len} tokens, {kind} mask: {wrong(found)}"
            )
    return results
