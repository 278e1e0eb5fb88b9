"""The benchmarks of attention on one CPU: what they time is right, and their rows count pairs by brute force."""

import functools
import json

import pytest

from scripts.benchmarks import attention as benchmark
from scripts.benchmarks.attention_cases import (
    FLASH4,
    Shape,
    cases_to_check,
    check,
)
from tests.distributed import run_program
from titan_sparse.attention.masks.ranges import Documents, SlidingWindow
from titan_sparse.estimate.indexes import ragged_lengths

SHAPE = Shape(heads=4, kv_heads=2, head_dim=32, block_size=32, seq_len=512, device="cpu")
SMALL = (
    "sparse masks patterns --device cpu --heads 2:1 --head-dim 32 --repeats 1 --warm-ups 0 --packs 2 "
    "--seq-lens 2048 --window 512 --densities 0.3 --verticals 0.03 --chunk-size 256 "
    "--points 1 --recall-rows 512"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "new" / "result.json"
    assert benchmark.main([*SMALL.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["complete"] and result["gpu"] == "CPU"
    return result["rows"]


def _rows(rows, **wanted):
    return [row for row in rows if wanted.items() <= row.items()]


@pytest.mark.parametrize("tensor", ["out", "dk", None])
def test_error_check_stops_what_is_wrong(tensor):
    def spoiled(call, q, k, v):
        if tensor == "out":
            return call(q, k, v) * 1.01
        # The right output, and the gradient of k off by 1 %.
        return call(q, k * 1.01 - (k * 0.01).detach(), v)

    cases = []
    for mask, name, call, seen in cases_to_check(SHAPE, ["eager"]):
        if tensor and (mask, name) == ("documents", "eager"):
            call = functools.partial(spoiled, call)
        cases.append((mask, name, call, seen))
    if tensor is None:
        assert check(iter(cases), SHAPE).keys() == {"causal", "documents"}
        return
    with pytest.raises(RuntimeError, match=f"eager is wrong at 512 tokens, documents.*'{tensor}'"):
        check(iter(cases), SHAPE)


def test_sparse_rows(rows):
    [row] = _rows(rows, case="sparse")
    spent = row["forward_ms"] + row["backward_ms"]
    flops = row["density"] * 14 * 32 * 2 * 2048 * 2049 / 2
    assert row["density"] == pytest.approx(0.3, abs=0.03)
    assert row["visited_tflops"] == pytest.approx(flops / spent / 1e9, abs=0.1)
    assert row["selection_ms"] > 0 and row["ratio_to_cudnn"] is None
    dense = {"cudnn": {"forward_ms": 1.0, "backward_ms": spent - 1.0}}
    found = benchmark._of_peers(SHAPE, 0.3, row, dense)
    assert found["ratio_to_cudnn"] == 1 and found["ratio_to_flash_attn_4"] is None


@pytest.mark.parametrize(
    "mask, masks",
    [
        ("documents", [Documents(ragged_lengths(2048, seed)) for seed in range(2)]),
        ("window", [SlidingWindow(512)]),
    ],
)
def test_rows_of_masks_count_visible_pairs(rows, mask, masks):
    peer, own = _rows(rows, case="masks", mask=mask)
    assert (peer["name"], own["name"]) == (FLASH4, "eager")
    assert "not measured" in peer["error"] and "total_of_flash_attn_4" not in own
    pairs = sum(mask.dense(2048).sum().item() for mask in masks) / len(masks)
    assert own["pairs"] == pytest.approx(pairs, rel=1e-4) and 0 < max(own["errors"].values()) < 5e-3
    for step, flops in (("forward", 4), ("backward", 10), ("total", 14)):
        rate = flops * pairs * 32 * 2 / own[f"{step}_ms"] / 1e9
        assert own[f"{step}_tflops"] == pytest.approx(rate, rel=1e-3)


def test_rows_of_patterns(rows):
    dense, *found = _rows(rows, case="patterns")
    assert [row["name"] for row in found[:2]] == [
        "vertical_slash, joint",
        "vertical_slash, independent",
    ]
    for row in found:
        assert 0 < row["density"] < 1 and 0 < row["recall_of_worst_head"] <= row["recall"] < 1
        assert row["step_ms"] == pytest.approx(row["selection_ms"] + row["total_ms"], rel=1e-4)
        ideal_ms = dense["total_ms"] * row["density"]
        assert row["of_dense_x_density"] == pytest.approx(row["total_ms"] / ideal_ms, rel=1e-3)


@pytest.mark.gpu
def test_small_run_on_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    words = "sparse masks patterns --heads 4:2 --seq-lens 8192 --densities 0.2 0.5 --repeats 2 "
    words += "--window 1024 --packs 2 --backends triton --chunk-size 512 "
    words += "--points 1"
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
