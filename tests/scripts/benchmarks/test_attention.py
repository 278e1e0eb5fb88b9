"""The attention benchmark without a GPU: patterns, error check, break-even, plot, refusals; on a GPU a small run."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from scripts.benchmarks import attention as bench_attention
from scripts.benchmarks import attention_cases, break_even, options, timing
from scripts.benchmarks import plot_attention as plot_attention_benchmark
from scripts.benchmarks.attention_cases import Shape, draw, ours, random_index, ready_index
from scripts.benchmarks.attention_errors import cases_to_check, check, errors
from titan_sparse.attention import backends
from titan_sparse.attention.masks.ranges import Causal

ROOT = Path(__file__).parents[3]

SHAPE = Shape(heads=4, kv_heads=2, head_dim=32, block_size=32, seq_len=512, device="cpu")


def _row(name, seq_len, ms, target=None, density=None, selection=None, heads=16):
    shape = {"heads": heads, "kv_heads": 2, "head_dim": 128, "block_size": 128, "seq_len": seq_len}
    row = {
        "name": name,
        **shape,
        "target_density": target,
        "density": density or target or 1.0,
        "forward_ms": ms / 4,
        "backward_ms": 3 * ms / 4,
    }
    return row | ({} if selection is None else {"selection_ms": selection})


ROWS = [
    _row("cudnn", 1024, 12),
    _row("flash-attn-4", 1024, 10),
    _row("ours, dense", 1024, 10.5),
    _row("triton", 1024, 6, 0.1, selection=2),
    _row("triton", 1024, 12, 0.3, selection=2),
    _row("cudnn", 4096, 120),
    _row("flash-attn-4", 4096, 100),
    _row("ours, dense", 4096, 101),
    _row("triton", 4096, 20, 0.1, selection=5),
    _row("triton", 4096, 40, 0.3, selection=5),
]


def test_first_reaching():
    points = [(3.0, 30.0), (1.0, 10.0), (2.0, 20.0)]
    assert break_even.first_reaching(points, 25.0) == ("at", 2.5)
    assert break_even.first_reaching(points, 20.0) == ("at", 2.0)
    assert break_even.first_reaching(points, 30.5) == ("above", 3.0)
    assert break_even.first_reaching(points, 10.0) == ("below", 1.0)
    assert break_even.first_reaching([(1.0, 1.0), (2.0, 9.0), (3.0, 2.0), (4.0, 9.0)], 5.0) == (
        "at",
        1.5,
    )
    with pytest.raises(ValueError, match="one point"):
        break_even.first_reaching([], 1.0)


def test_break_even_counts_selection_and_interpolates():
    answers = break_even.break_even(ROWS)
    about = {"backend": "triton", "heads": "16:2/128", "against": "flash-attn-4"}
    assert answers == [
        # 8 ms at 0.1, 14 at 0.3, dense 10
        about | {"sought": "density", "seq_len": 1024, "is": "at", "density": 0.1667},
        about | {"sought": "density", "seq_len": 4096, "is": "above", "density": 0.3},
        about | {"sought": "seq_len", "density": 0.1, "is": "below", "seq_len": 1024},
        # 1.4 of dense at 2^10 tokens, 0.45 at 2^12: 1 at 2^(10 + 2 * 0.4 / 0.95)
        about
        | {
            "sought": "seq_len",
            "density": 0.3,
            "is": "at",
            "seq_len": round(2 ** (10 + 0.8 / 0.95)),
        },
    ]
    assert break_even.in_words(answers[0]).endswith(
        "at 1,024 tokens sparse pays up to a density: 16.7%"
    )
    assert break_even.in_words(answers[1]).endswith(
        "at 4,096 tokens sparse pays up to a density: above 30.0%"
    )
    assert break_even.in_words(answers[2]).endswith(
        "sparse pays down to a length: below 1,024 tokens"
    )


def test_break_even_against_cudnn_and_alone():
    without = [row for row in ROWS if row["name"] != "flash-attn-4"]
    answers = break_even.break_even(without)
    assert {a["against"] for a in answers} == {"cudnn"} and answers[0]["density"] == round(
        0.1 + 0.2 * 4 / 6, 4
    )
    part = [row for row in ROWS if (row["name"], row["seq_len"]) != ("flash-attn-4", 4096)]
    assert (
        break_even.break_even(part) == answers
    )  # one peer for all lengths, so that lengths compare
    assert break_even.break_even([row for row in without if row["name"] != "cudnn"]) == []
    slow = [
        _row("cudnn", 1024, 1.0, heads=32),
        _row("flex", 1024, 2.0, 0.05, selection=0.1, heads=32),
    ]
    answers = break_even.break_even(slow)
    assert [(a["is"], a["heads"]) for a in answers] == [
        ("below", "32:2/128"),
        ("above", "32:2/128"),
    ]


@pytest.mark.parametrize("density", [pytest.param(0.3, marks=pytest.mark.slow), 0.6])
def test_random_index_has_the_density(density):
    shape = SHAPE._replace(seq_len=2048)
    pattern, index = random_index(shape, density, 0.03, 6)
    rows = Causal().rows(2048)
    seen = pattern.index(index, rows, 1, 4, 32).dense(Causal())[0]
    assert seen[:, :, :6].equal(Causal().dense(2048).expand(4, -1, -1)[:, :, :6])  # sinks
    assert all(seen[:, i, i - 32 : i + 1].all() for i in range(32, 2048))  # local diagonals
    shares = seen.sum((1, 2)) / (2048 * 2049 / 2)
    assert (shares > density - 0.02).all() and (
        shares < density + 0.04
    ).all()  # a diagonal is up to 3 %
    assert len({tuple(row) for row in index[0][0].tolist()}) == 4  # heads differ
    call = functools.partial(ours, "eager", ready_index(pattern, index), rows, 32)
    assert timing.visited_share(call, draw(shape)[:3]) == pytest.approx(shares.mean().item())
    assert all(error < 5e-3 for error in errors(call, shape, seen).values())


def test_two_ready_indices_stay_apart():
    pattern, index = random_index(SHAPE, 0.3, 0.08, 6)
    other = [~index[0], *index[1:]]
    q, k, _, _ = draw(SHAPE)
    patterns = [ready_index(pattern, tensors) for tensors in (index, other)]
    first, second = (p.select(q, k, Causal(), block_size=32) for p in patterns)
    assert first.slashes.equal(index[0]) and second.slashes.equal(other[0])


def test_error_check_passes_what_is_right():
    found = check(cases_to_check(SHAPE, ["eager"], []), SHAPE)
    assert list(found) == ["causal", "documents"]
    for results in found.values():
        assert list(results) == ["yardstick", "eager"] and set(results["eager"]) == {
            "out",
            "dq",
            "dk",
            "dv",
        }
        assert all(0 < error < 5e-3 for error in results["eager"].values())


@pytest.mark.parametrize("tensor", ["out", "dk"])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_error_check_stops_what_is_wrong(mask, tensor):
    def spoiled(call, q, k, v):
        if tensor == "out":
            return call(q, k, v) * 1.01
        return call(
            q, k * 1.01 - (k * 0.01).detach(), v
        )  # the right output, the gradient of k off by 1 %

    cases = [
        (
            kind,
            name,
            functools.partial(spoiled, call) if (kind, name) == (mask, "eager") else call,
            seen,
        )
        for kind, name, call, seen in cases_to_check(SHAPE, ["eager"], [])
    ]
    with pytest.raises(SystemExit, match=f"eager is wrong at 512 tokens, {mask} mask.*'{tensor}'"):
        check(iter(cases), SHAPE)


def test_row_has_ratios_and_rates():
    shape = SHAPE._replace(heads=16, head_dim=128, seq_len=131072)
    dense = {"cudnn": {"forward_ms": 120.0, "backward_ms": 330.0}}
    row = bench_attention.row(
        "triton", shape, 0.05, 0.0505, {"forward_ms": 9.0, "backward_ms": 24.0}, dense
    )
    assert row["ratio_to_cudnn"] == round(33 / 450, 4) and row["ratio_to_flash_attn_4"] is None
    flops = 0.0505 * 14 * 128 * 16 * 131072 * 131073 / 2
    assert row["visited_tflops"] == round(flops / 33e-3 / 1e12, 1)
    assert row["roofline_ms"] == round(flops / 790e12 * 1e3, 3)
    json.dumps(row)


def test_dense_attention_alone(monkeypatch):
    """Each of our backends beside torch's, and no sparse row."""
    words = ["--densities", "--backends", "triton", "--seq-lens", "512", "--head-sets", "4:2"]
    words += ["--peers", "cudnn", "ours, cudnn", "ours, triton"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cudnn", "triton"):
        monkeypatch.setattr(backends.BACKENDS[name], "refusal", lambda *case: None)
    args = bench_attention.parse(words)
    assert bench_attention.backends_used(args) == ["triton", "cudnn"]

    asked = []
    monkeypatch.setattr(attention_cases, "attend", lambda *_, backend, **__: asked.append(backend))

    def measured(name, call, tensors, *_):
        if name != "cudnn":
            call(*tensors[:3])
        return {"forward_ms": 1.0, "backward_ms": 3.0 if name == "cudnn" else 3.5}

    monkeypatch.setattr(bench_attention, "measure", measured)
    shape = SHAPE._replace(head_dim=128)
    rows = list(bench_attention.measure_length(shape, args))
    assert [row["name"] for row in rows] == ["cudnn", "ours, cudnn", "ours, triton"]
    assert [row["ratio_to_cudnn"] for row in rows] == [1.0, 1.125, 1.125]
    assert asked == ["cudnn", "triton"]
    assert break_even.break_even(rows) == []


def test_kernels_by_total_time():
    names = ("key", "device_type", "is_user_annotation", "self_device_time_total", "count")
    events = [
        SimpleNamespace(**dict(zip(names, values)))
        for values in (
            ("host", DeviceType.CPU, False, 9e6, 1),
            ("range", DeviceType.CUDA, True, 9e6, 1),
            ("small", DeviceType.CUDA, False, 500.0, 7),
            ("large", DeviceType.CUDA, False, 2000.0, 2),
            ("least", DeviceType.CUDA, False, 1.0, 1),
        )
    ]
    assert timing.by_total_time(events, 2) == [
        {"kernel": "large", "launches": 2, "ms": 2.0},
        {"kernel": "small", "launches": 7, "ms": 0.5},
    ]


def test_head_sets_and_shares():
    assert options.head_set("32:8") == (32, 8)
    for wrong in ("32", "8:32", "16:0", "a:b", "10:4", "16:2:1"):
        with pytest.raises(Exception, match="write query heads:KV heads"):
            options.head_set(wrong)
    for wrong in ("0", "1.5", "-1", "x"):
        with pytest.raises(Exception, match="share above 0"):
            options.share(wrong)
    args = SimpleNamespace(
        head_sets=[(16, 2), (4, 4), (16, 2)], seq_lens=[1024, 512], head_dim=64, block_size=128
    )
    assert [shape[:5] for shape in bench_attention.shapes(args)] == [
        (16, 2, 64, 128, 1024),
        (16, 2, 64, 128, 512),
        (4, 4, 64, 128, 1024),
        (4, 4, 64, 128, 512),
    ]


def _run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"scripts.benchmarks.{program}", *arguments],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_one_line_and_status_2():
    result = _run("attention")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "CUDA GPU" in result.stderr


def _result(path, rows, gpu="NVIDIA H200"):
    path.write_text(json.dumps({"gpu": gpu, "rows": rows}))
    return str(path)


def test_rows_of_several_files(tmp_path):
    first = _result(tmp_path / "a.json", ROWS)
    anew = [_row("triton", seq_len, 7, 0.1, selection=2) for seq_len in (1024, 2048)]
    again = _result(tmp_path / "b.json", anew)
    rows = break_even.read_rows([first, again])
    assert len(rows) == len(ROWS) + 1
    assert [
        r["forward_ms"] * 4 for r in rows if (r["seq_len"], r["target_density"]) == (1024, 0.1)
    ] == [7]
    with pytest.raises(SystemExit, match="different GPUs"):
        break_even.read_rows([first, _result(tmp_path / "c.json", ROWS, gpu="other")])
    with pytest.raises(SystemExit, match="without target_density"):
        break_even.read_rows([_result(tmp_path / "d.json", [{"name": "cudnn", "seq_len": 1024}])])
    printed = _run("break_even", first)
    assert printed.returncode == 0 and printed.stdout.count("sparse pays") == 4


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "pictures" / "attention.png"
    arguments = [_result(tmp_path / "a.json", ROWS), "--out", str(out), "--density", "0.1"]
    result = _run("plot_attention", *arguments)
    assert result.returncode == 0, result.stderr
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 5_000 < out.stat().st_size < 150_000
    wrong = _run("plot_attention", *arguments[:-1], "0.2")
    assert (
        wrong.returncode == 1
        and "measured: [0.1, 0.3]" in wrong.stderr
        and wrong.stderr.count("\n") == 1
    )


def test_plotted_lines():
    assert plot_attention_benchmark.longest_scan(ROWS) == 4096
    triton = [row for row in ROWS if row["name"] == "triton" and row["seq_len"] == 1024]
    assert plot_attention_benchmark.lines(triton[::-1], "density") == {
        "triton": [(0.1, 6.0), (0.3, 12.0)]
    }


def test_plot_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = [_result(tmp_path / "a.json", ROWS), "--out", str(tmp_path / "x.png")]
    with pytest.raises(SystemExit, match=r'needs matplotlib: pip install -e "\.\[eval\]"'):
        plot_attention_benchmark.main(words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_small_run(tmp_path):
    out = tmp_path / "result.json"
    words = "--seq-lens 8192 --densities 0.2 0.5 --head-sets 4:2 --repeats 2 --backends triton --peers cudnn"
    result = _run("attention", *words.split(), "--profile", "--out", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["rows"]] == ["cudnn", "triton", "triton"]
    for row in written["rows"][1:]:
        assert (
            abs(row["density"] - row["target_density"]) < 0.05
            and 0 < row["forward_ms"] + row["backward_ms"]
        )
        assert 0 < row["alone_ms"] and 0 < row["selection_ms"] and 0 < row["ratio_to_cudnn"]
        # The kernels of one call fit into the time that one call takes.
        assert 0 < sum(kernel["ms"] for kernel in row["kernels"]) < 2 * row["alone_ms"]
    assert {answer["sought"] for answer in written["break_even"]} == {"density", "seq_len"}
