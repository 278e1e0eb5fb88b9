"""Small training runs of transformers' Trainer and TRL's SFTTrainer, alike on one process and more."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import Dataset
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from titan_sparse.attention.patterns import Pattern, VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
    chunk_loss,
)

BLOCK = 16
VOCAB = 97
SPARSE = VerticalSlash(recall=0.5, sinks=1, max_columns=16, max_slashes=2, dense_below=64)
NUMBERS = ("loss", "grad_norm", "eval_loss", "mean_token_accuracy", "num_tokens")
"""What is compared, of each line of a Trainer's log."""


class LongTrainer(ContextParallelTrainer, Trainer):
    pass


class Documents(Dataset):
    """Random documents of 5 to 150 tokens, with labels for some."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for length in torch.randint(5, 150, (count,), generator=generator).tolist():
            ids = torch.randint(VOCAB, (length,), generator=generator)
            known = torch.rand(length, generator=generator) < 0.7
            labels = ids.where(known, torch.tensor(-100))
            self.rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return self.rows[i]


def tiny_model(tied: bool = False) -> PreTrainedModel:
    """Two layers, one of them with a window."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=50,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="titan_sparse")


def arguments(folder: Path | str, kind: type = TrainingArguments, **changes: Any) -> Any:
    settings = dict(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        parallelism_config=ContextParallelConfig(block_size=BLOCK),
    )
    return kind(**(settings | changes))


def parts(args: Any, pattern: Pattern | None = None, **changes: Any) -> dict[str, Any]:
    """What a Trainer is made of: 37 documents to train on, and 9, of which 4 go into a batch."""
    settings = {} if pattern is None else {"pattern": pattern}
    register(AttentionSettings(cp=args.parallelism_config.group(), **settings))
    of_documents = dict(
        model=tiny_model(),
        args=args,
        train_dataset=Documents(37, seed=1),
        eval_dataset=Documents(9, seed=2),
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )
    return of_documents | changes


def numbers(trainer: Trainer) -> list[dict[str, float]]:
    """The numbers of each line that the trainer has logged."""
    lines = []
    for line in trainer.state.log_history:
        known = {name: line[name] for name in NUMBERS if name in line}
        if known:
            lines.append(known)
    return lines


def pretend_gpus() -> None:
    """accelerate shards weights on GPUs only; its code runs on CPUs as well. After arguments()."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


# The runs. Each takes a folder, and returns numbers().


def plain(folder: Path, **changes: Any) -> list[dict[str, float]]:
    trainer = LongTrainer(**parts(arguments(folder, **changes)))
    trainer.train()
    trainer.evaluate()
    return numbers(trainer)


def zigzag(folder: Path) -> list[dict[str, float]]:
    config = ContextParallelConfig(layout="zigzag", schedule="ring", block_size=BLOCK)
    return plain(folder, parallelism_config=config)


def contiguous(folder: Path) -> list[dict[str, float]]:
    return plain(
        folder, parallelism_config=ContextParallelConfig(layout="contiguous", block_size=BLOCK)
    )


def balanced(folder: Path) -> list[dict[str, float]]:
    config = ContextParallelConfig(layout="balanced", schedule="group_cast", block_size=BLOCK)
    return plain(folder, parallelism_config=config)


def sparse(folder: Path) -> list[dict[str, float]]:
    trainer = LongTrainer(**parts(arguments(folder), SPARSE))
    trainer.train()
    return numbers(trainer)


def padded(folder: Path) -> list[dict[str, float]]:
    """A batch of several rows, with padding behind the short ones."""

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)

        def column(name: str, filler: int) -> torch.Tensor:
            return torch.tensor(
                [row[name] + [filler] * (longest - len(row[name])) for row in rows]
            )

        mask = [
            [1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows
        ]
        return {
            "input_ids": column("input_ids", 0),
            "labels": column("labels", -100),
            "attention_mask": torch.tensor(mask),
        }

    trainer = LongTrainer(**parts(arguments(folder), data_collator=collate))
    trainer.train()
    return numbers(trainer)


def sharded(folder: Path, changes: dict[str, Any] | None = None) -> list[dict[str, float]]:
    """FSDP2 by accelerate, with activation checkpointing, clipping, tied weights, and our loss."""
    options = {} if changes is None else changes
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    fsdp = {} if is_alone else {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}
    args = arguments(folder, max_grad_norm=0.1, **fsdp, **options)
    if not is_alone:
        pretend_gpus()
    model = parts(args)["model"]
    chunk_loss(model, chunk_tokens=50)
    trainer = LongTrainer(**parts(args, model=model))
    trainer.train()
    if not is_alone:
        parameter = next(trainer.model.parameters())
        assert parameter.device_mesh.mesh_dim_names[-1] == "dp_shard_cp"
    trainer.evaluate()
    return numbers(trainer)


def resumed(folder: Path) -> list[dict[str, float]]:
    """Two steps and a checkpoint, then the third step in another trainer."""
    args = arguments(folder, save_strategy="steps", save_steps=2)
    LongTrainer(**parts(args)).train()
    args = arguments(folder)
    trainer = LongTrainer(**parts(args))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.evaluate()
    return numbers(trainer)


RUNS = (plain, zigzag, contiguous, balanced, sparse, padded, sharded, resumed)


def run_all(folder: str, names: list[str]) -> None:
    """The named runs, one after the other; rank 0 writes FOLDER/NAME-PROCESSES.json."""
    for name in names:
        [run] = [run for run in RUNS if run.__name__ == name]
        found = run(Path(folder, f"{name}-{os.environ.get('WORLD_SIZE', '1')}"))
        write(folder, name, found)


def write(folder: str, name: str, found: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        processes = os.environ.get("WORLD_SIZE", "1")
        Path(folder, f"{name}-{processes}.json").write_text(json.dumps(found))


def read(folder: str | Path, name: str, processes: int) -> Any:
    return json.loads(Path(folder, f"{name}-{processes}.json").read_text())


def assert_same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [list(line) for line in found] == [list(line) for line in wanted]
    for line, expected in zip(found, wanted):
        assert line == pytest.approx(expected, rel=1e-6)
