"""Text -> shards of tokens (shards.py), by parallel processes; what was finished before an interruption is kept."""

import hashlib
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from titan_sparse.config.sections import Data
from titan_sparse.data.mds import MDSRows, is_mds, unpack
from titan_sparse.data.repositories import open_folder
from titan_sparse.data.shards import (
    FORMAT,
    META,
    PLAN,
    shard_path,
    token_dtype,
    write_json,
    write_shard,
)
from titan_sparse.data.sources import LazyTexts, Source, open_source
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Recipe:
    """What fixes the shards, whatever the number of processes."""

    source: str
    """as data.source, or a folder of repositories or of MDS shards"""
    tokenizer: str = "bytes"
    source_tokenizer: str = ""
    """that made the token ids of MDS shards; empty: they hold text"""
    document: str = "row"
    """row: a row, or a file; folder: a folder directly in `source`, its files joined; source: all of it"""
    text_field: str = "text"
    subset: str = ""
    split: str = "train"
    min_length: int = 0
    """shorter documents are left out; tokens, the end-of-document token not counted, as in max_length"""
    max_length: int = 0
    """longer documents are left out; tokens; 0: none are"""
    shard_rows: int = 0
    """rows of the source that go to one shard; 0: such that there are about 256 shards, but at most 16384 rows to each"""


class MaskRanges(Protocol):
    """A source's rows, each of them one document or several."""

    def __len__(self) -> int: ...

    def documents(self, row: int) -> Iterator[NDArray[np.int32]]: ...


class TextRows:
    """Rows that are one text each."""

    def __init__(self, texts: Source, tokenizer: Tokenizer) -> None:
        self.texts, self.tokenizer = texts, tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    def documents(self, row: int) -> Iterator[NDArray[np.int32]]:
        """The text's tokens, int32 [length], without the end-of-document token."""
        yield self.tokenizer.encode(self.texts[row])


class Writer:
    """Writes any shard of a recipe; a process has one."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.tokenizer = load_tokenizer(recipe.tokenizer)
        self.rows = open_rows(recipe, self.tokenizer)
        self.shard_rows = recipe.shard_rows or min(max(-(-len(self.rows) // 256), 1), 16384)
        self.shards = -(-len(self.rows) // self.shard_rows)

    def write(self, number: int) -> int:
        """Write a shard; returns its number. Its .json holds what was kept and the lengths of all documents."""
        lengths, kept = [], []
        tokens = write_shard(
            self.folder,
            number,
            self._kept(number, lengths, kept),
            self.tokenizer.end_of_document,
            token_dtype(self.tokenizer.vocab_size),
        )
        write_json(
            shard_path(self.folder, number, "json"),
            {
                "number": number,
                "documents": len(kept),
                "tokens": tokens,
                "histogram": histogram(lengths),
                "kept": histogram(kept),
            },
        )
        return number

    def _kept(
        self, number: int, lengths: list[int], kept: list[int]
    ) -> Iterator[NDArray[np.int32]]:
        """The documents of a shard within the limits; notes the length of each that is not empty, and of each kept."""
        first = number * self.shard_rows
        for row in range(first, min(first + self.shard_rows, len(self.rows))):
            for ids in self.rows.documents(row):
                if len(ids) == 0:
                    continue
                lengths.append(len(ids))
                if self.recipe.min_length <= len(ids) <= (self.recipe.max_length or len(ids)):
                    kept.append(len(ids))
                    yield ids


def histogram(lengths: list[int]) -> dict[str, list[int]]:
    """Documents by length: {power of two: [documents, their tokens]} of those with that many tokens to below twice as many."""
    counts, tokens = Counter(), Counter()
    for length in lengths:
        bucket = 1 << (length.bit_length() - 1)
        counts[bucket] += 1
        tokens[bucket] += length
    return {str(bucket): [counts[bucket], tokens[bucket]] for bucket in sorted(counts)}


def open_rows(recipe: Recipe, tokenizer: Tokenizer) -> MaskRanges:
    """Open the source of a recipe. Raises ValueError if that is impossible or an option would be ignored."""
    mds = recipe.document == "row" and is_mds(recipe.source)
    if mds:
        unused = ("subset", "split")
    elif recipe.document == "row":
        unused = ("source_tokenizer",)
    else:
        unused = ("source_tokenizer", "text_field", "subset", "split")
    defaults = {item.name: item.default for item in fields(Recipe)}
    for name in unused:
        if getattr(recipe, name) != defaults[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} would be ignored with this source; leave it out"
            )
    if mds:
        source_tokenizer = (
            load_tokenizer(recipe.source_tokenizer) if recipe.source_tokenizer else None
        )
        return MDSRows(recipe.source, recipe.text_field, tokenizer, source_tokenizer)
    if recipe.document == "row":
        data = Data(
            source=recipe.source,
            text_field=recipe.text_field,
            subset=recipe.subset,
            split=recipe.split,
        )
        return TextRows(open_source(data), tokenizer)
    return TextRows(open_folder(recipe.source, whole=recipe.document == "source"), tokenizer)


def prepare(
    recipe: Recipe, out: str, processes: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write the folder `out`, or what is missing of it; returns what meta.json holds.

    `progress(done, shards)` is called at the beginning and after every shard. Raises ValueError for a source or options that
    cannot be used, for an `out` that was begun with another source, tokenizer or option, and if no document is left.
    """
    folder = Path(out).expanduser()
    _check_out(folder, out)
    if recipe.document == "row" and is_mds(recipe.source):
        unpack(recipe.source)
    writer = Writer(recipe, folder)
    _check_plan(folder, out, _plan(writer))
    missing = [
        number
        for number in range(writer.shards)
        if not shard_path(folder, number, "json").is_file()
    ]
    done = writer.shards - len(missing)
    progress(done, writer.shards)
    for done, _ in enumerate(_written(writer, missing, processes), start=done + 1):
        progress(done, writer.shards)
    return _finish(writer, out)


_writer: Writer | None = None


def _start_worker(recipe: Recipe, folder: Path) -> None:
    global _writer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to deal with
    _writer = Writer(recipe, folder)


def _write(number: int) -> int:
    return _writer.write(number)


def _written(writer: Writer, missing: list[int], processes: int) -> Iterator[int]:
    """Write the missing shards; yields the number of each when it is whole."""
    processes = min(processes, len(missing))
    if processes <= 1:
        yield from map(writer.write, missing)
        return
    # Not forked from here: the libraries that read and tokenize have threads by now. From a server that only imported them.
    context = get_context("forkserver")
    context.set_forkserver_preload(["datasets", __name__])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (writer.recipe, writer.folder))
    try:
        for future in as_completed([pool.submit(_write, number) for number in missing]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _check_out(folder: Path, out: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{out} is a file; write a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PLAN).is_file():
        raise ValueError(f"{out} holds other files; write a new or empty folder")


def _plan(writer: Writer) -> dict[str, Any]:
    tokenizer = writer.tokenizer
    return {
        "format": FORMAT,
        **asdict(writer.recipe),
        "source": _absolute(writer.recipe.source),
        "tokenizer_digest": tokenizer.digest,
        "end_of_document": tokenizer.end_of_document,
        "vocab_size": tokenizer.vocab_size,
        "shard_rows": writer.shard_rows,
        "rows": len(writer.rows),
        "source_files": _source_digest(writer),
    }


def _absolute(source: str) -> str:
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _source_digest(writer: Writer) -> str:
    """A digest of names, sizes and times of change of the source's files; empty for a dataset of the hub."""
    root = Path(writer.recipe.source).expanduser()
    texts = getattr(writer.rows, "texts", None)
    if writer.recipe.source == "python" and isinstance(texts, LazyTexts):
        files = [path for _, path in texts.items]
    elif root.exists():
        files = (
            sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        )
    else:
        return ""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _check_plan(folder: Path, out: str, plan: dict[str, Any]) -> None:
    """Write the plan, or compare it with the one that `out` was begun with."""
    path = folder / PLAN
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, plan)
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    # A path that is written differently is the same tokenizer if its digest is.
    differing = [key for key in plan if key != "tokenizer" and saved.get(key) != plan[key]]
    if differing:
        details = "; ".join(
            "the source's files have changed"
            if key == "source_files"
            else f"{key} was {saved.get(key)} and is {plan[key]}"
            for key in differing
        )
        raise ValueError(
            f"{out} was begun with something else ({details}); write another folder, or delete this one"
        )


def _finish(writer: Writer, out: str) -> dict[str, Any]:
    folder = writer.folder
    shards = [
        json.loads(shard_path(folder, number, "json").read_text(encoding="utf-8"))
        for number in range(writer.shards)
    ]
    documents, tokens = (sum(shard[key] for shard in shards) for key in ("documents", "tokens"))
    if documents == 0:
        raise ValueError(
            f"no document of {writer.recipe.source} is within --min-length and --max-length; {out} holds none"
        )
    meta = {
        **json.loads((folder / PLAN).read_text(encoding="utf-8")),
        "dtype": token_dtype(writer.tokenizer.vocab_size),
        "documents": documents,
        "tokens": tokens,
        "histogram": _sum([shard["histogram"] for shard in shards]),
        "kept": _sum([shard["kept"] for shard in shards]),
        "shards": [
            {key: shard[key] for key in ("number", "documents", "tokens")} for shard in shards
        ],
    }
    _copy_tokenizer(writer.recipe.tokenizer, folder)
    write_json(folder / META, meta)
    return meta


def _copy_tokenizer(name: str, folder: Path) -> None:
    """Put the tokenizer's files beside the shards, so that the folder can be data.tokenizer too."""
    if name == "bytes":
        return
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    (folder / "tokenizer.json").write_bytes(path.read_bytes())
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        (folder / "tokenizer_config.json").write_bytes(config.read_bytes())


def _sum(histograms: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for item in histograms:
        for bucket, pair in item.items():
            total[bucket] = [a + b for a, b in zip(total.get(bucket, [0, 0]), pair, strict=True)]
    return dict(sorted(total.items(), key=lambda item: int(item[0])))
