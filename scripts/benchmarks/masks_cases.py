"""The cases kernels and varlen of scripts.benchmarks.masks.

Each yields its rows as it has them, on all ranks alike.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention_cases import (
    FLASH4,
    Attention,
    Shape,
    chosen_backend,
    draw,
    ours,
    sdpa,
)
from scripts.benchmarks.attention_errors import by_document, errors, too_large
from scripts.benchmarks.context_parallel_cases import attention, rounded, sent_by_rank, torch_dense
from scripts.benchmarks.context_parallel_timing import Bench, attempt, timed
from scripts.benchmarks.timing import training_call
from titan_sparse.attention import ContextParallel, backends
from titan_sparse.attention.backends import flash
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, MaskRanges, SlidingWindow
from titan_sparse.attention.masks.reach import seen_blocks, visible_pairs
from titan_sparse.attention.observe.statistics import recording, worker_imbalance
from titan_sparse.attention.patterns import Dense
from titan_sparse.attention.tiles.blocks import block_tiles
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS
from titan_sparse.estimate.synthetic import ragged_lengths

CHECKED_LENGTH = 4096
TOKENS_A_RANK = 8192
"""Of the case varlen, as in MagiAttention's benchmarks."""
ERRORS = ("out", "dq", "dk", "dv")


def shapes(bench: Bench, seq_len: int, heads: list[tuple[int, int]]) -> Iterator[Shape]:
    """What attention is timed on, all ranks together; --heads and --seq-len win over these."""
    args = bench.args
    for query_heads, kv_heads in dict.fromkeys(args.heads or heads):
        yield Shape(
            query_heads,
            kv_heads,
            args.head_dim,
            args.block_size,
            args.seq_len or seq_len,
            bench.device.type,
        )


def about(case: str, shape: Shape) -> dict:
    """The first fields of a row."""
    return {
        "case": case,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "seq_len": shape.seq_len,
    }


def mean(rows: list[dict]) -> dict:
    """Of rows with the same numbers or lists of numbers."""
    averages = {}
    for key in rows[0]:
        average = torch.tensor([row[key] for row in rows], dtype=torch.float64).mean(0)
        if average.ndim:
            averages[key] = [rounded(number) for number in average.tolist()]
        else:
            averages[key] = rounded(average.item())
    return averages


def rates(shape: Shape, measured: dict, ranks: int = 1) -> dict:
    """TFLOP/s of a rank, by the milliseconds measured and the "pairs" that each head sees."""
    flops = {
        "forward": FORWARD_FLOPS,
        "backward": BACKWARD_FLOPS,
        "total": FORWARD_FLOPS + BACKWARD_FLOPS,
    }
    work = shape.heads * shape.head_dim * measured["pairs"] / ranks / 1e9
    return {
        f"{step}_tflops": rounded(per_pair * work / measured[f"{step}_ms"])
        for step, per_pair in flops.items()
    }


def faster(name: str, row: dict, peer: dict) -> dict:
    """How many times faster than the peer a row is, by step; nothing where one of them failed."""
    if "error" in row or "error" in peer:
        return {}
    steps = ("forward", "backward", "total")
    return {f"{step}_{name}": rounded(peer[f"{step}_ms"] / row[f"{step}_ms"]) for step in steps}


class Masked(NamedTuple):
    """A mask, and others' attention under it.

    yardstick: torch's flash kernel, and the mask that it computes with.
    """

    mask: Mask
    peer: Attention
    yardstick: tuple[Attention, Mask]


torch_flash = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)


def documents(shape: Shape, seed: int) -> Masked:
    """Packed documents, causal inside each."""
    lengths = ragged_lengths(shape.seq_len, seed)
    mask = Documents(lengths)
    ends = itertools.accumulate(lengths)
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=shape.device)
    return Masked(
        mask,
        peer=functools.partial(flash4_varlen, starts, max(lengths)),
        yardstick=(functools.partial(by_document, torch_flash, lengths), mask),
    )


def window(tokens: int, shape: Shape, seed: int) -> Masked:
    """A causal window; at the checked length a smaller one, for it to be a window there too."""
    tokens = min(tokens, shape.seq_len // 4)
    return Masked(
        SlidingWindow(tokens),
        peer=functools.partial(flash4_window, tokens),
        yardstick=(torch_flash, Causal()),
    )


def flash4_varlen(starts: Tensor, longest: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4's own attention over packed documents, causal inside each.

    starts: int32, with the end of the last document. longest: tokens of the longest document.
    """
    from flash_attn.cute import flash_attn_varlen_func

    # [1, H, S, D] -> [S, H, D]
    out = flash_attn_varlen_func(
        q[0].transpose(0, 1),
        k[0].transpose(0, 1),
        v[0].transpose(0, 1),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    if isinstance(out, tuple):  # some versions return the LSE too
        out = out[0]
    return out.transpose(0, 1)[None]


def flash4_window(tokens: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4's own causal window, the query itself included."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(
        q.transpose(1, 2),  # [B, S, H, D]
        k.transpose(1, 2),
        v.transpose(1, 2),
        causal=True,
        window_size=(tokens - 1, 0),  # keys before the query's own, and after
    )
    if isinstance(out, tuple):
        out = out[0]
    return out.transpose(1, 2)


class KernelCase(NamedTuple):
    """What the kernels of one mask are measured on.

    shape: timed. small: checked against fp32. make: (shape, seed) -> the mask and its peers. packs:
    how many seeds are timed.
    """

    shape: Shape
    small: Shape
    make: Callable[[Shape, int], Masked]
    packs: int


def kernels(bench: Bench) -> Iterator[dict]:
    """Masks on one GPU by each of our backends, beside FlashAttention-4's own."""
    args = bench.args
    for shape in shapes(bench, 32768, [(64, 8), (16, 2)]):
        small = shape._replace(seq_len=min(CHECKED_LENGTH, shape.seq_len))
        row = about("kernels", shape) | {"mask": "documents", "packs": args.packs}
        yield from _by_mask(bench, row, KernelCase(shape, small, documents, args.packs))
        row = about("kernels", shape) | {"mask": "window", "window": args.window}
        make_window = functools.partial(window, args.window)
        yield from _by_mask(bench, row, KernelCase(shape, small, make_window, packs=1))


def _by_mask(bench: Bench, row: dict, case: KernelCase) -> Iterator[dict]:
    """The yardstick's errors, then the peer and our backends."""
    check = functools.partial(_yardstick, case.small, case.make(case.small, 0))
    named = row | {"name": "torch's flash kernel", "checked_seq_len": case.small.seq_len}
    yardstick = attempt(bench, named, check)
    yield yardstick
    # Without a yardstick only the absolute limit counts.
    bounds = yardstick.get("errors", dict.fromkeys(ERRORS, math.inf))

    measure = functools.partial(_kernel, bench, case, bounds, FLASH4)
    peer = attempt(bench, row | {"name": FLASH4}, measure)
    yield peer
    auto = chosen_backend("auto", case.shape, dynamic=False)
    for name in bench.args.backends:
        measure = functools.partial(_kernel, bench, case, bounds, name)
        ours_row = attempt(bench, row | {"name": name, "auto": name == auto}, measure)
        yield ours_row | faster("of_flash_attn_4", ours_row, peer)


def _yardstick(shape: Shape, masked: Masked) -> dict:
    call, mask = masked.yardstick
    return {"errors": errors(call, shape, _seen(mask, shape))}


def _seen(mask: Mask, shape: Shape) -> Tensor:
    """bool [Hq, S, S]: which keys each query sees."""
    dense = mask.dense(shape.seq_len, shape.device)  # [1, S, S]
    return dense[0].expand(shape.heads, -1, -1)


def _kernel(bench: Bench, case: KernelCase, bounds: dict[str, float], name: str) -> dict:
    """Errors at the small shape, then times at the other.

    RuntimeError for a missing peer, and for errors that are too large.
    """
    if name == FLASH4 and flash.missing():
        raise RuntimeError(f"not measured: {flash.missing()}")
    shape = case.shape
    small = case.small
    masked = case.make(small, 0)
    found = errors(_call(name, masked, small), small, _seen(masked.mask, small))
    wrong = too_large(found, bounds)
    if wrong:
        raise RuntimeError(f"wrong at {small.seq_len} tokens: {wrong}")

    tensors = draw(shape)
    packs = []
    for seed in range(case.packs):
        masked = case.make(shape, seed)
        pairs = visible_pairs(masked.mask.rows(shape.seq_len)).item()
        steps = training_call(_call(name, masked, shape), tensors[:3], tensors[3])
        measured = timed(bench, steps) | {"pairs": pairs}
        if name != FLASH4:
            measured |= _tables(bench, shape, name, masked.mask)
        packs.append(measured)
    average = mean(packs)
    return average | rates(shape, average) | {"errors": found}


def _call(name: str, masked: Masked, shape: Shape) -> Attention:
    if name == FLASH4:
        return masked.peer
    ranges = masked.mask.rows(shape.seq_len, shape.device)
    return functools.partial(ours, name, Dense(), ranges, shape.block_size)


def _tables(bench: Bench, shape: Shape, backend: str, mask: Mask) -> dict:
    """Milliseconds of the tables that the backend reads, made in every forward and backward."""
    ranges = mask.rows(shape.seq_len, bench.device)
    blocks = torch.arange(shape.seq_len // shape.block_size, device=bench.device)
    index = Dense().index([], ranges, 1, shape.heads, shape.block_size)
    make = functools.partial(block_tiles, ranges, index, blocks, blocks, 1)
    forward = functools.partial(make, False)
    backward = functools.partial(make, backends.BACKENDS[backend].READS_BY_KEY)
    return {"tables_ms": timed(bench, [forward, backward])["total_ms"]}


def varlen(bench: Bench) -> Iterator[dict]:
    """--varlen-masks by layouts and schedules, and torch's context_parallel, which knows neither."""
    args = bench.args
    ways: list[tuple[str, str, int | None]] = []  # layout, schedule, stages
    for layout in ("balanced", "contiguous"):
        for stages in args.stages:
            ways.append((layout, "group_cast", stages))
    ways.append(("balanced", "ring", None))
    ways.append(("zigzag", "ring", None))
    ways.append(("striped", "all_gather", None))

    for shape in shapes(bench, TOKENS_A_RANK * bench.world, [(64, 8)]):
        row = about("varlen", shape) | {"ranks": bench.world}
        peers = []
        for method in ("allgather", "alltoall"):
            named = row | {
                "name": "torch context_parallel",
                "rotate": method,
                "mask": f"causal, since it knows no {args.varlen_masks[0]}",
            }
            peer = attempt(bench, named, functools.partial(_torch_causal, bench, shape, method))
            peers.append(peer)
            yield peer
        best = min(peers, key=lambda peer: peer.get("total_ms", math.inf))
        for mask, (layout, schedule, stages) in itertools.product(args.varlen_masks, ways):
            masks = packs_of(mask, args, shape.seq_len)
            named = row | {
                "name": "ours",
                "mask": mask,
                "packs": len(masks),
                "layout": layout,
                "schedule": schedule,
                "overlap_stages": stages,
            }
            make = functools.partial(bench.context, layout, schedule, overlap_stages=stages or 1)
            ours_row = attempt(bench, named, functools.partial(_masked, bench, shape, make, masks))
            yield ours_row | faster("times_faster_than_torch", ours_row, best)


def packs_of(mask: str, args: argparse.Namespace, seq_len: int) -> list[Mask]:
    """The masks of one row: --packs sequences of documents, or one window, which is always alike."""
    if mask == "window":
        return [SlidingWindow(args.window)]
    return [Documents(ragged_lengths(seq_len, seed)) for seed in range(args.packs)]


def _torch_causal(bench: Bench, shape: Shape, method: str) -> dict:
    measured = torch_dense(bench, shape, method)
    measured["pairs"] = shape.seq_len * (shape.seq_len + 1) / 2
    return measured | rates(shape, measured, bench.world)


def _masked(
    bench: Bench, shape: Shape, make: Callable[[], ContextParallel], masks: list[Mask]
) -> dict:
    """Means over masks of times, bytes and imbalance."""
    cp = make()
    tensors = draw(shape._replace(seq_len=shape.seq_len // cp.size))
    packs = []
    for mask in masks:
        ranges = cp.balance(mask.rows(shape.seq_len, bench.device))
        steps = training_call(attention(bench, Dense(), ranges, cp), tensors[:3], tensors[3])
        measured = timed(bench, steps)
        measured["pairs"] = visible_pairs(ranges).item()
        measured |= _imbalance(steps)
        measured |= _megabytes(bench, shape, cp, ranges, steps)
        packs.append(measured)
    average = mean(packs)
    needed = average["megabytes_needed_forward"] + average["megabytes_needed_backward"]
    sent = average["megabytes_sent_forward"] + average["megabytes_sent_backward"]
    return {
        **average,
        **rates(shape, average, cp.size),
        "sent_of_needed": rounded(sent / needed) if needed else None,
        "backend": chosen_backend(bench.args.backend, shape, dynamic=False),
    }


def _imbalance(steps: list[Callable[[], None]]) -> dict:
    """Busiest rank / mean in one forward, by counted pairs and by measured computing time."""
    with recording() as seen:
        for step in steps:
            step()
        by_rank = seen.by_rank()
    return {
        "worker_imbalance": worker_imbalance(by_rank.work).item(),
        "worker_imbalance_time": worker_imbalance(by_rank.compute).item(),
    }


def _megabytes(
    bench: Bench,
    shape: Shape,
    cp: ContextParallel,
    ranges: MaskRanges,
    steps: list[Callable[[], None]],
) -> dict:
    """1e6 bytes, all ranks together, that are sent and that would do."""
    sent = sent_by_rank(bench, cp, steps).sum(0).tolist()
    # Of K and V, and of their gradients.
    elements = needed_blocks(cp, ranges) * 2 * shape.kv_heads * shape.block_size * shape.head_dim
    keys = elements * torch.bfloat16.itemsize / 1e6
    gradients = elements * torch.float32.itemsize / 1e6
    return {
        "megabytes_sent_forward": sent[0],
        "megabytes_needed_forward": keys,
        "megabytes_sent_backward": sent[1],
        "megabytes_needed_backward": keys + gradients,
    }


def needed_blocks(cp: ContextParallel, ranges: MaskRanges) -> int:
    """Blocks of keys that the mask lets ranks see and that others hold, summed over ranks."""
    table = cp.table(ranges)  # [ranks, n]
    seen = seen_blocks(ranges, table, cp.block_size)
    return int(seen.sum() - seen.gather(1, table).sum())
