"""Attention on one GPU: sparse against dense peers, masks against theirs, patterns at equal recall.

    python -m scripts.benchmarks.attention --seq-lens 131072 262144 \\
        --densities 0.05 0.2 --heads 16:2 32:8 --out benchmarks/results/attention_h200.json
    python -m scripts.benchmarks.attention masks patterns --repeats 3 --out masks.json

All in bf16, forward and backward, JSON out. Times are medians of --repeats after --warm-ups. In
training the host runs ahead of the GPU, so that launches cost nothing. It is timed like that:
before each call the GPU sleeps for some 20 ms, in which the host queues the call. TFLOP/s count the
pairs computed (4 D forward and 10 D backward per pair and head). With --device cpu everything runs
by plain PyTorch, to try it out at small sizes.

sparse    a random index beside dense peers: per query head the first --sinks, --verticals of the
          sequence as random verticals, two local slashes, and random ones up to each of
          --densities. Our times include the block tables, but not the selection, which is timed
          beside them. With --densities and no number: dense attention alone. Before, everything is
          checked at 4096 tokens against fp32. Without grouped heads also cudnn-frontend's
          block-sparse attention, if it is installed: --verticals 0 --sinks 0 gives it the same pairs
masks     causal inside packed documents, and a causal window of --window, by each of --backends and
          by FlashAttention-4's own attention for that mask. `..._of_flash_attn_4`: its time / ours.
          Each is checked as above.
          Documents are those of indexes.ragged_lengths: most under 1K tokens, the longest a
          quarter of the sequence; rows are means over --packs such sequences
patterns  our patterns on realistic q and k (patterns.py)

A measurement that fails, or a peer that is missing, is a row with `error`, and the run goes on.
Rows are written at once.
"""

import argparse
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scripts.benchmarks.attention_cases import (
    CUDNN,
    CUDNN_BLOCKS,
    FLASH4,
    Attention,
    Shape,
    all_pairs,
    cases_to_check,
    check,
    cudnn_blocks,
    dense_peers,
    draw,
    errors,
    flash4,
    ours,
    random_index,
    ready_index,
    wrong,
)
from scripts.benchmarks.harness import (
    Bench,
    about,
    add_common_options,
    faster,
    measure,
    place,
    timed,
    timed_masks,
    training_call,
    visited_share,
)
from scripts.benchmarks.options import head_set, parser_of, positive, share
from scripts.benchmarks.patterns import add_pattern_options, patterns
from titan_sparse.attention import backends
from titan_sparse.attention.backends import flex
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import Dense
from titan_sparse.estimate.flops import causal_pairs
from titan_sparse.estimate.indexes import ragged_lengths

PROGRAM = "scripts.benchmarks.attention"
LONG = 262144
"""Dense attention over more tokens than this is timed once: it takes seconds."""
CHECKED_LENGTH = 4096


def main(words: list[str]) -> int:
    args = parse(words)
    refused = refusal(args)
    return measure([args], CASES, refused)


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: sparse")
    add("--seq-lens", type=positive, nargs="+", default=[], help="default: each case's own")
    add("--heads", type=head_set, nargs="+", default=[], help="query heads:KV heads, as 16:2")
    add("--backends", nargs="+", choices=list(backends.BACKENDS), help="ours, timed by name")
    add("--densities", type=share, nargs="*", default=[0.05], help="of the causal pairs, of sparse")
    add("--verticals", type=lambda x: float(x) and share(x), default=0.005, help="share of keys")
    add("--sinks", type=int, default=30)
    add("--packs", type=positive, default=4, help="sequences of documents, of masks")
    add("--window", type=positive, default=4096, help="tokens that a query sees, of masks")
    add_pattern_options(parser)
    add_common_options(parser)
    args = parser.parse_args(words)
    args.cases = args.cases or ["sparse"]
    if not set(args.cases) <= CASES.keys():
        parser.error(f"unknown case in {args.cases}. Write one of {', '.join(CASES)}")
    on_gpu = ["triton"] if flex.missing() else ["flex", "triton"]
    args.backends = args.backends or (["eager"] if args.device == "cpu" else on_gpu)
    return args


def refusal(args: argparse.Namespace) -> str | None:
    """The reason why these options cannot run here; None if they can."""
    if place()[1] > 1:
        return f"{PROGRAM} is for one GPU; start it with python, not with torchrun"
    for seq_len in args.seq_lens:
        if seq_len % args.block_size:
            return f"--seq-lens: write multiples of --block-size ({args.block_size})"
    shortest = min(args.seq_lens, default=32768)
    if "sparse" in args.cases and shortest < 4 * args.block_size:
        return f"--seq-lens {shortest}: write four blocks or more"
    if "patterns" in args.cases and shortest < 2048:
        return f"--seq-lens {shortest}: realistic q and k need 2048 tokens or more"
    if "masks" in args.cases and 4 * args.window > shortest:
        return f"--window {args.window}: write a quarter of the sequence or less"
    if "patterns" in args.cases and args.chunk_size < args.block_size:
        return f"--chunk-size: write --block-size ({args.block_size}) or more"
    return None


# sparse -------------------------------------------------------------------------------------------


def sparse(bench: Bench) -> Iterator[dict]:
    """A row for each dense peer, then for each density and backend."""
    args = bench.args
    checked = set()
    for shape in bench.shapes(131072, [(16, 2)]):
        row = about("sparse", shape)
        if (shape.heads, shape.kv_heads) not in checked:
            checked.add((shape.heads, shape.kv_heads))
            small = shape._replace(seq_len=min(CHECKED_LENGTH, shape.seq_len))
            # Nothing that is wrong is timed: an error here ends the case.
            found = check(cases_to_check(small, args.backends), small)
            yield about("errors", small) | {"errors": found}
        tensors = draw(shape)
        ranges = Causal().rows(shape.seq_len, shape.device)
        dense = {}
        for name, call in dense_peers(ranges, shape).items():
            repeats = 1 if shape.seq_len > LONG else args.repeats
            named = row | {"name": name, "target_density": None}
            dense[name] = bench.attempt(named, timed, training_call(call, tensors), repeats)
            yield dense[name] | _of_peers(shape, 1.0, dense[name], dense)
        for target in args.densities:
            pattern, index = random_index(shape, target, args.verticals, args.sinks)
            q, k = (tensor.detach() for tensor in tensors[:2])
            select = functools.partial(pattern.select, q, k, ranges, block_size=shape.block_size)
            selection = {"selection_ms": timed(bench, [select])["total_ms"]}
            ready = ready_index(pattern, index)
            density = None
            for name in args.backends:
                call = ours(name, ready, ranges, shape.block_size)
                density = density or visited_share(call, tensors[:3])
                named = row | {"name": name, "target_density": target}
                measured = bench.attempt(named, timed, training_call(call, tensors))
                yield measured | selection | _of_peers(shape, density, measured, dense)
            if importlib.util.find_spec("cudnn") and shape.heads == shape.kv_heads:
                blocks = pattern.index(index, ranges, 1, shape.heads, shape.block_size)
                calls = training_call(cudnn_blocks(blocks, ranges), tensors)
                named = row | {"name": CUDNN_BLOCKS, "target_density": target}
                measured = bench.attempt(named, timed, calls)
                yield measured | _of_peers(shape, density, measured, dense)


def _of_peers(shape: Shape, density: float, measured: dict, dense: dict[str, dict]) -> dict:
    """Density, rate, and the ratio to others' dense attention; null for one that was not timed."""
    if "error" in measured:
        return {}
    spent = measured["forward_ms"] + measured["backward_ms"]
    pairs = density * causal_pairs(shape.seq_len)
    flops = 14 * shape.head_dim * shape.heads * pairs
    found = {
        "density": round(density, 4),
        "visited_tflops": round(flops / spent / 1e9, 1),
    }
    for key, peer in (("ratio_to_cudnn", CUDNN), ("ratio_to_flash_attn_4", FLASH4)):
        row = dense.get(peer, {"error": "not timed"})
        found[key] = None
        if "error" not in row:
            of_peer = row["forward_ms"] + row["backward_ms"]
            found[key] = round(spent / of_peer, 4)
    return found


# masks --------------------------------------------------------------------------------------------


Masked = tuple[Mask, Attention]
"""A mask, and FlashAttention-4's own attention under it."""


def documents(shape: Shape, seed: int) -> Masked:
    lengths = ragged_lengths(shape.seq_len, seed)
    ends = itertools.accumulate(lengths)
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=shape.device)
    return Documents(lengths), functools.partial(flash4_varlen, starts, max(lengths))


def window(tokens: int, shape: Shape, seed: int) -> Masked:
    """A causal window, smaller at the checked length so that it is still a window there."""
    tokens = min(tokens, shape.seq_len // 4)
    # Keys before the query's own, and after.
    sides = (tokens - 1, 0)
    return SlidingWindow(tokens), functools.partial(flash4, window_size=sides)


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


def masks(bench: Bench) -> Iterator[dict]:
    """Each of our backends, and FlashAttention-4's own attention for the mask."""
    args = bench.args
    of_window = functools.partial(window, args.window)
    kinds = (
        ({"mask": "documents", "packs": args.packs}, documents, args.packs),
        ({"mask": "window", "window": args.window}, of_window, 1),
    )
    for shape in bench.shapes(32768, [(64, 8), (16, 2)]):
        for described, make, packs in kinds:
            peer = {}
            for name in (FLASH4, *args.backends):
                row = about("masks", shape) | described | {"name": name}
                found = bench.attempt(row, _masked, shape, make, packs, name)
                peer = peer or found
                yield found | ({} if found is peer else faster("of_flash_attn_4", found, peer))


def _masked(
    bench: Bench, shape: Shape, make: Callable[[Shape, int], Masked], packs: int, name: str
) -> dict:
    """Errors at a small length, then times at the other, means over seeds.

    RuntimeError for a missing peer, and for errors that are too large.
    """
    if name == FLASH4 and flex.missing():
        raise RuntimeError(f"not measured: {flex.missing()}")
    small = shape._replace(seq_len=min(CHECKED_LENGTH, shape.seq_len))
    mask, peer = make(small, 0)
    found = errors(_call(name, mask, peer, small), small, all_pairs(mask, small))
    if wrong(found):
        raise RuntimeError(f"wrong at {small.seq_len} tokens: {wrong(found)}")

    made = (make(shape, seed) for seed in range(packs))
    calls = (
        (_call(name, mask, peer, shape), mask.rows(shape.seq_len, bench.device))
        for mask, peer in made
    )
    return timed_masks(bench, shape, draw(shape), calls) | {"errors": found}


def _call(name: str, mask: Mask, peer: Attention, shape: Shape) -> Attention:
    if name == FLASH4:
        return peer
    ranges = mask.rows(shape.seq_len, shape.device)
    return ours(name, Dense(), ranges, shape.block_size)


CASES = {"sparse": sparse, "masks": masks, "patterns": patterns}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
