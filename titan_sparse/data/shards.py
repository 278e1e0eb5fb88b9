"""Prepared tokens on disk: shards with document offsets. preparing.py writes them, and the loader
reads them document by document.

A folder holds, for every shard k,
  shard_k.bin      the tokens of its documents one after the other, uint16 or uint32
                   (little-endian), each document closed by the end-of-document token
  shard_k.idx.npy  int64 [documents + 1]: where each document begins in shard_k.bin, in tokens, and
                   where the last ends
  shard_k.json     its counts; written last, so that a shard with this file is complete
Once all shards are complete, it also holds meta.json: FORMAT or FORMAT_OF_CHATS, dtype, the
tokenizer's digest and end-of-document token, and all counts.
"""

import bisect
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.tokenizer import Encoded, SampleFormat, Tokenizer

FORMAT = "titan_sparse tokens 1"
FORMAT_OF_CHATS = "titan_sparse chats 1"
"""The format with masks. It has its own name because a reader without masks would learn every
token."""
FORMATS = (FORMAT, FORMAT_OF_CHATS)
CHECKED_AT_ONCE = 1 << 25
"""A folder of at most this many tokens is checked when it is opened. In a larger folder, each
document is checked when it is read."""
MAPPED_ABOVE = 1 << 20
"""Tokens. A longer document is memory-mapped, because a sequence needs only a part of it. A shorter
one is read, which takes a quarter of the time. Maps are not kept: a process may have only 65530."""
META = "meta.json"
PLAN = "plan.json"
SHARD_COUNTS = ("number", "documents", "tokens")
"""Counts of each shard in meta.json."""


FileState = tuple[int, int]
"""Size and modification time."""


class DataError(OSError):
    """Data that a running job cannot continue with. The job ends with one line and status 1."""


def shard_path(folder: Path, number: int, ending: str) -> Path:
    """Where a shard's file with the ending "bin", "idx.npy", "mask" or "json" lies."""
    return folder / f"shard_{number:05d}.{ending}"


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds all ids of a vocabulary, as meta.json names it."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_json(path: Path, value: Any) -> None:
    """Write the file completely or not at all, so that it is never half-written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def write_shard(
    folder: Path, number: int, documents: Iterable[Encoded], dtype: str
) -> tuple[list[int], int]:
    """Write documents as a shard, with a mask if they have one.

    Returns where its documents begin and where the last one ends, in tokens, and the number of
    learned tokens. Only one document is in memory at a time. The caller writes the shard's .json,
    which makes it complete.
    """
    little_endian = np.dtype(dtype).newbyteorder("<")
    offsets = [0]
    learned_tokens = 0
    mask_path = shard_path(folder, number, "mask")
    with shard_path(folder, number, "bin").open("wb") as file, mask_path.open("wb") as mask_file:
        for tokens, learned in documents:
            tokens.astype(little_endian).tofile(file)
            if learned is not None:
                learned.astype(np.uint8).tofile(mask_file)
                learned_tokens += int(learned.sum())
            offsets.append(offsets[-1] + len(tokens))
    if mask_path.stat().st_size == 0:
        mask_path.unlink()
    np.save(shard_path(folder, number, "idx.npy"), np.asarray(offsets, dtype=np.int64))
    return offsets, learned_tokens


def is_prepared(source: str) -> bool:
    """Whether data.source is a folder of shards, finished or not."""
    path = Path(source).expanduser()
    return any(_has_format(path / name) for name in (META, PLAN))


class _Shard(NamedTuple):
    offsets: NDArray[np.int64]
    """[documents + 1], where its documents begin and the last one ends"""
    checked: NDArray[np.bool_]
    """[documents], which of them have been checked"""
    files: dict[str, tuple[Path, FileState]]
    """of tokens and masks, by their endings, and their states"""


class TokenShards:
    """Documents of a folder of shards, in the order of the source. The tokens of a large folder are
    not read before they are asked for.

    Raises ValueError, naming data.source or data.tokenizer, for a folder that is unfinished or
    damaged, or that was made with another tokenizer.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        folder = Path(source).expanduser()
        if not _has_format(folder / META):
            raise ValueError(
                f'data.source = "{source}" is not finished; run the same titan-sparse prepare_data again'
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
        self.dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        self._shards: list[_Shard] = []
        # The index of each shard's first document, and the number of all documents.
        self._first = [0]
        endings = ("bin", "mask") if self.sample_format.is_chat else ("bin",)
        for counts in meta["shards"]:
            offsets = read_offsets(source, folder, counts, meta["dtype"], "mask" in endings)
            if counts["documents"] == 0:
                continue
            paths = {ending: shard_path(folder, counts["number"], ending) for ending in endings}
            files = {ending: (path, _state(path)) for ending, path in paths.items()}
            self._shards.append(_Shard(offsets, np.zeros(counts["documents"], dtype=bool), files))
            self._first.append(self._first[-1] + counts["documents"])
        if self.total_tokens <= CHECKED_AT_ONCE:
            for index in range(len(self)):
                self.tokens(index)

    def __len__(self) -> int:
        return self._first[-1]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, its end-of-document token included; int64 [documents]."""
        return np.concatenate([np.diff(shard.offsets) for shard in self._shards])

    def length(self, index: int) -> int:
        shard, row = self._find(index)
        return int(shard.offsets[row + 1] - shard.offsets[row])

    def tokens(self, index: int) -> NDArray[np.integer]:
        """Tokens of a document, its end-of-document token included; uint16 or uint32 [length].

        Raises DataError if the file has changed since it was opened. When the document is read for
        the first time, raises ValueError if it holds an id beyond the vocabulary or is not closed
        by exactly one end-of-document token.
        """
        shard, row = self._find(index)
        tokens = self._part(shard, row, "bin", self.dtype)
        if not shard.checked[row]:
            path, _ = shard.files["bin"]
            self._check(tokens, f"{path.name}, document {row + 1}")
            shard.checked[row] = True
        return tokens

    def learned(self, index: int) -> NDArray[np.bool_] | None:
        if not self.sample_format.is_chat:
            return None
        return self._part(*self._find(index), "mask", np.dtype(np.uint8)) != 0

    def check_unchanged(self) -> None:
        """Raises DataError if a file of tokens has changed since it was opened."""
        for shard in self._shards:
            for path, state in shard.files.values():
                self._check_file(path, state)

    def forget(self, index: int) -> None:
        """Do nothing: the operating system decides which pages of a file stay in memory."""

    def raw(self, index: int) -> bytes:
        """The tokens of a document and, if it has one, its mask of learned tokens."""
        learned = self.learned(index)
        return self.tokens(index).tobytes() + (b"" if learned is None else learned.tobytes())

    def _part(self, shard: _Shard, row: int, ending: str, dtype: np.dtype) -> NDArray[Any]:
        """One document's part of a shard's file."""
        path, state = shard.files[ending]
        # Reading a map of a file that was cut off gives zeros, or kills the process.
        self._check_file(path, state)
        start, stop = shard.offsets[row : row + 2].tolist()
        offset = start * dtype.itemsize
        if stop - start <= MAPPED_ABOVE:
            return np.fromfile(path, dtype, stop - start, offset=offset)
        return np.memmap(path, dtype, "r", offset, (stop - start,))

    def _check_file(self, path: Path, state: FileState) -> None:
        if _state(path) != state:
            raise DataError(
                f'data.source = "{self.source}": {path.name} was changed during the run; copy it '
                "again as it was, or prepare a new folder and begin a new run"
            )

    def _check(self, tokens: NDArray[np.integer], where: str) -> None:
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            _refuse(
                self.source,
                f"{where} holds the token {largest}, of a vocabulary of {self.vocab_size}",
            )
        if tokens[-1] != self.end_of_document:
            _refuse(self.source, f"{where} does not end with the end-of-document token")

    def _find(self, index: int) -> tuple[_Shard, int]:
        number = bisect.bisect_right(self._first, index) - 1
        return self._shards[number], index - self._first[number]


def _has_format(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("format") in FORMATS
    except (OSError, ValueError, AttributeError):
        return False


def _check_counts(source: str, meta: dict[str, Any]) -> None:
    """Refuse a meta.json that lacks an entry or contradicts itself."""
    kinds = {
        "dtype": str,
        "tokenizer": str,
        "tokenizer_digest": str,
        "end_of_document": int,
        "documents": int,
        "tokens": int,
        "shards": list,
    }
    for key, kind in kinds.items():
        if type(meta.get(key)) is not kind:
            _refuse(source, f"{META} has no valid {key}")
    if meta["dtype"] not in ("uint16", "uint32"):
        _refuse(source, f"{META} has no valid dtype")
    for shard in meta["shards"]:
        counts = [shard.get(key) for key in SHARD_COUNTS] if isinstance(shard, dict) else [None]
        if not all(type(count) is int and count >= 0 for count in counts):
            _refuse(source, f"{META} has no valid shards")
    for key in ("documents", "tokens"):
        written = sum(shard[key] for shard in meta["shards"])
        if meta[key] != written:
            _refuse(source, f"{META} has {meta[key]} {key}, its shards {written}")
    if meta["documents"] == 0:
        _refuse(source, f"{META} has no documents")


def read_offsets(
    source: str, folder: Path, counts: dict[str, int], dtype: str, has_mask: bool
) -> NDArray[np.int64]:
    """Where the documents of a shard begin, int64 [documents + 1].

    Raises ValueError, naming the file, if the files do not match each other and the shard's counts.
    """
    sizes = {"bin": counts["tokens"] * np.dtype(dtype).itemsize}
    if has_mask:
        sizes["mask"] = counts["tokens"]
    for ending, expected in sizes.items():
        path = shard_path(folder, counts["number"], ending)
        # A shard whose documents were all filtered out has no mask.
        size = max(_state(path)[0], 0)
        if size != expected:
            _refuse(source, f"{path.name} has {size} bytes instead of {expected}")
    offsets_path = shard_path(folder, counts["number"], "idx.npy")
    offsets = _load_offsets(source, offsets_path)
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
    # Each document has at least one token and the token that closes it.
    short = np.flatnonzero(np.diff(offsets) < 2)
    if len(short):
        _refuse(source, f"{name}: document {short[0] + 1} has fewer than 2 tokens")
    return offsets


def _state(path: Path) -> FileState:
    """The state of a file; the size is -1 if the file is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return -1, 0
    return stat.st_size, stat.st_mtime_ns


def _sample_format(source: str, meta: dict[str, Any]) -> SampleFormat:
    if meta["format"] == FORMAT:
        return SampleFormat()
    values = [meta.get(key) for key in ("row_format", "loss_on", "template_digest")]
    if not all(isinstance(value, str) for value in values) or type(meta.get("learned")) is not int:
        _refuse(source, f"{META} does not say what is learned")
    return SampleFormat(*values)


def _load_offsets(source: str, path: Path) -> NDArray[np.int64]:
    try:
        return np.load(path)
    # The file is missing, empty, cut short, or not a NumPy file.
    except (OSError, EOFError, ValueError, MemoryError) as error:
        _refuse(source, f"{path.name} cannot be read: {error}", error)


def _refuse(source: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f'data.source = "{source}": {reason}; copy the folder again, or prepare it anew'
    ) from cause


def _check_tokenizer(source: str, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    digest = meta["tokenizer_digest"]
    if (digest, meta["end_of_document"]) == (tokenizer.digest, tokenizer.end_of_document):
        return
    wanted = "bytes" if digest == "bytes" else source
    raise ValueError(
        f'data.source = "{source}" was made with the tokenizer "{meta["tokenizer"]}" (digest '
        f'{digest[:12]}), not with data.tokenizer; write data.tokenizer = "{wanted}"'
    )
