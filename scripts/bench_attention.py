"""Sparse attention against dense peers on one GPU: forward + backward in one process, medians, JSON out.

    python scripts/bench_attention.py --seq-lens 131072 262144 --out benchmarks/results/attention_h200.json

Pattern per query head: `--sinks` first columns, `--columns` of the sequence as random columns, two local block diagonals
and random ones up to `--density`. Times of our backends include building the block tables, forward and backward, but
not the selection, which is timed beside. Before anything is timed, every backend is checked at 4096 tokens against
fp32. TFLOP/s count the pairs visited: 4 D forward and 10 D backward per pair and head.
"""

import argparse
import datetime
import functools
import json
import statistics
import sys

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_sparse.attention import backends
from titan_sparse.attention.masks import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.statistics import recording

MATMUL_PEAK = 790.0
"""TFLOP/s of a large bf16 matmul on random data, measured on an H200: the roofline of every row."""


def random_index(heads: int, seq_len: int, block: int, args: argparse.Namespace) -> tuple[VerticalSlash, list[Tensor]]:
    """A pattern whose caps hold the index, and the index as the tensors that the ops take."""
    g = torch.Generator().manual_seed(0)
    blocks, columns = seq_len // block, max(args.sinks, round(args.columns * seq_len))
    slashes, picked = torch.zeros(heads, blocks, dtype=torch.bool), []
    for head in range(heads):
        random = torch.randperm(seq_len - args.sinks, generator=g)[: columns - args.sinks] + args.sinks
        picked.append(torch.cat([torch.arange(args.sinks), random.sort().values]))
        slashes[head, :2] = True
        area, total = 2 * blocks - 1, blocks * (blocks + 1) / 2
        for delta in (torch.randperm(blocks - 2, generator=g) + 2).tolist():
            if area / total + (1 - area / total) * columns / seq_len >= args.density:
                break
            slashes[head, delta], area = True, area + blocks - delta
    most = int(slashes.sum(-1).max())
    pattern = VerticalSlash(sinks=args.sinks, max_columns=columns, max_slashes=most)
    padded = torch.full((heads, pattern.column_capacity(seq_len, block, False)), seq_len, dtype=torch.int32)
    padded[:, :columns] = torch.stack(picked)
    return pattern, [x[None].cuda() for x in (slashes, padded, torch.zeros(heads, 2, dtype=torch.bool))]


def draw(seq_len: int, args: argparse.Namespace) -> list[Tensor]:
    """q, k, v that want a gradient, and the upstream gradient, all bf16."""
    torch.manual_seed(1)
    shape = lambda heads: (1, heads, seq_len, args.head_dim)
    q, k, v, d_out = (torch.randn(shape(h), device="cuda", dtype=torch.bfloat16)
                      for h in (args.heads, args.kv_heads, args.kv_heads, args.heads))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out]


def sparse(backend: str, pattern: VerticalSlash, index: list[Tensor], rows, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our attention on a ready index."""
    return torch.ops.titan_sparse.attend_forward(
        q, k, v, index, *rows[:3], pattern.key, f"single:{block}", backend, q.shape[-1] ** -0.5
    )[0]


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA on cuDNN, causal: the denominator of every ratio."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4 (CuTe) called directly, causal."""
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def times(function, leaves: list[Tensor], d_out: Tensor, repeats: int) -> tuple[float, float]:
    """Median milliseconds of the forward and of the backward."""
    forward, backward = [], []
    for number in range(repeats + 2):
        a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        a.record()
        out = function(*leaves)
        b.record()
        torch.autograd.grad(out, leaves, d_out)
        c.record()
        c.synchronize()
        if number >= 2:
            forward.append(a.elapsed_time(b))
            backward.append(b.elapsed_time(c))
    return statistics.median(forward), statistics.median(backward)


def peak_extra(function, leaves: list[Tensor], d_out: Tensor) -> float:
    """Peak bytes above inputs, outputs and gradients, as a share of q + k + v + out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*leaves)
    gradients = torch.autograd.grad(out, leaves, d_out)
    torch.cuda.synchronize()
    held = sum(x.nbytes for x in (out, *gradients))
    return (torch.cuda.max_memory_allocated() - before - held) / sum(x.nbytes for x in (*leaves, out))


def errors(function, seq_len: int, args: argparse.Namespace, seen: Tensor) -> dict[str, float]:
    """Relative Frobenius errors against fp32 over bool `seen` [Hq, S, S]."""
    *leaves, d_out = draw(seq_len, args)
    got = function(*leaves)
    gradients = torch.autograd.grad(got, leaves, d_out)
    wanted = _reference([x.detach().float() for x in leaves], d_out.float(), seen)
    names = ("out", "dq", "dk", "dv")
    return {n: ((a.float() - b).norm() / b.norm()).item() for n, a, b in zip(names, (got, *gradients), wanted)}


def _reference(qkv: list[Tensor], d_out: Tensor, seen: Tensor) -> list[Tensor]:
    q, k, v = qkv
    group, outs = q.shape[1] // k.shape[1], []
    grads = [torch.zeros_like(x) for x in qkv]
    for head in range(q.shape[1]):
        leaves = [x[:, i].clone().requires_grad_() for x, i in ((q, head), (k, head // group), (v, head // group))]
        scores = (leaves[0] @ leaves[1].mT * q.shape[-1] ** -0.5).masked_fill(~seen[head], -torch.inf)
        outs.append(scores.softmax(-1) @ leaves[2])
        parts = torch.autograd.grad(outs[-1], leaves, d_out[:, head])
        grads[0][:, head], outs[-1] = parts[0], outs[-1].detach()
        grads[1][:, head // group] += parts[1]
        grads[2][:, head // group] += parts[2]
    return [torch.stack(outs, 1), *grads]


def check(args: argparse.Namespace) -> dict:
    """Errors of every backend at 4096 tokens beside dense cuDNN's; exits if a backend is off by more than twice that."""
    seq_len, results = 4096, {}
    rows = Causal().rows(seq_len, "cuda")
    causal = Causal().dense(seq_len, "cuda").expand(args.heads, -1, -1)
    results["cudnn"] = errors(cudnn, seq_len, args, causal)
    for backend in args.backends:
        pattern, index = random_index(args.heads, seq_len, args.block_size, argparse.Namespace(**vars(args) | {"density": 0.3, "columns": 0.03}))
        seen = pattern.index(index, rows, 1, args.heads, args.block_size).dense(Causal())[0]
        call = functools.partial(sparse, backend, pattern, index, rows, args.block_size)
        results[backend] = errors(call, seq_len, args, seen)
        worse = {n: e for n, e in results[backend].items() if not (e <= 5e-3 and e <= 2 * results["cudnn"][n])}
        if worse:
            print(json.dumps(results, indent=1))
            sys.exit(f"{backend} is wrong at {seq_len} tokens: {worse}")
    return results


def visited_share(seq_len: int, call, leaves: list[Tensor]) -> float:
    """Density of the index by our own count."""
    with recording() as seen, torch.no_grad():
        call(*leaves)
    return seen.density().mean().item()


def measure(seq_len: int, args: argparse.Namespace, peers: dict) -> list[dict]:
    """One row a backend and peer at this length."""
    *leaves, d_out = draw(seq_len, args)
    rows, results = Causal().rows(seq_len, "cuda"), []
    pairs = seq_len * (seq_len + 1) / 2
    dense = None
    for name, function in peers.items():
        forward, backward = times(function, leaves, d_out, args.repeats if seq_len <= 262144 else 1)
        dense = dense or forward + backward
        results.append(_row(name, seq_len, forward, backward, dense, 1.0, pairs, args))
    pattern, index = random_index(args.heads, seq_len, args.block_size, args)
    for backend in args.backends:
        call = functools.partial(sparse, backend, pattern, index, rows, args.block_size)
        forward, backward = times(call, leaves, d_out, args.repeats)
        density = visited_share(seq_len, call, leaves)
        row = _row(backend, seq_len, forward, backward, dense, density, pairs, args)
        row["peak_extra_of_qkvo"] = round(peak_extra(call, leaves, d_out), 4)
        results.append(row)
    results.append({"name": "selection", "seq_len": seq_len, "ms": round(selection_time(leaves, pattern, rows, args), 3)})
    for row in results:
        print(json.dumps(row), flush=True)
    return results


def selection_time(leaves: list[Tensor], pattern: VerticalSlash, rows, args: argparse.Namespace) -> float:
    """Median milliseconds of choosing an index with this pattern's caps."""
    q, k = (x.detach() for x in leaves[:2])
    spent = []
    for number in range(args.repeats + 2):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        torch.ops.titan_sparse.select(q, k, *rows[:3], pattern.key, f"single:{args.block_size}", args.head_dim ** -0.5)
        b.record()
        b.synchronize()
        spent.append(a.elapsed_time(b))
    return statistics.median(spent[2:])


def _row(name: str, seq_len: int, forward: float, backward: float, dense: float, density: float, pairs: float,
         args: argparse.Namespace) -> dict:
    flops = 14 * args.head_dim * args.heads * pairs * density
    return {
        "name": name, "seq_len": seq_len, "forward_ms": round(forward, 2), "backward_ms": round(backward, 2),
        "ratio_to_dense": round((forward + backward) / dense, 4), "density": round(density, 4),
        "visited_tflops": round(flops / (forward + backward) / 1e9, 1),
        "roofline_ms": round(flops / MATMUL_PEAK / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[131072])
    parser.add_argument("--backends", nargs="+", default=["flex", "triton"], choices=[b for b in backends.BACKENDS])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--columns", type=float, default=0.005, help="share of the sequence that is columns")
    parser.add_argument("--sinks", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    peers = {"cudnn": cudnn} | ({"flash-attn-4": flash4} if backends.has_flash_attention_4() else {})
    result = {
        "command": " ".join(sys.argv), "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "errors_at_4096": check(args), "shape": vars(args),
        "rows": [row for seq_len in args.seq_lens for row in measure(seq_len, args, peers)],
    }
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
