"""Sparse attention against dense peers on one GPU: forward + backward in one process, JSON out.

    python -m scripts.benchmarks.attention --seq-lens 131072 262144 \\
        --densities 0.05 0.2 --head-sets 16:2 32:8 --out benchmarks/results/attention_h200.json
    python -m scripts.benchmarks.attention --seq-lens 65536 131072 --densities --backends triton \\
        --peers cudnn "ours, cudnn" "ours, triton" --repeats 9

The second compares dense attention alone.
Pattern per query head: `--sinks` first verticals, `--columns` of the sequence as random verticals,
two local block diagonals, and random ones up to each of `--densities`. Times of our backends
include building the block tables, forward and backward, but not the selection, which is timed
beside them. All times are medians.

In training the host runs ahead of the GPU, so that launches cost nothing. It is timed like that:
before each call the GPU is told to sleep for some 10 ms, in which the host queues the call. A call
that waits for the GPU gains nothing by it. `alone_ms` is the time without the sleep: what one call
on an idle GPU takes.

Before anything is timed, everything that is timed with a causal mask is checked at 4096 tokens
against fp32, and our backends over packed documents of ragged lengths too. A wrong one ends the
run. TFLOP/s count the pairs visited: 4 D forward and 10 D backward per pair and head. The last
lines say where sparse stops paying (scripts.benchmarks.break_even).
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.benchmarks.attention_cases import (
    CUDNN,
    FLASH4,
    OURS_DENSE,
    Attention,
    Shape,
    dense_peers,
    draw,
    ours,
    random_index,
    ready_index,
)
from scripts.benchmarks.attention_errors import cases_to_check, check
from scripts.benchmarks.break_even import break_even, in_words
from scripts.benchmarks.options import head_set, share
from scripts.benchmarks.provenance import provenance
from scripts.benchmarks.timing import (
    longest_kernels,
    peak_extra,
    times,
    training_call,
    visited_share,
)
from titan_sparse.attention import backends
from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.patterns import VerticalSlash

PROGRAM = "scripts.benchmarks.attention"
MATMUL_PEAK = 790.0
"""TFLOP/s of a large bf16 matmul on random data, measured on an H200: the roofline of every row."""
LONG = 262144
"""Dense attention over more tokens than this is timed once: it takes seconds."""
CHECKED_LENGTH = 4096


def main() -> None:
    args = parse(sys.argv[1:])
    errors = f"errors_at_{CHECKED_LENGTH}"
    result = about_run(args) | {errors: {}, "rows": [], "break_even": []}

    for heads, kv_heads in dict.fromkeys(args.head_sets):
        shape = Shape(heads, kv_heads, args.head_dim, args.block_size, CHECKED_LENGTH)
        checked = check(cases_to_check(shape, args.backends, args.peers), shape)
        result[errors][f"{heads}:{kv_heads}"] = checked

    for shape in shapes(args):
        for measured in measure_length(shape, args):
            report(measured)
            result["rows"].append(measured)
        result["break_even"] = break_even(result["rows"])
        if args.out:
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)

    for answer in result["break_even"]:
        print(in_words(answer))


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Ends the program with one line and status 2 for what cannot run here."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seq-lens", type=int, nargs="+", default=[131072])
    sparse = [name for name in backends.BACKENDS if name != "cudnn"]
    add("--backends", nargs="+", default=["flex", "triton"], choices=sparse)
    add(
        "--peers",
        nargs="*",
        choices=[CUDNN, FLASH4, *OURS_DENSE],
        help="default: cudnn, 'ours, dense' and, if it can run here, flash-attn-4",
    )
    add(
        "--head-sets",
        type=head_set,
        nargs="+",
        default=[(16, 2)],
        help="query heads:KV heads, as 16:2",
    )
    add("--head-dim", type=int, default=128)
    add("--block-size", type=int, default=128)
    add(
        "--densities",
        type=share,
        nargs="*",
        default=[0.05],
        help="shares of the causal pairs; none: dense attention only",
    )
    add("--columns", type=share, default=0.005, help="share of the sequence that is verticals")
    add("--sinks", type=int, default=30)
    add("--repeats", type=int, default=5)
    add(
        "--profile",
        action="store_true",
        help="also print the longest CUDA kernels of each of our rows",
    )
    add("--out", default="", help="JSON file, written anew after each length")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, f"{PROGRAM} times kernels on a CUDA GPU, and there is none here\n")
    if args.peers is None:
        args.peers = [CUDNN, "ours, dense"]
        if backends.has_flash_attention_4():
            args.peers.insert(1, FLASH4)
    refused = refusal(args)
    if refused:
        parser.exit(2, f"{PROGRAM}: {refused}\n")
    return args


def refusal(args: argparse.Namespace) -> str | None:
    """Why these options cannot run on this GPU, None if they can."""
    if any(seq_len % args.block_size or seq_len < 4 * args.block_size for seq_len in args.seq_lens):
        return (
            f"--seq-lens: write multiples of --block-size ({args.block_size}), four blocks or more"
        )
    if args.repeats < 1 or args.sinks < 0:
        return "--repeats is 1 or more, --sinks 0 or more"
    if FLASH4 in args.peers and not backends.has_flash_attention_4():
        return (
            '--peers flash-attn-4 cannot run here; pip install -e ".[flash]" on a Hopper GPU, '
            "or leave it out"
        )
    for name in backends_used(args):
        refused = backends.BACKENDS[name].refusal(
            "cuda", torch.bfloat16, args.head_dim, args.block_size
        )
        if refused:
            return refused
    return None


def backends_used(args: argparse.Namespace) -> list[str]:
    """Our backends that are timed, sparse or dense, each once."""
    used = list(args.backends)
    for peer in args.peers:
        if peer in OURS_DENSE:
            used.append(OURS_DENSE[peer])
    return list(dict.fromkeys(used))


def about_run(args: argparse.Namespace) -> dict:
    """The header of the result file: provenance, and the kernels behind each backend."""
    described = {name: backends.BACKENDS[name].describe() for name in backends_used(args)}
    return provenance(args) | {"backends": described}


def shapes(args: argparse.Namespace) -> Iterator[Shape]:
    """Head sets, and in each of them the lengths: each shape once, as flex compiles for each."""
    for heads, kv_heads in dict.fromkeys(args.head_sets):
        for seq_len in dict.fromkeys(args.seq_lens):
            yield Shape(heads, kv_heads, args.head_dim, args.block_size, seq_len)


def measure_length(shape: Shape, args: argparse.Namespace) -> Iterator[dict]:
    """A row for each dense peer, then for each density and backend."""
    tensors = draw(shape)
    ranges = Causal().rows(shape.seq_len, shape.device)
    repeats = 1 if shape.seq_len > LONG else args.repeats

    dense = {}
    for name, call in dense_peers(args.peers, ranges, shape.block_size).items():
        dense[name] = measure(name, call, tensors, repeats, args)
    for name, measured in dense.items():
        yield row(name, shape, None, 1.0, measured, dense)

    for target in args.densities:
        pattern, index = random_index(shape, target, args.columns, args.sinks)
        ready = ready_index(pattern, index)
        calls = {
            backend: functools.partial(ours, backend, ready, ranges, shape.block_size)
            for backend in args.backends
        }
        density = visited_share(calls[args.backends[0]], tensors[:3])
        selection = measure_selection(tensors, pattern, ranges, shape.block_size, args)
        for name, call in calls.items():
            measured = measure(name, call, tensors, args.repeats, args) | selection
            yield row(name, shape, target, density, measured, dense)


def measure(
    name: str, call: Attention, tensors: list[Tensor], repeats: int, args: argparse.Namespace
) -> dict:
    """Times and peak memory of one backend or peer; with --profile also our kernels.

    tensors: q, k, v, d_out.
    """
    leaves = tensors[:3]
    d_out = tensors[3]
    steps = training_call(call, leaves, d_out)
    # Two calls to warm up: this one, and that of peak_extra().
    for step in steps:
        step()
    extra = peak_extra(call, leaves, d_out)
    forward_ms, backward_ms = times(steps, repeats, lead=True)
    measured = {
        "peak_extra_of_qkvo": round(extra, 4),
        "forward_ms": round(forward_ms, 3),
        "backward_ms": round(backward_ms, 3),
    }
    if name in (*args.backends, *OURS_DENSE):
        measured["alone_ms"] = round(sum(times(steps, repeats, lead=False)), 3)
        if args.profile:
            measured["kernels"] = longest_kernels(steps)
    return measured


def measure_selection(
    tensors: list[Tensor],
    pattern: VerticalSlash,
    ranges: MaskRanges,
    block_size: int,
    args: argparse.Namespace,
) -> dict:
    """Median milliseconds of choosing an index with this pattern's caps; with --profile also its
    kernels."""
    step = functools.partial(pattern.select, tensors[0], tensors[1], ranges, block_size=block_size)
    times([step], 2, lead=False)  # warms up
    measured = {
        "selection_ms": round(times([step], args.repeats, lead=True)[0], 3),
        "selection_alone_ms": round(times([step], args.repeats, lead=False)[0], 3),
    }
    if args.profile:
        measured["selection_kernels"] = longest_kernels([step], most=25)
    return measured


def row(
    name: str,
    shape: Shape,
    target: float | None,
    density: float,
    measured: dict,
    dense: dict[str, dict],
) -> dict:
    """What is written of one measurement.

    target: the density asked for, None for dense rows. density: the one counted. dense: what was
    measured of the dense peers, to whose forward + backward the ratios are; null for a peer that
    was not timed.
    """
    causal_flops = 14 * shape.head_dim * shape.heads * shape.seq_len * (shape.seq_len + 1) / 2
    flops = causal_flops * density
    spent = _milliseconds(measured)
    ratios: dict[str, float | None] = {CUDNN: None, FLASH4: None}
    for peer in ratios:
        if peer in dense:
            ratios[peer] = round(spent / _milliseconds(dense[peer]), 4)
    described = shape._asdict()
    del described["device"]
    return {
        "name": name,
        **described,
        "target_density": target,
        "density": round(density, 4),
        "ratio_to_cudnn": ratios[CUDNN],
        "ratio_to_flash_attn_4": ratios[FLASH4],
        "visited_tflops": round(flops / spent / 1e9, 1),
        "roofline_ms": round(flops / MATMUL_PEAK / 1e9, 3),
        **measured,
    }


def _milliseconds(measured: dict) -> float:
    return measured["forward_ms"] + measured["backward_ms"]


def report(measured: dict) -> None:
    """Print a row, and its kernels below it, a line each, then those of the selection."""
    lists = ("kernels", "selection_kernels")
    without_kernels = {key: value for key, value in measured.items() if key not in lists}
    print(json.dumps(without_kernels), flush=True)
    for key in lists:
        for kernel in measured.get(key, []):
            print(
                f"    {kernel['ms']:10.3f} ms {kernel['launches']:5d} launches  {kernel['kernel']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
