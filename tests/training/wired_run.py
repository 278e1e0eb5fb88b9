"""Runs on one shard of text, of a small model on disk, by nothing but command-line words."""

import json
import os
import random
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.models.transformers_models import save_model
from titan_sparse.config import load_and_check
from titan_sparse.config.reading import as_words
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.training.metrics_output import read_lines
from titan_sparse.training.trainer import Trainer

SEQ_LEN = 64

ALIKE = 1e-5
"""Relative error of a loss or a gradient norm: fp32, summed in another order."""

SETTINGS: dict[str, object] = {
    "data.shuffle": False,
    "training.steps": 6,
    "training.seq_len": SEQ_LEN,
    "training.dtype": "float32",
    "training.device": "cpu",
    "training.loss_chunk_tokens": 48,
    "attention.pattern": "dense",
    "attention.block_size": 16,
    "checkpoint.enable": True,
    "checkpoint.last_save_in_hf": True,
    "metrics.log_every": 1,
    "metrics.recall_every": 0,
    "metrics.tensorboard": False,
}
"""Every run's, unless a test says otherwise."""


def write_shard(folder: Path, seed: int = 0) -> Path:
    """Thirty ragged documents of 3 to 150 letters, prepared as one shard: folder/shards."""
    letters = random.Random(seed)
    folder.mkdir(exist_ok=True)
    texts = []
    for _ in range(30):
        texts.append("".join(letters.choice("abcdefgh \n") for _ in range(letters.randint(3, 150))))
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shards = folder / "shards"
    prepare(Recipe(str(source), shard_rows=100), str(shards))
    return shards


def write_model(folder: Path, family: str) -> Path:
    """Of our decoder: Qwen3 with norms of q and k, Qwen2 with biases, or
    Llama with its own head."""
    save_model(folder / family, family.lower(), head_dim=8, tie_word_embeddings=family != "Llama")
    return folder / family


def run(folder: Path, output: str, settings: dict[str, object]) -> Trainer:
    """Train in folder/output on folder/shards. All processes of the world take part."""
    alone = not dist.is_initialized()
    paths = {
        "data.source": folder / "shards",
        "data.tokenizer": "bytes",
        "training.output_dir": folder / output,
    }
    words = as_words({**paths, **SETTINGS, **settings})
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    config, _ = load_and_check(words, ranks, ranks)
    try:
        trainer = Trainer(config)
        trainer.train()
    finally:
        if alone and dist.is_initialized():
            dist.destroy_process_group()
    return trainer


def lines_of(output: Path) -> list[dict]:
    return read_lines(output / "metrics.jsonl")


def assert_alike(folder: Path, output: str, wanted_output: str, rel: float = ALIKE) -> None:
    """Two runs of the same steps, of dense attention."""
    wanted_lines = lines_of(folder / wanted_output)
    for line, wanted in zip(lines_of(folder / output), wanted_lines, strict=True):
        for field in ("loss", "grad_norm", "density"):
            where = (output, field, line["step"])
            assert line[field] == pytest.approx(wanted[field], rel=rel), where
