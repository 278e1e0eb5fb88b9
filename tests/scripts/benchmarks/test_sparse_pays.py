"""scripts.benchmarks.sparse_pays: a small model at two lengths, and the table of the docs made of it."""

import json

import torch
import transformers

from scripts.benchmarks import sparse_pays
from scripts.docs import numbers
from titan_sparse.commands import choose


def test_rows_become_the_table_of_the_docs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "RECALLS", (0.5, 0.9))
    (tmp_path / "text.txt").write_text("some words, and some more of them. " * 20)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("model")
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
    assert table[2].endswith(f"| {speeds[0]:.2f} | {speeds[1]:.2f} |") and table[3].startswith(
        "| CPU | 256 |"
    )
