"""Measure what each recall of vertical_slash costs and saves, with your model and your text.

    titan-sparse choose --model FOLDER --seq-len 65536 --data.source TEXTS [--section.key value ...]

Trains a few steps densely and with several recalls, on the same batches and with a learning rate that
changes no weight. Prints the loss, the density, the recall, and the seconds of a step of each, and
the setting with the fewest pairs whose loss is at most 0.01 above dense. On a CPU, a step is a forward
pass: SmolLM2-135M at 8,192 tokens takes seven minutes on two cores. Other words are options of
the configuration, as train.py takes them; --config reads a file. Under torchrun it uses all ranks.
See docs/masks_and_patterns.md.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from titan_sparse.commands import parser_of, positive, refuses
from titan_sparse.config import Config, load, load_and_check, world_from_environment
from titan_sparse.config.reading import tokens
from titan_sparse.data.shards import write_json
from titan_sparse.trainer import Trainer
from titan_sparse.training.distributed import choose_device

RECALLS = (0.9, 0.95, 0.97, 0.99)
MOST_LOSS = 0.01
"""Nats a token above dense that the choice may lose."""
TIMED_STEPS = 5


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--seq-len", type=tokens, required=True, help="tokens of a sequence")
    parser.add_argument("--batches", type=positive, help="default: 3, on a CPU 1")
    parser.add_argument("--out", type=Path, default=Path("outputs/choose"), help="folder to write")
    args, rest = parser.parse_known_args(words)
    configs = configurations(args.model, args.seq_len, args.out, args.batches, rest)
    rows = {name: measure(config) for name, config in configs.items()}
    if os.environ.get("RANK", "0") == "0":
        write_json(args.out / "choose.json", rows)
        print(table(rows))
        print(f"choice: {choice(rows)}")
    return 0


def configurations(
    model: str, seq_len: int, out: Path, batches: int | None, words: list[str]
) -> dict[str, Config]:
    """The checked configuration of dense and of each recall, by name. Raises ConfigError."""
    words = [*words, "--model.initial_hf", model, "--training.seq_len", str(seq_len)]
    config, _ = load(words)
    if config.data.tokenizer == "bytes" and Path(model, "tokenizer.json").is_file():
        words += ["--data.tokenizer", model]
    # A step on a CPU may take a minute, and compiles nothing.
    batches = batches or (3 if choose_device(config.training.device).type == "cuda" else 1)
    settings: dict[str, dict[str, Any]] = {"dense": {"attention.pattern": "dense"}}
    for recall in RECALLS:
        settings[f"recall {recall}"] = {
            "attention.pattern": "vertical_slash",
            "attention.vertical_slash.recall": recall,
        }
    common = {
        "training.steps": batches,
        "training.gradient_accumulation_steps": 1,
        # Less than any weight can hold.
        "optimizer.lr": 1e-30,
        "lr_scheduler.warmup_steps": 0,
        "checkpoint.enable": "false",
        "validation.enable": "false",
        "metrics.tensorboard": "false",
        "metrics.trackers": "none",
        "metrics.log_every": 1,
        "metrics.recall_every": batches + 1,
    }
    configs = {}
    for name, keys in settings.items():
        keys = keys | common | {"training.output_dir": out / name.replace(" ", "_")}
        options = [f"--{key}={value}" for key, value in keys.items()]
        configs[name], _ = load_and_check([*words, *options], *world_from_environment())
    return configs


def measure(config: Config) -> dict[str, float]:
    """Loss, density, recall, and seconds of a step. Collective; other ranks than the first get {}."""
    with fresh_trainer(config) as trainer:
        is_gpu = trainer.device.type == "cuda"
        if not is_gpu:
            # Without a backward through its layers, a step takes a quarter of the time.
            trainer.model.requires_grad_(False)
            trainer.model.norm.requires_grad_(True)
        trainer.train()
        # On a CPU, nothing compiles, and the steps that were just logged tell the time.
        seconds = seconds_of_step(trainer) if is_gpu else math.nan
        if dist.get_rank() > 0:
            return {}
    lines = Path(config.training.output_dir, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[-config.training.steps :]]
    means = {
        name: fmean(record[name] for record in records)
        for name in ("loss", "density", "step_seconds")
    }
    if not math.isnan(seconds):
        means["step_seconds"] = seconds
    return means | {"recall": records[0].get("recall", 1.0)}


@contextlib.contextmanager
def fresh_trainer(config: Config) -> Iterator[Trainer]:
    """A trainer on an empty GPU, of several in one process."""
    # The trainer before it.
    gc.collect()
    # torch compiles the same code only so many times, and each run is another configuration.
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        yield Trainer(config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def seconds_of_step(trainer: Trainer) -> float:
    """The mean time of further steps, which are not logged. Those before have compiled."""
    section = trainer.metrics.section
    trainer.metrics.section = dataclasses.replace(section, log_every=sys.maxsize, recall_every=0)
    synchronize = torch.cuda.synchronize if trainer.device.type == "cuda" else torch.cpu.synchronize
    synchronize()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        trainer.step()
    synchronize()
    return (time.perf_counter() - began) / TIMED_STEPS


def table(rows: dict[str, dict[str, float]]) -> str:
    """For people; the last column says how many steps fit into the time of a dense step."""
    lines = [
        "setting        loss  above dense  density  recall  seconds a step  steps per dense step"
    ]
    dense = rows["dense"]
    for name, row in rows.items():
        lines.append(
            f"{name:<12}{row['loss']:>7.4f}{row['loss'] - dense['loss']:>+13.4f}"
            f"{row['density']:>9.1%}{row['recall']:>8.1%}{row['step_seconds']:>16.3f}"
            f"{dense['step_seconds'] / row['step_seconds']:>22.2f}"
        )
    return "\n".join(lines)


def choice(rows: dict[str, dict[str, float]]) -> str:
    """The name of the row with the fewest pairs among those that lose at most MOST_LOSS."""
    most = rows["dense"]["loss"] + MOST_LOSS
    return min(
        (name for name in rows if rows[name]["loss"] <= most), key=lambda n: rows[n]["density"]
    )
