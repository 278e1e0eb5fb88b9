"""Prepared tokens on disk: memory-mapped shards with document offsets. Written by preparing.py,
read by the loader.

A folder holds, for every shard k,
  shard_k.bin      the tokens of its documents one after the other, uint16 or uint32
                   (little-endian), each document closed by the end-of-document token
  shard_k.idx.npy  int64 [documents + 1]: where each document begins in shard_k.bin, in tokens, and
                   where the last ends
  shard_k.json     its counts; written last, so that a shard with it is whole
and, once all shards are whole, meta.json: FORMAT or FORMAT_OF_CHATS, dtype, the tokenizer's digest and end-of-document
token, and all counts.
"""

import bisect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.formats import Encoded, SampleFormat
from titan_sparse.data.tokenizer import Tokenizer

FORMAT = "titan_sparse tokens 1"
FORMAT_OF_CHATS = "titan_sparse chats 1"
"""With masks. Another name, as a reader without masks would learn every token."""
FORMATS = (FORMAT, FORMAT_OF_CHATS)
CHECKED_AT_ONCE = 1 << 25
"""A folder of so many tokens is looked through when it is opened; of a larger one, each document
when it is read."""
META = "meta.json"
PLAN = "plan.json"
SHARD_COUNTS = ("number", "documents", "tokens")
"""Of each shard in meta.json."""


def shard_path(folder: Path, number: int, ending: str) -> Path:
    """Where a shard's file with the ending "bin", "idx.npy", "mask" or "json" lies."""
    return folder / f"shard_{number:05d}.{ending}"


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds all ids of a vocabulary, as meta.json names it."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all: a file of that name is never half-written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def write_shard(folder: Path, number: int, documents: Iterable[Encoded], dtype: str) -> int:
    """Write documents as a shard, with a mask if they have one.

    Returns the number of its tokens, end-of-document tokens included. Only one document is in
    memory at a time. The caller writes the shard's .json, which makes it whole.
    """
    little_endian = np.dtype(dtype).newbyteorder("<")
    offsets = [0]
    mask_path = shard_path(folder, number, "mask")
    with shard_path(folder, number, "bin").open("wb") as file, mask_path.open("wb") as mask_file:
        for tokens, learned in documents:
            tokens.astype(little_endian).tofile(file)
            if learned is not None:
                learned.astype(np.uint8).tofile(mask_file)
            offsets.append(offsets[-1] + len(tokens))
    if mask_path.stat().st_size == 0:
        mask_path.unlink()
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
        self.source = source
        self.vocab_size = tokenizer.vocab_size
        self.end_of_document = tokenizer.end_of_document
        self.total_tokens: int = meta["tokens"]
        self.sample_format = _sample_format(source, meta)
        self.total_learned: int = meta.get("learned", self.total_tokens)
        # Of each shard: where its documents begin, its tokens and mask, which of its documents were
        # looked at, and the index of its first document.
        self._offsets = []
        self._tokens = []
        self._masks: list[NDArray[np.uint8]] = []
        self._checked: list[NDArray[np.bool_]] = []
        self._numbers: list[int] = []
        self._first = [0]
        for shard in meta["shards"]:
            offsets, tokens = map_shard(source, folder, shard, meta["dtype"])
            if shard["documents"] == 0:
                continue
            self._offsets.append(offsets)
            self._tokens.append(tokens)
            if self.sample_format.is_chat:
                self._masks.append(map_mask(source, folder, shard))
            self._checked.append(np.zeros(shard["documents"], dtype=bool))
            self._numbers.append(shard["number"])
            self._first.append(self._first[-1] + shard["documents"])
        if self.total_tokens <= CHECKED_AT_ONCE:
            for index in range(len(self)):
                self.tokens(index)

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
        uint32 [length].

        Raises ValueError, when it is read for the first time, if it holds an id beyond the
        vocabulary or is not closed by the one end-of-document token.
        """
        shard, row = self._find(index)
        start, stop = self._offsets[shard][row : row + 2]
        tokens = self._tokens[shard][start:stop]
        if not self._checked[shard][row]:
            self._check(tokens, f"{_name(self._numbers[shard])}, document {row + 1}")
            self._checked[shard][row] = True
        return tokens

    def learned(self, index: int) -> NDArray[np.bool_] | None:
        """Which tokens of a document are predicted in training, [length]; None: all."""
        if not self._masks:
            return None
        shard, row = self._find(index)
        start, stop = self._offsets[shard][row : row + 2]
        return self._masks[shard][start:stop] != 0

    def forget(self, index: int) -> None:
        """Nothing to drop: the operating system decides which pages of a file stay in memory."""

    def raw(self, index: int) -> bytes:
        """The tokens of a document, and which of them are learned where that is given."""
        learned = self.learned(index)
        return self.tokens(index).tobytes() + (b"" if learned is None else learned.tobytes())

    def _check(self, tokens: NDArray[np.integer], where: str) -> None:
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            _refuse(
                self.source,
                f"{where} holds the token {largest}, of a vocabulary of {self.vocab_size}",
            )
        if tokens[-1] != self.end_of_document:
            _refuse(self.source, f"{where} does not end with the end-of-document token")

    def _find(self, index: int) -> tuple[int, int]:
        """The shard of a document, and its row in that shard."""
        shard = bisect.bisect_right(self._first, index) - 1
        return shard, index - self._first[shard]


def _has_format(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") in FORMATS
    except (OSError, ValueError, AttributeError):
        return False


def _check_counts(source: str, meta: dict[str, Any]) -> None:
    """Refuses a meta.json that lacks what it was written with, or contradicts itself."""
    kinds = {
        "dtype": str,
        "tokenizer": str,
        "tokenizer_digest": str,
        "end_of_document": int,
        "documents": int,
        "tokens": int,
        "shards": list,
    }
    missing = kinds.keys() - meta.keys()
    if missing:
        _refuse(source, f"{META} has no {min(missing)}")
    for key, kind in kinds.items():
        if type(meta[key]) is not kind:
            _refuse(source, f"{META} has an odd {key}")
    if meta["dtype"] not in ("uint16", "uint32"):
        _refuse(source, f"{META} has an odd dtype")
    for shard in meta["shards"]:
        counts = [shard.get(key) for key in SHARD_COUNTS] if isinstance(shard, dict) else [None]
        if not all(type(count) is int and count >= 0 for count in counts):
            _refuse(source, f"{META} has odd shards")
    for key in ("documents", "tokens"):
        written = sum(shard[key] for shard in meta["shards"])
        if meta[key] != written:
            _refuse(source, f"{META} has {meta[key]} {key}, its shards {written}")
    if meta["documents"] == 0:
        _refuse(source, f"{META} has no documents")


def map_shard(
    source: str, folder: Path, counts: dict[str, int], dtype: str
) -> tuple[NDArray[np.int64], NDArray[np.integer]]:
    """Offsets, int64 [documents + 1], and tokens of a shard, which are not in memory.

    Raises ValueError, naming the file, if they do not match each other and the shard's counts.
    """
    tokens_path = shard_path(folder, counts["number"], "bin")
    offsets_path = shard_path(folder, counts["number"], "idx.npy")
    tokens = _map_tokens(source, tokens_path, np.dtype(dtype).newbyteorder("<"), counts["tokens"])
    offsets = _map_offsets(source, offsets_path)
    name = offsets_path.name
    if offsets.ndim != 1 or offsets.dtype != np.int64:
        _refuse(source, f"{name} holds {offsets.dtype} {list(offsets.shape)} instead of offsets")
    if len(offsets) != counts["documents"] + 1:
        _refuse(source, f"{name} has {len(offsets) - 1} documents instead of {counts['documents']}")
    if (offsets[0], offsets[-1]) != (0, counts["tokens"]):
        _refuse(
            source,
            f"{name} goes from {offsets[0]} to {offsets[-1]} instead of 0 to {counts['tokens']}",
        )
    # Each document has a token and the one that closes it.
    short = np.flatnonzero(np.diff(offsets) < 2)
    if len(short):
        _refuse(source, f"{name}: document {short[0] + 1} has fewer than 2 tokens")
    return offsets, tokens


def map_mask(source: str, folder: Path, counts: dict[str, int]) -> NDArray[np.uint8]:
    """Whether each token of a shard is learned, uint8 [tokens], not in memory.

    Raises ValueError, naming the file, if it has another size.
    """
    path = shard_path(folder, counts["number"], "mask")
    return _map_tokens(source, path, np.dtype(np.uint8), counts["tokens"])


def _sample_format(source: str, meta: dict[str, Any]) -> SampleFormat:
    if meta["format"] == FORMAT:
        return SampleFormat()
    values = [meta.get(key) for key in ("row_format", "loss_on", "template_digest")]
    if not all(isinstance(value, str) for value in values) or type(meta.get("learned")) is not int:
        _refuse(source, f"{META} does not say what is learned")
    return SampleFormat(*values)


def _map_offsets(source: str, path: Path) -> NDArray[np.int64]:
    try:
        return np.load(path, mmap_mode="r")
    # A file that is missing, empty, cut short, or none of NumPy's.
    except (OSError, EOFError, ValueError) as error:
        _refuse(source, f"{path.name} cannot be read: {error}", error)


def _map_tokens(source: str, path: Path, dtype: np.dtype, tokens: int) -> NDArray[np.integer]:
    size = path.stat().st_size if path.is_file() else 0
    expected_size = tokens * dtype.itemsize
    if size != expected_size:
        _refuse(source, f"{path.name} has {size} bytes instead of {expected_size}")
    # An empty file cannot be mapped, and a shard whose documents were all filtered out is one.
    if size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _refuse(source: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f'data.source = "{source}": {reason}; copy the folder again, or prepare it anew'
    ) from cause


def _name(number: int) -> str:
    return shard_path(Path(), number, "bin").name


def _check_tokenizer(source: str, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    digest = meta["tokenizer_digest"]
    if (digest, meta["end_of_document"]) == (tokenizer.digest, tokenizer.end_of_document):
        return
    wanted = "bytes" if digest == "bytes" else source
    raise ValueError(
        f'data.source = "{source}" was made with the tokenizer "{meta["tokenizer"]}" (digest '
        f'{digest[:12]}), not with data.tokenizer; write data.tokenizer = "{wanted}"'
    )
