"""transformers' Trainer with its own attention and with ours: step time, tokens/s, peak memory, JSON.

    python -m scripts.benchmarks.huggingface --shapes 0.6b 1.7b --tokens 32768 65536 131072 \\
        --out huggingface_h200.json

Qwen3's shapes with random weights, one sequence a step, bf16, activation checkpointing, AdamW. Arms
differ in attention alone: sdpa with the kernel that torch picks, and with its FlashAttention-2,
flash_attention_2 where flash-attn is installed, ours dense, and ours with vertical_slash. "kept"
arms are ours with keep_attention(): checkpointing keeps attention's output, where the others compute
attention again.

Full logits of 131,072 tokens do not fit beside the model, so that all arms share a head in chunks
(titan_sparse.loss). Random weights attend to nearly everything, so that sparse rows have fixed
budgets, and say which density and recall their times belong to. One GPU is used; on a machine with
several, set CUDA_VISIBLE_DEVICES.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from scripts.benchmarks.options import positive, share
from scripts.benchmarks.provenance import provenance
from titan_sparse import recording
from titan_sparse.attention.patterns import Pattern, VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, keep_attention, register
from titan_sparse.loss import IGNORE_INDEX, count_valid, linear_cross_entropy

LOSS_CHUNK_TOKENS = 4096
RECALL_ROWS = 256
BLOCK_SIZE = 128
"""Of our attention, as it is by default."""
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


@dataclass(frozen=True)
class Arm:
    """A row: the attention, and how activations are checkpointed.

    pattern: of our attention; None for dense. kernel: which sdpa has to take; None for torch's
    choice.
    """

    name: str
    implementation: str
    pattern: Pattern | None = None
    keeps_attention: bool = False
    kernel: SDPBackend | None = None

    def checkpointing(self) -> dict[str, object]:
        """gradient_checkpointing_kwargs."""
        return keep_attention() if self.keeps_attention else {"use_reentrant": False}

    def kernels(self) -> AbstractContextManager[None]:
        """Inside, sdpa takes the arm's kernel or raises."""
        return sdpa_kernel(self.kernel) if self.kernel else contextlib.nullcontext()


class ModelWithChunkedHead(Qwen3ForCausalLM):
    """Qwen3 whose logits exist in chunks only. Trainer gives it num_items_in_batch."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutput:
        """The mean loss of the labels [B, S], each of which the token before predicts."""
        hidden = self.model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        total = linear_cross_entropy(hidden, self.lm_head.weight, targets, LOSS_CHUNK_TOKENS)
        if num_items_in_batch is None:
            num_items_in_batch = count_valid(targets)
        return CausalLMOutput(loss=total / num_items_in_batch)


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
        self.seconds.append(time.perf_counter() - self._began)


def main(words: list[str]) -> int:
    args = parse(words)
    result = provenance(args, args.device)
    for package in ("transformers", "accelerate", "flash-attn"):
        result["versions"][package] = version(package)
    result["rows"] = []
    for shape in args.shapes:
        for seq_len in args.tokens:
            for arm in arms(args.density, seq_len):
                result["rows"].append(row(shape, seq_len, arm, args))
                print(json.dumps(result["rows"][-1]), flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.huggingface",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6b", "1.7b"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[32768, 65536, 131072])
    parser.add_argument("--layers", type=positive, help="instead of the shape's 28")
    parser.add_argument("--density", type=share, default=0.1, help="about, of vertical_slash")
    parser.add_argument("--steps", type=positive, default=4, help="timed, after one untimed")
    parser.add_argument("--arms", nargs="+", help="names of rows; all by default")
    parser.add_argument("--out", default="", help="JSON file, written anew after each row")
    args = parser.parse_args(words)
    known = [arm.name for arm in arms(args.density, args.tokens[0])]
    args.arms = args.arms or known
    for name in set(args.arms) - set(known):
        parser.error(f'--arms "{name}" is unknown; write of {", ".join(known)}')
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def version(package: str) -> str | None:
    """None for what is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def arms(density: float, seq_len: int) -> list[Arm]:
    """All rows of one shape and length.

    Random weights attend to nearly everything, so that no recall makes them sparse. Half of the
    density is a number of verticals, half one of diagonals, as they are spread.
    """
    columns = round(density / 2 * seq_len)
    diagonals = max(1, round(density / 2 * seq_len / BLOCK_SIZE))
    sparse = VerticalSlash(
        min_verticals=columns,
        max_verticals=columns,
        min_slashes=diagonals,
        max_slashes=diagonals,
    )
    return [
        Arm("sdpa", "sdpa"),
        Arm("sdpa, flash", "sdpa", kernel=SDPBackend.FLASH_ATTENTION),
        Arm("flash_attention_2", "flash_attention_2"),
        Arm("ours, dense", OURS),
        Arm("ours, dense, kept", OURS, keeps_attention=True),
        Arm("ours, vertical_slash", OURS, sparse),
        Arm("ours, vertical_slash, kept", OURS, sparse, keeps_attention=True),
    ]


def row(shape: str, seq_len: int, arm: Arm, args: argparse.Namespace) -> dict:
    """One training run's numbers, or why there are none."""
    found: dict = {"shape": shape, "tokens": seq_len, "arm": arm.name, "status": "ran"}
    if arm.name not in args.arms:
        return found | {"status": "left out"}
    if arm.implementation.startswith("flash") and not importlib.util.find_spec("flash_attn"):
        return found | {"status": "not installed"}
    try:
        found |= measure(shape, seq_len, arm, args)
    except torch.OutOfMemoryError:
        found["status"] = "out of memory"
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return found


def measure(shape: str, seq_len: int, arm: Arm, args: argparse.Namespace) -> dict:
    """Trains for some steps. Times are medians; peak memory is all that torch has allocated."""
    if arm.implementation == OURS:
        pattern = {} if arm.pattern is None else {"pattern": arm.pattern}
        register(AttentionSettings(**pattern), name=OURS)
    model = build_model(shape, seq_len, arm, args)
    generator = torch.Generator().manual_seed(0)
    size = (args.steps + 1, seq_len)
    texts = torch.randint(model.config.vocab_size, size, generator=generator)
    times = StepTimes(args.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            training_arguments(folder, arm, args),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
            callbacks=[times],
        )
        with arm.kernels():
            trained = trainer.train()
    timed = times.seconds[1:]
    seconds = statistics.median(timed)
    found = {
        "step_ms": 1e3 * seconds,
        "step_ms_least": 1e3 * min(timed),
        "step_ms_most": 1e3 * max(timed),
        "tokens_per_second": seq_len / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else None,
        "loss": trained.training_loss,
    }
    if arm.implementation == OURS:
        found |= what_was_kept(model, texts[:1].to(model.device))
    return found


def build_model(
    shape: str, seq_len: int, arm: Arm, args: argparse.Namespace
) -> ModelWithChunkedHead:
    """Random weights in bf16, the same for all arms, ready to be trained."""
    sizes = dict(SHAPES[shape], max_position_embeddings=seq_len)
    if args.layers:
        sizes["num_hidden_layers"] = args.layers
    config = Qwen3Config(**sizes)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = ModelWithChunkedHead._from_config(
            config, attn_implementation=arm.implementation, dtype=torch.bfloat16
        )
    # Not by Trainer's arguments, which would have to be written as JSON.
    model.gradient_checkpointing_enable(arm.checkpointing())
    return model


def training_arguments(folder: str, arm: Arm, args: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        folder,
        max_steps=args.steps + 1,
        per_device_train_batch_size=1,
        bf16=True,
        use_cpu=args.device == "cpu",
        learning_rate=1e-5,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )


@torch.no_grad()
def what_was_kept(model: ModelWithChunkedHead, text: Tensor) -> dict:
    """Density and recall of our attention, means over layers and heads, and the number of layers."""
    with recording(recall_rows=RECALL_ROWS) as seen:
        model(input_ids=text, labels=text)
    return {
        "density": seen.density().mean().item(),
        "recall": torch.stack(seen.recall).mean().item(),
        "recorded_layers": len(seen.recall),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
