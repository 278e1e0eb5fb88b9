"""The cases of scripts.benchmarks.context_parallel. Each yields its rows as it has them, on all ranks alike."""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention import training_call, visited_share
from scripts.benchmarks.attention_cases import (
    Attention,
    Shape,
    draw,
    random_index,
    ready_index,
    sdpa,
)
from scripts.benchmarks.attention_errors import errors
from scripts.benchmarks.context_parallel_timing import (
    Bench,
    WithoutTransfers,
    attempt,
    cp_mesh,
    gather,
    step_times,
    timed,
)
from scripts.benchmarks.plot_timeline import traced
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.observe import visits as balance
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash
from titan_sparse.attention.schedules.needs import needed_chunks_of
from titan_sparse.estimate import synthetic
from titan_sparse.estimate.planner import BACKWARD_FLOPS, FORWARD_FLOPS


def attention(
    bench: Bench, pattern: Pattern, rows: MaskRanges, cp: ContextParallel | None
) -> Attention:
    """attend() as a function of q, k, v: this rank's with cp, all tokens without."""
    size = bench.args.block_size if cp is None else None
    return functools.partial(
        attend, mask=rows, pattern=pattern, cp=cp, backend=bench.args.backend, block_size=size
    )


def sparse(
    bench: Bench, seq_len: int, cp: ContextParallel | None
) -> tuple[Attention, list[Tensor], Callable[[], object]]:
    """Attention with a random index of --density over `seq_len` tokens, its q, k, v and d_out, and a selection with the
    same caps."""
    shape, args = bench.shape(0)._replace(seq_len=seq_len), bench.args
    pattern, index = random_index(shape, args.density, args.columns, args.sinks)
    rows, ranks = Causal().rows(seq_len, bench.device), cp.size if cp else 1
    tensors = draw(shape._replace(seq_len=seq_len // ranks))
    size = args.block_size if cp is None else None
    select = functools.partial(
        pattern.select, *(x.detach() for x in tensors[:2]), rows, cp, block_size=size
    )
    return attention(bench, ready_index(pattern, index), rows, cp), tensors, select


def rounded(number: float) -> float:
    """To five digits."""
    return float(f"{number:.5g}")


def tera_flops(shape: Shape, density: float) -> float:
    """1e12 floating-point operations of a forward and a backward, all ranks together, of the visited pairs."""
    pairs = density * shape.seq_len * (shape.seq_len + 1) / 2
    return (FORWARD_FLOPS + BACKWARD_FLOPS) * shape.head_dim * shape.heads * pairs / 1e12


# Scaling ------------------------------------------------------------------------------------------------------------


def scaling(bench: Bench) -> Iterator[dict]:
    """Sparse attention over all ranks, and on each rank alone over as many visited pairs as a rank has then."""
    shape, size = bench.shape(524288), bench.args.block_size
    short = max(4, round(shape.seq_len / bench.world**0.5 / size)) * size
    about = {"case": "scaling", "schedule": "alone", "seq_len": short}
    alone = attempt(bench, about, lambda: _scaled(bench, shape._replace(seq_len=short), None))
    yield alone
    for schedule, dtype in itertools.product(bench.args.schedules, (torch.float32, torch.bfloat16)):
        about = {
            "case": "scaling",
            "schedule": schedule,
            "layout": "striped",
            "gradient_dtype": str(dtype)[6:],
            "seq_len": shape.seq_len,
        }
        cp = bench.context("striped", schedule, gradient_dtype=dtype)
        row = attempt(bench, about, lambda: _scaled(bench, shape, cp))
        if "error" not in row and "error" not in alone:
            for kind in ("", "_with_selection"):
                row[f"of_alone{kind}"] = rounded(
                    row[f"visited_tflops{kind}"] / alone[f"visited_tflops{kind}"]
                )
        yield row


def _scaled(bench: Bench, shape: Shape, cp: ContextParallel | None) -> dict:
    """Visited TFLOP/s of a rank by the slowest rank's time, without and with the selection."""
    call, (*leaves, d_out), select = sparse(bench, shape.seq_len, cp)
    density = visited_share(call, leaves)
    flops = tera_flops(shape, density) / (cp.size if cp else 1)
    found = timed(bench, training_call(call, leaves, d_out))
    selection = timed(bench, [select])["total_ms"]
    return found | {
        "density": rounded(density),
        "visited_tflop_per_rank": rounded(flops),
        "selection_ms": selection,
        "visited_tflops": rounded(flops / found["total_ms"] * 1e3),
        "visited_tflops_with_selection": rounded(flops / (found["total_ms"] + selection) * 1e3),
    }


# Dense --------------------------------------------------------------------------------------------------------------


def dense(bench: Bench) -> Iterator[dict]:
    """Dense causal attention by our layouts and schedules, and by torch's context_parallel, both its rotations."""
    shape = bench.shape(262144)
    flops = tera_flops(shape, 1.0) / bench.world
    measured = [
        (
            {"name": "ours", "layout": layout, "schedule": schedule},
            functools.partial(_our_dense, bench, shape, layout, schedule),
        )
        for layout, schedule in itertools.product(("zigzag", "striped"), ("ring", "all_gather"))
    ]
    measured += [
        (
            {"name": "torch context_parallel", "rotate": method},
            functools.partial(torch_dense, bench, shape, method),
        )
        for method in ("allgather", "alltoall")
    ]
    for about, measure in measured:
        row = attempt(bench, {"case": "dense", **about, "seq_len": shape.seq_len}, measure)
        if "error" not in row:
            row["tflops"] = rounded(flops / row["total_ms"] * 1e3)
        yield row


def _our_dense(bench: Bench, shape: Shape, layout: str, schedule: str) -> dict:
    rows, cp = Causal().rows(shape.seq_len, bench.device), bench.context(layout, schedule)
    *leaves, d_out = draw(shape._replace(seq_len=shape.seq_len // cp.size))
    return timed(bench, training_call(attention(bench, Dense(), rows, cp), leaves, d_out))


def torch_dense(bench: Bench, shape: Shape, method: str) -> dict:
    """As it comes: cuDNN, load balancing on. Where it refuses grouped heads, keys and values are repeated before."""
    try:
        return _torch_timed(bench, shape, method) | {"repeated_heads": False}
    except Exception:  # the versions of torch raise different ones
        return _torch_timed(bench, shape._replace(kv_heads=shape.heads), method) | {
            "repeated_heads": True
        }


def _torch_timed(bench: Bench, shape: Shape, method: str) -> dict:
    from torch.distributed.tensor.experimental import _attention, context_parallel

    if not _attention._cp_options.enable_load_balance:
        raise RuntimeError("torch's load balancer is off")
    _attention.set_rotate_method(method)
    *buffers, d_out = (x.detach() for x in draw(shape))
    mesh, dims = cp_mesh(bench.device.type, 1, bench.world), [2, 2, 2]
    # Shards are made in place, and only outside of autograd; inside they are leaves.
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)
    ):
        leaves = [x.requires_grad_() for x in buffers]
        local = d_out[:, :, : buffers[0].shape[2]].contiguous()
        return timed(
            bench, training_call(functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION), leaves, local)
        )


# Nodes --------------------------------------------------------------------------------------------------------------


def nodes(bench: Bench) -> Iterator[dict]:
    """ring and double_ring over the same (pretended) nodes; besides, their computing alone and the outer hops alone."""
    shape = bench.shape(524288)
    for dtype in (torch.float32, torch.bfloat16):
        about, found = (
            {
                "case": "nodes",
                "nodes": bench.nodes,
                "seq_len": shape.seq_len,
                "gradient_dtype": str(dtype)[6:],
            },
            {},
        )
        for schedule in ("ring", "double_ring"):
            measure = functools.partial(_across, bench, shape, schedule, dtype)
            found[schedule] = attempt(
                bench, about | {"schedule": schedule, "layout": "striped"}, measure
            )
            yield found[schedule]
        if not any("error" in row for row in found.values()):
            yield about | {
                "name": "double_ring against ring",
                "times_faster": round(
                    found["ring"]["total_ms"] / found["double_ring"]["total_ms"], 3
                ),
            }


def _across(bench: Bench, shape: Shape, schedule: str, gradient_dtype: torch.dtype) -> dict:
    cp, silent = (
        bench.context("striped", schedule, kind, gradient_dtype)
        for kind in (ContextParallel, WithoutTransfers)
    )
    call, (*leaves, d_out), _ = sparse(bench, shape.seq_len, cp)
    steps = training_call(call, leaves, d_out)
    found = timed(bench, steps) | {"megabytes_sent": _sent(bench, cp, steps)}
    alone, _, _ = sparse(bench, shape.seq_len, silent)
    parts = {"compute_alone": timed(bench, training_call(alone, leaves, d_out))}
    if schedule == "double_ring":
        parts["outer_alone"] = timed(bench, outer_transfers(cp, *leaves[1:]))
        for key in ("forward_ms", "backward_ms", "total_ms"):
            limit = max(part[key] for part in parts.values())
            found[key.replace("ms", "of_limit")] = round(found[key] / limit, 3)
    return found | parts


def _sent(bench: Bench, cp: ContextParallel, steps: list[Callable[[], None]]) -> dict:
    """1e6 bytes that the busiest rank sends, in the forward and in the backward."""
    return dict(zip(("forward", "backward"), sent_by_rank(bench, cp, steps).amax(0).tolist()))


def sent_by_rank(bench: Bench, cp: ContextParallel, steps: list[Callable[[], None]]) -> Tensor:
    """1e6 bytes that each rank sends in each step, float64 [ranks, steps]."""
    counts = [cp.bytes_sent]
    for step in steps:
        step()
        counts.append(cp.bytes_sent)
    return gather(bench, [(b - a) / 1e6 for a, b in zip(counts, counts[1:])])


def outer_transfers(cp: ContextParallel, k: Tensor, v: Tensor) -> list[Callable[[], None]]:
    """The outer hops of a double ring's forward and of its backward, with nothing to compute: keys and values go round to
    the last node, and in the backward their gradients from the second node home."""
    chunk = torch.stack([k.detach(), v.detach()])
    gradient = chunk.to(cp.gradient_dtype or torch.float32)

    def forward() -> None:
        for window in range(cp.inter - 1):
            cp.shift([chunk], "outer", f"outer {window % 2}").wait()

    def backward() -> None:
        for window in range(cp.inter - 1):
            hops = [
                cp.shift([gradient], "outer_gradient", f"outer gradient {window % 2}"),
                cp.shift([chunk], "outer", f"outer {window % 2}"),
            ]
            for hop in hops:
                hop.wait()

    return [forward, backward]


# Balance ------------------------------------------------------------------------------------------------------------


def balanced(bench: Bench) -> Iterator[dict]:
    """striped and zigzag with one index, which is selected from realistic queries and keys (synthetic.py)."""
    shape, args, found, prepared = bench.shape(524288), bench.args, {}, {}
    rows = Causal().rows(shape.seq_len, bench.device)
    pattern = VerticalSlash(
        recall=args.recall,
        sinks=args.sinks,
        max_columns=args.max_columns,
        max_slashes=args.max_slashes,
    )

    def prepare() -> dict:
        q, k = realistic(bench, shape)
        cp = bench.context("striped", "ring")
        index = pattern.select(cp.shard(q, 2), cp.shard(k, 2), rows, cp)
        prepared.update(
            q=q, k=k, v=torch.randn_like(k), d_out=torch.randn_like(q), index=index.tensors()
        )
        return {
            "columns_per_head": (index.verticals < shape.seq_len).sum(-1).double().mean().item(),
            "slashes_per_head": index.slashes.sum(-1).double().mean().item(),
            "capped": index.capped.double().mean().item(),
        }

    about = {"case": "balance", "seq_len": shape.seq_len}
    yield attempt(bench, about | {"name": "index"}, prepare)
    for layout in ("striped", "zigzag") if prepared else ():
        measure = functools.partial(_balance, bench, pattern, rows, layout, prepared)
        found[layout] = attempt(bench, about | {"layout": layout, "schedule": "ring"}, measure)
        yield found[layout]
    if found and not any("error" in row for row in found.values()):
        faster = lambda key: round(found["zigzag"][key] / found["striped"][key], 3)
        yield about | {
            "name": "striped against zigzag",
            "slowest_kernels_times_faster": faster("slowest_kernels_ms"),
            "times_faster": faster("total_ms"),
        }


def realistic(bench: Bench, shape: Shape) -> tuple[Tensor, Tensor]:
    """q, k [1, H, S, D] in bf16 of all tokens; each rank makes its share of them on the CPU."""
    heads = synthetic.draw_heads(shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim)
    cp, part = bench.context("contiguous", "ring"), shape.seq_len // bench.world
    own = [
        make(heads, bench.rank * part, (bench.rank + 1) * part, torch.bfloat16).to(bench.device)
        for make in (synthetic.queries, synthetic.keys)
    ]
    if not all(x.isfinite().all() for x in own):
        raise ValueError(
            f"no realistic inputs with --head-dim {shape.head_dim} at {shape.seq_len} tokens; "
            "write larger ones"
        )
    return tuple(cp.unshard(x, 2) for x in own)


def _balance(
    bench: Bench, pattern: VerticalSlash, rows: MaskRanges, layout: str, prepared: dict
) -> dict:
    ready, cp = ready_index(pattern, prepared["index"]), bench.context(layout, "ring")
    *leaves, d_out = (cp.shard(prepared[name], 2) for name in ("q", "k", "v", "d_out"))
    leaves = [x.requires_grad_() for x in leaves]
    found = timed(bench, training_call(attention(bench, ready, rows, cp), leaves, d_out))
    silent = bench.context(layout, "ring", WithoutTransfers)
    times = step_times(
        bench, silent, training_call(attention(bench, ready, rows, silent), leaves, d_out)
    )
    on_cpu = Causal().rows(rows.start.shape[1])
    index = pattern.index(
        [x.cpu() for x in prepared["index"]], on_cpu, *leaves[0].shape[:2], bench.args.block_size
    )
    work = _counted(bench, index, on_cpu, cp)
    slowest = times.sum((0, 2)).amax().item()
    imbalance = {
        "counted_forward": work,
        "measured_forward": times[0],
        "measured_backward": times[1],
    }
    return found | {
        "slowest_kernels_ms": round(slowest, 3),
        "kernels_ms": times.sum((0, 2)).tolist(),
        "step_ms": {"forward": times[0].tolist(), "backward": times[1].tolist()},
        "imbalance": {name: _degrees(x) for name, x in imbalance.items()},
    }


def _counted(bench: Bench, index: object, rows: MaskRanges, cp: ContextParallel) -> Tensor:
    """Pairs of every rank and step of the forward, [ranks, steps]; rank 0 counts for all."""
    work = torch.zeros(cp.size, cp.size, dtype=torch.float64)
    if bench.rank == 0:
        visits = balance.count_visits_of_all_heads(index, rows, cp.block_table(rows.start.shape[1]))
        needed = needed_chunks_of(index, rows, cp.layout, cp.size)
        work = (
            balance.by_step(visits, balance.step_sources("ring", 1, cp.size), needed=needed)
            .sum((0, 1))
            .double()
        )
    return gather(bench, work.tolist())[0]


def _degrees(work: Tensor) -> dict[str, float]:
    """Imbalance degrees of balance.py, and the slowdown if ranks waited for each other at every step."""
    degrees = {
        "worker": balance.worker_imbalance,
        "worker_per_step": balance.worker_imbalance_per_step,
        "step": balance.step_imbalance,
        "lockstep": balance.lockstep_imbalance,
    }
    return {name: round(degree(work).item(), 4) for name, degree in degrees.items()}


# Timeline and errors ------------------------------------------------------------------------------------------------


def timeline(bench: Bench) -> Iterator[dict]:
    """What rank 0's streams do in one forward and backward of sparse attention, schedule by schedule."""
    shape = bench.shape(262144)
    for schedule in ("ring", "all_gather", *["double_ring"] * (bench.nodes > 1)):
        about = {
            "case": "timeline",
            "schedule": schedule,
            "layout": "striped",
            "nodes": bench.nodes,
            "seq_len": shape.seq_len,
        }
        yield attempt(bench, about, functools.partial(_timeline, bench, shape, schedule))


def _timeline(bench: Bench, shape: Shape, schedule: str) -> dict:
    call, (*leaves, d_out), _ = sparse(bench, shape.seq_len, bench.context("striped", schedule))
    return {"intervals": traced(bench, training_call(call, leaves, d_out))}


def accuracy(bench: Bench) -> Iterator[dict]:
    """Relative Frobenius errors in bf16 against fp32: one rank alone, then all ranks by every schedule."""
    shape = bench.shape(8192)
    rows = Causal().rows(shape.seq_len, bench.device)
    pattern = VerticalSlash(recall=0.9, max_columns=shape.seq_len * 3 // 100, max_slashes=8)
    pattern.check_block_size(bench.args.block_size)
    index = pattern.select(
        *(x.detach() for x in draw(shape)[:2]), rows, block_size=bench.args.block_size
    )
    ready, seen = ready_index(pattern, index.tensors()), index.dense(Causal())[0]
    about = {"case": "errors", "ranks": bench.world, "seq_len": shape.seq_len}
    alone = attention(bench, ready, rows, None)
    yield attempt(bench, about | {"schedule": "alone"}, lambda: _errors(bench, alone, shape, seen))
    schedules = (
        ["ring", "all_gather", *["double_ring"] * (bench.world % 2 == 0)]
        if bench.world > 1
        else ["local"]
    )
    for schedule, dtype in itertools.product(schedules, (torch.float32, torch.bfloat16)):
        cp = bench.context("striped", schedule, gradient_dtype=dtype)
        call = functools.partial(_Sharded.apply, cp, attention(bench, ready, rows, cp))
        row = {"schedule": schedule, "layout": "striped", "gradient_dtype": str(dtype)[6:]}
        yield attempt(bench, about | row, functools.partial(_errors, bench, call, shape, seen))


def _errors(bench: Bench, call: Attention, shape: Shape, seen: Tensor) -> dict:
    """The largest of any rank; ranks get the same whole tensors."""
    found = errors(call, shape, seen)
    return dict(zip(found, gather(bench, list(found.values())).amax(0).tolist()))


class _Sharded(torch.autograd.Function):
    """Attention of whole tensors by way of shards."""

    @staticmethod
    def forward(ctx, cp: ContextParallel, call: Attention, *whole: Tensor) -> Tensor:
        ctx.cp, ctx.leaves = cp, [cp.shard(x.detach(), 2).requires_grad_() for x in whole]
        with torch.enable_grad():
            ctx.out = call(*ctx.leaves)
        return cp.unshard(ctx.out.detach(), 2)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        gradients = torch.autograd.grad(ctx.out, ctx.leaves, ctx.cp.shard(d_out, 2))
        return None, None, *(ctx.cp.unshard(x, 2) for x in gradients)


CASES: dict[str, Callable[[Bench], Iterator[dict]]] = {
    "scaling": scaling,
    "dense": dense,
    "nodes": nodes,
    "balance": balanced,
    "timeline": timeline,
    "errors": accuracy,
}
