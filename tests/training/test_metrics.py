"""Balance and communication in the training log: counted by hand, times by a clock of our own, bytes hop by hop."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import run_processes
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend, recorder
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.observe.visits import count_visits, worker_imbalance
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.training.metrics import context_parallel_averages

BLOCK, BATCH, HEADS, KV_HEADS, DIM = 16, 2, 4, 2, 8
TOKENS = 6 * BLOCK  # of a rank


def _cp(layout: str, schedule: str, *options) -> ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return ContextParallel(mesh, layout, schedule, BLOCK, *options)


def _record(
    cp, calls=1, mask=Causal(), pattern=Dense(), dtype=torch.float64, delay=0.0, backward=False
):
    """The recording of `calls` attention calls, and the index of the last."""
    seq_len = TOKENS * dist.get_world_size()
    local = [
        cp.shard(x, 2).requires_grad_()
        for x in structured_qkv(BATCH, HEADS, KV_HEADS, seq_len, DIM, dtype=dtype)
    ]
    dist.barrier()
    with recording() as seen:
        for _ in range(calls):
            time.sleep(delay)
            out, aux = attend(*local, mask, pattern, cp, return_aux=True)
            if backward:
                out.sum().backward()
    return seen, aux.index


def _check_work() -> None:
    ranks = dist.get_world_size()
    n = TOKENS
    own, other = n * (n + 1) // 2, n * n
    by_hand = [own + rank * other for rank in range(ranks)]
    by_hand = BATCH * HEADS * torch.tensor(by_hand, dtype=torch.float64)
    seen, _ = _record(_cp("contiguous", "ring"), calls=2)
    measured = seen.by_rank()
    assert torch.equal(measured.work, torch.stack([by_hand, by_hand]))
    assert torch.equal(measured.compute > 0, measured.work > 0)
    logged = context_parallel_averages(seen)
    busiest = by_hand.max() / by_hand.mean()
    assert logged["worker_imbalance"] == pytest.approx(busiest.item())
    assert logged["worker_imbalance"] == pytest.approx(2 - 1 / ranks, rel=0.02)
    for schedule in ("ring", "all_gather"):
        seen, _ = _record(_cp("zigzag", schedule))
        work = seen.by_rank().work
        assert context_parallel_averages(seen)["worker_imbalance"] == 1.0
        assert work.shape == (1, ranks) and work.sum() == by_hand.sum()


SPARSE = VerticalSlash(
    recall=0.5, sinks=3, local_slashes=1, max_verticals=40, max_slashes=2, dense_below=48
)


def _check_sparse_work() -> None:
    """Against the count of visits.py, which test_visits.py checks against index.dense()."""
    for schedule in ("ring", "all_gather"):
        cp = _cp("striped", schedule)
        mask = Documents([[dist.get_world_size() * TOKENS - 70], [100, 30, 50]])
        seen, index = _record(cp, mask=mask, pattern=SPARSE)
        ranges = mask.rows(index.seq_len)
        visits = count_visits(index, ranges, cp.block_table(index.seq_len))
        assert visits.vertical_pairs.sum() > 0
        want = visits.total().sum((0, 1))
        work, compute, _ = seen.by_rank()
        assert torch.equal(work[0], want.double()), schedule
        assert (compute > 0)[work > 0].all(), schedule


def _check_waiting() -> None:
    """A rank that is late makes the others wait, and that is not computing."""
    for schedule in ("ring", "all_gather"):
        cp, late = _cp("zigzag", schedule), dist.get_rank() == 1
        _record(cp)
        began = time.perf_counter()
        seen, _ = _record(cp, delay=1.0 * late)
        took = 1e3 * (time.perf_counter() - began)
        _, compute, elapsed = (x[0] for x in seen.by_rank())
        waited = elapsed - compute
        assert (elapsed >= compute).all() and (compute > 0).all()
        assert min(waited[0], waited[2]) > 800 and waited[1] < 500, (schedule, waited)
        assert compute.max() < 500 and elapsed[dist.get_rank()] < took
        logged = context_parallel_averages(seen)
        assert logged["exposed_communication_ms"] == pytest.approx(waited.mean().item())
        assert logged["exposed_communication_share"] == pytest.approx(
            (waited.sum() / elapsed.sum()).item()
        )
        assert logged["worker_imbalance_time"] == pytest.approx(worker_imbalance(compute).item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_times_on_a_gpu_need_no_waiting():
    device = torch.device("cuda")
    small, large = (torch.randn(n, n, device=device) for n in (256, 8192))
    small @ small, large @ large  # the first products load libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call = recorder.TimedCall(ContextParallel(None, schedule="local"), device)
        for x in (small, large):
            with call.computing():
                x @ x
            large @ large
        call.ended = recorder.mark(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compute, elapsed = call.milliseconds()
    assert 0 < compute and elapsed > 1.4 * compute


def _check_bytes() -> None:
    """Chunks of keys and values in bf16 (1), their gradients in fp32 (2) or bf16 (1), on a ring of 3."""
    rank, ranks, n = dist.get_rank(), dist.get_world_size(), TOKENS
    chunk = 2 * BATCH * KV_HEADS * n * DIM * 2

    def record(*options):
        seen, _ = _record(_cp(*options), dtype=torch.bfloat16, backward=True)
        return seen

    plain = (ranks - 1) * (1 + 1 + 2) * chunk
    for layout, schedule in (
        ("zigzag", "ring"),
        ("striped", "all_gather"),
        ("contiguous", "all_gather"),
    ):
        seen = record(layout, schedule)
        assert (seen.bytes_sent, seen.plain_ring_bytes) == (plain, plain), (layout, schedule)
    # Causal and contiguous: chunk s is needed by the ranks after s; its gradient comes home around the whole ring.
    keys, gradients = [1, 2, 0], [1, 1, 2]
    seen = record("contiguous", "ring")
    assert (
        seen.bytes_sent == (2 * keys[rank] + 2 * gradients[rank]) * chunk
        and seen.plain_ring_bytes == plain
    )
    logged = context_parallel_averages(seen)
    assert logged["cp_sent_of_plain_ring"] == pytest.approx(
        (2 * sum(keys) + 2 * sum(gradients)) * chunk / plain / ranks
    )
    assert logged["cp_gib_sent"] == pytest.approx(
        (2 * sum(keys) + 2 * sum(gradients)) * chunk / ranks / 2**30
    )
    seen = record("zigzag", "ring", "auto", torch.bfloat16)
    assert seen.bytes_sent == seen.plain_ring_bytes == (ranks - 1) * 3 * chunk
    # The queries with d_out (bf16), lse and delta (fp32), and their gradient (fp32); forward as ever.
    seen = record("zigzag", "ring", "q")
    queries = BATCH * HEADS * n * (DIM * (2 * 2 + 4) + 2 * 4)
    assert seen.bytes_sent == (ranks - 1) * (chunk + queries) and seen.plain_ring_bytes == plain


def _check_bytes_besides() -> None:
    """Verticals in bf16, their gradients in fp32, each summed over a ring.

    Selection is what select() alone sends.
    """
    ranks = dist.get_world_size()
    cp = _cp("striped", "ring")
    pattern = VerticalSlash(recall=0.7, max_verticals=40, dense_below=48)
    seen, index = _record(cp, 2, pattern=pattern, dtype=torch.bfloat16, backward=True)
    # Numbers in k and v of the verticals, and bytes of each in bf16 and in fp32.
    numbers = 2 * index.verticals.numel() * DIM
    expected = sum(2 * (2 * numbers * size * (ranks - 1) // ranks) for size in (2, 4))
    assert seen.bytes_of_verticals == expected > 0
    before = cp.sent["collectives"]
    q, k, _ = structured_qkv(BATCH, HEADS, KV_HEADS, TOKENS * ranks, DIM, dtype=torch.bfloat16)
    pattern.select(cp.shard(q, 2), cp.shard(k, 2), Causal(), cp)
    assert seen.bytes_of_selection == 2 * (cp.sent["collectives"] - before) > 0
    logged = context_parallel_averages(seen)
    assert logged["cp_gib_verticals"] * 2**30 == pytest.approx(seen.bytes_of_verticals)
    assert logged["cp_gib_selection"] * 2**30 == pytest.approx(seen.bytes_of_selection)
    assert seen.bytes_sent == seen.plain_ring_bytes
    assert _record(_cp("striped", "ring"))[0].bytes_of_verticals == 0


def _check_all() -> None:
    _check_work()
    _check_sparse_work()
    _check_bytes()
    _check_bytes_besides()
    _check_waiting()


def test_recorded_over_ranks():
    run_processes(3, _check_all)
