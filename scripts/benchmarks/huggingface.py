"""transformers' Trainer with its own attention and with ours: step time,
tokens/s, peak memory, JSON.

    python -m scripts.benchmarks.huggingface --shapes 0.6b 1.7b --tokens 32768 65536 131072 \\
        --out huggingface_h200.json
    torchrun --nproc-per-node 2 -m scripts.benchmarks.huggingface --packed --shapes 0.6b \\
        --tokens 65536 131072 --out huggingface_packed_2xh200.json

Qwen3's shapes with random weights, one sequence a step, bf16, activation checkpointing, AdamW, the
head and its loss in chunks for all, since full logits of 131,072 tokens do not fit beside the
model. Arms differ in attention alone: sdpa with the kernel that torch picks, ours dense, and ours
with vertical_slash.

With --packed the sequence is packed documents (indexes.ragged_lengths), under FSDP2, and all
processes share it. Nothing else runs packed documents under context parallelism: sdpa runs on one
process alone.

Random weights attend to nearly everything, so that sparse rows have fixed budgets, and say which
density and recall their times belong to (recall without --packed). Times are medians of --steps.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from scripts.benchmarks.harness import Bench, place, report
from scripts.benchmarks.options import share
from scripts.benchmarks.provenance import provenance
from titan_sparse import recording
from titan_sparse.attention.patterns import Dense, Pattern, VerticalSlash
from titan_sparse.commands import parser_of, positive
from titan_sparse.estimate.indexes import ragged_lengths
from titan_sparse.integrations.transformers import AttentionSettings, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
    chunk_loss,
)

RECALL_ROWS = 256
OURS = "titan_sparse"

_QWEN3 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SHAPES = {
    "0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "toy": {
        **_QWEN3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 101,
        "num_hidden_layers": 2,
    },
}


def arms(args: argparse.Namespace, tokens: int, world: int) -> dict[str, Pattern | None]:
    """{name: pattern of our attention}, None for sdpa.

    Half of the density is a number of verticals, half one of slashes, as they are spread.
    """
    verticals = round(args.density / 2 * tokens)
    slashes = max(1, round(args.density / 2 * tokens / args.block_size))
    ours = {
        "ours, dense": Dense(),
        "ours, vertical_slash": VerticalSlash(
            min_verticals=verticals,
            max_verticals=verticals,
            min_slashes=slashes,
            max_slashes=slashes,
        ),
    }
    return ours if world > 1 else {"sdpa": None, **ours}


class PackedTrainer(ContextParallelTrainer, Trainer):
    pass


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, and the peak memory of those after the first."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            if len(self.seconds) == 1:
                # The first step compiles kernels and tunes them.
                torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self.seconds.append(seconds)


def main(words: list[str]) -> int:
    args = parse(words)
    rank, world = place()
    if world > 1 and not args.packed:
        print("several processes share packed documents; write --packed", file=sys.stderr)
        return 2
    result = provenance(args, args.device) | {"ranks": world, "rows": []}
    bench = Bench(args, torch.device(args.device), rank, world)
    for shape in args.shapes:
        for tokens in args.tokens:
            for name, pattern in arms(args, tokens, world).items():
                row = {"shape": shape, "tokens": tokens, "arm": name}
                try:
                    row |= measure(shape, tokens, pattern, args)
                except torch.OutOfMemoryError:
                    row["error"] = "out of memory"
                gc.collect()
                report(bench, result, row)
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "scripts.benchmarks.huggingface")
    add = parser.add_argument
    add("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b", "1.7b"])
    add("--tokens", nargs="+", type=positive, default=[32768, 65536, 131072])
    add("--density", type=share, default=0.1, help="about, of vertical_slash")
    add("--steps", type=positive, default=4, help="timed, after one untimed")
    add("--packed", action="store_true", help="packed documents, shared by all processes")
    add("--block-size", type=positive, default=128)
    add("--out", default="", help="JSON file, written anew after each row")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.set_defaults(device=device)
    return parser.parse_args(words)


def measure(shape: str, tokens: int, pattern: Pattern | None, args: argparse.Namespace) -> dict:
    """Trains for some steps. Times are medians; peak memory is that of the busiest process."""
    times = StepTimes(args.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, shape, tokens, pattern, args, times)
        trained = trainer.train()
    timed = times.seconds[1:]
    seconds = statistics.median(timed)
    found = {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": peak_bytes(args.device),
        "loss": trained.training_loss,
    }
    if pattern is not None:
        text = {key: value[None] for key, value in trainer.train_dataset[0].items()}
        found |= what_was_kept(trainer, text)
    trainer.accelerator.free_memory()
    return found


def peak_bytes(device: str) -> int | None:
    """All that torch has allocated; None on a CPU, where it does not count."""
    if device == "cpu":
        return None
    peak = torch.tensor(torch.cuda.max_memory_allocated(), device=device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def make_trainer(
    folder: str,
    shape: str,
    tokens: int,
    pattern: Pattern | None,
    args: argparse.Namespace,
    times: StepTimes,
) -> Trainer:
    """A trainer of random weights on random tokens, the same for all arms."""
    on_gpu = args.device == "cuda"
    parallelism = None
    if args.packed and pattern is not None:
        parallelism = ContextParallelConfig(
            layout="balanced", schedule="group_cast", block_size=args.block_size
        )
    training = TrainingArguments(
        folder,
        max_steps=args.steps + 1,
        per_device_train_batch_size=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        fsdp=args.packed and on_gpu,
        learning_rate=1e-5,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        parallelism_config=parallelism,
    )
    if pattern is not None:
        group = parallelism.group() if parallelism else None
        register(AttentionSettings(pattern, group), name=OURS)
    model = build_model(shape, tokens, "sdpa" if pattern is None else OURS, args)
    dataset = texts(model.config.vocab_size, tokens, args)
    kind = PackedTrainer if parallelism else Trainer
    return kind(model, training, train_dataset=dataset, callbacks=[times])


def texts(vocab_size: int, tokens: int, args: argparse.Namespace) -> list[dict]:
    size = (args.steps + 1, tokens)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocab_size, size, generator=generator)
    if not args.packed:
        return [{"input_ids": text, "labels": text} for text in drawn]
    lengths = ragged_lengths(tokens, seed=0)
    position = torch.cat([torch.arange(length) for length in lengths])
    found = []
    for text in drawn:
        labels = text.masked_fill(position == 0, -100)
        sample = {"input_ids": text, "labels": labels, "position_ids": position}
        found.append(sample)
    return found


def build_model(
    shape: str, tokens: int, attention: str, args: argparse.Namespace
) -> PreTrainedModel:
    """Random weights, the same for all arms, with checkpointed layers and a loss in chunks."""
    sizes = dict(SHAPES[shape], max_position_embeddings=tokens)
    torch.manual_seed(0)
    # FSDP keeps fp32 weights and computes in bf16.
    dtype = torch.float32 if args.packed else torch.bfloat16
    with torch.device(args.device):
        model = Qwen3ForCausalLM._from_config(
            Qwen3Config(**sizes), attn_implementation=attention, dtype=dtype
        )
    chunk_loss(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def what_was_kept(trainer: Trainer, text: dict[str, torch.Tensor]) -> dict:
    """Density of our attention in one more step, and without context parallelism its recall."""
    packed = "position_ids" in text
    recall_rows = 0 if packed else RECALL_ROWS
    inputs = trainer._prepare_inputs(text)
    with recording(recall_rows=recall_rows) as seen:
        trainer.training_step(trainer.model_wrapped, inputs)
    found = {"density": seen.density().mean().item()}
    if not packed:
        found["recall"] = torch.stack(seen.recall).mean().item()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
