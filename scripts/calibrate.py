"""Measures the constants that scripts.plan plans with, on the machines at hand, and writes them as JSON.

    torchrun --nproc-per-node 8 -m scripts.calibrate --out constants.json --across-gb-s 25       # one node
    torchrun --nnodes 4 --nproc-per-node 8 ... -m scripts.calibrate --out constants.json         # several

Kernels: attend() on each rank alone, a vertical-slash pattern at its caps, the selection's time taken off, at --seq-len and
a quarter of it: the line through both gives the rate and what a launch costs. Links: all ranks hop at the same time, in
rings inside the nodes, and in rings of one rank a node. The slowest rank's medians count. Without a GPU it measures the CPU.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from titan_sparse.attention import attend
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe.visits import count_visits_of_all_heads
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.estimate.planner import BACKWARD_FLOPS, FORWARD_FLOPS
from titan_sparse.training.parallelize import choose_device, init_distributed, leave_distributed

BLOCK_SIZE = 128


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens of the timed attention")
    parser.add_argument(
        "--heads", type=int, nargs=2, default=[16, 2], help="query heads and KV heads"
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--megabytes", type=float, default=32, help="size of a timed message, 1e6 bytes"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--across-gb-s",
        type=float,
        help="rate between nodes, where there is only one to measure on",
    )
    parser.add_argument("--across-latency-ms", type=float, default=0.05, help="with --across-gb-s")
    return parser.parse_args(words)


def seconds(function, device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after two to warm up, from one finished device to the next."""
    spent = []
    for number in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_seconds(
    seq_len: int, args: argparse.Namespace, device: torch.device
) -> tuple[int, float, float]:
    """Pairs visited by attend(), and its seconds forward and backward, without the selection."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = lambda heads: torch.randn(
        1, heads, seq_len, args.head_dim, device=device, dtype=dtype, requires_grad=True
    )
    q, k, v = draw(args.heads[0]), draw(args.heads[1]), draw(args.heads[1])
    # On random inputs the caps decide: one diagonal in thirty, one vertical in four hundred.
    blocks = seq_len // BLOCK_SIZE
    pattern = VerticalSlash(
        recall=1.0, sinks=30, max_columns=seq_len // 400, max_slashes=max(1, blocks // 30)
    )
    rows, on_cpu = Causal().rows(seq_len, device), Causal().rows(seq_len)
    call = lambda: attend(q, k, v, rows, pattern, block_size=BLOCK_SIZE)
    select = lambda: pattern.select(q, k, rows, block_size=BLOCK_SIZE)
    with torch.no_grad():
        forward = seconds(call, device, args.repeats) - seconds(select, device, args.repeats)
    out = call()
    d_out = torch.randn_like(out)
    backward = seconds(
        lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), device, args.repeats
    )
    index = pattern.index(
        [x.cpu() for x in select().tensors()], on_cpu, 1, args.heads[0], BLOCK_SIZE
    )
    visits = count_visits_of_all_heads(
        index, on_cpu, block_ids("contiguous", 1, seq_len, BLOCK_SIZE)
    )
    return int(visits.total().sum()), forward, backward


def line(work: tuple[float, float], took: tuple[float, float]) -> tuple[float, float]:
    """(rate, seconds at no work) of the line through two timings, the larger first; through the origin where the line
    would meet it below zero or times do not grow with work. ValueError for times that are none."""
    if took[0] <= 0:
        raise ValueError(
            f"{took[0]} s is no time: these timings are noise; write a larger --seq-len or --repeats"
        )
    if work[0] > work[1] and took[0] > took[1]:
        rate = (work[0] - work[1]) / (took[0] - took[1])
        if took[1] - work[1] / rate > 0:
            return rate, took[1] - work[1] / rate
    return work[0] / took[0], 0.0


def hop_seconds(
    group: dist.ProcessGroup, size: float, args: argparse.Namespace, device: torch.device
) -> float:
    """Of sending `size` bytes to the next rank of the group while as many come from the previous one."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = torch.zeros(max(1, int(size)), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def hop() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
            ]
        )
        for work in works:
            work.wait()

    return seconds(hop, device, args.repeats)


def link(
    groups: list[list[int]], args: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """(GB/s, latency in ms) of hops in these rings, every rank of the world being in one of them."""
    made = [dist.new_group(ranks) for ranks in groups]
    own = next(group for group, ranks in zip(made, groups) if dist.get_rank() in ranks)
    took = [slowest(hop_seconds(own, size, args, device)) for size in (args.megabytes * 1e6, 8)]
    rate, latency = line((args.megabytes * 1e6, 8), tuple(took))
    return rate / 1e9, latency * 1e3


def slowest(number: float) -> float:
    """The largest of all ranks' numbers."""
    numbers = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.item()


def measure(
    args: argparse.Namespace, device: torch.device, local: int
) -> dict[str, tuple[float, str]]:
    """Value and source of every constant."""
    world = dist.get_world_size()
    large, small = (
        kernel_seconds(length, args, device) for length in (args.seq_len, args.seq_len // 4)
    )
    found = {}
    for place, name, flops in ((1, "forward", FORWARD_FLOPS), (2, "backward", BACKWARD_FLOPS)):
        took = (slowest(large[place]), slowest(small[place]))
        rate, launch = line(tuple(x[0] * flops * args.head_dim for x in (large, small)), took)
        source = f"attend(), {took[0] * 1e3:.2f} ms at {args.seq_len} tokens, {args.heads[0]}:{args.heads[1]} heads"
        found[f"{name}_tflops"] = (rate / 1e12, source)
        launch = max(launch * 1e3, found.get("launch_ms", (0,))[0])
        found["launch_ms"] = (launch, "time of attend() at no work, extrapolated")
    inside = [list(range(first, first + local)) for first in range(0, world, local)]
    across = [list(range(place, world, local)) for place in range(local)]
    for name, groups in (("inside", inside), ("across", across)):
        if name == "across" and world == local:
            rate, latency, source = (
                args.across_gb_s,
                args.across_latency_ms,
                "given on the command line",
            )
        else:
            rate, latency = link(groups, args, device)
            source = f"hops of {args.megabytes:g} MB in rings of {len(groups[0])}"
        found |= {f"{name}_gb_s": (rate, source), f"{name}_latency_ms": (latency, source)}
    return found


def main(words: list[str]) -> int:
    args = arguments(words)
    world, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    refused = None
    if local < 2:
        refused = "one rank on a node has nobody to send to; start torchrun with --nproc-per-node 2 or more"
    elif world == local and not args.across_gb_s:
        refused = "there is only one node to measure on; write --across-gb-s NUMBER for the links between nodes"
    elif args.seq_len % (4 * BLOCK_SIZE) or args.seq_len < 4096:
        refused = f"--seq-len {args.seq_len} is no multiple of {4 * BLOCK_SIZE} of at least 4096; write 131072"
    if refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    device = choose_device(args.device)
    init_distributed(device, timeout_seconds=600)
    try:
        constants = measure(args, device, local)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        described = {
            key: {"value": value, "source": source} for key, (value, source) in constants.items()
        }
        about = {
            "machine": f"{name}, {world // local} nodes of {local}",
            "date": str(datetime.date.today()),
            "torch": torch.__version__,
            "constants": described,
        }
        Path(args.out).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(about, indent=1))
    leave_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
