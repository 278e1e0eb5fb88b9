"""The benchmarks of trainers, of their losses, and of the length from which sparse pays."""

import argparse
import json

import pytest
import torch
import transformers

from scripts.benchmarks import huggingface, sparse_pays, trainers
from scripts.benchmarks import loss as bench_loss
from scripts.docs import numbers
from tests.distributed import run_program
from tests.models.transformers_models import tiny_model
from titan_sparse.commands import choose


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
    folder = tmp_path / "toy"
    trainer, _ = trainers.torchtitan_trainer("toy", folder, tmp_path, texts, "cpu", False)
    trainer.checkpointer.load(step=-1)
    inputs, labels = next(trainer.batch_generator(trainer.dataloader))
    assert torch.equal(labels, torch.tensor([[*texts[0][1:], -100]]))
    tokens, _, others = trainer.post_dataloading_process(inputs, labels)
    [model] = trainer.model_parts
    model._skip_lm_head = False
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(tokens, **others)
        torch.testing.assert_close(found, reference(tokens).logits, rtol=0, atol=1e-4)


def test_documents_of_many_steps_are_whole(tmp_path):
    """Python's own files hold less than 5 million letters."""
    trainers.write_texts(tmp_path, 2**20, 7)
    assert [len(text) for text in trainers.read_texts(tmp_path)] == [2**20] * 7


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


def test_every_loss_is_measured_or_says_why_not(tmp_path):
    out = tmp_path / "loss.json"
    toy = "--tokens 130 --hidden 16 --vocab 101 --chunk-tokens 32 --repeats 1"
    assert bench_loss.main([*toy.split(), "--out", str(out)]) == 0
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


def test_rows_become_the_table_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "RECALLS", (0.5, 0.9))
    (tmp_path / "text.txt").write_text("some words, and some more of them. " * 20)
    tiny_model("LlamaConfig", vocab_size=258, num_hidden_layers=1).save_pretrained("model")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    words = f"""
        --model model --lengths 128,256 --original-length 128 --batches 2
        --out benchmarks/results/sparse_pays_h100.json --data.source {tmp_path}/text.txt
        --data.sequences fixed --training.device cpu --training.dtype float32 --attention.block_size 16
        --attention.vertical_slash.local_slashes 1 --data.tokenizer bytes
    """
    assert sparse_pays.main(words.split()) == 0
    rows = json.loads((tmp_path / "benchmarks/results/sparse_pays_h100.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [128] * 3 + [256] * 3
    assert rows[0]["above_dense"] == 0 and rows[1]["density"] < rows[2]["density"] < 1
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    numbers.result.cache_clear()
    table = numbers.sparse_pays()
    numbers.result.cache_clear()
    assert table[0] == "| GPU | tokens | dense, s per step | recall 0.5 | recall 0.9 |"
    speeds = [rows[0]["step_seconds"] / row["step_seconds"] for row in rows[1:3]]
    assert table[2].endswith(f"| {speeds[0]:.2f} | {speeds[1]:.2f} |")
    assert table[3].startswith("| CPU | 256 |")
