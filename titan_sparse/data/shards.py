"""Prepared tokens on disk: memory-mapped shards with document offsets. Written by preparing.py,
read by the loader.

A folder holds, for every shard k,
  shard_k.bin      the tokens of its documents one after the other, uint16 or uint32
                   (little-endian), each document closed by the end-of-document token
  shard_k.idx.npy  int64 [documents + 1]: where each document begins in shard_k.bin, in tokens, and
                   where the last ends
  shard_k.json     its counts; written last, so that a shard with it is whole
and, once all shards are whole, meta.json: FORMAT, dtype, the tokenizer's digest and end-of-document
token, and all counts.
"""

import bisect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.tokenizer import Tokenizer

FORMAT = "titan_sparse tokens 1"
META = "meta.json"
PLAN = "plan.json"


def shard_path(folder: Path, number: int, ending: str) -> Path:
    """Where a shard's file with the ending "bin", "idx.npy" or "json" lies."""
    return folder / f"shard_{number:05d}.{ending}"


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds all ids of a vocabulary, as meta.json names it."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all: a file of that name is never half-written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def write_shard(
    folder: Path, number: int, documents: Iterable[NDArray[np.integer]], end: int, dtype: str
) -> int:
    """Write documents (int [length], no end-of-document token) as a shard.

    Returns the number of its tokens, end-of-document tokens included. Only one document is in
    memory at a time. The caller writes the shard's .json, which makes it whole.
    """
    little_endian = np.dtype(dtype).newbyteorder("<")
    offsets = [0]
    with shard_path(folder, number, "bin").open("wb") as file:
        for ids in documents:
            closed = np.append(ids, end).astype(little_endian)
            closed.tofile(file)
            offsets.append(offsets[-1] + len(ids) + 1)
    np.save(shard_path(folder, number, "idx.npy"), np.asarray(offsets, dtype=np.int64))
    return offsets[-1]


def is_prepared(source: str) -> bool:
    """Whether data.source is a folder of shards, finished or not."""
    path = Path(source).expanduser()
    return any(_has_format(path / name) for name in (META, PLAN))


class TokenShards:
    """Documents of a folder of shards, in the order of the source. Nothing is read before it is
    asked for.

    Raises ValueError, naming data.source or data.tokenizer, for a folder that is unfinished or
    damaged, or that was made with another tokenizer.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        folder = Path(source).expanduser()
        if not _has_format(folder / META):
            raise ValueError(
                f'data.source = "{source}" is not finished; run the same scripts.prepare_data again'
            )
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        _check_counts(source, meta)
        _check_tokenizer(source, meta, tokenizer)
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        # An empty file cannot be mapped, and a shard whose documents were all filtered out is one.
        shards = [shard for shard in meta["shards"] if shard["documents"]]
        self.total_tokens: int = meta["tokens"]
        # Of each shard: where its documents begin, its tokens, and the index of its first document.
        self._offsets = []
        self._tokens = []
        self._first = [0]
        for shard in shards:
            index_path = shard_path(folder, shard["number"], "idx.npy")
            tokens_path = shard_path(folder, shard["number"], "bin")
            self._offsets.append(_map_offsets(source, index_path))
            self._tokens.append(_map_tokens(source, tokens_path, dtype, shard["tokens"]))
            self._first.append(self._first[-1] + shard["documents"])

    def __len__(self) -> int:
        return self._first[-1]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, its end-of-document token included; int64 [documents]."""
        return np.concatenate([np.diff(offsets) for offsets in self._offsets])

    def length(self, index: int) -> int:
        """Tokens of a document, its end-of-document token included."""
        shard, row = self._find(index)
        start, stop = self._offsets[shard][row : row + 2]
        return int(stop - start)

    def tokens(self, index: int) -> NDArray[np.integer]:
        """Tokens of a document, its end-of-document token included; a view of the file, uint16 or
        uint32 [length]."""
        shard, row = self._find(index)
        start, stop = self._offsets[shard][row : row + 2]
        return self._tokens[shard][start:stop]

    def forget(self, index: int) -> None:
        """Nothing to drop: the operating system decides which pages of a file stay in memory."""

    def _find(self, index: int) -> tuple[int, int]:
        """The shard of a document, and its row in that shard."""
        shard = bisect.bisect_right(self._first, index) - 1
        return shard, index - self._first[shard]


def _has_format(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _check_counts(source: str, meta: dict[str, Any]) -> None:
    """Refuses a meta.json that lacks what it was written with."""
    keys = {"dtype", "tokenizer", "tokenizer_digest", "end_of_document", "tokens", "shards"}
    missing = keys - meta.keys()
    if missing:
        raise ValueError(
            f'data.source = "{source}": {META} has no {min(missing)}; copy the folder again, or '
            "prepare it anew"
        )


def _map_offsets(source: str, path: Path) -> NDArray[np.int64]:
    try:
        return np.load(path, mmap_mode="r")
    # A file that is missing, cut short, or none of NumPy's.
    except (OSError, ValueError) as error:
        raise ValueError(
            f'data.source = "{source}": {path.name} cannot be read: {error}; copy the folder '
            "again, or prepare it anew"
        ) from error


def _map_tokens(source: str, path: Path, dtype: np.dtype, tokens: int) -> NDArray[np.integer]:
    size = path.stat().st_size if path.is_file() else 0
    expected_size = tokens * dtype.itemsize
    if size != expected_size:
        raise ValueError(
            f'data.source = "{source}": {path.name} has {size} bytes instead of {expected_size}; '
            "copy the folder again, or prepare it anew"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _check_tokenizer(source: str, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    digest = meta["tokenizer_digest"]
    if (digest, meta["end_of_document"]) == (tokenizer.digest, tokenizer.end_of_document):
        return
    wanted = "bytes" if digest == "bytes" else source
    raise ValueError(
        f'data.source = "{source}" was made with the tokenizer "{meta["tokenizer"]}" (digest '
        f'{digest[:12]}), not with data.tokenizer; write data.tokenizer = "{wanted}"'
    )
