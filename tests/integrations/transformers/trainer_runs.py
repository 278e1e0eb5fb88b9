"""Small training runs of transformers' Trainer and TRL's SFTTrainer, alike on
one process and more."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainingArguments

from tests.distributed import run_processes
from tests.integrations.transformers.families import with_ours
from titan_sparse.attention.patterns import Pattern, VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, keep_attention, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
    chunk_loss,
)

BLOCK = 16
VOCAB = 97
SPARSE = VerticalSlash(recall=0.5, sinks=1, max_verticals=16, max_slashes=2, dense_below=64)
NUMBERS = (
    "loss",
    "grad_norm",
    "eval_loss",
    "mean_token_accuracy",
    "entropy",
    "eval_mean_token_accuracy",
    "eval_entropy",
    "num_tokens",
    "total_flos",
    "num_input_tokens_seen",
)
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


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from Documents(37, seed=1).rows


def tiny_model(tied: bool = False) -> PreTrainedModel:
    windows = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}
    # The embedding of a padding token would be 0, by which DoRA divides.
    settings = {"vocab_size": VOCAB, "pad_token_id": None, "tie_word_embeddings": tied}
    return with_ours("qwen3", **windows, **settings)


def arguments(folder: Path | str, kind: type = TrainingArguments, **changes: Any) -> Any:
    settings = dict(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        # So large that AdamW does not make long steps of rounding, where a gradient is nearly 0.
        adam_epsilon=1e-3,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
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


def trained(
    folder: Path, pattern: Pattern | None = None, options: dict | None = None, **changes: Any
) -> list[dict[str, float]]:
    """options: of parts(). changes: of arguments()."""
    trainer = LongTrainer(**parts(arguments(folder, **changes), pattern, **(options or {})))
    trainer.train()
    trainer.evaluate()
    return numbers(trainer)


def plain(folder: Path) -> list[dict[str, float]]:
    return trained(folder)


def balanced(folder: Path) -> list[dict[str, float]]:
    config = ContextParallelConfig(layout="balanced", schedule="group_cast", block_size=BLOCK)
    return trained(folder, SPARSE, parallelism_config=config)


def streamed(folder: Path) -> list[dict[str, float]]:
    options = {"train_dataset": Stream()}
    return trained(folder, options=options, accelerator_config={"dispatch_batches": False})


def padded(folder: Path) -> list[dict[str, float]]:
    """A batch of several rows, with padding behind the short ones."""

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
        batch = {}
        for name, filler in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
            columns = [torch.tensor(row[name]) for row in rows]
            batch[name] = pad_sequence(columns, batch_first=True, padding_value=filler)
        return batch

    return trained(folder, options={"data_collator": collate})


def sharded(
    folder: Path,
    changes: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    model: PreTrainedModel | None = None,
) -> list[dict[str, float]]:
    """FSDP2 by accelerate, with tied weights, clipping, our checkpointing and our loss."""
    options = {} if changes is None else changes
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    args = arguments(folder, max_grad_norm=0.1, fsdp=not is_alone, **options)
    if not is_alone:
        pretend_gpus()
    if model is None:
        model = tiny_model(tied=True)
    chunk_loss(model, chunk_tokens=50)
    model.gradient_checkpointing_enable(keep_attention())
    if lora is not None:
        torch.manual_seed(0)
        model = get_peft_model(model, lora)
    trainer = LongTrainer(**parts(args, model=model))
    trainer.train()
    if not is_alone:
        names = next(trainer.model.parameters()).device_mesh.mesh_dim_names
        copies = args.parallelism_config.dp_replicate_size
        assert names == (("dp_replicate",) if copies > 1 else ()) + ("dp_shard_cp",)
    trainer.evaluate()
    return numbers(trainer)


def sharded_lora(folder: Path) -> list[dict[str, float]]:
    """The same with an adapter of lm_head, which accelerate shards apart from the final norm."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], use_dora=True)
    return sharded(folder, lora=lora)


def hybrid(folder: Path) -> list[dict[str, float]]:
    """The same with linear attention and experts."""
    model = with_ours("qwen3_next", vocab_size=VOCAB)
    return sharded(folder, {"max_steps": 2}, model=model)


def resumed(folder: Path) -> list[dict[str, float]]:
    """Two steps and a checkpoint, then the third step in another trainer."""
    args = arguments(folder, save_strategy="steps", save_steps=2)
    LongTrainer(**parts(args)).train()
    args = arguments(folder)
    trainer = LongTrainer(**parts(args))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.evaluate()
    return numbers(trainer)


def noisy(folder: Path) -> list[dict[str, float]]:
    """The largest noise of NEFTune in a step, over its bound for the whole batch."""
    args = arguments(folder, neftune_noise_alpha=5.0, max_steps=1, gradient_accumulation_steps=1)
    trainer = LongTrainer(**parts(args))
    decoder = trainer.model.model
    kept = {}
    decoder.embed_tokens.register_forward_hook(lambda _, args, out: kept.update(clean=out))
    decoder.layers[0].register_forward_pre_hook(lambda _, args: kept.update(noisy=args[0]))
    trainer.train()
    noise = (kept["noisy"] - kept["clean"]).abs().max().item()
    bound = 5.0 / math.sqrt(trainer.state.num_input_tokens_seen * kept["clean"].shape[2])
    return [{"noise": round(noise / bound, 2)}]


# On four processes, two to a sequence: batches of half the documents.


def of_two_sequences() -> dict[str, Any]:
    """Arguments with which one process and two sequences see the same batches."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return {
        "per_device_train_batch_size": 4 if is_alone else 2,
        "train_sampling_strategy": "sequential",
    }


def two_sequences(folder: Path) -> list[dict[str, float]]:
    size = min(2, int(os.environ.get("WORLD_SIZE", "1")))
    config = ContextParallelConfig(size, block_size=BLOCK)
    lines = trained(folder, parallelism_config=config, **of_two_sequences())
    return [line for line in lines if "loss" in line]


def two_copies(folder: Path) -> list[dict[str, float]]:
    """HSDP: each copy of the weights is sharded over the two ranks of a sequence."""
    copies = min(2, int(os.environ.get("WORLD_SIZE", "1")))
    config = ContextParallelConfig(dp_replicate_size=copies, schedule="auto", block_size=BLOCK)
    changes = {"parallelism_config": config, **of_two_sequences()}
    return [line for line in sharded(folder, changes) if "loss" in line]


WIDE = (two_sequences, two_copies)
RUNS = (balanced, hybrid, padded, sharded, sharded_lora, resumed, noisy)


def run_all(folder: Path, runs: Sequence[Callable[[Path], list]]) -> None:
    """The runs, one after the other; rank 0 writes FOLDER/NAME-PROCESSES.json."""
    for run in runs:
        name = run.__name__
        write(folder, name, run(Path(folder, f"{name}-{os.environ.get('WORLD_SIZE', '1')}")))


def assert_trains_alike(folder: Path, processes: int, runs: Sequence[Callable]) -> None:
    """So many processes log the same as one. Leaves what run_all() writes."""
    run_all(folder, runs)
    run_processes(processes, run_all, folder, runs)
    for run in runs:
        assert_same(read(folder, run.__name__, processes), read(folder, run.__name__, 1))


def write(folder: str, name: str, found: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        processes = os.environ.get("WORLD_SIZE", "1")
        Path(folder, f"{name}-{processes}.json").write_text(json.dumps(found))


def read(folder: str | Path, name: str, processes: int) -> Any:
    return json.loads(Path(folder, f"{name}-{processes}.json").read_text())


def assert_same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """The same log: losses to 1e-6, norms of gradients after several steps to 1e-5."""
    assert [list(line) for line in found] == [list(line) for line in wanted]
    for line, expected in zip(found, wanted):
        for name, number in line.items():
            tolerance = 1e-5 if name == "grad_norm" else 1e-6
            assert number == pytest.approx(expected[name], rel=tolerance), (name, found, wanted)
