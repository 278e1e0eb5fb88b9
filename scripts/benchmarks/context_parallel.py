"""Attention over several GPUs: scaling, dense peers, and documents.

    torchrun --standalone --nproc-per-node 4 -m scripts.benchmarks.context_parallel \\
        scaling dense --out results.json
    torchrun --standalone --nproc-per-node 4 -m scripts.benchmarks.context_parallel \\
        scaling --schedules ring double_ring --pretend-nodes 2 --out nodes.json

All in bf16. Times are of the forward and the backward of attend(), medians of --repeats after
--warm-ups. GPUs start together, and their hosts run ahead by a sleep of some 20 ms. `total_ms` is
the slowest rank's, `per_rank_ms` every rank's. TFLOP/s are of one rank, count the pairs computed
(4 D forward, 10 D backward per pair and head) and go by the slowest rank. "+" between two lists of
options measures both in one process group, each with its --out.

scaling   sparse attention with a random index of --density, striped, for every schedule and dtype
          of the gradients on the wire. `alone`: a sequence shorter by the root of the number of
          ranks, which is the same work for one GPU, on every rank at the same time. `of_alone` is
          the ratio of their TFLOP/s. The index is given; choosing one is timed beside it. One
          rank: `alone` and nothing else
dense     our layout zigzag in each of --schedules, and torch's context_parallel over cuDNN
          attention with its defaults
varlen    packed documents (indexes.ragged_lengths), or a causal window, by layouts and schedules,
          group_cast with each of --stages; means over --packs. torch's context_parallel knows no
          documents: it computes the causal mask, and its TFLOP/s count that

A measurement that fails is a row with `error`, and the run goes on; a rank that fails alone ends it
after --timeout. --pretend-nodes makes NCCL treat the ranks of this host as those of several, so
that it sends over sockets between them. With --device cpu everything runs over gloo, to try it out.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator

import torch

from scripts.benchmarks.attention_cases import (
    Shape,
    cudnn,
    draw,
    sparse,
)
from scripts.benchmarks.harness import (
    Bench,
    Case,
    about,
    add_common_options,
    cp_mesh,
    measure,
    place,
    timed,
    training_call,
    visited_share,
)
from scripts.benchmarks.options import head_set, share
from titan_sparse.attention import ContextParallel, backends
from titan_sparse.attention.context_parallel.layouts import block_multiple
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.masks.visibility import visible_pairs
from titan_sparse.attention.patterns import Dense
from titan_sparse.commands import parser_of, positive
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS
from titan_sparse.estimate.flops import causal_pairs
from titan_sparse.estimate.indexes import ragged_lengths

SCHEDULES = ("all_gather", "ring", "double_ring", "ulysses")
TORCH = "torch context_parallel"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of the gradients on the wire, by the name in rows."""


def main(words: list[str]) -> int:
    by_plus = itertools.groupby(words, lambda word: word == "+")
    runs = [parse(list(of_run)) for is_plus, of_run in by_plus if not is_plus]
    rank, world = place()
    refused = next(filter(None, (refusal(args, world) for args in runs)), None)
    nodes = runs[0].pretend_nodes
    if refused is None and nodes > 1:
        pretend(nodes, rank, world)
    return measure(runs, CASES, refused, nodes)


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "scripts.benchmarks.context_parallel")
    add = parser.add_argument
    add("cases", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    add("--seq-lens", type=positive, nargs="+", default=[], help="of all ranks together")
    add("--heads", type=head_set, nargs="+", default=[], help="query heads:KV heads, as 16:2")
    add("--density", type=share, default=0.05, help="share of the causal pairs, of random indexes")
    add("--verticals", type=share, default=0.005, help="share of the sequence that is verticals")
    add("--sinks", type=int, default=30)
    add("--schedules", nargs="+", default=["all_gather", "ring"], choices=SCHEDULES)
    add("--gradient-dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    add("--packs", type=positive, default=4, help="sequences of documents, of varlen")
    add("--window", type=positive, default=4096, help="tokens that a query sees, of varlen")
    add("--varlen-masks", nargs="+", choices=["documents", "window"], default=["documents"])
    add("--stages", type=positive, nargs="+", default=[1, 2, 4], help="of group_cast, of varlen")
    add("--pretend-nodes", type=positive, default=1, help="nodes that NCCL sees")
    add_common_options(parser)
    return parser.parse_args(words)


def refusal(args: argparse.Namespace, world: int) -> str | None:
    """The reason why these options cannot run on `world` ranks; None if they can."""
    nodes = args.pretend_nodes
    multiple = block_multiple("zigzag", world) * args.block_size
    if world % nodes:
        return f"--pretend-nodes {nodes} does not divide {world} ranks; write a divisor"
    if world == 1 and args.cases != ["scaling"]:
        return "one rank shares nothing; start torchrun with --nproc-per-node 2 or more"
    if args.backend == "cudnn" and set(args.cases) != {"dense"}:
        return "--backend cudnn computes dense attention; write the case dense alone, or auto"
    if world > 1 and "double_ring" in args.schedules and world % max(2, nodes):
        return f"double_ring needs an even number of ranks, not {world}; leave it out"
    if any(seq_len % multiple for seq_len in args.seq_lens):
        return f"--seq-lens: write multiples of {multiple}"
    return None


def pretend(nodes: int, rank: int, world: int) -> None:
    """Simulate `nodes` nodes, joined by sockets. Call it before NCCL starts."""
    os.environ |= {
        "NCCL_HOSTID": f"node{rank * nodes // world}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


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


def rounded(number: float) -> float:
    return float(f"{number:.5g}")


def rates(shape: Shape, measured: dict, pairs: float, ranks: int) -> dict:
    """TFLOP/s of a rank, by the milliseconds measured and the pairs that each head computes."""
    work = shape.heads * shape.head_dim * pairs / ranks / 1e9
    flops = {"forward": FORWARD_FLOPS, "backward": BACKWARD_FLOPS}
    flops["total"] = FORWARD_FLOPS + BACKWARD_FLOPS
    return {
        f"{step}_tflops": rounded(of_pair * work / measured[f"{step}_ms"])
        for step, of_pair in flops.items()
    }


# scaling ------------------------------------------------------------------------------------------


def scaling(bench: Bench) -> Iterator[dict]:
    """Sparse attention over all ranks, and on each rank alone with as many visited pairs.

    A single rank computes the whole sequence.
    """
    for shape in bench.shapes(524288, [(16, 2)]):
        # Pairs grow with the square of the length: a rank's share of them fits into this length.
        blocks = round(shape.seq_len / bench.world**0.5 / shape.block_size)
        blocks = max(4, blocks)
        short = shape._replace(seq_len=blocks * shape.block_size)
        backend = chosen_backend(bench.args.backend, shape, dynamic=True)
        row = about("scaling", short)
        row |= {"schedule": "alone", "backend": backend}
        alone = bench.attempt(row, _scaled, short, None)
        yield alone
        if bench.world == 1:
            continue
        for schedule in bench.args.schedules:
            for dtype in bench.args.gradient_dtypes:
                if schedule == "ulysses" and dtype != "float32":
                    # No gradients are summed between ranks.
                    continue
                row = about("scaling", shape)
                row["schedule"] = schedule
                row["layout"] = "striped"
                row["backend"] = backend
                row["gradient_dtype"] = dtype
                row["nodes"] = bench.nodes
                cp = bench.context("striped", schedule, gradient_dtype=DTYPES[dtype])
                found = bench.attempt(row, _scaled, shape, cp)
                if "error" not in found and "error" not in alone:
                    of_alone = found["visited_tflops"] / alone["visited_tflops"]
                    found["of_alone"] = rounded(of_alone)
                yield found


def _scaled(bench: Bench, shape: Shape, cp: ContextParallel | None) -> dict:
    pattern, tensors, select = sparse(shape, bench.args.density, bench.args, cp)
    call = bench.attention(pattern, Causal().rows(shape.seq_len, bench.device), cp)
    density = visited_share(call, tensors[:3])
    measured = timed(bench, training_call(call, tensors))
    pairs = density * causal_pairs(shape.seq_len)
    ranks = cp.size if cp else 1
    speed = rates(shape, measured, pairs, ranks)
    return measured | {
        "density": rounded(density),
        "selection_ms": timed(bench, [select])["total_ms"],
        "visited_tflops": speed["total_tflops"],
    }


# dense --------------------------------------------------------------------------------------------


def dense(bench: Bench) -> Iterator[dict]:
    for shape in bench.shapes(262144, [(16, 2)]):
        backend = chosen_backend(bench.args.backend, shape, dynamic=False)
        row = about("dense", shape)
        for schedule in bench.args.schedules:
            named = {"name": "ours", "schedule": schedule, "backend": backend}
            found = bench.attempt(row | named, _our_dense, shape, schedule)
            yield with_rates(bench, shape, found)
        found = bench.attempt(row | {"name": TORCH}, torch_dense, shape)
        yield with_rates(bench, shape, found)


def _our_dense(bench: Bench, shape: Shape, schedule: str) -> dict:
    cp = bench.context("zigzag", schedule)
    call = bench.attention(Dense(), Causal().rows(shape.seq_len, bench.device), cp)
    tensors = draw(shape._replace(seq_len=shape.seq_len // cp.size))
    return timed(bench, training_call(call, tensors))


def torch_dense(bench: Bench, shape: Shape) -> dict:
    """torch's context_parallel with its defaults: cuDNN, load balancing on.

    Where it refuses grouped heads, keys and values are repeated first.
    """
    try:
        return _torch_timed(bench, shape) | {"repeated_heads": False}
    except Exception:  # the versions of torch raise different ones
        repeated = shape._replace(kv_heads=shape.heads)
        return _torch_timed(bench, repeated) | {"repeated_heads": True}


def _torch_timed(bench: Bench, shape: Shape) -> dict:
    from torch.distributed.tensor.experimental import context_parallel

    *buffers, d_out = (tensor.detach() for tensor in draw(shape))
    mesh = cp_mesh(bench.device.type, 1, bench.world)
    # Shards are made in place, and only outside of autograd; inside they are leaves.
    with context_parallel(
        mesh,
        buffers=buffers,
        buffer_seq_dims=[2, 2, 2],
        no_restore_buffers=set(buffers),
    ):
        leaves = [buffer.requires_grad_() for buffer in buffers]
        local = d_out[:, :, : buffers[0].shape[2]].contiguous()
        return timed(bench, training_call(cudnn, [*leaves, local]))


def with_rates(bench: Bench, shape: Shape, found: dict) -> dict:
    """A row of causal attention with the TFLOP/s of a rank."""
    if "error" in found:
        return found
    pairs = causal_pairs(shape.seq_len)
    return found | {"pairs": pairs} | rates(shape, found, pairs, bench.world)


# varlen -------------------------------------------------------------------------------------------


def varlen(bench: Bench) -> Iterator[dict]:
    """--varlen-masks by layouts and schedules, and torch's context_parallel,
    which supports neither."""
    args = bench.args
    ways: list[tuple[str, str, int]] = []  # layout, schedule, stages
    for layout in ("balanced", "contiguous"):
        ways += [(layout, "group_cast", stages) for stages in args.stages]
    ways += [("balanced", "ring", 1), ("zigzag", "ring", 1), ("striped", "all_gather", 1)]

    # 8,192 tokens a rank, as in MagiAttention's benchmarks.
    for shape in bench.shapes(8192 * bench.world, [(64, 8)]):
        row = about("varlen", shape) | {"ranks": bench.world}
        causal = row | {"name": TORCH, "mask": "causal"}
        peer = with_rates(bench, shape, bench.attempt(causal, torch_dense, shape))
        yield peer
        for mask in args.varlen_masks:
            masks: list[Mask] = [SlidingWindow(args.window)]
            if mask == "documents":
                packs = [ragged_lengths(shape.seq_len, seed) for seed in range(args.packs)]
                masks = [Documents(lengths) for lengths in packs]
            for layout, schedule, stages in ways:
                named = row | {"name": "ours", "mask": mask, "packs": len(masks)}
                named |= {"layout": layout, "schedule": schedule, "overlap_stages": stages}
                found = bench.attempt(named, _masked, shape, layout, schedule, stages, masks)
                yield found | _faster(found, peer)


def _masked(
    bench: Bench, shape: Shape, layout: str, schedule: str, stages: int, masks: list[Mask]
) -> dict:
    """Times, pairs, and TFLOP/s of a rank: means over the masks."""
    cp = bench.context(layout, schedule, overlap_stages=stages)
    tensors = draw(shape._replace(seq_len=shape.seq_len // cp.size))
    measured = []
    for mask in masks:
        ranges = cp.balance(mask.rows(shape.seq_len, bench.device))
        call = bench.attention(Dense(), ranges, cp)
        pairs = visible_pairs(ranges).item()
        measured.append(timed(bench, training_call(call, tensors)) | {"pairs": pairs})
    average = _mean(measured)
    backend = chosen_backend(bench.args.backend, shape, dynamic=False)
    return average | rates(shape, average, average["pairs"], bench.world) | {"backend": backend}


def _faster(row: dict, peer: dict) -> dict:
    """The speed of a row relative to the peer, by step. Empty where one of them failed."""
    if "error" in row or "error" in peer:
        return {}
    return {
        f"{step}_times_faster_than_torch": rounded(peer[f"{step}_ms"] / row[f"{step}_ms"])
        for step in ("forward", "backward", "total")
    }


def _mean(rows: list[dict]) -> dict:
    """The mean of rows with the same numbers or lists of numbers."""
    averages = {}
    for key in rows[0]:
        average = torch.tensor([row[key] for row in rows], dtype=torch.float64).mean(0)
        values = [rounded(number) for number in average.flatten().tolist()]
        averages[key] = values if average.ndim else values[0]
    return averages


CASES: dict[str, Case] = {
    "scaling": scaling,
    "dense": dense,
    "varlen": varlen,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
