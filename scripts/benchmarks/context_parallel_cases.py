"""The cases of scripts.benchmarks.context_parallel.

Each yields its rows as it has them, on all ranks alike.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scripts.benchmarks.attention_cases import (
    Attention,
    Shape,
    chosen_backend,
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
    outer_transfers,
    step_times,
    timed,
    traced,
)
from scripts.benchmarks.timing import training_call, visited_share
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.observe import visits as imbalance
from titan_sparse.attention.observe.statistics import worker_imbalance
from titan_sparse.attention.observe.visits import (
    by_step,
    count_visits_of_all_heads,
    step_sources,
)
from titan_sparse.attention.patterns import BlockIndex, Dense, Pattern, VerticalSlash
from titan_sparse.attention.schedules.needs import needed_chunks_of
from titan_sparse.estimate import synthetic
from titan_sparse.estimate.constants import BACKWARD_FLOPS, FORWARD_FLOPS

GRADIENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of the gradients on the wire, by the name in rows."""


def attention(
    bench: Bench, pattern: Pattern, ranges: MaskRanges, cp: ContextParallel | None
) -> Attention:
    """attend() as a function of q, k, v: this rank's with cp, all tokens without."""
    block_size = bench.args.block_size if cp is None else None
    return functools.partial(
        attend,
        mask=ranges,
        pattern=pattern,
        cp=cp,
        backend=bench.args.backend,
        block_size=block_size,
    )


def sparse(
    bench: Bench, seq_len: int, cp: ContextParallel | None
) -> tuple[Attention, list[Tensor], Callable[[], object]]:
    """Attention with a random index of --density over `seq_len` tokens.

    Returns the attention, its q, k, v and d_out (this rank's), and a selection with the same caps.
    """
    args = bench.args
    shape = bench.shape(0)._replace(seq_len=seq_len)
    pattern, index = random_index(shape, args.density, args.columns, args.sinks)
    ranges = Causal().rows(seq_len, bench.device)
    ranks = cp.size if cp else 1
    tensors = draw(shape._replace(seq_len=seq_len // ranks))
    q = tensors[0].detach()
    k = tensors[1].detach()
    block_size = args.block_size if cp is None else None
    select = functools.partial(pattern.select, q, k, ranges, cp, block_size=block_size)
    return attention(bench, ready_index(pattern, index), ranges, cp), tensors, select


def rounded(number: float) -> float:
    """To five digits."""
    return float(f"{number:.5g}")


def tera_flops(shape: Shape, density: float) -> float:
    """1e12 floating-point operations of a forward and a backward, all ranks, of visited pairs."""
    pairs = density * shape.seq_len * (shape.seq_len + 1) / 2
    flops_per_pair = (FORWARD_FLOPS + BACKWARD_FLOPS) * shape.head_dim
    return flops_per_pair * shape.heads * pairs / 1e12


def scaling(bench: Bench) -> Iterator[dict]:
    """Sparse attention over all ranks, and on each rank alone over as many visited pairs.

    One rank is alone, with the whole sequence.
    """
    shape = bench.shape(524288)
    block_size = bench.args.block_size
    # Pairs grow with the square of the length: a rank's share of them fits into this length.
    short = max(4, round(shape.seq_len / bench.world**0.5 / block_size)) * block_size
    backend = chosen_backend(bench.args.backend, shape, dynamic=True)
    about = {"case": "scaling", "schedule": "alone", "seq_len": short, "backend": backend}
    measure = functools.partial(_scaled, bench, shape._replace(seq_len=short), None)
    alone = attempt(bench, about, measure)
    yield alone
    if bench.world == 1:
        return
    for schedule, dtype in itertools.product(bench.args.schedules, bench.args.gradient_dtypes):
        about = {
            "case": "scaling",
            "schedule": schedule,
            "layout": "striped",
            "gradient_dtype": dtype,
            "seq_len": shape.seq_len,
            "backend": backend,
        }
        cp = bench.context("striped", schedule, gradient_dtype=GRADIENT_DTYPES[dtype])
        row = attempt(bench, about, functools.partial(_scaled, bench, shape, cp))
        if "error" not in row and "error" not in alone:
            for kind in ("", "_with_selection"):
                rate = f"visited_tflops{kind}"
                row[f"of_alone{kind}"] = rounded(row[rate] / alone[rate])
        yield row


def _scaled(bench: Bench, shape: Shape, cp: ContextParallel | None) -> dict:
    """Visited TFLOP/s of a rank by the slowest rank's time, without and with the selection."""
    call, tensors, select = sparse(bench, shape.seq_len, cp)
    leaves = tensors[:3]
    density = visited_share(call, leaves)
    flops = tera_flops(shape, density) / (cp.size if cp else 1)
    measured = timed(bench, training_call(call, leaves, tensors[3]))
    total_ms = measured["total_ms"]
    selection_ms = timed(bench, [select])["total_ms"]
    return measured | {
        "density": rounded(density),
        "visited_tflop_per_rank": rounded(flops),
        "selection_ms": selection_ms,
        "visited_tflops": rounded(flops / total_ms * 1e3),
        "visited_tflops_with_selection": rounded(flops / (total_ms + selection_ms) * 1e3),
    }


def dense(bench: Bench) -> Iterator[dict]:
    """Dense causal attention: our layouts and schedules, and both of torch's rotations."""
    shape = bench.shape(262144)
    flops = tera_flops(shape, 1.0) / bench.world
    backend = chosen_backend(bench.args.backend, shape, dynamic=False)
    ways = list(itertools.product(("zigzag", "striped"), ("ring", "all_gather")))
    methods = ["allgather", "alltoall"]
    if bench.args.brief:
        ways = ways[:1]
        methods = methods[:1]
    measurements = []
    for layout, schedule in ways:
        about = {"name": "ours", "layout": layout, "schedule": schedule, "backend": backend}
        measurements.append((about, functools.partial(_our_dense, bench, shape, layout, schedule)))
    for method in methods:
        about = {"name": "torch context_parallel", "rotate": method}
        measurements.append((about, functools.partial(torch_dense, bench, shape, method)))
    for about, measure in measurements:
        row = attempt(bench, {"case": "dense", **about, "seq_len": shape.seq_len}, measure)
        if "error" not in row:
            row["tflops"] = rounded(flops / row["total_ms"] * 1e3)
        yield row


def _our_dense(bench: Bench, shape: Shape, layout: str, schedule: str) -> dict:
    ranges = Causal().rows(shape.seq_len, bench.device)
    cp = bench.context(layout, schedule)
    tensors = draw(shape._replace(seq_len=shape.seq_len // cp.size))
    call = attention(bench, Dense(), ranges, cp)
    return timed(bench, training_call(call, tensors[:3], tensors[3]))


def torch_dense(bench: Bench, shape: Shape, method: str) -> dict:
    """torch's context_parallel as it comes: cuDNN, load balancing on.

    Where it refuses grouped heads, keys and values are repeated before.
    """
    try:
        return _torch_timed(bench, shape, method) | {"repeated_heads": False}
    except Exception:  # the versions of torch raise different ones
        repeated = shape._replace(kv_heads=shape.heads)
        return _torch_timed(bench, repeated, method) | {"repeated_heads": True}


def _torch_timed(bench: Bench, shape: Shape, method: str) -> dict:
    from torch.distributed.tensor.experimental import _attention, context_parallel

    if not _attention._cp_options.enable_load_balance:
        raise RuntimeError("torch's load balancer is off")
    _attention.set_rotate_method(method)
    tensors = [tensor.detach() for tensor in draw(shape)]
    buffers = tensors[:3]
    d_out = tensors[3]
    mesh = cp_mesh(bench.device.type, 1, bench.world)
    # Shards are made in place, and only outside of autograd; inside they are leaves.
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(buffers)
    ):
        leaves = [buffer.requires_grad_() for buffer in buffers]
        local = d_out[:, :, : buffers[0].shape[2]].contiguous()
        call = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)
        return timed(bench, training_call(call, leaves, local))


def nodes(bench: Bench) -> Iterator[dict]:
    """ring and double_ring over the same (pretended) nodes.

    Beside them their computing alone, and the outer hops alone.
    """
    shape = bench.shape(524288)
    for dtype, gradient_dtype in GRADIENT_DTYPES.items():
        about = {
            "case": "nodes",
            "nodes": bench.nodes,
            "seq_len": shape.seq_len,
            "gradient_dtype": dtype,
        }
        rows = {}
        for schedule in ("ring", "double_ring"):
            measure = functools.partial(_across, bench, shape, schedule, gradient_dtype)
            named = about | {"schedule": schedule, "layout": "striped"}
            rows[schedule] = attempt(bench, named, measure)
            yield rows[schedule]
        if not any("error" in row for row in rows.values()):
            times_faster = rows["ring"]["total_ms"] / rows["double_ring"]["total_ms"]
            yield about | {
                "name": "double_ring against ring",
                "times_faster": round(times_faster, 3),
            }


def _across(bench: Bench, shape: Shape, schedule: str, gradient_dtype: torch.dtype) -> dict:
    cp = bench.context("striped", schedule, ContextParallel, gradient_dtype)
    silent = bench.context("striped", schedule, WithoutTransfers, gradient_dtype)
    call, tensors, _ = sparse(bench, shape.seq_len, cp)
    leaves = tensors[:3]
    d_out = tensors[3]
    steps = training_call(call, leaves, d_out)
    measured = timed(bench, steps)
    measured["megabytes_sent"] = _sent(bench, cp, steps)
    alone, _, _ = sparse(bench, shape.seq_len, silent)
    limits = {"compute_alone": timed(bench, training_call(alone, leaves, d_out))}
    if schedule == "double_ring":
        limits["outer_alone"] = timed(bench, outer_transfers(cp, leaves[1], leaves[2]))
        for key in ("forward_ms", "backward_ms", "total_ms"):
            limit = max(times[key] for times in limits.values())
            measured[key.replace("ms", "of_limit")] = round(measured[key] / limit, 3)
    return measured | limits


def _sent(bench: Bench, cp: ContextParallel, steps: list[Callable[[], None]]) -> dict:
    """1e6 bytes that the busiest rank sends, in the forward and in the backward."""
    forward, backward = sent_by_rank(bench, cp, steps).amax(0).tolist()
    return {"forward": forward, "backward": backward}


def sent_by_rank(bench: Bench, cp: ContextParallel, steps: list[Callable[[], None]]) -> Tensor:
    """1e6 bytes that each rank sends in each step, float64 [ranks, steps]."""
    counts = [cp.bytes_sent]
    for step in steps:
        step()
        counts.append(cp.bytes_sent)
    return gather(bench, [(after - before) / 1e6 for before, after in pairwise(counts)])


def balanced(bench: Bench) -> Iterator[dict]:
    """striped and zigzag with one index, selected from realistic queries and keys."""
    args = bench.args
    shape = bench.shape(524288)
    ranges = Causal().rows(shape.seq_len, bench.device)
    pattern = VerticalSlash(
        recall=args.recall,
        sinks=args.sinks,
        max_verticals=args.max_columns,
        max_slashes=args.max_slashes,
    )
    prepared = {}  # all tokens' q, k, v, d_out, and the index's tensors

    def prepare() -> dict:
        q, k = realistic(bench, shape)
        cp = bench.context("striped", "ring")
        index = pattern.select(cp.shard(q, 2), cp.shard(k, 2), ranges, cp)
        prepared["q"] = q
        prepared["k"] = k
        prepared["v"] = torch.randn_like(k)
        prepared["d_out"] = torch.randn_like(q)
        prepared["index"] = index.tensors()
        # Places without a vertical hold seq_len.
        verticals = (index.verticals < shape.seq_len).sum(-1)
        return {
            "columns_per_head": verticals.double().mean().item(),
            "slashes_per_head": index.slashes.sum(-1).double().mean().item(),
            "capped": index.capped.double().mean().item(),
        }

    about = {"case": "balance", "seq_len": shape.seq_len}
    yield attempt(bench, about | {"name": "index"}, prepare)
    if not prepared:
        return
    rows = {}
    for layout in ("striped", "zigzag"):
        measure = functools.partial(_balance, bench, pattern, ranges, layout, prepared)
        rows[layout] = attempt(bench, about | {"layout": layout, "schedule": "ring"}, measure)
        yield rows[layout]
    if any("error" in row for row in rows.values()):
        return
    slowest = rows["zigzag"]["slowest_kernels_ms"] / rows["striped"]["slowest_kernels_ms"]
    total = rows["zigzag"]["total_ms"] / rows["striped"]["total_ms"]
    yield about | {
        "name": "striped against zigzag",
        "slowest_kernels_times_faster": round(slowest, 3),
        "times_faster": round(total, 3),
    }


def realistic(bench: Bench, shape: Shape) -> tuple[Tensor, Tensor]:
    """q, k [1, H, S, D] in bf16 of all tokens; each rank makes its share of them on the CPU."""
    heads = synthetic.draw_heads(shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim)
    cp = bench.context("contiguous", "ring")
    share = shape.seq_len // bench.world
    start = bench.rank * share
    q = synthetic.queries(heads, start, start + share, torch.bfloat16).to(bench.device)
    k = synthetic.keys(heads, start, start + share, torch.bfloat16).to(bench.device)
    if not (q.isfinite().all() and k.isfinite().all()):
        raise ValueError(
            f"no realistic inputs with --head-dim {shape.head_dim} at {shape.seq_len} tokens; "
            "write larger ones"
        )
    return cp.unshard(q, 2), cp.unshard(k, 2)


def _balance(
    bench: Bench, pattern: VerticalSlash, ranges: MaskRanges, layout: str, prepared: dict
) -> dict:
    ready = ready_index(pattern, prepared["index"])
    cp = bench.context(layout, "ring")
    leaves = [cp.shard(prepared[name], 2).requires_grad_() for name in ("q", "k", "v")]
    d_out = cp.shard(prepared["d_out"], 2)
    steps = training_call(attention(bench, ready, ranges, cp), leaves, d_out)
    measured = timed(bench, steps)

    silent = bench.context(layout, "ring", WithoutTransfers)
    silent_steps = training_call(attention(bench, ready, ranges, silent), leaves, d_out)
    times = step_times(bench, silent, silent_steps)  # [forward or backward, ranks, steps]

    ranges_on_cpu = Causal().rows(ranges.start.shape[1])
    index_on_cpu = [tensor.cpu() for tensor in prepared["index"]]
    batch, heads = leaves[0].shape[:2]
    index = pattern.index(index_on_cpu, ranges_on_cpu, batch, heads, bench.args.block_size)
    work_of_passes = {
        "counted_forward": _counted(bench, index, ranges_on_cpu, cp),
        "measured_forward": times[0],
        "measured_backward": times[1],
    }
    kernels = times.sum((0, 2))  # [ranks]
    return measured | {
        "slowest_kernels_ms": round(kernels.amax().item(), 3),
        "kernels_ms": kernels.tolist(),
        "step_ms": {"forward": times[0].tolist(), "backward": times[1].tolist()},
        "imbalance": {name: _degrees(work) for name, work in work_of_passes.items()},
    }


def _counted(bench: Bench, index: BlockIndex, ranges: MaskRanges, cp: ContextParallel) -> Tensor:
    """Pairs of every rank and step of the forward, [ranks, steps]; rank 0 counts for all."""
    work = torch.zeros(cp.size, cp.size, dtype=torch.float64)
    if bench.rank == 0:
        table = cp.block_table(ranges.start.shape[1])
        visits = count_visits_of_all_heads(index, ranges, table)
        needed = needed_chunks_of(index, ranges, cp.layout, cp.size)
        sources = step_sources("ring", 1, cp.size)
        work = by_step(visits, sources, needed=needed).sum((0, 1)).double()
    return gather(bench, work.tolist())[0]


def _degrees(work: Tensor) -> dict[str, float]:
    """Imbalance of whole ranks, within each step, and of a rank's steps."""
    degrees = {
        "worker": worker_imbalance(work.sum(-1)),
        "worker_per_step": imbalance.worker_imbalance_per_step(work),
        "step": imbalance.step_imbalance(work),
    }
    return {name: round(degree.item(), 4) for name, degree in degrees.items()}


def timeline(bench: Bench) -> Iterator[dict]:
    """What rank 0's streams do in one forward and backward of sparse attention, by schedule."""
    shape = bench.shape(262144)
    schedules = ["ring", "all_gather"]
    if bench.nodes > 1:
        schedules.append("double_ring")
    for schedule in schedules:
        about = {
            "case": "timeline",
            "schedule": schedule,
            "layout": "striped",
            "nodes": bench.nodes,
            "seq_len": shape.seq_len,
        }
        yield attempt(bench, about, functools.partial(_timeline, bench, shape, schedule))


def _timeline(bench: Bench, shape: Shape, schedule: str) -> dict:
    cp = bench.context("striped", schedule)
    call, tensors, _ = sparse(bench, shape.seq_len, cp)
    return {"intervals": traced(bench, training_call(call, tensors[:3], tensors[3]))}


def accuracy(bench: Bench) -> Iterator[dict]:
    """Relative Frobenius errors in bf16 against fp32: one rank alone, then every schedule."""
    shape = bench.shape(8192)
    ranges = Causal().rows(shape.seq_len, bench.device)
    # Prices of random inputs are alike: budgets by prices would leave out most under a cap.
    pattern = VerticalSlash(
        recall=0.9,
        max_verticals=shape.seq_len * 3 // 100,
        max_slashes=8,
        budget="independent",
        probe_rows="last",
        count_sinks=True,
    )
    pattern.check_block_size(bench.args.block_size)
    q, k, _, _ = draw(shape)
    index = pattern.select(q.detach(), k.detach(), ranges, block_size=bench.args.block_size)
    ready = ready_index(pattern, index.tensors())
    seen = index.dense(Causal())[0]  # [Hq, S, S]
    about = {"case": "errors", "ranks": bench.world, "seq_len": shape.seq_len}

    alone = attention(bench, ready, ranges, None)
    measure = functools.partial(_errors, bench, alone, shape, seen)
    yield attempt(bench, about | {"schedule": "alone"}, measure)

    schedules = ["local"]
    if bench.world > 1:
        schedules = ["ring", "all_gather"]
        if bench.world % 2 == 0:
            schedules.append("double_ring")
    for schedule, dtype in itertools.product(schedules, GRADIENT_DTYPES):
        cp = bench.context("striped", schedule, gradient_dtype=GRADIENT_DTYPES[dtype])
        call = functools.partial(_Sharded.apply, cp, attention(bench, ready, ranges, cp))
        row = {"schedule": schedule, "layout": "striped", "gradient_dtype": dtype}
        yield attempt(bench, about | row, functools.partial(_errors, bench, call, shape, seen))


def _errors(bench: Bench, call: Attention, shape: Shape, seen: Tensor) -> dict:
    """The largest of any rank; ranks get the same whole tensors."""
    here = errors(call, shape, seen)
    largest = gather(bench, list(here.values())).amax(0).tolist()
    return dict(zip(here, largest))


class _Sharded(torch.autograd.Function):
    """Attention of whole tensors by way of shards."""

    @staticmethod
    def forward(
        ctx, cp: ContextParallel, call: Attention, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.cp = cp
        ctx.leaves = [cp.shard(whole.detach(), 2).requires_grad_() for whole in (q, k, v)]
        with torch.enable_grad():
            ctx.out = call(*ctx.leaves)
        return cp.unshard(ctx.out.detach(), 2)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple:
        gradients = torch.autograd.grad(ctx.out, ctx.leaves, ctx.cp.shard(d_out, 2))
        dq, dk, dv = (ctx.cp.unshard(gradient, 2) for gradient in gradients)
        return None, None, dq, dk, dv


CASES: dict[str, Callable[[Bench], Iterator[dict]]] = {
    "scaling": scaling,
    "dense": dense,
    "nodes": nodes,
    "balance": balanced,
    "timeline": timeline,
    "errors": accuracy,
}
