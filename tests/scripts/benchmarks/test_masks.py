"""The benchmark of masks and patterns on the CPU at tiny sizes: what its rows count, and what it refuses."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import masks as benchmark
from scripts.benchmarks import masks_cases as cases
from scripts.benchmarks import patterns_cases
from scripts.benchmarks.attention_cases import FLASH4, Shape, draw
from scripts.benchmarks.context_parallel import run
from scripts.benchmarks.context_parallel_cases import realistic
from scripts.benchmarks.context_parallel_timing import Bench
from tests.distributed import run_processes
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.patterns import MoBA, XAttention
from titan_sparse.estimate.synthetic import ragged_lengths

eager = BACKENDS["eager"]

ROOT = Path(__file__).parents[3]

SMALL = "--device cpu --heads 2:1 --head-dim 32 --repeats 1 --warm-ups 0 --packs 2"
ALONE = (
    f"{SMALL} --seq-len 2048 --window 512 --chunk-size 256 --independent-recalls 0.2 0.9 "
    "--joint-recalls 0.9 "
    "--thresholds 0.5 0.95 --top-ks 2 6 --recall-rows 2048 --at-recalls 0.8"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Result and printed text of a run on one rank."""
    out, printed = tmp_path_factory.mktemp("alone") / "result.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert benchmark.main(f"kernels patterns {ALONE} --out {out}".split()) == 0
    return json.loads(out.read_text()), printed.getvalue()


def _rows(result, **wanted):
    return [row for row in result["rows"] if wanted.items() <= row.items()]


# Kernels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask, masks",
    [
        ("documents", [Documents(ragged_lengths(2048, seed)) for seed in range(2)]),
        ("window", [SlidingWindow(512)]),
    ],
)
def test_kernels_count_visible_pairs(alone, mask, masks):
    yardstick, peer, own = _rows(alone[0], case="kernels", mask=mask)
    assert (
        yardstick["errors"].keys() == own["errors"].keys() and yardstick["checked_seq_len"] == 2048
    )
    assert (peer["name"], own["name"], own["auto"]) == (FLASH4, "eager", True)
    assert own["tables_ms"] > 0 and "total_ms" not in peer and "total_of_flash_attn_4" not in own
    assert peer["error"].endswith("not measured: no CUDA GPU") or torch.cuda.is_available()
    pairs = sum(mask.dense(2048).sum().item() for mask in masks) / len(masks)
    assert own["pairs"] == pytest.approx(pairs, rel=1e-4) and 0 < max(own["errors"].values()) < 5e-3
    for step, flops in (("forward", 4), ("backward", 10), ("total", 14)):
        assert own[f"{step}_tflops"] == pytest.approx(
            flops * pairs * 32 * 2 / own[f"{step}_ms"] / 1e9, rel=1e-3
        )


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    """The window is off by one key, or the gradient of k by 2 %; torch's kernel is the yardstick."""
    shape = Shape(2, 1, 32, 128, 512, "cpu")
    wrong = {
        "window": lambda call, *qkv: cases.ours(
            "eager", cases.Dense(), SlidingWindow(127).rows(512), 128, *qkv
        ),
        "gradient": lambda call, q, k, v: call(q, k * 1.02 - (k * 0.02).detach(), v),
    }
    right = cases._call
    for spoil in wrong.values():
        monkeypatch.setattr(
            cases, "_call", lambda *x, spoil=spoil: functools.partial(spoil, right(*x))
        )
        bounds = dict.fromkeys(("out", "dq", "dk", "dv"), 5e-3)
        case = cases.KernelCase(shape, shape, functools.partial(cases.window, 128), packs=1)
        with pytest.raises(RuntimeError, match="wrong at 512 tokens"):
            cases._kernel(None, case, bounds, "eager")


def test_peers_are_called_as_they_want_to_be(monkeypatch):
    """FlashAttention-4's interface in plain torch: [B, S, H, D], packed [S, H, D].

    A window does not count its query.
    """

    def dense(q, k, v, seen):
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(-3, -2), None

    def flash_attn_func(q, k, v, causal, window_size):
        left, right = window_size
        key = torch.arange(q.shape[1])
        query = key[:, None]
        seen = (key >= query - left) & (key <= query + right)
        return dense(q, k, v, seen)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
    ):
        assert causal
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q.equal(cu_seqlens_k)
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        outs = []
        parts = zip(lengths, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        for length, *qkv in parts:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            out, _ = dense(*qkv, seen)
            outs.append(out)
        return torch.cat(outs)

    cute = ModuleType("flash_attn.cute")
    cute.flash_attn_func = flash_attn_func
    cute.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    shape = Shape(4, 2, 32, 128, 512, "cpu")
    for make in (cases.documents, functools.partial(cases.window, 100)):
        masked, qkv = make(shape, 0), draw(shape)[:3]
        own = cases._call("eager", masked, shape)(*qkv)
        assert (masked.peer(*qkv) - own).norm() < 5e-3 * own.norm()


def test_what_is_too_large():
    for error, bound, large in (
        (4e-3, 2e-3, False),
        (4e-3, 1.9e-3, True),
        (6e-3, 6e-3, True),
        (torch.nan, 1, True),
    ):
        assert bool(cases.too_large({"out": error}, {"out": bound})) is large


def test_ratios():
    row, peer = (
        {"forward_ms": f, "backward_ms": b, "total_ms": f + b} for f, b in ((2.0, 8.0), (1.0, 7.0))
    )
    assert cases.faster("of_x", row, peer) == {
        "forward_of_x": 0.5,
        "backward_of_x": 0.875,
        "total_of_x": 0.8,
    }
    assert (
        cases.faster("of_peer", row, {"error": "x"})
        == cases.faster("of_peer", {"error": "x"}, peer)
        == {}
    )
    assert cases.mean([{"a": 1.0, "b": [1, 2]}, {"a": 2.0, "b": [3, 6]}]) == {"a": 1.5, "b": [2, 4]}


# Documents over two ranks -------------------------------------------------------------------------------------------


def _on_two_ranks(out):
    args = benchmark.parse(
        f"varlen {SMALL} --seq-len 1024 --block-size 64 --stages 1 3 --out {out}".split()
    )
    with contextlib.redirect_stdout(io.StringIO()):
        run(Bench(args, torch.device("cpu"), dist.get_rank(), 2, 1), {"rows": []}, benchmark.CASES)


def _needed(layout):
    """Blocks of 64 that a rank sees and does not hold, both ranks, mean of the two packs; from the dense mask."""
    table, counts = block_ids(layout, 2, 1024, 64), []
    for seed in range(2):
        tiles = (
            Documents(ragged_lengths(1024, seed)).dense(1024)[0].view(16, 64, 16, 64).any(3).any(1)
        )
        counts += [tiles[own].any(0)[other].sum().item() for own, other in (table, table.flip(0))]
    return sum(counts) / 2


def test_documents_over_two_ranks(tmp_path):
    run_processes(2, _on_two_ranks, tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    torch_rows, ours = (
        _rows(result, case="varlen", name=name) for name in ("torch context_parallel", "ours")
    )
    assert (
        all("knows no documents" in row["mask"] and "error" in row for row in torch_rows)
        and len(torch_rows) == 2
    )
    assert [(row["layout"], row["schedule"], row["overlap_stages"]) for row in ours] == [
        *[
            (layout, "group_cast", stages)
            for layout in ("balanced", "contiguous")
            for stages in (1, 3)
        ],
        ("balanced", "ring", None),
        ("zigzag", "ring", None),
        ("striped", "all_gather", None),
    ]
    pairs = sum(n * (n + 1) / 2 for seed in range(2) for n in ragged_lengths(1024, seed)) / 2
    block = 2 * 64 * 32 * 2 / 1e6  # K and V of one head, bf16
    for row in ours:
        assert row["pairs"] == pytest.approx(pairs, rel=1e-4)
        assert row["worker_imbalance"] >= 1 and row["worker_imbalance_time"] >= 1
        assert row["total_tflops"] == pytest.approx(
            14 * pairs * 32 * 2 / 2 / row["total_ms"] / 1e9, rel=1e-3
        )
        needed = row["megabytes_needed_forward"]
        assert row["megabytes_needed_backward"] == pytest.approx(
            3 * needed, rel=1e-3
        )  # and gradients in fp32
        if row["layout"] != "balanced":
            assert needed == pytest.approx(block * _needed(row["layout"]), rel=1e-3)
        sent = (row["megabytes_sent_forward"], row["megabytes_sent_backward"])
        if row["schedule"] == "group_cast":
            assert sent == (needed, row["megabytes_needed_backward"]) and row["sent_of_needed"] == 1
        else:
            assert 1 < row["sent_of_needed"] == pytest.approx(sum(sent) / (4 * needed), rel=1e-3)
    assert sent == pytest.approx((16 * block, 48 * block), rel=1e-3)  # all_gather: everything


# Patterns -----------------------------------------------------------------------------------------------------------


def test_patterns_keep_what_the_rows_say(alone):
    """Density and recall of xattention from tables of all pairs."""
    bench = Bench(benchmark.parse(f"patterns {ALONE}".split()), torch.device("cpu"), 0, 1, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    q, k = realistic(bench, Shape(2, 1, 32, 128, 2048, "cpu"))
    dist.destroy_process_group()
    causal = Causal().dense(2048)
    # [1, Hq, S, S]
    scores = q.float() @ k.float().mT * 32**-0.5
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    rows = _rows(alone[0], case="patterns", knob="threshold")
    for row, threshold in zip(rows, (0.5, 0.95), strict=True):
        chosen = XAttention(threshold=threshold).select(q, k, Causal()).dense(Causal())
        # [Hq]
        kept = (weights * chosen).sum(-1).mean(-1)[0]
        heads = len(kept)
        density = chosen.sum() / (heads * causal.sum())
        assert row["value"] == threshold
        assert row["density"] == pytest.approx(density.item(), rel=1e-3)
        assert row["recall"] == pytest.approx(kept.mean().item(), abs=1e-3)
        assert row["recall_of_worst_head"] == pytest.approx(kept.min().item(), abs=1e-3)


def test_patterns_rows_and_table(alone):
    result, printed = alone
    measured = [row for row in _rows(result, case="patterns") if "knob" in row]
    assert [(row["name"], row["value"]) for row in measured] == [
        ("vertical_slash, joint", 0.9),
        ("vertical_slash, independent", 0.2),
        ("vertical_slash, independent", 0.9),
        ("xattention", 0.5),
        ("xattention", 0.95),
        ("moba", 2),
        ("moba", 6),
    ]
    for row in measured:
        assert (
            row["total_ms"]
            < row["step_ms"]
            == pytest.approx(row["selection_ms"] + row["total_ms"], rel=1e-4)
        )
        assert 0 < row["recall_of_worst_head"] <= row["recall"] <= 1 and 0 < row["density"] <= 1
    few, many = _rows(result, name="moba", knob="top_k")
    assert few["density"] < many["density"] and few["recall"] < many["recall"]
    joint = _rows(result, name="vertical_slash, joint", knob="recall")[0]
    assert (
        joint["density"]
        < _rows(result, name="vertical_slash, independent", value=0.9)[0]["density"]
    )
    read_off = _rows(result, at_recall=0.8)
    assert len(read_off) == 5 and printed.endswith(patterns_cases.table(read_off) + "\n")
    [dense] = _rows(result, case="patterns", name="dense")
    assert dense["step_ms"] == dense["total_ms"] > 0
    for row in measured:
        ideal = dense["total_ms"] * row["density"]
        assert row["dense_x_density_ms"] == pytest.approx(ideal, rel=1e-2)
        assert row["of_dense_x_density"] == pytest.approx(row["total_ms"] / ideal, rel=1e-2)
        # Plain PyTorch does not gather queries, so that there is no other way to compare with.
        assert "by_blocks_total_ms" not in row


def test_moba_is_timed_both_ways(monkeypatch):
    """Where the backend gathers queries: with them gathered, and by blocks."""
    seen = []

    def timed(bench, steps):
        seen.append(eager.GATHERS_QUERIES)
        return {"total_ms": float(len(seen))}

    monkeypatch.setattr(eager, "GATHERS_QUERIES", True)
    monkeypatch.setattr(patterns_cases, "timed", timed)
    bench = Bench(benchmark.parse(f"patterns {ALONE}".split()), torch.device("cpu"), 0, 1, 1)
    shape = Shape(2, 1, 32, 128, 512, "cpu")
    for pattern, wanted in ((MoBA(256, 2), [True, True, False]), (XAttention(), [True, True])):
        seen.clear()
        row = patterns_cases._pattern(bench, shape, pattern, draw(shape))
        # The selection, attention, and attention by blocks.
        assert seen == wanted
        assert row.get("by_blocks_total_ms") == (3.0 if len(wanted) == 3 else None)
    assert eager.GATHERS_QUERIES


def test_chunks_of_several_sizes():
    args = benchmark.parse("patterns --chunk-size 512 4096 --top-ks 12".split())
    names = [name for name, *_ in patterns_cases.grid(args) if name.startswith("moba")]
    assert names == ["moba, chunks of 512", "moba, chunks of 4096"]
    failed = {"error": "out of memory"}
    assert patterns_cases.of_dense(failed, {"total_ms": 1.0}) == {}
    assert patterns_cases.of_dense({"density": 0.5, "total_ms": 2.0}, failed) == {}


def test_read_off_at_equal_recall():
    def numbers(ms):
        return dict.fromkeys(patterns_cases.READ_OFF, ms)

    def row(recall, ms, **more):
        return {"name": "a", "recall": recall, **numbers(ms), **more}

    found = [
        row(0.95, 8.0),
        row(0.8, 5.0),
        row(0.9, 4.0),
        {"name": "a", "error": "x"},
        row(0.5, 1.0, name="b"),
        {"name": "c", "error": "x"},
    ]
    a, b, c = patterns_cases.at_recall(found, 0.92)
    assert a == {"name": "a", "at_recall": 0.92, **numbers(pytest.approx(5.6))}
    assert b["error"] == "0.500 to 0.500 was measured" and c["error"] == "nothing was measured"
    assert [next(patterns_cases.at_recall(found, x))["step_ms"] for x in (0.8, 0.95)] == [5, 8]
    assert "0.500 to 0.500" in patterns_cases.table([a, b, c]).splitlines()[2]


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, world, words",
    [
        ("varlen", 1, "--nproc-per-node 2"),
        ("varlen kernels", 2, "the case kernels is for one GPU"),
        ("varlen --seq-len 1024", 8, "a multiple of 2048"),
        ("patterns --seq-len 1024", 1, "2048 tokens or more"),
        ("kernels --seq-len 2048", 1, "--window 4096: write a quarter"),
        ("patterns --chunk-size 4096 64", 1, "--chunk-size 64: write --block-size (128)"),
        ("kernels --repeats 0", 1, "1 or more"),
    ],
)
def test_refusals(text, world, words):
    assert words in benchmark.refusal(benchmark.parse(text.split()), world)


def test_what_can_run():
    for text, world in (("kernels patterns", 1), ("varlen", 8), (f"kernels patterns {ALONE}", 1)):
        assert benchmark.refusal(benchmark.parse(text.split()), world) is None
    assert benchmark.parse(["kernels"]).backends == ["flex", "triton"]
    bench = SimpleNamespace(
        args=benchmark.parse(["kernels", "--heads", "4:2", "4:2"]), device=torch.device("cuda")
    )
    assert list(cases.shapes(bench, 32768, [])) == [Shape(4, 2, 128, 128, 32768, "cuda")]
    with pytest.raises(SystemExit):
        benchmark.parse(["patterns", "--top-ks", "0"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_small_run_on_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    options = (
        "kernels patterns --heads 4:2 --seq-len 8192 --window 1024 --repeats 2 --packs 2 --chunk-size 512 "
        "--independent-recalls 0.9 --joint-recalls 0.9 --thresholds 0.9 --top-ks 4"
    )
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks.masks",
        *options.split(),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    failed = [row for row in result["rows"] if "error" in row and "at_recall" not in row]
    assert all(row["name"] == FLASH4 and "not measured" in row["error"] for row in failed), failed
    assert {row["name"] for row in _rows(result, case="kernels")} >= {"flex", "triton"}
    [moba] = _rows(result, name="moba", knob="top_k")
    assert moba["by_blocks_total_ms"] > 0 and moba["of_dense_x_density"] > 0
