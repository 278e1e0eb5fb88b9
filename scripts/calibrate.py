"""Measures the constants that titan-sparse plan plans with, on the machines at hand, and writes
JSON. attention.balance_costs takes the same file.

    torchrun --nproc-per-node 8 -m scripts.calibrate --out constants.json --across-gb-s 25  # 1 node
    torchrun --nnodes 4 --nproc-per-node 8 ... -m scripts.calibrate --out constants.json    # several

Kernels: attend() on each rank alone, a vertical-slash pattern at its caps, the selection's time
taken off, at --seq-len and a quarter of it. The line through both gives the rate and what a launch
costs. Tiles: dense attention under four windows, which differ in the tiles that they see whole and
in those that they cut through. Links: all ranks hop at the same time, in rings inside the nodes,
and in rings of one rank a node. The slowest rank's medians count. Without a GPU it measures the
CPU.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.benchmarks.provenance import provenance
from titan_sparse.attention import attend
from titan_sparse.attention.backends import choose
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import Causal, MaskRanges, SlidingWindow
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import BlockIndex, Dense, VerticalSlash
from titan_sparse.commands import in_tokens, parser_of, refuses
from titan_sparse.config import world_from_environment
from titan_sparse.config.reading import require
from titan_sparse.data.shards import write_json
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS
from titan_sparse.estimate.visits import count_visits
from titan_sparse.training.faults.process_groups import choose_device, init_distributed

BLOCK_SIZE = 128
Constants = dict[str, tuple[float, str]]
"""{name of a constant: (its value, where it comes from)}."""


@refuses
def main(words: list[str]) -> int:
    args = arguments(words)
    world, ranks_of_node = world_from_environment()
    check(args, world, ranks_of_node)
    device = choose_device(args.device)
    init_distributed(device, timeout_seconds=600)
    constants = measure(args, device, ranks_of_node)
    if dist.get_rank() == 0:
        about = provenance(args, device)
        machine = f"{about['gpu']}, {world // ranks_of_node} nodes of {ranks_of_node}"
        result = {"machine": machine, **about, "constants": {}}
        for name, (value, source) in constants.items():
            result["constants"][name] = {"value": value, "source": source}
        write_json(Path(args.out), result)
        print(json.dumps(result, indent=1))
    dist.destroy_process_group()
    return 0


def arguments(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "scripts.calibrate")
    add = parser.add_argument
    add("--out", required=True, help="JSON file to write")
    add("--seq-len", type=in_tokens, default=131072, help="tokens of the timed attention")
    add("--heads", type=int, nargs=2, default=[16, 2], help="query heads and KV heads")
    add("--head-dim", type=int, default=128)
    add("--megabytes", type=float, default=32, help="size of a timed message, 1e6 bytes")
    add("--repeats", type=int, default=7)
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--across-gb-s", type=float, help="rate between nodes, where there is only one node")
    add("--across-latency-ms", type=float, default=0.05, help="with --across-gb-s")
    return parser.parse_args(words)


def check(args: argparse.Namespace, world: int, ranks_of_node: int) -> None:
    """Raises Refusal if this cannot be measured here."""
    require(
        ranks_of_node > 1,
        "one rank on a node has no other to send to; write --nproc-per-node 2 or more",
    )
    require(
        world > ranks_of_node or args.across_gb_s,
        "there is only one node; write --across-gb-s NUMBER for the links between nodes",
    )
    require(
        args.seq_len % (4 * BLOCK_SIZE) == 0 and args.seq_len >= 4096,
        f"--seq-len {args.seq_len} is not a multiple of {4 * BLOCK_SIZE} of at least 4096; "
        "write 131072",
    )


def measure(args: argparse.Namespace, device: torch.device, ranks_of_node: int) -> Constants:
    heads = f"{args.heads[0]}:{args.heads[1]} heads"
    large = kernel_seconds(args.seq_len, args, device)
    small = kernel_seconds(args.seq_len // 4, args, device)
    constants: Constants = {}
    launches = []
    for name, flops in (("forward", FORWARD_FLOPS), ("backward", BACKWARD_FLOPS)):
        took = [slowest(getattr(times, name)) for times in (large, small)]
        work = [times.pairs * flops * args.head_dim for times in (large, small)]
        rate, launch = line(work, took)
        launches.append(launch * 1e3)
        source = f"attend(), {took[0] * 1e3:.2f} ms at {args.seq_len} tokens, {heads}"
        constants[f"{name}_tflops"] = (rate / 1e12, source)
    source = "time of attend() at no work, extrapolated; the host's time of a call is in it"
    constants["launch_ms"] = (max(launches), source)

    runs = windowed_runs(args, device)
    whole_seconds, partial_seconds = tile_seconds(runs)
    tile_flops = args.heads[0] * BLOCK_SIZE**2 * args.head_dim * (FORWARD_FLOPS + BACKWARD_FLOPS)
    longest = max(run.seconds for run in runs)
    backend = choose("auto", device.type, _dtype(device), args.head_dim, BLOCK_SIZE)
    source = (
        f"attend() with pattern dense under {len(runs)} windows, up to {longest * 1e3:.2f} ms at "
        f"{args.seq_len} tokens, {heads}, backend {backend}"
    )
    constants["dense_tflops"] = (tile_flops / whole_seconds / 1e12, source)
    constants["partial_tile"] = (partial_seconds / whole_seconds, source)

    world = dist.get_world_size()
    places = {
        "inside": [range(first, first + ranks_of_node) for first in range(0, world, ranks_of_node)],
        "across": [range(place, world, ranks_of_node) for place in range(ranks_of_node)],
    }
    for name, rings in places.items():
        if len(rings[0]) == 1:
            rate = args.across_gb_s
            latency = args.across_latency_ms
            source = "given on the command line"
        else:
            rate, latency = link(rings, args, device)
            source = f"hops of {args.megabytes:g} MB in rings of {len(rings[0])}"
        constants[f"{name}_gb_s"] = (rate, source)
        constants[f"{name}_latency_ms"] = (latency, source)
    return constants


class TiledRun(NamedTuple):
    """One run of attend(), forward and backward: tiles of a head that the mask leaves whole, those
    that it cuts through, and seconds of the slowest rank."""

    whole: int
    partial: int
    seconds: float


def windowed_runs(args: argparse.Namespace, device: torch.device) -> list[TiledRun]:
    """Time dense attention on this rank alone, under windows narrow and wide.

    A window of whole blocks and one token cuts two tiles of each block of queries: the last one,
    and the one where it begins. Half a block more, and it begins in two tiles.
    """
    inputs = random_inputs(args.seq_len, args, device)
    d_out = torch.randn_like(inputs[0])
    one_rank = block_ids("contiguous", 1, args.seq_len, BLOCK_SIZE)
    widest = min(64, args.seq_len // BLOCK_SIZE // 4)
    runs = []
    for blocks in (1, widest):
        for begin in (1, BLOCK_SIZE // 2 + 1):
            mask = Causal() & SlidingWindow(blocks * BLOCK_SIZE + begin)
            ranges = mask.rows(args.seq_len, device)

            def call(ranges: MaskRanges = ranges) -> None:
                out = attend(*inputs, ranges, Dense(), block_size=BLOCK_SIZE)
                torch.autograd.grad(out, inputs, d_out)

            took = slowest(seconds(call, device, args.repeats))
            on_cpu = mask.rows(args.seq_len)
            index = Dense().index([], on_cpu, 1, 1, BLOCK_SIZE)
            visits = count_visits(index, on_cpu, one_rank)
            runs.append(TiledRun(visits.full.sum().item(), visits.partial.sum().item(), took))
    return runs


def tile_seconds(runs: list[TiledRun]) -> tuple[float, float]:
    """(seconds of a whole tile, of a partial one): a fit of least relative errors to runs.

    What else a call takes is the same for all of them. A partial tile has the products of a whole
    one and takes no less. ValueError for times that do not grow with whole tiles.
    """
    # [runs, 3]: what a call takes, and what each kind of tile adds.
    tiles = torch.tensor([[1, run.whole, run.partial] for run in runs], dtype=torch.float64)
    took = torch.tensor([run.seconds for run in runs], dtype=torch.float64)
    # Columns of like size, for the numerics.
    largest = tiles.amax(0)
    fit = torch.linalg.lstsq(tiles / largest / took[:, None], torch.ones_like(took)[:, None])
    _, whole, partial = (fit.solution[:, 0] / largest).tolist()
    if whole <= 0:
        raise ValueError(
            f"{whole} s is not the time of a tile: these timings are noise; "
            "write a larger --seq-len or --repeats"
        )
    return whole, max(whole, partial)


class KernelTimes(NamedTuple):
    """Times of attend() over one length: pairs visited, and seconds without the selection."""

    pairs: int
    forward: float
    backward: float


def kernel_seconds(seq_len: int, args: argparse.Namespace, device: torch.device) -> KernelTimes:
    """Time attend() on this rank alone."""
    q, k, v = random_inputs(seq_len, args, device)
    # On random inputs the caps decide: one diagonal in thirty, one vertical in four hundred. A
    # budget by scores would drop many candidates of equal score together.
    blocks = seq_len // BLOCK_SIZE
    pattern = VerticalSlash(
        recall=1.0,
        sinks=30,
        max_verticals=seq_len // 400,
        max_slashes=max(1, blocks // 30),
        budget="independent",
        probe_rows="last",
        count_sinks=True,
    )
    ranges = Causal().rows(seq_len, device)

    def call() -> Tensor:
        return attend(q, k, v, ranges, pattern, block_size=BLOCK_SIZE)

    def select() -> BlockIndex:
        return pattern.select(q, k, ranges, block_size=BLOCK_SIZE)

    with torch.no_grad():
        both = seconds(call, device, args.repeats)
        forward = both - seconds(select, device, args.repeats)
    out = call()
    d_out = torch.randn_like(out)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    backward = seconds(gradients, device, args.repeats)
    with recording() as seen, torch.no_grad():
        call()
    return KernelTimes(int(seen.visited[0].sum()), forward, backward)


def random_inputs(seq_len: int, args: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """q, k and v, [1, heads or KV heads, S, D]."""
    torch.manual_seed(0)
    dtype = _dtype(device)
    heads, kv_heads = args.heads
    inputs = []
    for number in (heads, kv_heads, kv_heads):
        size = (1, number, seq_len, args.head_dim)
        inputs.append(torch.randn(size, device=device, dtype=dtype, requires_grad=True))
    return inputs


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def link(
    groups: list[range], args: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """(GB/s, latency in ms) of hops in these rings, every rank of the world
    being in one of them."""
    for ranks in groups:
        # Creating a group is collective: every rank creates all of them, and keeps its own.
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            ring = group
    sizes = (args.megabytes * 1e6, 8)
    took = [slowest(hop_seconds(ring, size, args.repeats, device)) for size in sizes]
    rate, latency = line(sizes, took)
    return rate / 1e9, latency * 1e3


def hop_seconds(group: dist.ProcessGroup, size: float, repeats: int, device: torch.device) -> float:
    """Seconds of sending `size` bytes to the next rank of the group, and receiving as many from the
    previous one.
    """
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    following = (rank + 1) % ranks
    previous = (rank - 1) % ranks
    sent = torch.zeros(max(1, int(size)), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def hop() -> None:
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=following)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=previous)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return seconds(hop, device, repeats)


def line(work: Sequence[float], took: Sequence[float]) -> tuple[float, float]:
    """(rate, seconds at no work) of the line through two timings, the larger first.

    The line goes through the origin where it would meet it below zero, and where times do not grow
    with work. ValueError for times that are none.
    """
    if took[0] <= 0:
        raise ValueError(
            f"{took[0]} s is not a time: these timings are noise; "
            "write a larger --seq-len or --repeats"
        )
    more_work = work[0] - work[1]
    more_time = took[0] - took[1]
    if more_work > 0 and more_time > 0:
        rate = more_work / more_time
        at_no_work = took[1] - work[1] / rate
        if at_no_work > 0:
            return rate, at_no_work
    return work[0] / took[0], 0.0


def seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after two to warm up, from one finished device to the next."""
    spent = []
    for _ in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(number: float) -> float:
    """The largest of all ranks' numbers."""
    numbers = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.item()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
