"""The benchmark of whole trainers runs at toy size; all of them train the same model on the same text."""

import argparse
import json

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers

from scripts.benchmarks import trainers
from scripts.benchmarks.provenance import version

HAS_0_3 = (version("torchtitan") or "").startswith("0.3")


@pytest.mark.slow
def test_trainers_agree_on_the_loss(tmp_path):
    out = tmp_path / "trainers.json"
    # FlexAttention, which torchtitan 0.3 uses, has no backward on CPUs.
    arms = ["ours, dense", *([] if HAS_0_3 else ["torchtitan"]), "transformers"]
    words = ["--shapes", "toy", "--tokens", "128", "--steps", "1", "--device", "cpu"]
    assert trainers.main([*words, "--arms", *arms, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == arms
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["step_ms"])
        for step in ("first_loss", "last_loss"):
            assert row[step] == pytest.approx(rows[0][step], abs=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_0_3, reason="torchtitan 0.3 is not installed")
def test_torchtitan_has_the_weights_and_the_data(tmp_path):
    """Logits of the trainer that the benchmark builds, beside transformers'."""
    args = argparse.Namespace(tokens=[128], device="cpu")
    trainers.write_model("toy", tmp_path / "toy", args)
    texts = trainers.write_texts(tmp_path, 128, 2)
    trainer, _ = trainers.torchtitan_0_3("toy", tmp_path / "toy", tmp_path, texts, "cpu")
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
