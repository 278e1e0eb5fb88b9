"""Hybrid models beside transformers: step time, peak memory and loss, JSON.

    python -m scripts.benchmarks.hybrid --tokens 32768 131072 262144 --out hybrid_h200.json
    python -m scripts.benchmarks.hybrid --shape toy --tokens 256 --steps 1 --device cpu

The shape of Qwen3.5-0.8B with random weights, the same for all arms: one sequence of packed documents
a step, bf16, checkpointed layers, AdamW, the loss in chunks. transformers runs with its own choice
of kernels and sdpa. It does not separate the documents of this sequence, so that its loss is compared
with that of one document: each arm's first loss is of the sequence as one document.

titan-sparse[huggingface,hybrid] is needed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from scripts.benchmarks.harness import write
from scripts.benchmarks.options import parser_of, positive, share
from scripts.benchmarks.provenance import provenance
from titan_sparse.attention import linear
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.config import Attention
from titan_sparse.estimate.indexes import ragged_lengths
from titan_sparse.from_config import build_attends, build_layer_masks
from titan_sparse.integrations.transformers.chunked_loss import chunk_loss
from titan_sparse.models.build import build_decoder
from titan_sparse.models.transformers_config import read_transformers_config
from titan_sparse.training.build_model import checkpointed

LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
SHAPES = {
    "0.8b": {
        **LINEAR,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
    },
    "toy": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size": 101,
    },
}
ARMS = ("transformers", "ours, dense", "ours, vertical_slash")


def main(words: list[str]) -> int:
    args = parse(words)
    if args.device == "cuda" and linear._import_kernels() is None:
        print("install flash-linear-attention and fla-core", file=sys.stderr)
        return 2
    result = provenance(args, args.device) | {"rows": []}
    for tokens in args.tokens:
        for arm in args.arms:
            try:
                found = measure(arm, tokens, args)
            except torch.OutOfMemoryError:
                found = {"status": "out of memory"}
            row = {"shape": args.shape, "tokens": tokens, "arm": arm} | found
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if args.out:
                write(Path(args.out), result)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of("scripts.benchmarks.hybrid", __doc__)
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="0.8b")
    add("--tokens", nargs="+", type=positive, default=[32768, 131072, 262144])
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--density", type=share, default=0.1, help="about, of vertical_slash")
    add("--steps", type=positive, default=3, help="timed, after one untimed")
    add("--device", default="cuda")
    add("--out", default="", help="JSON file, written anew after each row")
    return parser.parse_args(words)


def measure(arm: str, tokens: int, args: argparse.Namespace) -> dict:
    """Trains for some steps. Times are medians."""
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(0)
    sizes = SHAPES[args.shape]
    text = torch.randint(sizes["vocab_size"], (1, tokens), generator=generator).to(device)
    labels = text.roll(-1, 1).index_fill(1, torch.tensor(tokens - 1, device=device), -100)
    step = _transformers(args) if arm == "transformers" else _ours(arm, tokens, args)
    loss_of, model = step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=args.device == "cuda")
    lengths = ragged_lengths(tokens, seed=0)
    seconds = []
    losses = []
    for number in range(args.steps + 1):
        if number == 1 and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = _now(args.device)
        loss = loss_of(text, labels, [tokens] if number == 0 else lengths)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_now(args.device) - began)
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    timed = seconds[1:]
    return {
        "status": "ran",
        "loss_of_one_document": losses[0],
        "step_ms": 1e3 * statistics.median(timed),
        "step_ms_least": 1e3 * min(timed),
        "step_ms_most": 1e3 * max(timed),
        "peak_bytes": peak,
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _their_model(args: argparse.Namespace, attention: str) -> nn.Module:
    config = transformers.Qwen3_5TextConfig(
        **SHAPES[args.shape], max_position_embeddings=max(args.tokens)
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )


def _transformers(args: argparse.Namespace):
    model = _their_model(args, "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    chunk_loss(model)

    def loss_of(text: Tensor, labels: Tensor, lengths: list[int]) -> Tensor:
        return model(text, shift_labels=labels, use_cache=False).loss

    return loss_of, model


def _ours(arm: str, tokens: int, args: argparse.Namespace):
    """Our decoder of transformers' modules, with the weights of the other arm."""
    section = Attention(pattern="dense")
    if arm == "ours, vertical_slash":
        section.pattern = "vertical_slash"
        # Random weights attend to nearly everything, so that only caps make them sparse.
        options = section.vertical_slash
        options.max_verticals = options.min_verticals = round(args.density / 2 * tokens)
        blocks = max(1, round(args.density / 2 * tokens / section.block_size))
        options.max_slashes = options.min_slashes = blocks
    theirs = _their_model(args, "eager")
    with tempfile.TemporaryDirectory() as folder:
        theirs.config.save_pretrained(folder)
        config = read_transformers_config(folder)
        with torch.device("meta"):
            model = build_decoder(config, build_attends(section, None)).bfloat16()
    model.to_empty(device=args.device)
    weights = {name.removeprefix("model."): x for name, x in theirs.state_dict().items()}
    model.load_state_dict(weights, strict=False)
    for name, layer in model.layers.items():
        model.layers[name] = checkpointed(layer, "full")
    device = torch.device(args.device)

    def loss_of(text: Tensor, labels: Tensor, lengths: list[int]) -> Tensor:
        masks = build_layer_masks(
            section, config, [lengths], tokens, one_rank(section.block_size), device, None
        )
        positions = torch.cat([torch.arange(length) for length in lengths])
        padding = torch.zeros(tokens - len(positions), dtype=torch.int64)
        positions = torch.cat([positions, padding])[None].to(device)
        return model(text, positions, masks, labels, 2048) / (tokens - 1)

    return loss_of, model


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
