"""What a ring sends of the real model's keys and values, by what decides how far they go.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.route_bytes --model outputs/smollm2 --out route_bytes.json

For each text, ranks W, and attention.route_by, under the layout striped: bytes of a layer's forward
and backward over those of a ring that skips nothing, means over the layers. "mask" skips nothing
under a causal mask. "across" is the share that leaves a node, of two nodes of W / 2 ranks in a
double ring. Inputs are bf16, gradients between ranks fp32. No GPU is needed.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from scripts.benchmarks.provenance import provenance
from scripts.study.density.inputs import Inputs, RealModel
from scripts.study.density.mass import BLOCK
from scripts.study.density.texts import KINDS, text_of
from titan_sparse.attention.context_parallel import routing
from titan_sparse.attention.context_parallel.schedule import head_groups
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.schedules.needs import needed_chunks_of
from titan_sparse.data.tokenizer import load_tokenizer

WIDTH = 2
GRADIENT_WIDTH = 4
"""Bytes of an element of keys and values, and of their gradients."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.route_bytes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a folder of scripts.study.real_model")
    parser.add_argument("--out", required=True, help="a .json file for the rows")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a text")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="even numbers")
    parser.add_argument("--recall", type=float, default=VerticalSlash().recall)
    args = parser.parse_args(words)

    folder = Path(args.model)
    model = RealModel(folder, torch.device("cpu"), torch.float32)
    tokenizer = load_tokenizer(str(folder))
    layers = list(range(model.config.layers))
    rows = []
    for kind in KINDS:
        tokens = text_of(kind, 0).tokens(tokenizer, args.length)
        indexes = select(model.inputs(tokens, layers), args.recall)
        for ranks in args.ranks:
            row = {"text": kind, "ranks": ranks, **shares(indexes, model.config.kv_heads, ranks)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    result = {**provenance(args, "cpu"), "rows": rows}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def select(inputs: Inputs, recall: float) -> list[BlockIndex]:
    """The default's choice in each layer."""
    pattern = VerticalSlash(recall=recall, dense_below=2 * BLOCK)
    indexes = []
    for q, k in zip(inputs.q, inputs.k, strict=True):
        indexes.append(pattern.select(q[None], k[None], Causal(), block_size=BLOCK))
    return indexes


def shares(indexes: list[BlockIndex], kv_heads: int, ranks: int) -> dict[str, float]:
    """Bytes sent with route_by = "index" over those of a ring that skips nothing; see the top."""
    groups = head_groups(kv_heads, windows=1, by_index=True)
    ring = 0.0
    across = 0.0
    for index in indexes:
        heads_a_group = index.heads // groups
        for group in range(groups):
            heads = slice(group * heads_a_group, (group + 1) * heads_a_group)
            needed = _needed(index.of_heads(heads), ranks)
            everything = torch.ones_like(needed)
            ring += sum(_bytes(needed, 1, ranks)) / sum(_bytes(everything, 1, ranks))
            across += _bytes(needed, 2, ranks)[1] / _bytes(everything, 2, ranks)[1]
    count = len(indexes) * groups
    return {"ring": round(ring / count, 4), "across": round(across / count, 4)}


def _needed(index: BlockIndex, ranks: int) -> Tensor:
    ranges = Causal().rows(index.seq_len)
    return needed_chunks_of(index, ranges, "striped", ranks, route_by="index")


def _bytes(needed: Tensor, nodes: int, ranks: int) -> tuple[float, float]:
    """Inside nodes and across, of all ranks, for an element of a chunk: forward and backward."""
    keys = routing.hops_needed(needed, nodes, ranks // nodes)
    gradients = routing.gradient_hops(needed, nodes, ranks // nodes)
    of_keys = routing.traffic(keys, ranks // nodes)
    of_gradients = routing.traffic(gradients, ranks // nodes)
    # Keys go around in the forward and once more in the backward.
    inside = 2 * WIDTH * of_keys.inside.sum() + GRADIENT_WIDTH * of_gradients.inside.sum()
    across = 2 * WIDTH * of_keys.across.sum() + GRADIENT_WIDTH * of_gradients.across.sum()
    return inside.item(), across.item()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
