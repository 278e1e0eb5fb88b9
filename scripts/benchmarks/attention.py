"""Sparse attention against dense peers on one GPU: forward + backward in one process, medians, JSON out.

    python -m scripts.benchmarks.attention --seq-lens 131072 262144 \\
        --densities 0.05 0.2 --head-sets 16:2 32:8 --out benchmarks/results/attention_h200.json

Pattern per query head: `--sinks` first verticals, `--columns` of the sequence as random verticals, two local block
diagonals and random ones up to each of `--densities`. Times of our backends include building the block tables, forward
and backward, but not the selection, which is timed beside.

In training the host runs ahead of the GPU, so that launches cost nothing. It is timed like that: before each call the
GPU is told to sleep for some 10 ms, in which the host queues the call. A call that waits for the GPU gains nothing by
it. `alone_ms` is the time without the sleep, which is what one call on an idle GPU takes.

Before anything is timed, all that is timed with a causal mask is checked at 4096 tokens against fp32, and our backends
over packed documents of ragged lengths too: a wrong one ends the run. TFLOP/s count the pairs visited: 4 D forward and
10 D backward per pair and head. The last lines say where sparse stops paying (scripts.benchmarks.break_even).
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import DeviceType

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
from titan_sparse.attention import backends
from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.patterns import VerticalSlash

MATMUL_PEAK = 790.0
"""TFLOP/s of a large bf16 matmul on random data, measured on an H200: the roofline of every row."""
LEAD_CYCLES = 20_000_000
"""GPU cycles of sleep before a timed call, about 10 ms: more than the host takes to queue a forward and a backward."""
LONG = 262144
"""Dense attention over more tokens than this is timed once: it takes seconds."""
CHECKED_LENGTH = 4096


# Measuring ----------------------------------------------------------------------------------------------------------


def training_call(call: Attention, leaves: list[Tensor], d_out: Tensor) -> list[Callable[[], None]]:
    """The two steps of one call: the forward, and the backward of what the forward gave."""
    kept = {}

    def forward() -> None:
        kept["out"] = call(*leaves)

    def backward() -> None:
        torch.autograd.grad(kept.pop("out"), leaves, d_out)

    return [forward, backward]


def times(steps: Sequence[Callable[[], object]], repeats: int, lead: bool) -> list[float]:
    """Median milliseconds of each step, run after each other `repeats` times; lead: the host runs ahead of the GPU."""
    spent = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        torch.cuda.synchronize()
        if lead:
            torch.cuda._sleep(LEAD_CYCLES)
        events[0].record()
        for step, event in zip(steps, events[1:]):
            step()
            event.record()
        events[-1].synchronize()
        spent.append([a.elapsed_time(b) for a, b in zip(events, events[1:])])
    return [statistics.median(step) for step in zip(*spent)]


def peak_extra(call: Attention, leaves: list[Tensor], d_out: Tensor) -> float:
    """Peak bytes above inputs, outputs and gradients, as a share of q + k + v + out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, d_out)
    torch.cuda.synchronize()
    held = sum(x.nbytes for x in (out, *gradients))
    return (torch.cuda.max_memory_allocated() - before - held) / sum(
        x.nbytes for x in (*leaves, out)
    )


def visited_share(call: Attention, leaves: list[Tensor]) -> float:
    """Density of the index by our own count."""
    with recording() as seen, torch.no_grad():
        call(*leaves)
    return seen.density().mean().item()


def longest_kernels(steps: Sequence[Callable[[], object]], most: int = 15) -> list[dict]:
    """The CUDA kernels of one call, by their total time: name, number of launches, milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for step in steps:
            step()
        torch.cuda.synchronize()
    return by_total_time(trace.key_averages(), most)


def by_total_time(events: Sequence, most: int) -> list[dict]:
    """The longest CUDA kernels among the profiler's averaged events, at most `most`."""
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    longest = sorted(
        ((e.self_device_time_total / 1e3, e.count, e.key[:100]) for e in kernels), reverse=True
    )[:most]
    return [{"kernel": key, "launches": count, "ms": round(ms, 3)} for ms, count, key in longest]


def measure(
    name: str, call: Attention, tensors: list[Tensor], repeats: int, args: argparse.Namespace
) -> dict:
    """Times, peak memory and, with --profile, kernels of one backend or peer, after two calls to warm up."""
    *leaves, d_out = tensors
    steps = training_call(call, leaves, d_out)
    for step in steps:
        step()
    found = {"peak_extra_of_qkvo": round(peak_extra(call, leaves, d_out), 4)}
    found["forward_ms"], found["backward_ms"] = (
        round(ms, 3) for ms in times(steps, repeats, lead=True)
    )
    if name in (*backends.BACKENDS, OURS_DENSE):
        found["alone_ms"] = round(sum(times(steps, repeats, lead=False)), 3)
        if args.profile:
            found["kernels"] = longest_kernels(steps)
    return found


def row(
    name: str,
    shape: Shape,
    target: float | None,
    density: float,
    found: dict,
    dense: dict[str, dict],
) -> dict:
    """What is written of one measurement.

    target: the density asked for, None for dense rows; density: the one counted. dense: what was found for the dense
    peers, to whose forward + backward the ratios are; null for a peer not timed.
    """
    flops = 14 * shape.head_dim * shape.heads * shape.seq_len * (shape.seq_len + 1) / 2 * density
    spent = _milliseconds(found)
    ratio = {
        peer: round(spent / _milliseconds(dense[peer]), 4) if peer in dense else None
        for peer in (CUDNN, FLASH4)
    }
    about = {key: value for key, value in shape._asdict().items() if key != "device"}
    return {
        "name": name,
        **about,
        "target_density": target,
        "density": round(density, 4),
        "ratio_to_cudnn": ratio[CUDNN],
        "ratio_to_flash_attn_4": ratio[FLASH4],
        "visited_tflops": round(flops / spent / 1e9, 1),
        "roofline_ms": round(flops / MATMUL_PEAK / 1e9, 3),
        **found,
    }


def _milliseconds(found: dict) -> float:
    return found["forward_ms"] + found["backward_ms"]


def measure_length(shape: Shape, args: argparse.Namespace) -> Iterator[dict]:
    """A row for each dense peer, then for each density and backend."""
    tensors, rows = draw(shape), Causal().rows(shape.seq_len, shape.device)
    repeats = 1 if shape.seq_len > LONG else args.repeats
    dense = {
        name: measure(name, call, tensors, repeats, args)
        for name, call in dense_peers(args.peers, rows, shape.block_size).items()
    }
    for name, found in dense.items():
        yield row(name, shape, None, 1.0, found, dense)
    for target in args.densities:
        pattern, index = random_index(shape, target, args.columns, args.sinks)
        ready = ready_index(pattern, index)
        calls = {
            backend: functools.partial(ours, backend, ready, rows, shape.block_size)
            for backend in args.backends
        }
        density = visited_share(calls[args.backends[0]], tensors[:3])
        selection = selection_times(tensors, pattern, rows, shape.block_size, args.repeats)
        for name, call in calls.items():
            found = measure(name, call, tensors, args.repeats, args) | selection
            yield row(name, shape, target, density, found, dense)


def selection_times(
    tensors: list[Tensor], pattern: VerticalSlash, rows: MaskRanges, block_size: int, repeats: int
) -> dict:
    """Median milliseconds of choosing an index with this pattern's caps."""
    step = functools.partial(pattern.select, *tensors[:2], rows, block_size=block_size)
    times([step], 2, lead=False)
    return {
        "selection_ms": round(times([step], repeats, lead=True)[0], 3),
        "selection_alone_ms": round(times([step], repeats, lead=False)[0], 3),
    }


# The run ------------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Of what the numbers depend on; null for what is not there."""
    driver = subprocess.run(
        "nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1",
        shell=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flash-attn-4": _version("flash-attn-4"),
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": driver or None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Ends the program, in one line and with status 2, for what cannot run here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seq-lens", type=int, nargs="+", default=[131072])
    add("--backends", nargs="+", default=["flex", "triton"], choices=list(backends.BACKENDS))
    add(
        "--peers",
        nargs="*",
        choices=[CUDNN, FLASH4, OURS_DENSE],
        help="default: all that can run here",
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
    add("--densities", type=share, nargs="+", default=[0.05], help="shares of the causal pairs")
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
        parser.exit(
            2, "scripts.benchmarks.attention times kernels on a CUDA GPU, and there is none here\n"
        )
    if args.peers is None:
        args.peers = [CUDNN, *[FLASH4] * backends.has_flash_attention_4(), OURS_DENSE]
    refused = refusal(args)
    if refused:
        parser.exit(2, f"scripts.benchmarks.attention: {refused}\n")
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
        return '--peers flash-attn-4 cannot run here; pip install -e ".[flash]" on a Hopper GPU, or leave it out'
    used = dict.fromkeys([*args.backends, *["flex"] * (OURS_DENSE in args.peers)])
    refused = (
        backends.BACKENDS[name].refusal("cuda", torch.bfloat16, args.head_dim, args.block_size)
        for name in used
    )
    return next(filter(None, refused), None)


def head_set(text: str) -> tuple[int, int]:
    """ "16:2" -> (16, 2)."""
    heads, kv_heads = (
        int(x) if x.isdigit() else 0 for x in (text.partition(":")[0], text.partition(":")[2])
    )
    if not heads or not kv_heads or heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text}: write query heads:KV heads, a multiple and its divisor, as 16:2"
        )
    return heads, kv_heads


def share(text: str) -> float:
    """A number in (0, 1]."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: write a share above 0 and at most 1, as 0.05")
    return number


def shapes(args: argparse.Namespace) -> Iterator[Shape]:
    """Head sets, and in each of them the lengths: each shape once, as flex compiles for each."""
    for heads, kv_heads in dict.fromkeys(args.head_sets):
        for seq_len in dict.fromkeys(args.seq_lens):
            yield Shape(heads, kv_heads, args.head_dim, args.block_size, seq_len)


def report(found: dict) -> None:
    """Print a row, and its kernels below it, a line each."""
    print(json.dumps({key: value for key, value in found.items() if key != "kernels"}), flush=True)
    for kernel in found.get("kernels", []):
        print(
            f"    {kernel['ms']:10.3f} ms {kernel['launches']:5d} launches  {kernel['kernel']}",
            flush=True,
        )


def about_run(args: argparse.Namespace) -> dict:
    """What the numbers belong to: command, date, GPU, versions, options, kernels behind each backend."""
    return {
        "command": " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "options": vars(args),
        "backends": {
            name: backends.BACKENDS[name].describe()
            for name in dict.fromkeys([*args.backends, "flex"])
        },
    }


def main() -> None:
    args = parse(sys.argv[1:])
    result = about_run(args) | {f"errors_at_{CHECKED_LENGTH}": {}, "rows": [], "break_even": []}
    for heads, kv_heads in dict.fromkeys(args.head_sets):
        shape = Shape(heads, kv_heads, args.head_dim, args.block_size, CHECKED_LENGTH)
        found = check(cases_to_check(shape, args.backends, args.peers), shape)
        result[f"errors_at_{CHECKED_LENGTH}"][f"{heads}:{kv_heads}"] = found
    for shape in shapes(args):
        for found in measure_length(shape, args):
            report(found)
            result["rows"].append(found)
        result["break_even"] = break_even(result["rows"])
        if args.out:
            with open(args.out, "w") as file:
                json.dump(result, file, indent=1)
    for answer in result["break_even"]:
        print(in_words(answer))


if __name__ == "__main__":
    main()
