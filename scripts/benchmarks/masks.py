"""Masks and patterns on GPUs: kernels, packed documents over several GPUs, patterns at equal recall.

    python -m scripts.benchmarks.masks kernels patterns --repeats 3 --out masks.json
    torchrun --standalone --nproc-per-node 8 -m scripts.benchmarks.masks varlen --out varlen.json

All in bf16, JSON out. Times are of the forward and the backward of attend(), medians of --repeats
after --warm-ups, of the slowest rank, taken as by scripts.benchmarks.context_parallel. TFLOP/s are
of one GPU and count the pairs that the mask lets a query see (4 D forward, 10 D backward per pair
and head). Documents are drawn by synthetic.ragged_lengths: most under 1K tokens, the longest a
quarter of the sequence; rows are means over --packs such sequences.

kernels   one GPU: causal inside packed documents, and a causal window of --window; each of
          --backends (`auto`: what "auto" takes) and FlashAttention-4's own attention for that mask.
          `..._of_flash_attn_4`: its time / ours. `tables_ms`: the share of our time that builds the
          block tables, forward and backward (absent where a kernel needs none). Before it is timed,
          each is checked at 4096 tokens against fp32: errors above 5e-3, or above twice those of
          torch's flash kernel (for the window: of that kernel without one), make its row an error
varlen    2 GPUs or more: packed documents, or a causal window, by layouts and schedules, group_cast
          with each of --stages. `megabytes_needed_...`: keys and values that ranks see and do not hold, again in
          the backward, and their gradients in fp32; all ranks together, as `megabytes_sent_...`.
          Imbalance is the busiest rank / mean of a forward, by pairs and by computing time. torch's
          context_parallel knows no documents: it computes the causal mask over the whole sequence,
          and its TFLOP/s count that. Plans and layouts are made before, as in training once a batch
patterns  one GPU: vertical_slash with budgets of a layer, joint ones and independent ones (these as
          published: the last 64 rows, 30 sinks, 2 local diagonals), xattention and moba on
          realistic q and k (estimate/synthetic.py), over a few values of the knob of each. The
          index is given to forward and backward, choosing it is `selection_ms`; `step_ms` is all
          three. Density is counted; recall is the share of the softmax mass that --recall-rows
          sampled rows keep. `dense_x_density_ms`: the time of `dense` times the density, and
          `of_dense_x_density` what attention takes of it. moba is timed twice, with its queries
          gathered by chunk and as `by_blocks_...`, where a block of queries computes the union of
          what they chose. At the end what each costs --at-recalls, linear between measurements

A measurement that fails, or a peer that is missing, is a row with `error`, and the run goes on.
Rows are written at once. With --device cpu everything runs over gloo by plain PyTorch, to try it
out at small sizes.
"""

import argparse
import sys

from scripts.benchmarks.context_parallel import Cases, add_common_options, measure, place
from scripts.benchmarks.masks_cases import TOKENS_A_RANK, kernels, varlen
from scripts.benchmarks.options import head_set, positive, share
from scripts.benchmarks.patterns_cases import patterns
from titan_sparse.attention import backends
from titan_sparse.attention.context_parallel.layouts import block_multiple

PROGRAM = "scripts.benchmarks.masks"
CASES: Cases = {"kernels": kernels, "varlen": varlen, "patterns": patterns}


def main(words: list[str]) -> int:
    args = parse(words)
    _, world = place()
    return measure(args, CASES, refusal(args, world), PROGRAM)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("cases", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    add(
        "--seq-len",
        type=int,
        default=0,
        help=f"default: kernels 32768, varlen {TOKENS_A_RANK} a GPU, patterns 524288",
    )
    add(
        "--heads",
        type=head_set,
        nargs="+",
        default=[],
        help="query heads:KV heads; default: kernels 64:8 16:2, varlen 64:8, patterns 16:2",
    )
    add("--packs", type=positive, default=4, help="sequences of documents, of kernels and varlen")
    add("--window", type=positive, default=4096, help="tokens that a query sees")
    add(
        "--varlen-masks",
        nargs="+",
        choices=["documents", "window"],
        default=["documents"],
        help="of varlen",
    )
    add(
        "--backends",
        nargs="+",
        choices=list(backends.BACKENDS),
        help="of kernels; default: flex triton, on the CPU eager",
    )
    add(
        "--stages",
        type=positive,
        nargs="+",
        default=[1, 2, 4],
        help="overlap_stages of group_cast, of varlen",
    )
    add(
        "--independent-recalls",
        type=share,
        nargs="*",
        default=[0.3, 0.5, 0.7, 0.8, 0.9, 0.95],
        help="of patterns, as all below",
    )
    add("--joint-recalls", type=share, nargs="*", default=[0.8, 0.85, 0.9, 0.95, 0.98])
    add("--max-columns", type=positive, default=4096, help="of vertical_slash")
    add(
        "--thresholds", type=share, nargs="*", default=[0.5, 0.9, 0.99, 0.999], help="of xattention"
    )
    add("--top-ks", type=positive, nargs="*", default=[4, 12, 24, 48], help="of moba")
    add("--chunk-size", type=positive, nargs="+", default=[4096], help="of moba, tokens")
    add("--recall-rows", type=positive, default=256, help="rows whose recall is measured")
    add("--at-recalls", type=share, nargs="*", default=[0.9, 0.95], help="where costs are compared")
    add_common_options(add)
    args = parser.parse_args(words)
    if not args.backends:
        args.backends = ["eager"] if args.device == "cpu" else ["flex", "triton"]
    return args


def refusal(args: argparse.Namespace, world: int) -> str | None:
    """Why these options cannot run on `world` ranks, None if they can."""
    alone = [case for case in args.cases if case != "varlen"]
    if world == 1 and "varlen" in args.cases:
        return "the case varlen shares a sequence; start torchrun with --nproc-per-node 2 or more"
    if world > 1 and alone:
        return f"the case {alone[0]} is for one GPU; start it with python, not with torchrun"
    multiple = args.block_size
    if world > 1:
        multiple *= block_multiple("zigzag", world)
    if args.seq_len % multiple:
        return f"--seq-len {args.seq_len}: write a multiple of {multiple}"
    if "patterns" in args.cases and 0 < args.seq_len < 2048:
        return (
            f"--seq-len {args.seq_len}: realistic q and k of the case patterns need 2048 tokens "
            "or more"
        )
    if "kernels" in args.cases and 4 * args.window > (args.seq_len or 32768):
        return (
            f"--window {args.window}: write a quarter of the sequence or less, of which the other "
            "tokens see a part"
        )
    smallest = min(args.chunk_size)
    if "patterns" in args.cases and args.top_ks and smallest < args.block_size:
        return f"--chunk-size {smallest}: write --block-size ({args.block_size}) or more"
    if args.repeats < 1 or args.warm_ups < 0:
        return "--repeats is 1 or more, --warm-ups 0 or more"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
