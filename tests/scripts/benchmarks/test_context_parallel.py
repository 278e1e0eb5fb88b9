"""The context-parallel benchmark over gloo at tiny sizes: every case and its bookkeeping."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import context_parallel as benchmark
from scripts.benchmarks import harness, plots, traces
from tests.distributed import run_processes, run_program
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.estimate.indexes import ragged_lengths

SMALL = (
    "--device cpu --heads 4:2 --head-dim 32 --block-size 64 --repeats 1 --warm-ups 0 --density 0.3 "
)
SMALL += "--verticals 0.03 --backend eager --seq-lens 1024 --packs 2 --stages 1"


def _run(ranks, out, *runs):
    words = []
    for text in runs:
        words += ["+", *text.split(), *SMALL.split(), "--out", str(out / f"{text.split()[0]}.json")]
    run_program(ranks, benchmark.main, words[1:])
    return {path.stem: json.loads(path.read_text())["rows"] for path in out.iterdir()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    runs = ("scaling", "dense --brief", "errors", "varlen")
    return _run(2, tmp_path_factory.mktemp("two"), *runs)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("four")
    return out, _run(4, out, "nodes --pretend-nodes 2", "timeline")


def test_scaling_compares_the_same_work(two_ranks):
    alone, *shared = two_ranks["scaling"]
    assert alone["seq_len"] == 704  # 1024 / sqrt(2), in blocks of 64
    assert [(row["schedule"], row["gradient_dtype"]) for row in shared] == [
        ("all_gather", "float32"),
        ("all_gather", "bfloat16"),
        ("ring", "float32"),
        ("ring", "bfloat16"),
    ]
    for row in (alone, *shared):
        pairs = row["density"] * row["seq_len"] * (row["seq_len"] + 1) / 2
        flops = 14 * 32 * 4 * pairs / (1 if row is alone else 2)
        assert row["visited_tflops"] == pytest.approx(flops / row["total_ms"] / 1e9, rel=1e-3)
        assert 0 < row["forward_ms"] <= row["total_ms"] == max(row["per_rank_ms"])  # one repeat
    for row in shared:
        of_alone = row["visited_tflops"] / alone["visited_tflops"]
        assert row["of_alone"] == pytest.approx(of_alone, rel=1e-3)


def test_dense_rows_and_a_peer_that_cannot_run(two_ranks):
    ours, peer = two_ranks["dense"]
    flops = 14 * 32 * 4 * 1024 * 1025 / 2 / 2
    assert ours["tflops"] == pytest.approx(flops / ours["total_ms"] / 1e9, rel=1e-3)
    # No cuDNN here.
    assert peer["error"].startswith("rank 0: ") and "total_ms" not in peer


def test_errors_do_not_grow(two_ranks):
    alone, *shared = two_ranks["errors"]
    assert {row["schedule"] for row in shared} == {"ring", "all_gather", "double_ring"}
    for row in shared:
        allowed = 1.05 if row["gradient_dtype"] == "float32" else 1.7
        for name in ("out", "dq", "dk", "dv"):
            assert 0 < row[name] <= allowed * alone[name] < 5e-3, row


def test_documents_over_two_ranks(two_ranks):
    ours = [row for row in two_ranks["varlen"] if row["name"] == "ours"]
    assert [(row["layout"], row["schedule"]) for row in ours] == [
        ("balanced", "group_cast"),
        ("contiguous", "group_cast"),
        ("balanced", "ring"),
        ("zigzag", "ring"),
        ("striped", "all_gather"),
    ]
    packs = [Documents(ragged_lengths(1024, seed)).dense(1024)[0] for seed in range(2)]
    block = 2 * 2 * 64 * 32 * 2 / 1e6  # K and V of two heads, bf16
    for row in ours:
        assert row["pairs"] == pytest.approx(sum(p.sum().item() for p in packs) / 2, rel=1e-4)
        sent = (row["megabytes_sent_forward"], row["megabytes_sent_backward"])
        needed = row["megabytes_needed_forward"]
        # And gradients in fp32.
        assert row["megabytes_needed_backward"] == pytest.approx(3 * needed, rel=1e-3)
        if row["schedule"] == "group_cast":
            assert sent == (needed, row["megabytes_needed_backward"]) and row["sent_of_needed"] == 1
        if row["layout"] == "balanced":
            continue
        table = block_ids(row["layout"], 2, 1024, 64)
        blocks, imbalances = 0, []
        for dense in packs:
            tiles = dense.view(16, 64, 16, 64).sum((1, 3))
            work = [tiles[own].sum() for own in table]
            imbalances.append(2 * max(work) / sum(work))
            for own, other in (table, table.flip(0)):
                blocks += tiles[own].sum(0)[other].count_nonzero().item() / 2
        assert needed == pytest.approx(block * blocks, rel=1e-3)
        assert row["worker_imbalance"] == pytest.approx(sum(imbalances).item() / 2, rel=1e-3)
    assert sent == pytest.approx((16 * block, 48 * block), rel=1e-3)  # all_gather: everything


def test_nodes_rows(four_ranks):
    rows = four_ranks[1]["nodes"]
    chunk = 2 * 2 * 1024 // 4 * 32 * 2 / 1e6  # K and V, 2 heads, bf16
    # dK and dV in fp32 are twice as many bytes.
    for (ring, double_ring, compared), width in ((rows[:3], 2), (rows[3:], 1)):
        for row in (ring, double_ring):
            sent = {"forward": 3 * chunk, "backward": 3 * chunk + 3 * width * chunk}
            assert row["megabytes_sent"] == pytest.approx(sent)
        faster = ring["total_ms"] / double_ring["total_ms"]
        assert "outer_alone" not in ring
        assert compared["times_faster"] == pytest.approx(faster, abs=1e-3)
        limits = [double_ring[name]["total_ms"] for name in ("compute_alone", "outer_alone")]
        of_limit = double_ring["total_ms"] / max(limits)
        assert double_ring["total_of_limit"] == pytest.approx(of_limit, abs=1e-3)


def test_timelines_of_a_run_and_their_picture(four_ranks, tmp_path):
    folder, rows = four_ranks
    assert [row["schedule"] for row in rows["timeline"]] == ["ring", "all_gather", "double_ring"]
    for row in rows["timeline"]:
        kinds = {interval["kind"] for interval in row["intervals"]}
        sends = "collective" if row["schedule"] == "all_gather" else "send-receive"
        assert {"compute", sends} <= kinds and row["intervals"][0]["start_us"] == 0
    out = tmp_path / "pictures/timeline.png"
    plots.main(["timeline", str(folder / "timeline.json"), "--out", str(out)])
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def _check_harness():
    """Rank 1 is slow in its backward, and fails alone."""
    args = SimpleNamespace(warm_ups=0, repeats=1)
    bench = harness.Bench(args, torch.device("cpu"), dist.get_rank(), 2)
    found = harness.timed(bench, [lambda: None, lambda: time.sleep(0.3 if bench.rank == 1 else 0)])
    assert found["backward_ms"] >= 300 > found["forward_ms"]
    assert found["total_ms"] == found["per_rank_ms"][1] and found["per_rank_ms"][0] < 300

    def fails(bench):
        if bench.rank == 1:
            raise ValueError("nothing here")
        return {"total_ms": 1.0}

    failed = bench.attempt({"case": "x"}, fails)
    assert failed == {"case": "x", "error": "rank 1: ValueError: nothing here"}


def test_clocks_and_failures_on_two_ranks():
    run_processes(2, _check_harness)


@pytest.mark.parametrize(
    "text, world, words",
    [
        ("scaling --pretend-nodes 3", 4, "write a divisor"),
        ("nodes", 4, "write --pretend-nodes 2"),
        ("dense", 1, "--nproc-per-node 2"),
        ("scaling --schedules double_ring", 3, "even number of ranks"),
        ("scaling --seq-lens 1000", 2, "write multiples of 512"),
        ("dense scaling --backend cudnn", 2, "write the case dense alone"),
    ],
)
def test_refusals(text, world, words):
    assert words in benchmark.refusal(benchmark.parse(text.split()), world)


def _event(start, duration, stream, name, cat="kernel"):
    return {"cat": cat, "ts": start, "dur": duration, "tid": stream, "name": name}


def test_intervals_of_a_trace():
    events = [
        _event(0, 50, 20, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"),
        _event(60, 9, 1, "cudaLaunchKernel", "cuda_runtime"),
        _event(110, 10, 7, "void small<float>(int)"),
        _event(170, 5, 7, "Memcpy DtoD (Device -> Device)", "gpu_memcpy"),
        _event(100, 80, 24, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
    ]
    found = traces.intervals(events, on_gpu=True)
    assert [tuple(interval.values()) for interval in found] == [
        (0, 80, 24, "send-receive", "ncclDevKernel_SendRecv"),
        (10, 10, 7, "compute", "small"),
        (70, 5, 7, "copy", "Memcpy DtoD "),
    ]
    assert list(plots.lanes(found)) == ["compute 7", "send-receive 24"]
