"""The context-parallel benchmark over gloo at tiny sizes: every case, its bookkeeping, its clocks, its timelines."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import context_parallel as benchmark
from scripts.benchmarks import context_parallel_cases as cases
from scripts.benchmarks import context_parallel_timing as timing
from scripts.benchmarks import plot_timeline, traces
from tests.distributed import run_processes, run_program
from titan_sparse.attention.backends import BACKENDS

eager = BACKENDS["eager"]

SMALL = (
    "--device cpu --heads 4:2 --head-dim 32 --block-size 128 --repeats 1 --warm-ups 0 --density 0.3 "
    "--columns 0.03 --backend eager"
)


def _arguments(text):
    return benchmark.parse(f"{text} {SMALL}".split())


def _run(ranks, text, out):
    run_program(ranks, benchmark.main, [*text.split(), *SMALL.split(), "--out", str(out)])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "result.json"
    _run(2, "scaling dense balance errors --seq-len 2048 --max-columns 64 --max-slashes 12", out)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("four") / "new folder" / "result.json"
    _run(4, "nodes timeline --seq-len 2048 --pretend-nodes 2", out)
    return out


def _rows(result, case, **wanted):
    wanted["case"] = case
    return [row for row in result["rows"] if wanted.items() <= row.items()]


# Cases --------------------------------------------------------------------------------------------------------------


def test_header(two_ranks):
    assert (
        two_ranks["ranks"] == 2
        and two_ranks["gpu"] == "CPU"
        and two_ranks["versions"]["torch"] == torch.__version__
    )
    assert (
        two_ranks["options"]["density"] == 0.3
        and "scripts.benchmarks.context_parallel" in two_ranks["command"]
    )


def test_scaling_compares_the_same_work(two_ranks):
    alone, *shared = _rows(two_ranks, "scaling")
    assert alone["seq_len"] == 1408  # 2048 / sqrt(2), in blocks of 128
    assert [(row["schedule"], row["gradient_dtype"]) for row in shared] == [
        ("all_gather", "float32"),
        ("all_gather", "bfloat16"),
        ("ring", "float32"),
        ("ring", "bfloat16"),
    ]
    for row in (alone, *shared):
        pairs = row["density"] * row["seq_len"] * (row["seq_len"] + 1) / 2
        ranks = 1 if row is alone else 2
        assert row["visited_tflop_per_rank"] == pytest.approx(
            14 * 32 * 4 * pairs / ranks / 1e12, rel=1e-3
        )
        assert row["visited_tflops"] == pytest.approx(
            row["visited_tflop_per_rank"] / row["total_ms"] * 1e3, rel=1e-3
        )
        assert row["density"] == pytest.approx(0.3, abs=0.06) and len(row["per_rank_ms"]) == 2
        assert 0 < row["forward_ms"] <= row["total_ms"] == max(row["per_rank_ms"])  # one repeat
        with_selection = (
            row["visited_tflop_per_rank"] / (row["total_ms"] + row["selection_ms"]) * 1e3
        )
        assert row["visited_tflops_with_selection"] == pytest.approx(with_selection, rel=1e-3)
    for row in shared:
        assert row["visited_tflop_per_rank"] == pytest.approx(
            alone["visited_tflop_per_rank"], rel=0.15
        )
        assert row["of_alone"] == pytest.approx(
            row["visited_tflops"] / alone["visited_tflops"], rel=1e-3
        )


def test_one_rank_is_alone_with_the_whole_sequence(tmp_path):
    _run(1, "scaling --seq-len 1024", tmp_path / "result.json")
    [alone] = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert alone["schedule"] == "alone" and alone["seq_len"] == 1024
    assert alone["backend"] == "eager" and alone["visited_tflops"] > 0


def test_dense_rows_and_a_peer_that_cannot_run(two_ranks):
    rows = _rows(two_ranks, "dense", name="ours")
    assert {(row["layout"], row["schedule"]) for row in rows} == {
        (layout, schedule)
        for layout in ("zigzag", "striped")
        for schedule in ("ring", "all_gather")
    }
    for row in rows:
        flops = 14 * 32 * 4 * 2048 * 2049 / 2 / 2
        assert row["tflops"] == pytest.approx(flops / row["total_ms"] / 1e9, rel=1e-3)
    peers = _rows(two_ranks, "dense", name="torch context_parallel")
    assert [row["rotate"] for row in peers] == ["allgather", "alltoall"]
    assert all(
        row["error"].startswith("rank 0: ") and "total_ms" not in row for row in peers
    )  # no cuDNN here


def test_balance_rows(two_ranks):
    index, striped, zigzag, compared = _rows(two_ranks, "balance")
    assert index["columns_per_head"] > 30 and 2 < index["slashes_per_head"] <= 14
    for row in (striped, zigzag):
        assert {"counted_forward", "measured_forward", "measured_backward"} == row[
            "imbalance"
        ].keys()
        sums = torch.tensor([row["step_ms"]["forward"], row["step_ms"]["backward"]]).sum((0, 2))
        assert (
            row["kernels_ms"] == pytest.approx(sums.tolist())
            and len(row["step_ms"]["forward"][0]) == 2
        )
        assert row["slowest_kernels_ms"] == pytest.approx(sums.max().item(), abs=1e-3)
        measured = torch.tensor(row["step_ms"]["backward"])
        assert row["imbalance"]["measured_backward"] == cases._degrees(measured)
        assert all(
            degree >= 1 for degrees in row["imbalance"].values() for degree in degrees.values()
        )
    assert compared["times_faster"] == pytest.approx(
        zigzag["total_ms"] / striped["total_ms"], rel=1e-3
    )


def test_errors_do_not_grow(two_ranks):
    alone, *shared = _rows(two_ranks, "errors", ranks=2)
    assert len(shared) == 6 and {row["schedule"] for row in shared} == {
        "ring",
        "all_gather",
        "double_ring",
    }
    for row in shared:
        allowed = 1.05 if row["gradient_dtype"] == "float32" else 1.7
        assert all(
            0 < row[name] <= allowed * alone[name] < 5e-3 for name in ("out", "dq", "dk", "dv")
        ), row


def test_nodes_rows(four_ranks):
    rows = _rows(json.loads(four_ranks.read_text()), "nodes")
    chunk = 2 * 2 * 2048 // 4 * 32 * 2 / 1e6  # K and V, 2 heads, bf16
    for (ring, double_ring, compared), width in (
        (rows[:3], 2),
        (rows[3:], 1),
    ):  # dK and dV in fp32 are twice as many bytes
        for row in (ring, double_ring):
            sent = {"forward": 3 * chunk, "backward": 3 * chunk + 3 * width * chunk}
            assert row["megabytes_sent"] == pytest.approx(sent)
        assert "outer_alone" not in ring and compared["times_faster"] == pytest.approx(
            ring["total_ms"] / double_ring["total_ms"], rel=1e-3
        )
        limit = max(
            double_ring["compute_alone"]["total_ms"], double_ring["outer_alone"]["total_ms"]
        )
        assert double_ring["total_of_limit"] == pytest.approx(
            double_ring["total_ms"] / limit, rel=1e-3
        )


# Clocks and groups --------------------------------------------------------------------------------------------------


def _bench():
    args = _arguments("nodes --pretend-nodes 2")
    return timing.Bench(args, torch.device("cpu"), dist.get_rank(), dist.get_world_size(), 2)


def _seen_tiles(bench, cp, monkeypatch):
    """What the backend is given in a forward and a backward: counts of tiles, in order."""
    seen = []
    for name in ("forward", "backward"):
        function = getattr(eager, name)

        def spy(*args, function=function, name=name, **kwargs):
            _, pieces, *_ = args
            for piece in pieces:
                lists = piece.tiles.by_query
                counts = (int(lists.full_count.sum()), int(lists.partial_count.sum()))
                seen.append((name, *counts))
            return function(*args, **kwargs)

        monkeypatch.setattr(eager, name, spy)
    call, (*leaves, d_out), _ = cases.sparse(bench, 2048, cp)
    torch.autograd.grad(call(*leaves), leaves, d_out)
    monkeypatch.undo()
    return seen


def _in_processes():
    bench, monkeypatch = _bench(), pytest.MonkeyPatch()
    for schedule in ("ring", "double_ring"):
        cp, silent = (
            bench.context("striped", schedule),
            bench.context("striped", schedule, timing.WithoutTransfers),
        )
        real = _seen_tiles(bench, cp, monkeypatch)
        groups = 2 if schedule == "double_ring" else 1  # of KV heads
        assert len(real) == groups * (2 * cp.size + 2) and len(set(real)) > 4  # and the verticals'
        sent = silent.bytes_sent
        assert _seen_tiles(bench, silent, monkeypatch) == real and silent.bytes_sent == sent == 0
    k, v = torch.randn(2, 1, 2, 128, 32)
    before = cp.bytes_sent
    for step in cases.outer_transfers(cp, k, v):
        step()
    chunk = 2 * k.nbytes  # a hop forward; one, and one of gradients, back
    assert cp.bytes_sent - before == (1 + 1 + 1) * chunk
    assert timing.gather(bench, [[bench.rank, 7]]).tolist() == [[[rank, 7]] for rank in range(4)]
    _check_clocks(bench)
    _check_attempt(bench)


def _check_clocks(bench):
    """Rank 2 is slow in its backward, or in its third step."""
    import time

    def slow(seconds):
        time.sleep(seconds if bench.rank == 2 else 0)

    found = timing.timed(bench, [lambda: slow(0), lambda: slow(0.3)])
    assert (
        found["backward_ms"] >= 300 > found["forward_ms"]
        and found["total_ms"] == found["per_rank_ms"][2]
    )
    assert max(found["per_rank_ms"][rank] for rank in (0, 1, 3)) < 300
    cp = SimpleNamespace(size=4, marks=[])

    def forward():
        for step in range(3):
            slow(0.2 if step == 2 else 0)
            cp.marks.append(timing.mark(False))

    times = timing.step_times(bench, cp, [forward, forward])
    assert times.shape == (2, 4, 4) and (times > 200).nonzero().tolist() == [[0, 2, 2], [1, 2, 2]]
    with pytest.raises(RuntimeError, match="6 intervals for 4 steps"):
        timing.step_times(bench, cp, [lambda: cp.marks.extend([0.0] * 2)] * 2)


def _check_attempt(bench):
    def fails():
        if bench.rank == 3:
            raise ValueError("nothing here")
        return {"total_ms": 1.0}

    assert timing.attempt(bench, {"case": "x"}, fails) == {
        "case": "x",
        "error": "rank 3: ValueError: nothing here",
    }
    assert timing.attempt(bench, {"case": "x"}, lambda: {"y": 1}) == {"case": "x", "y": 1}


def test_groups_clocks_and_failures_on_four_ranks():
    run_processes(4, _in_processes)


def test_a_failing_case_does_not_end_the_run(monkeypatch, tmp_path):
    def breaks(bench):
        yield {"case": "first", "x": 1}
        raise RuntimeError("out of something")

    of_this_test = {"first": breaks, "second": lambda bench: iter([{"case": "second"}])}
    monkeypatch.setattr(benchmark, "attempt", _attempt_alone)
    out = tmp_path / "result.json"
    args = SimpleNamespace(cases=["first", "second"], out=str(out))
    bench = SimpleNamespace(args=args, rank=0, device=torch.device("cpu"))
    benchmark.run(bench, {"rows": []}, of_this_test)
    assert json.loads(out.read_text())["rows"] == [
        {"case": "first", "x": 1},
        {"case": "first", "error": "out of something"},
        {"case": "second"},
    ]


def _attempt_alone(bench, row, measure):
    try:
        return row | measure()
    except RuntimeError as error:
        return row | {"error": str(error)}


# Options ------------------------------------------------------------------------------------------------------------


def test_cudnn_is_for_the_case_dense():
    sparse, dense = _arguments("dense scaling"), _arguments("dense")
    sparse.backend = dense.backend = "cudnn"
    assert "write the case dense alone" in benchmark.refusal(sparse, 2)
    assert benchmark.refusal(dense, 2) is None


@pytest.mark.parametrize(
    "text, world, words",
    [
        ("scaling --pretend-nodes 3", 4, "write a divisor"),
        ("nodes", 4, "write --pretend-nodes 2"),
        ("dense", 1, "--nproc-per-node 2"),
        ("scaling --schedules double_ring", 3, "even number of ranks"),
        ("scaling --seq-len 1000", 2, "write a multiple of 512"),
        ("scaling --sinks -1", 2, "--sinks and --warm-ups 0 or more"),
    ],
)
def test_refusals(text, world, words):
    assert words in benchmark.refusal(_arguments(text), world)
    assert (
        benchmark.refusal(_arguments("scaling nodes --seq-len 4096 --pretend-nodes 2"), 4) is None
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_one_line(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert benchmark.main(["scaling"]) == 2
    assert capsys.readouterr().err == (
        "scripts.benchmarks.context_parallel: there is no GPU here; write --device cpu and small sizes to try it out\n"
    )


def test_pretended_nodes(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    names = []
    for rank in range(4):
        benchmark.pretend(2, rank, 4)
        names.append(os.environ["NCCL_HOSTID"])
    assert names == ["node0", "node0", "node1", "node1"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_IB_DISABLE"] == "1"


# Timelines ----------------------------------------------------------------------------------------------------------


def _event(start, duration, stream, name, cat="kernel"):
    return {"ph": "X", "cat": cat, "ts": start, "dur": duration, "tid": stream, "name": name}


EVENTS = [
    _event(0, 50, 20, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    {"ph": "M", "name": "process_name"},
    _event(60, 9, 1, "cudaLaunchKernel", "cuda_runtime"),
    _event(110, 10, 7, "void small<float>(int)"),
    _event(122, 30, 7, "long_one"),
    _event(170, 5, 7, "later"),
    _event(100, 80, 24, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
    _event(185, 4, 7, "Memcpy DtoD (Device -> Device)", "gpu_memcpy"),
]


def test_intervals_of_a_trace():
    found = traces.intervals(traces.after_start(EVENTS), on_gpu=True)
    assert [tuple(x.values()) for x in found] == [
        (0, 80, 24, "send-receive", "ncclDevKernel_SendRecv"),
        (10, 42, 7, "compute", "long_one"),
        (70, 5, 7, "compute", "later"),
        (85, 4, 7, "copy", "Memcpy DtoD"),
    ] or found[3]["name"].startswith("Memcpy DtoD")
    assert (
        list(found[0]) == ["start_us", "duration_us", "stream", "kind", "name"] and len(found) == 4
    )
    assert found[1] == {
        "start_us": 10,
        "duration_us": 42,
        "stream": 7,
        "kind": "compute",
        "name": "long_one",
    }


def test_long_traces_are_merged_until_they_are_short():
    events = [_event(100 * i, 10, 7, f"kernel_{i}") for i in range(3 * traces.MOST_INTERVALS)]
    found = traces.intervals(events, on_gpu=True)
    assert 0 < len(found) <= traces.MOST_INTERVALS and traces.intervals([], on_gpu=True) == []
    assert (
        found[-1]["start_us"] + found[-1]["duration_us"]
        == 100 * (3 * traces.MOST_INTERVALS - 1) + 10
    )


def test_lanes_have_the_kernels_first():
    found = traces.intervals(traces.after_start(EVENTS), on_gpu=True)
    assert list(plot_timeline.lanes(found)) == ["compute 7", "send-receive 24"]


def test_timelines_of_a_run_and_their_picture(four_ranks, tmp_path):
    rows = _rows(json.loads(four_ranks.read_text()), "timeline")
    assert [row["schedule"] for row in rows] == ["ring", "all_gather", "double_ring"]
    assert four_ranks.stat().st_size < 1_000_000
    for row in rows:
        kinds = {x["kind"] for x in row["intervals"]}
        assert (
            "compute" in kinds
            and ("collective" if row["schedule"] == "all_gather" else "send-receive") in kinds
        )
        assert row["intervals"][0]["start_us"] == 0 and all(
            x["duration_us"] >= 0 for x in row["intervals"]
        )
    pytest.importorskip("matplotlib")
    out = tmp_path / "pictures" / "timeline.png"
    plot_timeline.main([str(four_ranks), "--out", str(out)])
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 5_000 < out.stat().st_size < 150_000
    with pytest.raises(SystemExit, match="no timeline of local"):
        plot_timeline.main([str(four_ranks), "--out", str(out), "--schedules", "local", "ring"])


def test_plot_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r'needs matplotlib: pip install -e "\.\[eval\]"'):
        plot_timeline.main(["x.json", "--out", "x.png"])
