"""The benchmarks of attention, on one CPU and over gloo: their rows count pairs by brute force."""

import functools
import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import attention as benchmark
from scripts.benchmarks import context_parallel, harness
from scripts.benchmarks.attention_cases import Shape, cases_to_check, check
from scripts.benchmarks.synthetic import draw_heads, expected_logits
from tests.distributed import on_ranks, run_program
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.estimate.indexes import ragged_lengths

SHAPE = Shape(heads=4, kv_heads=2, head_dim=32, block_size=32, seq_len=512, device="cpu")
SMALL = (
    "--device cpu --heads 2:1 --head-dim 32 --repeats 1 --warm-ups 0 "
    "--seq-lens 2048 --densities 0.3 --verticals 0.03"
)


def _rows(rows, **wanted):
    return [row for row in rows if wanted.items() <= row.items()]


@pytest.mark.parametrize("tensor", ["out", "dk", None])
def test_error_check_stops_what_is_wrong(tensor):
    def spoiled(call, q, k, v):
        if tensor == "out":
            return call(q, k, v) * 1.01
        # The right output, and the gradient of k off by 1 %.
        return call(q, k * 1.01 - (k * 0.01).detach(), v)

    [(name, call, seen)] = cases_to_check(SHAPE, ["eager"])
    if tensor is None:
        assert check(iter([(name, call, seen)]), SHAPE).keys() == {"eager"}
        return
    with pytest.raises(RuntimeError, match=f"eager is wrong at 512 tokens.*'{tensor}'"):
        check(iter([(name, functools.partial(spoiled, call), seen)]), SHAPE)


def test_sparse_rows(tmp_path):
    out = tmp_path / "new" / "result.json"
    assert benchmark.main([*SMALL.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["complete"] and result["gpu"] == "CPU"
    [row] = _rows(result["rows"], case="sparse")
    spent = row["forward_ms"] + row["backward_ms"]
    flops = row["density"] * 14 * 32 * 2 * 2048 * 2049 / 2
    assert row["density"] == pytest.approx(0.3, abs=0.03)
    assert row["visited_tflops"] == pytest.approx(flops / spent / 1e9, abs=0.1)
    assert row["selection_ms"] > 0 and row["ratio_to_cudnn"] is None
    dense = {"cudnn": {"forward_ms": 1.0, "backward_ms": spent - 1.0}}
    found = benchmark._of_peers(SHAPE, 0.3, row, dense)
    assert found["ratio_to_cudnn"] == 1 and found["ratio_to_flash_attn_4"] is None


@pytest.mark.gpu
def test_small_run_on_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    words = "--heads 4:2 --seq-lens 8192 --densities 0.2 0.5 --repeats 2 --backends triton"
    run_program(1, benchmark.main, [*words.split(), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    failed = [row for row in rows if "error" in row]
    assert all("not measured" in row["error"] for row in failed), failed
    measured = _rows(rows, case="sparse")
    assert measured[0]["name"] == "cudnn" and measured[0]["ratio_to_cudnn"] == 1
    for row in measured:
        if row["target_density"] is None:
            continue
        assert abs(row["density"] - row["target_density"]) < 0.05
        assert row["ratio_to_cudnn"] > 0


# Context parallelism

SMALL_RUNS = (
    "--device cpu --heads 4:2 --head-dim 32 --block-size 64 --repeats 1 --warm-ups 0 --density 0.3 "
    "--verticals 0.03 --backend eager --seq-lens 1024 --packs 2 --stages 1"
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    words = []
    for text in ("scaling --schedules ring ulysses", "dense --schedules ring", "varlen"):
        name = text.split()[0]
        words += ["+", *text.split(), *SMALL_RUNS.split(), "--out", str(out / f"{name}.json")]
    run_program(2, context_parallel.main, words[1:])
    return {path.stem: json.loads(path.read_text())["rows"] for path in out.iterdir()}


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


@on_ranks(2)
def test_clocks_and_failures_on_two_ranks():
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


SEQ_LEN, HEADS, KV_HEADS = 16384, 4, 2


def test_logits_depend_on_the_distance_and_on_outliers_as_the_formula_says():
    heads = draw_heads(SEQ_LEN, HEADS, KV_HEADS, 64)
    first = SEQ_LEN - 512
    q, k = heads.q[:, :, first:], heads.k
    distances = torch.arange(512, first, 37)
    # [512, distances]: the key that lies so far before each of the last 512 queries.
    key = torch.arange(first, SEQ_LEN)[:, None] - distances
    # [Hq, distances]
    wanted = expected_logits(heads.strengths, heads.frequency, distances)
    is_ordinary = torch.ones(KV_HEADS, SEQ_LEN, dtype=torch.bool)
    is_ordinary.scatter_(1, heads.outliers, False)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        # [512, S]
        logits = (q[0, head] @ k[0, kv_head].T) * 64**-0.5

        by_distance = logits.gather(1, key)
        of_ordinary = by_distance.where(is_ordinary[kv_head][key], torch.nan)
        mean = of_ordinary.nanmean(0).double()
        # 512 noisy pairs a distance.
        assert (mean - wanted[head]).abs().max() < 0.5
        correlation = torch.corrcoef(torch.stack([mean, wanted[head]]))[0, 1]
        assert correlation > 0.995

        # Outliers are the same from everywhere.
        of_outliers = logits[:, heads.outliers[kv_head]]
        assert of_outliers.mean(0).std() < 1.2
        assert of_outliers.mean() > wanted[head].median() + 2
