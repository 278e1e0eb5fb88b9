"""Attention on one GPU: sparse against dense peers.

    python -m scripts.benchmarks.attention --seq-lens 131072 262144 \\
        --densities 0.05 0.2 --heads 16:2 32:8 --out benchmarks/results/attention_h200.json

All in bf16, forward and backward, JSON out. Times are medians of --repeats after --warm-ups. In
training the host runs ahead of the GPU, so that launches cost nothing. It is timed like that:
before each call the GPU sleeps for some 20 ms, in which the host queues the call. TFLOP/s count the
pairs computed (4 D forward and 10 D backward per pair and head). With --device cpu everything runs
by plain PyTorch, to try it out at small sizes.

The index is random: per query head the first --sinks, --verticals of the sequence as random
verticals, two local slashes, and random ones up to each of --densities. Our times include the block
tables, but not the selection, which is timed beside them. With --densities and no number: dense
attention alone. Before, everything is checked at 4096 tokens against fp32.

A measurement that fails, or a peer that is missing, is a row with `error`, and the run goes on.
Rows are written at once.
"""

import argparse
import sys
from collections.abc import Iterator

from scripts.benchmarks.attention_cases import (
    CUDNN,
    FLASH4,
    Shape,
    cases_to_check,
    check,
    dense_peers,
    draw,
    ours,
    sparse,
)
from scripts.benchmarks.harness import (
    Bench,
    about,
    add_common_options,
    measure,
    place,
    timed,
    training_call,
    visited_share,
)
from scripts.benchmarks.options import head_set, share
from titan_sparse.attention import backends
from titan_sparse.attention.backends import flex
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.commands import parser_of, positive
from titan_sparse.estimate.flops import causal_pairs

PROGRAM = "scripts.benchmarks.attention"
LONG = 262144
"""Dense attention over more tokens than this is timed once: it takes seconds."""
CHECKED_LENGTH = 4096


def main(words: list[str]) -> int:
    args = parse(words)
    return measure([args], {"sparse": rows}, refusal(args))


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, PROGRAM)
    add = parser.add_argument
    add("--seq-lens", type=positive, nargs="+", default=[131072])
    add("--heads", type=head_set, nargs="+", default=[], help="query heads:KV heads, as 16:2")
    add("--backends", nargs="+", choices=list(backends.BACKENDS), help="ours, timed by name")
    add("--densities", type=share, nargs="*", default=[0.05], help="of the causal pairs")
    add("--verticals", type=lambda x: float(x) and share(x), default=0.005, help="share of keys")
    add("--sinks", type=int, default=30)
    add_common_options(parser)
    parser.set_defaults(cases=["sparse"])
    args = parser.parse_args(words)
    on_gpu = ["triton"] if flex.missing() else ["flex", "triton"]
    args.backends = args.backends or (["eager"] if args.device == "cpu" else on_gpu)
    return args


def refusal(args: argparse.Namespace) -> str | None:
    """The reason why these options cannot run here; None if they can."""
    if place()[1] > 1:
        return f"{PROGRAM} is for one GPU; start it with python, not with torchrun"
    for seq_len in args.seq_lens:
        if seq_len % args.block_size or seq_len < 4 * args.block_size:
            return f"--seq-lens: write multiples of --block-size ({args.block_size}), four or more"
    return None


def rows(bench: Bench) -> Iterator[dict]:
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
            pattern, tensors, select = sparse(shape, target, args)
            selection = {"selection_ms": timed(bench, [select])["total_ms"]}
            density = None
            for name in args.backends:
                call = ours(name, pattern, ranges, shape.block_size)
                density = density or visited_share(call, tensors[:3])
                named = row | {"name": name, "target_density": target}
                measured = bench.attempt(named, timed, training_call(call, tensors))
                yield measured | selection | _of_peers(shape, density, measured, dense)


def _of_peers(shape: Shape, density: float, measured: dict, dense: dict[str, dict]) -> dict:
    """Density, rate, and the ratio to others' dense attention; null for one that was not timed."""
    if "error" in measured:
        return {}
    spent = measured["forward_ms"] + measured["backward_ms"]
    flops = 14 * shape.head_dim * shape.heads * density * causal_pairs(shape.seq_len)
    found = {"density": round(density, 4), "visited_tflops": round(flops / spent / 1e9, 1)}
    for key, peer in (("ratio_to_cudnn", CUDNN), ("ratio_to_flash_attn_4", FLASH4)):
        row = dense.get(peer, {"error": "not timed"})
        found[key] = None
        if "error" not in row:
            of_peer = row["forward_ms"] + row["backward_ms"]
            found[key] = round(spent / of_peer, 4)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
