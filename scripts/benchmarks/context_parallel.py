"""Attention over several GPUs: scaling, dense peers, pretended nodes, balance, timelines, errors.

    torchrun --standalone --nproc-per-node 4 -m scripts.benchmarks.context_parallel \\
        scaling dense --out results.json
    torchrun --standalone --nproc-per-node 4 -m scripts.benchmarks.context_parallel \\
        nodes timeline --pretend-nodes 2 --out nodes.json

All in bf16. Times are of the forward and the backward of attend(), medians of --repeats after
--warm-ups. GPUs start together, and their hosts run ahead by a sleep of some 20 ms, as in
scripts.benchmarks.attention. `total_ms` is the slowest rank's, `per_rank_ms` every rank's. TFLOP/s
are of one rank, count the visited pairs (4 D forward, 10 D backward per pair and head) and go by
the slowest rank.

scaling   sparse attention with a random index of --density, striped, for every schedule and dtype
          of the gradients on the wire. `alone`: a sequence shorter by the root of the number of
          ranks, which is the same work for one GPU, on every rank at the same time. `of_alone` is
          the ratio of their TFLOP/s. The index is given; choosing one with the same caps is timed
          beside it, and in `..._with_selection` added. One rank: `alone` and nothing else
dense     zigzag and striped, ring and all_gather; torch's context_parallel over cuDNN attention,
          load balancing on. With --brief only zigzag with ring and torch's all-gather
nodes     double_ring against ring over --pretend-nodes. `compute_alone`: the same kernels, nothing
          sent; `outer_alone`: only the hops between nodes. `..._of_limit` is time / the larger of
          these two
balance   striped against zigzag, index selected from realistic q and k. `slowest_kernels_ms`: of
          the slowest rank when nothing is sent. Imbalance degrees (observe/visits.py) of counted
          pairs and of measured times of steps
timeline  what the streams of rank 0 do, for scripts.benchmarks.plot_timeline
errors    relative errors against fp32, on one rank alone and by every schedule

A measurement that fails is a row with `error`, and the run goes on; a rank that fails alone ends it
after --timeout. Rows are written at once. --pretend-nodes tells NCCL that the ranks of this host
are on several, so that it sends over sockets between them. With --device cpu everything runs over
gloo, to try it out at small sizes.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator

import torch

from scripts.benchmarks.context_parallel_cases import CASES, GRADIENT_DTYPES
from scripts.benchmarks.context_parallel_timing import Bench, attempt
from scripts.benchmarks.options import head_set, share
from scripts.benchmarks.provenance import provenance
from titan_sparse.attention import backends
from titan_sparse.attention.context_parallel.layouts import block_multiple
from titan_sparse.training.distributed import choose_device, init_distributed, leave_distributed

PROGRAM = "scripts.benchmarks.context_parallel"
Cases = dict[str, Callable[[Bench], Iterator[dict]]]
"""{name: a function that yields the rows of the case, on all ranks alike}."""


def main(words: list[str]) -> int:
    args = parse(words)
    rank, world = place()
    refused = refusal(args, world)
    if refused is None and args.pretend_nodes > 1:
        pretend(args.pretend_nodes, rank, world)
    return measure(args, CASES, refused, PROGRAM, args.pretend_nodes)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"torchrun -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    add(
        "--seq-len",
        type=int,
        default=0,
        help="tokens of all ranks together; default: each case's own",
    )
    add("--heads", type=head_set, default=(16, 2), help="query heads:KV heads, as 16:2")
    add("--density", type=share, default=0.05, help="share of the causal pairs, of random indexes")
    add(
        "--columns",
        type=share,
        default=0.005,
        help="share of the sequence that is verticals, of random indexes",
    )
    add("--sinks", type=int, default=30)
    add(
        "--schedules",
        nargs="+",
        default=["all_gather", "ring"],
        choices=["all_gather", "ring", "double_ring", "group_cast"],
        help="of the case scaling",
    )
    add(
        "--gradient-dtypes",
        nargs="+",
        default=list(GRADIENT_DTYPES),
        choices=list(GRADIENT_DTYPES),
        help="of gradients on the wire, of the case scaling",
    )
    add("--brief", action="store_true", help="of the case dense: one row of ours and one of torch")
    add("--recall", type=share, default=0.9, help="of the case balance, as the next two")
    add("--max-columns", type=int, default=2048)
    add("--max-slashes", type=int, default=0, help="0: no cap")
    add("--pretend-nodes", type=int, default=1, help="nodes that NCCL is told the ranks are on")
    add_common_options(add)
    return parser.parse_args(words)


def add_common_options(add: Callable) -> None:
    """Options of every benchmark that measure() carries out. add: a parser's add_argument."""
    add("--head-dim", type=int, default=128)
    add("--block-size", type=int, default=128)
    add("--backend", default="auto", choices=["auto", *backends.BACKENDS])
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--repeats", type=int, default=5)
    add("--warm-ups", type=int, default=2, help="calls before the timed ones")
    add(
        "--timeout",
        type=int,
        default=180,
        help="seconds until a collective that does not come ends the run",
    )
    add("--out", default="", help="JSON file, written anew after each row")


def refusal(args: argparse.Namespace, world: int) -> str | None:
    """Why these options cannot run on `world` ranks, None if they can."""
    multiple = block_multiple("zigzag", world) * args.block_size
    if args.pretend_nodes < 1 or world % args.pretend_nodes:
        return (
            f"--pretend-nodes {args.pretend_nodes} does not divide {world} ranks; write a divisor"
        )
    if "nodes" in args.cases and args.pretend_nodes == 1:
        return "the case nodes compares schedules across nodes; write --pretend-nodes 2"
    if world == 1 and not set(args.cases) <= {"errors", "scaling"}:
        return (
            "one rank shares nothing; start torchrun with --nproc-per-node 2 or more, "
            "or write the cases errors and scaling"
        )
    if args.backend == "cudnn" and set(args.cases) != {"dense"}:
        return "--backend cudnn computes dense attention; write the case dense alone, or auto"
    scales_double_ring = "double_ring" in args.schedules and "scaling" in args.cases
    if world > 1 and scales_double_ring and world % max(2, args.pretend_nodes):
        return (
            f"double_ring needs an even number of ranks, not {world}; leave it out of --schedules"
        )
    if args.seq_len % multiple:
        return f"--seq-len {args.seq_len}: write a multiple of {multiple}"
    if args.repeats < 1 or min(args.sinks, args.warm_ups) < 0:
        return "--repeats is 1 or more, --sinks and --warm-ups 0 or more"
    return None


def pretend(nodes: int, rank: int, world: int) -> None:
    """Tell NCCL, before it starts, that this rank is on one of `nodes` nodes, joined by sockets."""
    os.environ |= {
        "NCCL_HOSTID": f"node{rank * nodes // world}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def place() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def measure(
    args: argparse.Namespace, cases: Cases, refused: str | None, program: str, nodes: int = 1
) -> int:
    """Carry out args.cases over so many (pretended) nodes.

    Returns the exit status: 0, or 2 with one line on stderr for what cannot run here.
    """
    rank, world = place()
    if refused is None and args.device == "cuda" and not torch.cuda.is_available():
        refused = "there is no GPU here; write --device cpu and small sizes to try it out"
    if refused:
        if rank == 0:
            print(f"{program}: {refused}", file=sys.stderr)
        return 2
    device = start(args)
    result = provenance(args, device) | {"ranks": world, "rows": []}
    run(Bench(args, device, rank, world, nodes), result, cases)
    leave_distributed()
    return 0


def start(args: argparse.Namespace) -> torch.device:
    """Join the other ranks; returns this rank's device."""
    device = choose_device(args.device)
    init_distributed(device, args.timeout)
    if device.type == "cuda":
        # torchrun says 1, but realistic inputs are made on the CPU.
        torch.set_num_threads(max(1, os.cpu_count() // place()[1]))
    return device


def run(bench: Bench, result: dict, cases: Cases) -> None:
    """All cases in the order asked for; rank 0 reports."""
    os.makedirs(os.path.dirname(bench.args.out) or ".", exist_ok=True)
    for case in bench.args.cases:
        failed = attempt(
            bench, {"case": case}, functools.partial(report_case, bench, result, cases[case])
        )
        if "error" in failed and bench.rank == 0:
            report(result, failed, bench.args.out)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def report_case(bench: Bench, result: dict, case: Callable[[Bench], Iterator[dict]]) -> dict:
    """Report a case's rows as they come; returns nothing to add to a row."""
    for row in case(bench):
        if bench.rank == 0:
            report(result, row, bench.args.out)
    return {}


def report(result: dict, row: dict, out: str) -> None:
    """Print a row without its intervals, and write all rows so far."""
    shown = {key: value for key, value in row.items() if key != "intervals"}
    print(json.dumps(shown), flush=True)
    result["rows"].append(row)
    if out:
        # All at once: a run that is killed leaves a whole file.
        with open(out + ".part", "w") as file:
            json.dump(result, file)
        os.replace(out + ".part", out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
