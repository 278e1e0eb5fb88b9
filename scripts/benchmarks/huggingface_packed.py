"""transformers' Trainer on packed documents, over the GPUs that torchrun starts: JSON out.

    torchrun --nproc-per-node 2 -m scripts.benchmarks.huggingface_packed \\
        --tokens 65536 131072 --out huggingface_packed_2xh200.json
    torchrun --nproc-per-node 1 -m scripts.benchmarks.huggingface_packed \\
        --tokens 32768 65536 --out huggingface_packed_h200.json

Whole steps of a model of Qwen3-0.6B's shape with random weights, in bf16 under FSDP2, with one
sequence of packed documents a step. All processes share the sequence. Rows, for each length: our
attention dense and sparse, and on one process transformers' own `sdpa`. Nothing else runs packed
documents under context parallelism, so the second command is the nearest that others have: one GPU,
half the tokens.

A row has the median time of a step, tokens per second, the peak memory of the busiest process, and
attention's kernels as a share of a step, from a profile of one step after the timed ones: with
context parallelism they wait for each other inside of it. Recall is not measured: with random
weights, selection ends at its caps.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

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

from scripts.benchmarks.options import positive
from scripts.benchmarks.provenance import provenance
from titan_sparse import recording
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, keep_attention, register
from titan_sparse.integrations.transformers.context_parallel import (
    ContextParallelConfig,
    ContextParallelTrainer,
    chunk_loss,
)

WARMUP = 2
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": dict(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e6,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    ),
    "toy": dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    ),
}
OURS = ("dense", "sparse")


class LongTrainer(ContextParallelTrainer, Trainer):
    pass


def main(words: list[str]) -> int:
    options = parse(words)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    is_first = os.environ.get("RANK", "0") == "0"
    result = provenance(options, "cpu" if options.cpu else "cuda")
    result["versions"] |= {name: version(name) for name in ("transformers", "accelerate")}
    result |= {"processes": processes, "rows": []}
    for tokens in options.tokens:
        lengths = document_lengths(tokens, options.shortest, options.longest)
        for attention in (*OURS, "sdpa") if processes == 1 else OURS:
            row = measure_or_say(attention, tokens, lengths, options)
            result["rows"].append(row)
            if is_first:
                print(json.dumps(row), flush=True)
            if is_first and options.out:
                # After each row: a later one may not fit.
                text = json.dumps(result, indent=1) + "\n"
                Path(options.out).write_text(text, encoding="utf-8")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.huggingface_packed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=positive, nargs="+", default=[65536, 131072])
    parser.add_argument("--shortest", type=positive, default=512, help="tokens of a document")
    parser.add_argument("--longest", type=positive, default=65536)
    parser.add_argument("--steps", type=positive, default=5, help="timed")
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--block-size", type=positive, default=128)
    parser.add_argument("--dense-layout", default="balanced")
    parser.add_argument("--sparse-layout", default="striped")
    parser.add_argument("--max-columns", type=positive, default=1024)
    parser.add_argument("--max-slashes", type=positive, default=16)
    parser.add_argument("--dense-below", type=positive, default=4096)
    parser.add_argument("--cpu", action="store_true", help="float32 on CPUs, without FSDP2")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(words)


def document_lengths(tokens: int, shortest: int, longest: int) -> list[int]:
    """Lengths of documents that fill `tokens`, drawn evenly by their logarithm. The last is cut."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        share = torch.rand(1, generator=generator).item()
        drawn = round(shortest * (longest / shortest) ** share)
        lengths.append(min(drawn, tokens - sum(lengths)))
    return lengths


class Clock(TrainerCallback):
    """Times steps, then records one, then profiles one."""

    def __init__(self, device: torch.device, steps: int):
        self.device = device
        self.timed = range(WARMUP, WARMUP + steps)
        self.ms: list[float] = []
        self.peak_bytes = 0
        self.density: float | None = None
        self.attention_ms = 0.0
        self._open: Any = None

    @property
    def last_step(self) -> int:
        return self.timed.stop + 2

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.timed.stop:
            self._open = recording()
        elif state.global_step == self.timed.stop + 1:
            self._open = torch.profiler.profile()
        if self._open is not None:
            self._record = self._open.__enter__()
        self._wait()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait()
        step = state.global_step - 1
        if step in self.timed:
            self.ms.append(1e3 * (time.perf_counter() - self._began))
        if step == self.timed.stop - 1 and self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if self._open is None:
            return
        self._open.__exit__(None, None, None)
        if step == self.timed.stop and self._record.visited:
            self.density = self._record.density().mean().item()
        elif step > self.timed.stop:
            self.attention_ms = attention_ms(self._record, self.device)
        self._open = None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def attention_ms(profile: torch.profiler.profile, device: torch.device) -> float:
    """Milliseconds of kernels that attention's operators started; on a CPU, of the operators."""
    total = 0.0
    for event in profile.events():
        if not _is_attention(event.name) or event.device_type != torch.autograd.DeviceType.CPU:
            continue
        ancestor = event.cpu_parent
        while ancestor is not None and not _is_attention(ancestor.name):
            ancestor = ancestor.cpu_parent
        if ancestor is None:
            on_gpu = device.type == "cuda"
            total += event.device_time_total if on_gpu else event.cpu_time_total
    return total / 1e3


def _is_attention(name: str) -> bool:
    return name.startswith("titan_sparse::") or "scaled_dot_product" in name


def measure_or_say(
    attention: str, tokens: int, lengths: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """The row; of a peer that does not fit, one that says so."""
    try:
        row = measure(attention, tokens, lengths, options)
    except torch.OutOfMemoryError:
        if attention in OURS:
            raise
        row = {"attention": attention, "tokens": tokens, "status": "out of memory"}
    gc.collect()
    if not options.cpu:
        torch.cuda.empty_cache()
    return row


def measure(
    attention: str, tokens: int, lengths: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """The row of one attention at one length."""
    clock = Clock(torch.device("cpu" if options.cpu else "cuda"), options.steps)
    layout = options.dense_layout if attention == "dense" else options.sparse_layout
    schedule = "group_cast" if layout == "balanced" else "auto"
    row: dict[str, Any] = {"attention": attention, "tokens": tokens, "documents": len(lengths)}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=clock.last_step,
            per_device_train_batch_size=1,
            bf16=not options.cpu,
            use_cpu=options.cpu,
            fsdp=not options.cpu,
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
            parallelism_config=ContextParallelConfig(
                layout=layout, schedule=schedule, block_size=options.block_size
            ),
        )
        trainer = make_trainer(attention, args, tokens, lengths, options, clock)
        if not options.cpu:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    peak = torch.tensor(clock.peak_bytes, device=clock.device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    step_ms = statistics.median(clock.ms)
    if attention in OURS:
        row |= {"layout": layout, "schedule": args.parallelism_config.group().schedule}
    row |= {
        "step_ms": step_ms,
        "steps_ms": clock.ms,
        "tokens_per_s": 1e3 * tokens / step_ms,
        "peak_bytes": int(peak),
        "attention_ms": clock.attention_ms,
        "attention_share": clock.attention_ms / step_ms,
        "density": clock.density,
    }
    trainer.accelerator.free_memory()
    return row


def make_trainer(
    attention: str,
    args: TrainingArguments,
    tokens: int,
    lengths: list[int],
    options: argparse.Namespace,
    clock: Clock,
) -> Trainer:
    """A trainer on one sequence of documents, again and again."""
    if attention in OURS:
        pattern = Dense()
        if attention == "sparse":
            pattern = VerticalSlash(
                recall=0.9,
                max_verticals=options.max_columns,
                max_slashes=options.max_slashes,
                dense_below=options.dense_below,
            )
        register(AttentionSettings(pattern, args.parallelism_config.group()))
        kind, implementation = LongTrainer, "titan_sparse"
    else:
        args.parallelism_config = None
        kind, implementation = Trainer, attention
    model = make_model(options.shape, implementation)
    sequence = {
        "input_ids": torch.randint(
            model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1)
        ),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
    }
    sequence["labels"] = sequence["input_ids"].masked_fill(sequence["position_ids"] == 0, -100)
    return kind(model, args, train_dataset=[sequence] * clock.last_step, callbacks=[clock])


def make_model(shape: str, implementation: str) -> PreTrainedModel:
    """Random weights, checkpointed layers, and a loss in chunks, whatever the attention."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(
        Qwen3Config(**SHAPES[shape]), attn_implementation=implementation
    )
    chunk_loss(model)
    # Where attention is not ours, it runs twice, as in transformers' own checkpointing.
    model.gradient_checkpointing_enable(keep_attention())
    return model


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
