"""The benchmark of transformers' Trainer runs at toy size; its arms differ in attention alone."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from scripts.benchmarks import huggingface

TOY = ["--shapes", "toy", "--tokens", "512", "--steps", "2", "--density", "0.5"]


def test_every_arm_is_measured_or_says_why_not(tmp_path: Path):
    out = tmp_path / "huggingface.json"
    assert huggingface.main([*TOY, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["versions"]["transformers"]
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == [arm.name for arm in huggingface.arms(0.5, 512)]
    if not importlib.util.find_spec("flash_attn"):
        assert rows.pop("flash_attention_2")["status"] == "not installed"
    for row in rows.values():
        assert row["status"] == "ran"
        assert row["step_ms_least"] <= row["step_ms"] <= row["step_ms_most"]
        # Attention over random weights is an average: the loss is that of chance in all arms.
        assert row["loss"] == pytest.approx(rows["sdpa"]["loss"], rel=2e-3)
    for name in ("ours, dense", "ours, dense, kept"):
        assert rows[name]["density"] == 1.0
        assert rows[name]["recall"] == pytest.approx(1.0, abs=1e-3)
        assert rows[name]["recorded_layers"] == 2
    for name in ("ours, vertical_slash", "ours, vertical_slash, kept"):
        assert 0.1 < rows[name]["density"] < 0.9
        assert rows[name]["density"] <= rows[name]["recall"] + 0.1


def test_unknown_arms_are_refused():
    with pytest.raises(SystemExit):
        huggingface.parse([*TOY, "--arms", "sdpaa"])
    args = huggingface.parse([*TOY, "--arms", "sdpa"])
    left_out = huggingface.row("toy", 512, huggingface.arms(0.5, 512)[2], args)
    assert left_out["status"] == "left out"


def test_the_head_in_chunks_is_transformers_own_loss():
    config = huggingface.Qwen3Config(**huggingface.SHAPES["toy"], max_position_embeddings=64)
    torch.manual_seed(0)
    model = huggingface.ModelWithChunkedHead._from_config(config, attn_implementation="sdpa")
    text = torch.randint(101, (2, 64))
    whole = super(huggingface.ModelWithChunkedHead, model).forward(text, labels=text)
    torch.testing.assert_close(model(text, text).loss, whole.loss)
