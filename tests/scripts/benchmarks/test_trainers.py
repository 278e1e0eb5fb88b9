"""The benchmark of whole trainers runs at toy size; all of them train the same model on the same text."""

import argparse
import json

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers

from scripts.benchmarks import trainers


@pytest.mark.slow
def test_trainers_agree_on_the_loss(tmp_path):
    out = tmp_path / "trainers.json"
    # FlexAttention, which torchtitan uses, has no backward on CPUs.
    arms = ["ours, dense", "transformers"]
    words = ["--shapes", "toy", "--tokens", "128", "--steps", "2", "--device", "cpu"]
    assert trainers.main([*words, "--arms", *arms, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    words = ["--shapes", "toy", "--tokens", "64", "--gpus", "2", "--steps", "2", "--device", "cpu"]
    assert trainers.main([*words, "--arms", arms[0], "--out", str(out)]) == 0
    rows += json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == [*arms, arms[0]]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["step_ms"])
        for step in ("first_loss", "last_loss"):
            assert row[step] == pytest.approx(rows[0][step], abs=1e-4)


@pytest.mark.slow
def test_torchtitan_has_the_weights_and_the_data(tmp_path, monkeypatch):
    """Logits of the trainer that the benchmark builds, beside transformers'."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    args = argparse.Namespace(gpus=[1], tokens=[128], device="cpu")
    trainers.write_model("toy", tmp_path / "toy", args)
    trainers.write_texts(tmp_path, 128, 2)
    texts = trainers.read_texts(tmp_path)
    trainer, _ = trainers.torchtitan_trainer(
        "toy", tmp_path / "toy", tmp_path, texts, "cpu", cuda_graphs=False
    )
    trainer.checkpointer.load(step=-1)
    inputs, labels = next(trainer.batch_generator(trainer.dataloader))
    assert torch.equal(labels, torch.tensor([[*texts[0][1:], -100]]))
    tokens, _, others = trainer.post_dataloading_process(inputs, labels)
    [model] = trainer.model_parts
    model._skip_lm_head = False
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "toy", dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens, **others), reference(tokens).logits, rtol=0, atol=1e-4
        )
