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
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from titan_sparse.config.sections import Data
from titan_sparse.config.sources import source_weights
from titan_sparse.data.tokenizer import Encoded, SampleFormat, Tokenizer

FORMAT = "titan_sparse tokens 1"
FORMAT_OF_CHATS = "titan_sparse chats 1"
"""The format with masks. It has its own name because a reader without masks would learn every
token."""
FORMATS = (FORMAT, FORMAT_OF_CHATS)
MAPPED_ABOVE = 1 << 20
"""Tokens. A longer document is memory-mapped, because a sequence needs only a part of it. A shorter
one is read, which takes a quarter of the time. Maps are not kept: a process may have only 65530."""
META = "meta.json"
PLAN = "plan.json"


FileState = tuple[int, int]
"""Size and modification time."""


class DataError(OSError):
    """Data that a running job cannot continue with. The job ends with one line and status 1."""


def shard_path(folder: Path, number: int, ending: str) -> Path:
    """The path of a shard's file with the ending "bin", "idx.npy", "mask" or "json"."""
    return folder / f"shard_{number:05d}.{ending}"


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds all ids of a vocabulary, as meta.json names it."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_json(path: Path, value: Any) -> None:
    """Write the file completely or not at all, so that it is never
    half-written. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
            # tofile() would not say that the disk is full.
            file.write(tokens.astype(little_endian))
            if learned is not None:
                mask_file.write(learned.astype(np.uint8))
                learned_tokens += int(learned.sum())
            offsets.append(offsets[-1] + len(tokens))
    if mask_path.stat().st_size == 0:
        mask_path.unlink()
    index = io.BytesIO()
    np.save(index, np.asarray(offsets, dtype=np.int64))
    shard_path(folder, number, "idx.npy").write_bytes(index.getbuffer())
    return offsets, learned_tokens


def is_prepared(source: str) -> bool:
    """True if data.source is a folder of shards, finished or not."""
    return any(read_meta(source, name) for name in (META, PLAN))


def adds_bos(data: Data) -> bool:
    """True if texts of a run begin with the tokenizer's `begin`: data.add_bos, unless all texts of
    data.source are prepared tokens without it. Chats do not say."""
    metas = [read_meta(source) for source in source_weights(data.source)]
    is_begun = [
        not meta or meta["add_bos"]
        for meta in metas
        if not meta or SampleFormat(meta.get("row_format", "text")).takes_bos
    ]
    return data.add_bos and (not is_begun or any(is_begun))


class TokenShards:
    """Documents of a folder of shards, in the order of the source. The tokens of a large folder are
    not read before they are asked for.

    Raises ValueError, naming data.source or data.tokenizer, for a folder that is unfinished or
    damaged, or that was made with another tokenizer.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.folder = Path(source).expanduser()
        meta = read_meta(source)
        if not meta:
            raise ValueError(
                f'data.source = "{source}" is not finished; run the same titan-sparse prepare_data again'
            )
        self.source = source
        self.tokenizer = tokenizer
        self._meta = meta
        # The number of each shard, and where its documents begin and the last one ends.
        self._shards: list[tuple[int, NDArray[np.int64]]] = []
        self._states: dict[Path, FileState] = {}
        # The index of each shard's first document, and the number of all documents.
        self._first = [0]
        try:
            _check_tokenizer(source, meta, tokenizer)
            self.total_tokens: int = meta["tokens"]
            self.sample_format = SampleFormat()
            if meta["format"] == FORMAT_OF_CHATS:
                made_by = (meta["row_format"], meta["loss_on"], meta["template_digest"])
                self.sample_format = SampleFormat(*made_by)
            # What stands before a text, int32 [n]. Chats do not say.
            is_begun = meta["add_bos"] or not self.sample_format.takes_bos
            self.begin = tokenizer.begin if is_begun else tokenizer.begin[:0]
            self.dtype = np.dtype(meta["dtype"]).newbyteorder("<")
            is_chat = self.sample_format.is_chat
            for counts in meta["shards"]:
                offsets = read_offsets(source, self.folder, counts, self.dtype, is_chat)
                if counts["documents"] == 0:
                    continue
                for ending in ("bin", "mask") if is_chat else ("bin",):
                    path = shard_path(self.folder, counts["number"], ending)
                    self._states[path] = _state(path)
                self._shards.append((counts["number"], offsets))
                self._first.append(self._first[-1] + counts["documents"])
        except (KeyError, TypeError) as error:
            _refuse(source, f"{META} is damaged ({error!r})", error)
        if len(self) == 0 or len(self) != meta["documents"]:
            _refuse(source, f"{META} has {meta['documents']} documents, its shards {len(self)}")

    def option(self, name: str) -> Any:
        """The value of data.`name` that prepare_data has applied."""
        # The folder has a format of its own.
        return self._meta["row_format" if name == "format" else name]

    def __len__(self) -> int:
        return self._first[-1]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document, its end-of-document token included; int64 [documents]."""
        return np.concatenate([np.diff(offsets) for _, offsets in self._shards])

    def longest(self) -> int | None:
        """Tokens of the longest document, its end-of-document token included."""
        return int(self.lengths().max())

    def length(self, index: int) -> int:
        _, _, start, stop = self._find(index)
        return stop - start

    def __getitem__(self, index: int) -> Encoded:
        """A document, its tokens uint16 or uint32 [length].

        Raises DataError if the file has changed since it was opened, and ValueError if the
        document is not closed, as in a copy that was never finished.
        """
        tokens = self._part(index, "bin", self.dtype)
        if tokens[-1] != self.tokenizer.end_of_document:
            number, row, *_ = self._find(index)
            where = f"{shard_path(self.folder, number, 'bin').name}, document {row + 1}"
            _refuse(self.source, f"{where} does not end with the end-of-document token")
        if not self.sample_format.is_chat:
            return Encoded(tokens)
        return Encoded(tokens, self._part(index, "mask", np.dtype(np.uint8)) != 0)

    def check_unchanged(self) -> None:
        """Raises DataError if a file of tokens has changed since it was opened."""
        for path in self._states:
            self._check_file(path)

    def raw(self, index: int) -> bytes:
        """The tokens of a document and, if it has one, its mask of learned tokens."""
        return b"".join(part.tobytes() for part in self[index] if part is not None)

    def _part(self, index: int, ending: str, dtype: np.dtype) -> NDArray[Any]:
        """One document's part of a shard's file."""
        number, _, start, stop = self._find(index)
        path = shard_path(self.folder, number, ending)
        # Reading a map of a file that was cut off gives zeros, or kills the process.
        self._check_file(path)
        offset = start * dtype.itemsize
        if stop - start <= MAPPED_ABOVE:
            return np.fromfile(path, dtype, stop - start, offset=offset)
        return np.memmap(path, dtype, "r", offset, (stop - start,))

    def _check_file(self, path: Path) -> None:
        if _state(path) != self._states[path]:
            raise DataError(
                f'data.source = "{self.source}": {path.name} was changed during the run; copy it '
                "again as it was, or prepare a new folder and begin a new run"
            )

    def _find(self, index: int) -> tuple[int, int, int, int]:
        """A document's shard, its row there, and where it begins and ends in it."""
        place = bisect.bisect_right(self._first, index) - 1
        number, offsets = self._shards[place]
        row = index - self._first[place]
        return number, row, int(offsets[row]), int(offsets[row + 1])


def read_meta(source: str, name: str = META) -> dict[str, Any]:
    """The content of meta.json, or plan.json, of a folder of shards; empty if it is not one."""
    try:
        meta = json.loads((Path(source).expanduser() / name).read_text(encoding="utf-8"))
        return meta if meta.get("format") in FORMATS else {}
    except (OSError, ValueError, AttributeError):
        return {}


def read_offsets(
    source: str, folder: Path, counts: dict[str, int], dtype: str, has_mask: bool
) -> NDArray[np.int64]:
    """The offsets at which the documents of a shard begin, int64 [documents + 1].

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
    path = shard_path(folder, counts["number"], "idx.npy")
    try:
        offsets = np.load(path)
    # The file is missing, empty, cut short, or not a NumPy file.
    except (OSError, EOFError, ValueError, MemoryError) as error:
        _refuse(source, f"{path.name} cannot be read: {error}", error)
    # Each document has at least one token and the token that closes it.
    fits = offsets.dtype == np.int64 and offsets.shape == (counts["documents"] + 1,)
    fits = fits and (offsets[0], offsets[-1]) == (0, counts["tokens"])
    if not fits or (np.diff(offsets) < 2).any():
        documents = f"{counts['documents']} documents of together {counts['tokens']} tokens"
        _refuse(source, f"{path.name} does not say where {documents} begin")
    return offsets


def _state(path: Path) -> FileState:
    """The state of a file; the size is -1 if the file is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return -1, 0
    return stat.st_size, stat.st_mtime_ns


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
