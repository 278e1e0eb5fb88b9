"""The study's runs: sizes, methods, the configuration of each run, and what it costs."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.config import Config, load_and_check
from titan_sparse.config.reading import show
from titan_sparse.estimate.flops import causal_pairs, flops_per_token
from titan_sparse.models.flavours import resolve

PRETRAIN = "pretrain"
"""The run that all methods start from; the others are named by their method."""


@dataclass(frozen=True)
class Size:
    """Of the whole study.

    Lengths are in tokens, batches in sequences of `short` tokens. An extension's step is one
    sequence of `context` tokens. common: keys that all runs share. windows: of validation text, for
    the loss by position. tasks, depths, samples: of scripts.evaluate. reserve_seconds: with less
    time left than that nothing is begun (a compilation, an evaluation). most_characters: of the
    text, from each package; 0: all.
    """

    name: str
    model: dict[str, Any]
    short: int
    context: int
    pretrain_steps: int
    micro_batch: int
    accumulation: int
    steps: int
    block_size: int
    dense_below: int
    moba_chunk: int
    fixed_columns: int
    fixed_slashes: int
    common: dict[str, Any]
    compile_pretrain: bool
    compile_extensions: bool
    lengths: tuple[int, ...]
    tasks: str
    windows: int
    depths: int
    samples: int
    reserve_seconds: float
    most_characters: int = 0


FULL = Size(
    # 0.104 B parameters: six of Qwen2.5-0.5B's layers (14 query heads of 64 over 2 KV heads), and
    # a small vocabulary.
    "full",
    {"flavour": "qwen2.5-0.5b", "layers": 6, "vocab_size": 16384, "rope_theta": 10000.0},
    short=4096,
    context=65536,
    pretrain_steps=700,
    micro_batch=16,
    accumulation=4,
    steps=300,
    block_size=128,
    # MoBA: chunks as large a share of the context as published (4096 of 524288). Fixed budgets as
    # published.
    dense_below=4096,
    moba_chunk=512,
    fixed_columns=1000,
    fixed_slashes=48,
    compile_pretrain=True,
    compile_extensions=True,
    common={
        "training.dtype": "bfloat16",
        "training.device": "cuda",
        "training.loss_chunk_tokens": 8192,
        "metrics.log_every": 1,
        "metrics.recall_every": 20,
    },
    lengths=(16384, 65536),
    tasks="needle,vt,fwe,niah_multikey_3",
    windows=32,
    depths=5,
    samples=10,
    reserve_seconds=75,
)
SHORT = dataclasses.replace(
    FULL,
    name="short",
    pretrain_steps=300,
    steps=80,
    compile_extensions=False,
    common=FULL.common | {"metrics.recall_every": 10},
    windows=16,
    depths=3,
    samples=5,
)
TOY = Size(
    "toy",
    {"flavour": "debug", "layers": 2, "vocab_size": 512},
    short=256,
    context=1024,
    pretrain_steps=8,
    micro_batch=4,
    accumulation=1,
    steps=4,
    block_size=32,
    dense_below=64,
    moba_chunk=32,
    fixed_columns=32,
    fixed_slashes=6,
    compile_pretrain=False,
    compile_extensions=False,
    common={
        "training.dtype": "float32",
        "training.device": "cpu",
        "training.loss_chunk_tokens": 1024,
        "metrics.log_every": 1,
        "metrics.recall_every": 2,
        "metrics.recall_rows": 16,
    },
    lengths=(1024,),
    tasks="needle",
    windows=4,
    depths=2,
    samples=1,
    reserve_seconds=0,
    most_characters=10_000,
)
SIZES = {size.name: size for size in (FULL, SHORT, TOY)}


def methods(size: Size) -> dict[str, dict[str, Any]]:
    """The keys of [attention] that make each method, dense first."""
    probe = {
        "pattern": "vertical_slash",
        "vertical_slash.probe": min(64, size.block_size),
        "vertical_slash.dense_below": size.dense_below,
        "vertical_slash.max_columns": size.context // 16,
    }
    blocks = {"xattention.threshold": 0.9, "xattention.dense_below": size.dense_below}
    fixed = {
        "vertical_slash.min_columns": size.fixed_columns,
        "vertical_slash.min_slashes": size.fixed_slashes,
        "vertical_slash.max_columns": size.fixed_columns,
        "vertical_slash.max_slashes": size.fixed_slashes,
    }
    return {
        "dense": {"pattern": "dense"},
        "vertical_slash_90": {**probe, "vertical_slash.recall": 0.9},
        "vertical_slash_95": {**probe, "vertical_slash.recall": 0.95},
        "vertical_slash_95_joint": {
            **probe,
            "vertical_slash.recall": 0.95,
            "vertical_slash.budget": "joint",
        },
        "vertical_slash_xattention": {
            **blocks,
            "pattern": "vertical_slash",
            "vertical_slash.index": "xattention",
        },
        "xattention": {**blocks, "pattern": "xattention"},
        "moba": {"pattern": "moba", "moba.chunk_size": size.moba_chunk, "moba.top_k": 12},
        "minference": {**probe, **fixed},
    }


def evaluations(size: Size) -> dict[str, list[str]]:
    """The attentions to evaluate with, by weights: dense, and as trained.

    Two runs are also evaluated with minference's fixed budgets, as in MTraining's Table 1. What the
    extensions start from is evaluated densely.
    """
    found = {PRETRAIN: ["dense"]}
    for name in methods(size):
        found[name] = list(dict.fromkeys(["dense", name]))
    for name in ("dense", "vertical_slash_95"):
        found[name].append("minference")
    return found


def configuration(size: Size, folder: Path, name: str) -> Config:
    """The checked configuration of a run of the study in `folder`.

    name: PRETRAIN, or a method, whose extension starts from the newest checkpoint of PRETRAIN, if
    there is one. Raises ConfigError.
    """
    keys = (
        {f"model.{key}": value for key, value in size.model.items()}
        | size.common
        | {
            "data.source": str(folder / "text/train"),
            "data.tokenizer": str(folder / "text"),
            "data.sequences": "fixed",
            "training.output_dir": str(folder / name),
            "attention.block_size": size.block_size,
            "activation_checkpoint.mode": "none",
            "checkpoint.enable": True,
            "checkpoint.keep_latest_k": 2,
        }
    )
    keys |= _pretraining(size) if name == PRETRAIN else _extension(size, folder, name)
    keys["checkpoint.interval"] = keys["training.steps"]
    words = []
    for key, value in keys.items():
        shown = show(value) if isinstance(value, bool) else value
        words.append(f"--{key}={shown}")
    config, _ = load_and_check(words, 1, 1)
    return config


def _pretraining(size: Size) -> dict[str, Any]:
    return {
        "training.steps": size.pretrain_steps,
        "training.seq_len": size.short,
        "training.local_batch_size": size.micro_batch,
        "training.gradient_accumulation_steps": size.accumulation,
        "attention.pattern": "dense",
        "optimizer.lr": 1e-3,
        "lr_scheduler.warmup_steps": max(1, size.pretrain_steps // 10),
        "compile.enable": size.compile_pretrain,
        "metrics.recall_every": 0,
        "metrics.log_every": 10,
    }


def _extension(size: Size, folder: Path, method: str) -> dict[str, Any]:
    keys = {f"attention.{key}": value for key, value in methods(size)[method].items()}
    return keys | {
        "model.rope_scaling": "yarn",
        "model.rope_factor": size.context / size.short,
        "model.rope_original_length": size.short,
        "training.steps": size.steps,
        "training.seq_len": size.context,
        "optimizer.lr": 2e-4,
        "lr_scheduler.warmup_steps": max(1, size.steps // 10),
        "compile.enable": size.compile_extensions,
        "checkpoint.initial_load_path": _newest(folder / PRETRAIN) or "",
    }


def is_done(size: Size, folder: Path, name: str) -> bool:
    """Whether the run has all its steps."""
    steps = size.pretrain_steps if name == PRETRAIN else size.steps
    newest = _newest(folder / name)
    return newest is not None and newest.endswith(f"step-{steps}")


def _newest(run: Path) -> str | None:
    # Imported here, as it loads torch, which --list does without.
    from titan_sparse.training.checkpoint import newest_checkpoint

    return newest_checkpoint(str(run))


class Cost(NamedTuple):
    """Of a run. tokens: trained on. linear, attention: FLOPs, attention's as if it were dense."""

    tokens: int
    linear: float
    attention: float


def cost(size: Size, name: str) -> Cost:
    """What a run is to cost; a sparse method's attention is its density's share of what stands here."""
    if name == PRETRAIN:
        length = size.short
        steps = size.pretrain_steps
        tokens_per_step = size.short * size.micro_batch * size.accumulation
    else:
        length = size.context
        steps = size.steps
        tokens_per_step = size.context
    tokens = tokens_per_step * steps
    model = resolve(**size.model)
    pairs = causal_pairs(length) / length * model.layers * model.heads  # of a token
    linear = flops_per_token(model, 0)
    return Cost(tokens, linear * tokens, (flops_per_token(model, pairs) - linear) * tokens)
