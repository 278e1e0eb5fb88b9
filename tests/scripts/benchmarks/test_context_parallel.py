"""The context-parallel benchmark over gloo at tiny sizes: every case and its bookkeeping."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import context_parallel as benchmark
from scripts.benchmarks import harness
from tests.distributed import run_processes, run_program
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
    runs = ("scaling --schedules ring ulysses", "dense --schedules ring", "varlen")
    return _run(2, tmp_path_factory.mktemp("two"), *runs)


def test_scaling_compares_the_same_work(two_ranks):
    alone, *shared = two_ranks["scaling"]
    assert alone["seq_len"] == 704  # 1024 / sqrt(2), in blocks of 64
    assert [row["gradient_dtype"] for row in shared] == ["float32", "bfloat16", "float32"]
    # Each rank of ulysses has the heads of the given index that are its own.
    assert shared[2]["schedule"] == "ulysses" and shared[2]["density"] == shared[0]["density"]
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
    assert ours["total_tflops"] == pytest.approx(flops / ours["total_ms"] / 1e9, rel=1e-3)
    # No cuDNN here.
    assert peer["error"].startswith("rank 0: ") and "total_ms" not in peer


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
    pairs = sum(pack.sum().item() for pack in packs) / 2
    for row in ours:
        assert row["pairs"] == pytest.approx(pairs, rel=1e-4)
        flops = 14 * 32 * 4 * row["pairs"] / 2
        assert row["total_tflops"] == pytest.approx(flops / row["total_ms"] / 1e9, rel=1e-3)


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
