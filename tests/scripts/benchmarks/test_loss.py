"""The loss benchmark runs at toy size on any device; its errors are those of what it compares."""

import json

from scripts.benchmarks import loss as bench_loss

TOY = "--tokens 130 --hidden 16 --vocab 101 --chunk-tokens 32 --repeats 1".split()


def test_every_row_is_measured_or_says_why_not(tmp_path):
    out = tmp_path / "loss.json"
    assert bench_loss.main([*TOY, "--out", str(out)]) == 0
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(bench_loss.losses(32))
    assert all("error" in row or row["ms"] > 0 for row in rows.values())
    for name in ("ours", "torch, full logits"):
        assert rows[name]["gradient_bytes"] == 2 * 16 * (130 + 101)
        flops = 6 * 130 * 16 * 101
        assert abs(rows[name]["tflops"] - flops / rows[name]["ms"] / 1e9) <= 0.05
    # Full logits are rounded to bf16, ours are not.
    for name, error in rows["ours"]["errors"].items():
        assert 0 < error < 0.9 * rows["torch, full logits"]["errors"][name] < 0.01


def test_wrong_gradients_are_seen():
    inputs = bench_loss.draw(40, 8, 11, "cpu")
    right = bench_loss.errors(bench_loss.full_logits, inputs)
    wrong = bench_loss.errors(lambda x, *rest: bench_loss.full_logits(x * 1.1, *rest), inputs)
    assert all(wrong[name] > 5 * right[name] for name in right)
