"""The loss benchmark runs at toy size on any device; its errors are those of what it compares."""

import json
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import loss as bench_loss

ROOT = Path(__file__).parents[3]

TOY = [
    "--tokens",
    "130",
    "--hidden",
    "16",
    "--vocab",
    "101",
    "--chunk-tokens",
    "32",
    "--repeats",
    "1",
]


def test_every_row_is_measured_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "loss.json"
    bench_loss.main([*TOY, "--out", str(out)])
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert (
        list(rows) == list(bench_loss.losses(32))
        and len(capsys.readouterr().out.splitlines()) == len(rows) + 1
    )
    for name in ("ours", "torch, full logits"):
        assert rows[name]["status"] == "ran" and rows[name]["ms"] > 0
        assert rows[name]["gradient_bytes"] == 2 * 16 * (130 + 101)
    # Full logits are rounded to bf16, ours are not.
    for name in ("loss", "d_hidden", "d_weight"):
        assert (
            0
            < rows["ours"]["errors"][name]
            < 0.9 * rows["torch, full logits"]["errors"][name]
            < 0.01
        )
    if not torch.cuda.is_available():
        assert {
            row["status"] for row in rows.values() if row["name"].startswith(("liger", "cut"))
        } <= {"not installed", "needs a GPU"}
    by_chunks = [errors["d_weight"] for errors in result["errors_by_chunks"].values()]
    assert len(by_chunks) == 3 and max(by_chunks) < 1.1 * min(by_chunks)


def test_a_peer_that_fails_is_a_row_and_ours_is_fatal() -> None:
    args = bench_loss.parse(TOY)
    inputs = bench_loss.draw(8, 4, 5, args.device)

    def fails(*_):
        raise RuntimeError("no such kernel\nmore")

    assert (
        bench_loss.row("liger", fails, inputs, inputs, args)["status"]
        == "failed: RuntimeError: no such kernel"
    )
    assert (
        bench_loss.row("liger", "not installed", inputs, inputs, args)["status"] == "not installed"
    )
    with pytest.raises(RuntimeError):
        bench_loss.row("ours", fails, inputs, inputs, args)


def test_wrong_gradients_are_seen() -> None:
    inputs = bench_loss.draw(40, 8, 11, "cpu")
    right = bench_loss.errors(bench_loss.full_logits, inputs)
    wrong = bench_loss.errors(
        lambda hidden, *rest: bench_loss.full_logits(hidden * 1.1, *rest), inputs
    )
    assert all(wrong[name] > 5 * right[name] for name in right)


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_loss.parse(["--chunk-tokens", "0"])
    assert "--chunk-tokens is 1 or more" in capsys.readouterr().err
