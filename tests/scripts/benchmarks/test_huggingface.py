"""The benchmark of transformers' Trainer runs at toy size; its arms differ in attention alone."""

import importlib.util
import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from scripts.benchmarks import huggingface
from tests.distributed import run_program

TOY = ["--shapes", "toy", "--tokens", "512", "--steps", "2", "--density", "0.5"]


def test_every_arm_is_measured_or_says_why_not(tmp_path):
    out = tmp_path / "huggingface.json"
    arms = ["sdpa", "flash_attention_2", "ours, dense", "ours, vertical_slash, kept"]
    assert huggingface.main([*TOY, "--out", str(out), "--arms", *arms]) == 0
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [arm.name for arm in huggingface.arms(0.5, 512, 128)]
    assert {rows.pop(name)["status"] for name in set(rows) - set(arms)} == {"left out"}
    if not importlib.util.find_spec("flash_attn"):
        assert rows.pop("flash_attention_2")["status"] == "not installed"
    for row in rows.values():
        assert row["status"] == "ran"
        assert row["step_ms_least"] <= row["step_ms"] <= row["step_ms_most"]
        # Attention over random weights is an average: the loss is that of chance in all arms.
        assert row["loss"] == pytest.approx(rows["sdpa"]["loss"], rel=2e-3)
    assert rows["ours, dense"]["density"] == 1.0
    assert rows["ours, dense"]["recall"] == pytest.approx(1.0, abs=1e-3)
    sparse = rows["ours, vertical_slash, kept"]
    assert 0.1 < sparse["density"] < 0.9 and sparse["density"] <= sparse["recall"] + 0.1


def test_packed_documents_over_two_processes(tmp_path):
    out = tmp_path / "packed.json"
    words = ["--packed", *TOY, "--block-size", "16", "--out", str(out)]
    run_program(2, huggingface.main, [*words, "--arms", "ours, dense"])
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["sdpa"]["status"] == "left out"
    assert rows["ours, dense"]["status"] == "ran" and rows["ours, dense"]["density"] == 1


def test_unknown_arms_are_refused():
    with pytest.raises(SystemExit):
        huggingface.parse([*TOY, "--arms", "sdpaa"])
