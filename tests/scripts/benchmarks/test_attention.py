"""The benchmarks of attention on one CPU: what they time is right, and their rows count pairs by brute force."""

import functools
import json

import pytest

from scripts.benchmarks import attention as benchmark
from scripts.benchmarks.attention_cases import Shape, cases_to_check, check
from tests.distributed import run_program

SHAPE = Shape(heads=4, kv_heads=2, head_dim=32, block_size=32, seq_len=512, device="cpu")
SMALL = (
    "--device cpu --heads 2:1 --head-dim 32 --repeats 1 --warm-ups 0 "
    "--seq-lens 2048 --densities 0.3 --verticals 0.03"
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

    [(name, call, seen)] = cases_to_check(SHAPE, ["eager"])
    if tensor is None:
        assert check(iter([(name, call, seen)]), SHAPE).keys() == {"eager"}
        return
    with pytest.raises(RuntimeError, match=f"eager is wrong at 512 tokens.*'{tensor}'"):
        check(iter([(name, functools.partial(spoiled, call), seen)]), SHAPE)


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
