"""The benchmark of transformers' Trainer runs at toy size; its arms differ in attention alone."""

import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from scripts.benchmarks import huggingface
from tests.distributed import run_program

TOY = ["--shapes", "toy", "--tokens", "512", "--steps", "2", "--density", "0.5"]


def test_arms_differ_in_attention_alone(tmp_path):
    out = tmp_path / "huggingface.json"
    assert huggingface.main([*TOY, "--out", str(out)]) == 0
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["sdpa", "ours, dense", "ours, vertical_slash"]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(512e3 / row["step_ms"])
        # Attention over random weights is an average: the loss is that of chance in all arms.
        assert row["loss"] == pytest.approx(rows["sdpa"]["loss"], rel=2e-3)
    dense, sparse = rows["ours, dense"], rows["ours, vertical_slash"]
    assert dense["density"] == 1.0 and dense["recall"] == pytest.approx(1.0, abs=1e-3)
    assert 0.1 < sparse["density"] < 0.9 and sparse["density"] <= sparse["recall"] + 0.1


@pytest.mark.slow
def test_packed_documents_over_two_processes(tmp_path):
    out = tmp_path / "packed.json"
    words = ["--packed", *TOY, "--block-size", "16", "--out", str(out)]
    run_program(2, huggingface.main, words)
    dense, sparse = json.loads(out.read_text())["rows"]
    # Documents this short are dense with either pattern.
    assert dense["density"] == sparse["density"] == 1
    assert dense["loss"] == pytest.approx(sparse["loss"], rel=1e-5)
