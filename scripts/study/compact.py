"""A real model in few megabytes, to carry it to a machine without a network.

    python -m scripts.study.compact pack --model qwen2.5-coder-0.5b --folder outputs/qwen_0_5b \\
        --text outputs/study/text --out outputs/small
    python -m scripts.study.compact unpack --small outputs/small --out outputs/qwen_0_5b_small

pack keeps the quantized blocks of the GGUF file, of the words that the texts use alone. The
tokenizer splits these texts as before. A text with other words is split into smaller pieces. unpack
writes a Hugging Face folder. Its weights are those of --folder, to the bit, and pack checks that.
"""

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scripts.study.real_model import (
    EMBEDDING,
    HEAD,
    SOURCES,
    checked_tokens,
    fetch_gguf,
)
from scripts.study.settings import read_json
from titan_sparse.commands import parser_of, refuses
from titan_sparse.config.reading import require
from titan_sparse.data.shards import META, shard_path
from titan_sparse.data.tokenizer import load_tokenizer

BLOCKS = "blocks.safetensors"
WEIGHTS = "model.safetensors"
_MULTIPLE = 128
"""Of words, as matrix products are slow on odd sizes."""

Json = dict[str, Any]


@refuses
def main(words: list[str]) -> int:
    args = parse(words)
    args.run(args)
    print(f"wrote {args.out}")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "scripts.study.compact")
    commands = parser.add_subparsers(required=True, metavar="pack|unpack")
    packing = commands.add_parser("pack", help="the quantized blocks of the words that texts use")
    packing.set_defaults(run=run_pack)
    add = packing.add_argument
    add("--model", choices=SOURCES, required=True)
    add("--folder", type=Path, required=True, help="what scripts.study.real_model wrote of it")
    add("--text", type=Path, nargs="+", required=True, help="folders of the study's part text")
    add("--cache", type=Path, default=Path("outputs/wheels"), help="where packages are kept")
    add("--out", type=Path, required=True, help="the new folder")
    unpacking = commands.add_parser("unpack", help="a Hugging Face folder")
    unpacking.set_defaults(run=lambda args: unpack(args.small, args.out))
    unpacking.add_argument("--small", type=Path, required=True, help="what pack wrote")
    unpacking.add_argument("--out", type=Path, required=True, help="the new folder")
    return parser.parse_args(words)


def run_pack(args: argparse.Namespace) -> None:
    used = words_of(args.folder, args.text)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        gguf = Path(folder, "model.gguf")
        fetch_gguf(SOURCES[args.model], args.cache, gguf)
        pack(args.folder, gguf, used, args.out)


def words_of(folder: Path, texts: list[Path]) -> set[int]:
    """The ids that occur in prepared texts, in their prompts, and in the text that is checked."""
    used = set(checked_tokens(folder).flatten().tolist())
    for text in texts:
        for path in text.glob(f"*/{META}"):
            meta = read_json(path)
            for number in range(len(meta["shards"])):
                tokens = np.fromfile(shard_path(path.parent, number, "bin"), meta["dtype"])
                used.update(np.unique(tokens).tolist())
        used.update(np.unique(np.load(text / "prompts.npy")).tolist())
        for record in read_json(text / "prompts.json"):
            used.update(record["answer"])
    return used


def pack(folder: Path, gguf: Path, used: set[int], out: Path) -> None:
    """Write config.json, the tokenizer, and BLOCKS of the words `used` to the new folder `out`.

    Raises Refusal, one line, if blocks do not make the weights of `folder`.
    """
    require(not out.exists(), f"{out} is there already; write the name of a new folder")
    tokenizer = read_json(folder / "tokenizer.json")
    kept = kept_words(tokenizer, used)
    tensors, kinds = blocks_of(folder, gguf, kept)
    out.mkdir(parents=True)
    new_ids = {old: new for new, old in enumerate(kept)}
    write_json(out / "tokenizer.json", cut_tokenizer(tokenizer, new_ids))
    for name in ("config.json", "generation_config.json"):
        ids = read_json(folder / name)
        for key, value in ids.items():
            if key.endswith("_token_id") and value is not None:
                ids[key] = new_ids[value]
        write_json(out / name, ids | {"vocab_size": len(kept)} if "vocab_size" in ids else ids)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            shutil.copy(folder / name, out)
    save_file(tensors, out / BLOCKS, metadata=kinds)
    print(f"{len(kept):,} of {read_json(folder / 'config.json')['vocab_size']:,} words")


def write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def kept_words(tokenizer: Json, used: set[int]) -> list[int]:
    """Ids in order: of `used`, of all that they are merged from, of bytes, and of added tokens.

    The lowest others fill up to _MULTIPLE.
    """
    vocabulary = tokenizer["model"]["vocab"]
    parts: dict[int, set[int]] = {word: set() for word in vocabulary.values()}
    for pair in map(pair_of, tokenizer["model"]["merges"]):
        parts[vocabulary["".join(pair)]].update(vocabulary[piece] for piece in pair)
    kept = {added["id"] for added in tokenizer["added_tokens"]}
    waiting = used | {word for word, pieces in parts.items() if not pieces}
    while waiting:
        kept |= waiting
        waiting = {piece for word in waiting for piece in parts.get(word, ())} - kept
    for word in sorted(parts):
        if len(kept) % _MULTIPLE == 0:
            break
        # Words that others are merged from have lower ids.
        if parts[word] <= kept:
            kept.add(word)
    return sorted(kept)


def pair_of(merge: str | list[str]) -> list[str]:
    """The two pieces of a merge, which older files write as one string."""
    return merge.split(" ") if isinstance(merge, str) else merge


def cut_tokenizer(tokenizer: Json, new_ids: dict[int, int]) -> Json:
    """tokenizer.json with these words alone, under their new ids.

    Texts made of these words are split as before: each merge that takes place makes a piece of one
    of them, and so was kept, in its order.
    """
    model = tokenizer["model"]
    vocabulary = {word: new_ids[old] for word, old in model["vocab"].items() if old in new_ids}
    merges = []
    for merge in model["merges"]:
        pieces = pair_of(merge)
        if vocabulary.keys() >= {*pieces, "".join(pieces)}:
            merges.append(merge)
    added = [one | {"id": new_ids[one["id"]]} for one in tokenizer["added_tokens"]]
    cut = model | {"vocab": vocabulary, "merges": merges}
    return tokenizer | {"added_tokens": added, "model": cut}


def blocks_of(
    folder: Path, gguf: Path, kept: list[int]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The blocks of each weight in `folder`, uint8 or fp32, and how each is quantized."""
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map

    stored = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    config = read_json(folder / "config.json")
    architecture = MODEL_ARCH[config["model_type"].upper()]
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    blocks, kinds = {}, {}
    with safe_open(folder / WEIGHTS, "pt") as weights:
        for name in weights.keys():
            found = stored.get(names.get_name(name, (".weight", ".bias")))
            if name == EMBEDDING:
                # As dequantize() of real_model ties them.
                found = stored.get(names.get_name(HEAD, (".weight",)), found)
            want = weights.get_tensor(name)
            rows = found.data
            if name in (EMBEDDING, HEAD):
                rows, want = rows[kept], want[kept]
            # A copy, since the file is only read.
            blocks[name] = torch.from_numpy(np.array(rows))
            kinds[name] = found.tensor_type.name
            require(
                torch.equal(dequantized(rows, kinds[name]), want),
                f"{name} in {folder} is not what {found.name} of the GGUF file holds; "
                "write a model whose weights GGUF keeps in their order",
            )
    return blocks, kinds


def dequantized(blocks: NDArray[Any], kind: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # A copy, as what gguf returns may be a view of a file that is only read.
    return torch.from_numpy(np.array(dequantize(blocks, GGMLQuantizationType[kind])))


def unpack(small: Path, out: Path) -> None:
    """Write the Hugging Face folder `out`. Raises Refusal if it is there, or `small` is not."""
    require((small / BLOCKS).is_file(), f"{small} has no {BLOCKS}; write a folder that pack wrote")
    require(not out.exists(), f"{out} is there already; write the name of a new folder")
    shutil.copytree(small, out, ignore=shutil.ignore_patterns(BLOCKS))
    with safe_open(small / BLOCKS, "np") as file, ThreadPoolExecutor() as pool:
        kinds = file.metadata()
        blocks = [file.get_tensor(name) for name in kinds]
        weights = dict(zip(kinds, pool.map(dequantized, blocks, kinds.values()), strict=True))
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    # What is written is read as any tokenizer is.
    load_tokenizer(str(out))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
