"""The cases kernels and varlen of scripts.benchmarks.masks. Each yields its rows as it has them, on all ranks alike."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention import training_call
from scripts.benchmarks.attention_cases import FLASH4, Attention, Shape, draw, ours, sdpa
from scripts.benchmarks.attention_errors import by_document, errors, too_large
from scripts.benchmarks.context_parallel_cases import attention, rounded, sent_by_rank, torch_dense
from scripts.benchmarks.context_parallel_timing import Bench, attempt, timed
from titan_sparse.attention import ContextParallel, backends
from titan_sparse.attention.backends import flash
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, MaskRanges, SlidingWindow
from titan_sparse.attention.observe import visits as balance
from titan_sparse.attention.observe.statistics import recording, visible_pairs
from titan_sparse.attention.patterns import Dense
from titan_sparse.attention.schedules.needs import seen_blocks
from titan_sparse.attention.tiles.blocks import block_tiles
from titan_sparse.estimate.planner import BACKWARD_FLOPS, FORWARD_FLOPS
from titan_sparse.estimate.synthetic import ragged_lengths

CHECKED_LENGTH = 4096
TOKENS_A_RANK = 8192
"""Of the case varlen, as in MagiAttention's benchmarks."""


def shapes(bench: Bench, seq_len: int, heads: list[tuple[int, int]]) -> Iterator[Shape]:
    """What attention is timed on, all ranks together; --heads and --seq-len win over the case's own."""
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
        **{name: getattr(shape, name) for name in ("heads", "kv_heads", "head_dim", "seq_len")},
    }


def chosen_backend(bench: Bench, shape: Shape) -> str:
    """What --backend means."""
    return backends.choose(
        bench.args.backend, shape.device, torch.bfloat16, shape.head_dim, shape.block_size
    )


def mean(found: list[dict]) -> dict:
    """Of rows with the same numbers or lists of numbers."""
    average = {
        key: torch.tensor([row[key] for row in found], dtype=torch.float64).mean(0)
        for key in found[0]
    }
    return {
        key: [rounded(y) for y in x.tolist()] if x.ndim else rounded(x.item())
        for key, x in average.items()
    }


def rates(shape: Shape, found: dict, ranks: int = 1) -> dict:
    """TFLOP/s of a rank, by found's milliseconds and its "pairs", those that the mask lets each head see."""
    flops = {
        "forward": FORWARD_FLOPS,
        "backward": BACKWARD_FLOPS,
        "total": FORWARD_FLOPS + BACKWARD_FLOPS,
    }
    work = shape.heads * shape.head_dim * found["pairs"] / ranks / 1e9
    return {
        f"{step}_tflops": rounded(per_pair * work / found[f"{step}_ms"])
        for step, per_pair in flops.items()
    }


def faster(name: str, row: dict, peer: dict) -> dict:
    """How many times faster than the peer a row is, step by step; nothing where one of them failed."""
    if "error" in row or "error" in peer:
        return {}
    steps = ("forward", "backward", "total")
    return {f"{step}_{name}": rounded(peer[f"{step}_ms"] / row[f"{step}_ms"]) for step in steps}


# Kernels ------------------------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """A mask, and others' attention under it. yardstick: torch's flash kernel, and the mask that it computes with."""

    mask: Mask
    peer: Attention
    yardstick: tuple[Attention, Mask]


torch_flash = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)


def documents(shape: Shape, seed: int) -> Masked:
    lengths = ragged_lengths(shape.seq_len, seed)
    mask = Documents(lengths)
    starts = torch.tensor(
        [0, *itertools.accumulate(lengths)], dtype=torch.int32, device=shape.device
    )
    return Masked(
        mask,
        functools.partial(flash4_varlen, starts, max(lengths)),
        (functools.partial(by_document, torch_flash, lengths), mask),
    )


def window(tokens: int, shape: Shape, seed: int) -> Masked:
    """At the checked length a smaller one, for it to be a window there too."""
    tokens = min(tokens, shape.seq_len // 4)
    return Masked(
        SlidingWindow(tokens), functools.partial(flash4_window, tokens), (torch_flash, Causal())
    )


def flash4_varlen(starts: Tensor, longest: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4's own attention over packed documents, causal inside each. starts: int32, with the end."""
    from flash_attn.cute import flash_attn_varlen_func

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )
    return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]


def flash4_window(tokens: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4's own causal window, the query itself included."""
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = flash_attn_func(
        q, k, v, causal=True, window_size=(tokens - 1, 0)
    )  # keys before its own, and after
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def kernels(bench: Bench) -> Iterator[dict]:
    """Masks on one GPU by each of our backends, beside FlashAttention-4's own."""
    args = bench.args
    for shape in shapes(bench, 32768, [(64, 8), (16, 2)]):
        row = about("kernels", shape)
        yield from _by_mask(
            bench, shape, row | {"mask": "documents", "packs": args.packs}, documents, args.packs
        )
        yield from _by_mask(
            bench,
            shape,
            row | {"mask": "window", "window": args.window},
            functools.partial(window, args.window),
            1,
        )


def _by_mask(
    bench: Bench, shape: Shape, row: dict, make: Callable[[Shape, int], Masked], packs: int
) -> Iterator[dict]:
    """The yardstick's errors, then the peer and our backends."""
    small = shape._replace(seq_len=min(CHECKED_LENGTH, shape.seq_len))
    check = functools.partial(_yardstick, small, make(small, 0))
    yardstick = attempt(
        bench, row | {"name": "torch's flash kernel", "checked_seq_len": small.seq_len}, check
    )
    yield yardstick
    bounds = yardstick.get("errors", dict.fromkeys(("out", "dq", "dk", "dv"), math.inf))
    measure = functools.partial(_kernel, bench, shape, small, FLASH4, make, packs, bounds)
    peer = attempt(bench, row | {"name": FLASH4}, measure)
    yield peer
    auto = backends.choose("auto", shape.device, torch.bfloat16, shape.head_dim, shape.block_size)
    for name in bench.args.backends:
        measure = functools.partial(_kernel, bench, shape, small, name, make, packs, bounds)
        own = attempt(bench, row | {"name": name, "auto": name == auto}, measure)
        yield own | faster("of_flash_attn_4", own, peer)


def _yardstick(shape: Shape, masked: Masked) -> dict:
    call, mask = masked.yardstick
    return {"errors": errors(call, shape, _seen(mask, shape))}


def _seen(mask: Mask, shape: Shape) -> Tensor:
    return mask.dense(shape.seq_len, shape.device)[0].expand(shape.heads, -1, -1)


def _kernel(
    bench: Bench,
    shape: Shape,
    small: Shape,
    name: str,
    make: Callable[[Shape, int], Masked],
    packs: int,
    bounds: dict[str, float],
) -> dict:
    """Errors at the small shape, then times at the other. RuntimeError for a missing peer, and for errors too large."""
    if name == FLASH4 and flash.missing():
        raise RuntimeError(f"not measured: {flash.missing()}")
    masked = make(small, 0)
    found = errors(_call(name, masked, small), small, _seen(masked.mask, small))
    if too_large(found, bounds):
        raise RuntimeError(f"wrong at {small.seq_len} tokens: {too_large(found, bounds)}")
    *leaves, d_out = draw(shape)
    times = []
    for seed in range(packs):
        masked = make(shape, seed)
        pairs = visible_pairs(masked.mask.rows(shape.seq_len)).item()
        spent = timed(bench, training_call(_call(name, masked, shape), leaves, d_out))
        times.append(
            spent
            | {"pairs": pairs}
            | ({} if name == FLASH4 else _tables(bench, shape, name, masked.mask))
        )
    return (average := mean(times)) | rates(shape, average) | {"errors": found}


def _call(name: str, masked: Masked, shape: Shape) -> Attention:
    if name == FLASH4:
        return masked.peer
    return functools.partial(
        ours, name, Dense(), masked.mask.rows(shape.seq_len, shape.device), shape.block_size
    )


def _tables(bench: Bench, shape: Shape, backend: str, mask: Mask) -> dict:
    """What the backend is given to go by, made as in every forward and every backward."""
    rows = mask.rows(shape.seq_len, bench.device)
    blocks = torch.arange(shape.seq_len // shape.block_size, device=bench.device)
    index = Dense().index([], rows, 1, shape.heads, shape.block_size)
    make = functools.partial(block_tiles, rows, index, blocks, blocks, 1)
    steps = [
        functools.partial(make, by_key)
        for by_key in (False, backends.BACKENDS[backend].READS_BY_KEY)
    ]
    return {"tables_ms": timed(bench, steps)["total_ms"]}


# Packed documents over several GPUs ---------------------------------------------------------------------------------


def varlen(bench: Bench) -> Iterator[dict]:
    """Packed documents by layouts and schedules, beside torch's context_parallel without documents."""
    args = bench.args
    casts = [
        (layout, "group_cast", stages)
        for layout in ("balanced", "contiguous")
        for stages in args.stages
    ]
    others = [("balanced", "ring", None), ("zigzag", "ring", None), ("striped", "all_gather", None)]
    for shape in shapes(bench, TOKENS_A_RANK * bench.world, [(64, 8)]):
        row = about("varlen", shape) | {"ranks": bench.world}
        peers = []
        for method in ("allgather", "alltoall"):
            named = {
                "name": "torch context_parallel",
                "rotate": method,
                "mask": "causal, since it knows no documents",
            }
            peers.append(
                attempt(bench, row | named, functools.partial(_torch_causal, bench, shape, method))
            )
            yield peers[-1]
        best = min(peers, key=lambda peer: peer.get("total_ms", math.inf))
        for layout, schedule, stages in casts + others:
            named = {
                "name": "ours",
                "mask": "documents",
                "packs": args.packs,
                "layout": layout,
                "schedule": schedule,
            }
            own = attempt(
                bench,
                row | named | {"overlap_stages": stages},
                functools.partial(_documents, bench, shape, layout, schedule, stages),
            )
            yield own | faster("times_faster_than_torch", own, best)


def _torch_causal(bench: Bench, shape: Shape, method: str) -> dict:
    found = torch_dense(bench, shape, method) | {"pairs": shape.seq_len * (shape.seq_len + 1) / 2}
    return found | rates(shape, found, bench.world)


def _documents(bench: Bench, shape: Shape, layout: str, schedule: str, stages: int | None) -> dict:
    """Means over packs of times, bytes and imbalance."""
    cp = bench.context(layout, schedule, overlap_stages=stages or 1)
    *leaves, d_out = draw(shape._replace(seq_len=shape.seq_len // cp.size))
    packs = []
    for seed in range(bench.args.packs):
        rows = cp.balance(
            Documents(ragged_lengths(shape.seq_len, seed)).rows(shape.seq_len, bench.device)
        )
        steps = training_call(attention(bench, Dense(), rows, cp), leaves, d_out)
        times = timed(bench, steps) | {"pairs": visible_pairs(rows).item()}
        packs.append(times | _imbalance(steps) | _megabytes(bench, shape, cp, rows, steps))
    found = mean(packs)
    needed = found["megabytes_needed_forward"] + found["megabytes_needed_backward"]
    sent = found["megabytes_sent_forward"] + found["megabytes_sent_backward"]
    return (
        found
        | rates(shape, found, cp.size)
        | {
            "sent_of_needed": rounded(sent / needed) if needed else None,
            "backend": chosen_backend(bench, shape),
        }
    )


def _imbalance(steps: list[Callable[[], None]]) -> dict:
    """Busiest rank / mean in one forward, by counted pairs and by measured computing time."""
    with recording() as seen:
        for step in steps:
            step()
        by_rank = seen.by_rank()
    degrees = {"worker_imbalance": by_rank.work, "worker_imbalance_time": by_rank.compute}
    return {name: balance.worker_imbalance(work).item() for name, work in degrees.items()}


def _megabytes(
    bench: Bench,
    shape: Shape,
    cp: ContextParallel,
    rows: MaskRanges,
    steps: list[Callable[[], None]],
) -> dict:
    """1e6 bytes, all ranks together, that are sent and that would do."""
    sent = sent_by_rank(bench, cp, steps).sum(0).tolist()
    keys, gradients = (
        needed_blocks(cp, rows)
        * 2
        * shape.kv_heads
        * shape.block_size
        * shape.head_dim
        * size
        / 1e6
        for size in (torch.bfloat16.itemsize, torch.float32.itemsize)
    )
    return {
        "megabytes_sent_forward": sent[0],
        "megabytes_needed_forward": keys,
        "megabytes_sent_backward": sent[1],
        "megabytes_needed_backward": keys + gradients,
    }


def needed_blocks(cp: ContextParallel, rows: MaskRanges) -> int:
    """Blocks of keys that the mask lets ranks see and that others hold, summed over ranks."""
    table = cp.table(rows)
    seen = seen_blocks(rows, table, cp.block_size)
    return int(seen.sum() - seen.gather(1, table).sum())
