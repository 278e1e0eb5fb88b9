"""Small training runs for tests: a tiny model in float64 on generated text files."""

import random
from pathlib import Path

from torch import Tensor

from titan_sparse.config import Config, save
from titan_sparse.models import flavours
from titan_sparse.training.metrics_output import read_lines
from titan_sparse.training.trainer import Trainer

TINY = flavours.DecoderConfig(
    vocab_size=258,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=True,
    norm_eps=1e-6,
    rope=flavours.RopeConfig(10000.0, "none", 1.0, 1024),
    max_positions=1024,
)


def write_texts(folder: Path, documents: int = 12) -> None:
    """Ragged documents of 20 to 400 letters, so that long and short ones are packed together."""
    letters = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = "".join(letters.choice("abcdefgh \n") for _ in range(letters.randint(20, 400)))
        (folder / f"{number:02}.txt").write_text(text)


def tiny_config(folder: Path, output: str, **overrides) -> Config:
    """A float64 run of 5 SGD steps on the texts in `folder`.

    overrides: dotted keys, with __ for the dot.
    """
    flavours.FLAVOURS["tiny"] = TINY
    config = Config()
    settings = {
        "model__flavour": "tiny",
        "data__source": str(folder / "texts"),
        "data__tokenizer": "bytes",
        "training__output_dir": str(folder / output),
        "training__steps": 5,
        "training__seq_len": 300,
        "training__dtype": "float64",
        "training__device": "cpu",
        "training__loss_chunk_tokens": 100,
        "attention__block_size": 16,
        "optimizer__name": "SGD",
        "optimizer__lr": 0.2,
        "optimizer__weight_decay": 0.01,
        "lr_scheduler__warmup_steps": 1,
        "metrics__tensorboard": False,
        "metrics__log_every": 1,
        "metrics__recall_every": 2,
        "attention__vertical_slash__recall": 0.6,
        "attention__vertical_slash__sinks": 2,
        "attention__vertical_slash__max_verticals": 40,
        "attention__vertical_slash__local_slashes": 1,
        "attention__vertical_slash__dense_below": 64,
    } | overrides
    for key, value in settings.items():
        *sections, name = key.split("__")
        section = config
        for section_name in sections:
            section = getattr(section, section_name)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def train(config: Config) -> Trainer:
    """Run it; all processes of the world take part."""
    trainer = Trainer(config)
    trainer.train()
    return trainer


def debug_run(folder: Path, output: str = "run", **overrides) -> Config:
    """Two float32 steps of the flavour debug, which other processes also know. Leaves a
    checkpoint and config.toml."""
    settings = {
        "model__flavour": "debug",
        "training__steps": 2,
        "training__dtype": "float32",
        "checkpoint__enable": True,
    }
    config = tiny_config(folder, output, **settings | overrides)
    train(config)
    save(config, config.training.output_dir)
    return config


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """The whole weights. Collective."""
    return {name: x.full_tensor() for name, x in trainer.model.state_dict().items()}


def metrics_of(config: Config) -> list[dict]:
    return read_lines(Path(config.training.output_dir) / "metrics.jsonl")
