"""Tokenize a source once, into memory-mapped shards that data.source reads.

    titan-sparse prepare_data SOURCE OUT --tokenizer tokenizer.json --processes 16

The command prints and saves a histogram of lengths. For chats (--format messages) it also
prints the share that sequences keep whole, and the share of tokens that is learned. SOURCE is
what data.source takes (a file or folder of .txt, .jsonl, .json or .parquet, a Hugging Face
dataset, python), a folder of source code (--document folder or source), or a folder of MDS
shards such as ProLong's (with index.json; needs mosaicml-streaming). After an interruption, the
same command continues
and keeps finished shards. See docs/data.md.
"""

import argparse
import logging
import os
import re
import shlex
import sys
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from titan_sparse.commands import in_tokens, parser_of, positive, refuses
from titan_sparse.config import Data, field_docs
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import OPTIONS, Recipe
from titan_sparse.models.huggingface_files import local_folder
from titan_sparse.options.values import full_disk_at, plain

REASONS_SHOWN = 10
"""Reasons for which chats are skipped that have a line of their own."""


@refuses
def main(words: list[str]) -> int:
    args = arguments(words)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    for name in ("tokenizer", "source_tokenizer"):
        folder = local_folder(getattr(args, name), f"--{name.replace('_', '-')}", weights=False)
        setattr(args, name, folder)
    recipe = Recipe(args.source, **{name: getattr(args, name) for name in OPTIONS})
    try:
        with full_disk_at(args.out):
            meta = prepare(recipe, args.out, args.processes)
    except ValueError as error:
        raise ValueError(in_flags(str(error))) from error
    except BrokenProcessPool:
        print(
            "error: a process died, perhaps because memory ran out; "
            "the same command continues, with fewer --processes",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    print(show_histogram(meta))
    # The most frequent first.
    skipped = list(meta.get("skipped", {}).items())
    for reason, count in skipped[:REASONS_SHOWN]:
        print(f"skipped {count:,} chats: {reason}")
    if rare := skipped[REASONS_SHOWN:]:
        chats = sum(count for _, count in rare)
        print(f"skipped {chats:,} chats for {len(rare):,} other reasons, which meta.json names")
    if "learned" in meta:
        print(show_kept(meta))
    print(
        f"wrote {args.out}: {meta['documents']:,} documents, {meta['tokens']:,} tokens "
        f"({meta['dtype']}) with one end-of-document token each, {len(meta['shards'])} shards; "
        "histogram in meta.json"
    )
    empty = meta["empty"] - meta["bad_rows_skipped"]
    print(
        f"left out: {empty:,} empty documents, {meta['bad_rows_skipped']:,} bad rows, "
        f"{meta['filtered']:,} shorter or longer than asked for"
    )
    tokenizer = "bytes" if recipe.tokenizer == "bytes" else args.out
    words = ["--data.source", args.out, "--data.tokenizer", tokenizer]
    print(f"train with: {shlex.join(words)}")
    return 0


def arguments(words: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE")
    add("out", metavar="OUT", help="a new folder, or one that was begun with the same options")
    docs = field_docs(Data) | field_docs(Recipe)
    for option in fields(Recipe):
        kind = plain(option.type)
        more = {"help": docs[option.name], "type": kind}
        if kind is bool:
            more = {"help": docs[option.name], "action": argparse.BooleanOptionalAction}
        elif "tokens" in get_args(option.type):
            more["type"] = in_tokens
        elif get_origin(kind) is Literal:
            more |= {"type": str, "choices": get_args(kind)}
        if option.name in OPTIONS:
            flag = option.name.replace("_", "-")
            add(f"--{flag}", dest=option.name, default=option.default, **more)
    add("--processes", type=positive, default=os.cpu_count(), help="default: as many as CPUs")
    return parser.parse_args(words)


def in_flags(message: str) -> str:
    """A message that advises keys of [data], as configurations have them, with this command's
    options."""

    def flag_of(found: re.Match[str]) -> str:
        name, _, value = found.groups()
        flag = name.replace("_", "-")
        if value in ("true", "false"):
            return f"--{flag}" if value == "true" else f"--no-{flag}"
        return f"--{flag}{' ' * (found[2] is not None)}{value or ''}"

    keys = "|".join(sorted(OPTIONS, key=len, reverse=True))
    said, semicolon, advice = message.partition("; ")
    pattern = rf'\bdata\.({keys})\b( = ("[^"]*"|true\b|false\b)?)?'
    return said + semicolon + re.sub(pattern, flag_of, advice)


def show_kept(meta: dict[str, Any]) -> str:
    """A line: the share of chats that fit whole in sequences of some lengths,
    and what is learned."""
    total = sum(documents for documents, _ in meta["histogram"].values())
    shares = []
    for length in (1 << 15, 1 << 16, 1 << 17):
        # Buckets are powers of two, and lengths there leave out the end-of-document token.
        whole = [count for low, (count, _) in meta["histogram"].items() if int(low) < length]
        shares.append(f"{length >> 10}K {sum(whole) / total:.1%}")
    learned = meta["learned"] / meta["tokens"]
    return f"a sequence keeps whole: {', '.join(shares)}; {learned:.1%} of the tokens are learned"


def show_histogram(meta: dict[str, Any]) -> str:
    """A line for each power of two: documents of that length, and their share of the tokens."""
    total = sum(tokens for _, tokens in meta["histogram"].values())
    lines = [f"{'tokens of a document':>25} {'documents':>11} {'tokens':>15} {'share':>7}"]
    for bucket, (documents, tokens) in meta["histogram"].items():
        span = f"{int(bucket):,} - {2 * int(bucket) - 1:,}"
        lines.append(f"{span:>25} {documents:>11,} {tokens:>15,} {tokens / total:>7.1%}")
    return "\n".join(lines)
