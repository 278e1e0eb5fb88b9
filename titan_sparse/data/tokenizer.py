"""Convert between text and token ids, by raw bytes or a tokenizer of Hugging Face. Also defines
what a row of a source becomes: tokens, and which of them are learned.

transformers reads a tokenizer from up to ten files, among them the model's config.json, and some of
its classes replace parts of tokenizer.json. Whoever serves the model reads it in this way, so we do
too.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray

from titan_sparse.config.reading import require
from titan_sparse.config.sections import Config
from titan_sparse.config.sources import holds_tokenizer, tokenizer_folder, tokenizer_name
from titan_sparse.options.values import one_line, show

END_OF_DOCUMENT_TOKENS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>"]
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
PADDING_TOKENS = ["<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"]


PROBE = (
    "I'm sure they'LL say: don't!",
    "  two blanks, a\ttab,\r\nlines\n\n\n  and more \n",
    "In 2024, 1234567.89 + 0x1F = 3,000",
    "Ünïcode e\u0301 \ufb01 \uff21 \u1e9e ß \u200d ½",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639 \u0939\u093f",
    "\U0001f600\U0001f469\u200d\U0001f680 ...!!! --- ___ ## //",
    "def f(x_1):\n    return {'a': [x_1, \"b\"]}  # CamelCase HTTPServer",
    " <s> </s> <unk> <a>\n<b> [INST]x",
)
"""Texts on which tokenizers differ if they differ at all: contractions, blanks, numbers, letters
that normalizers change, scripts, symbols, and code."""


class ByteTokenizer:
    """One token per UTF-8 byte: 256 bytes, 256 = end of document, 257 = padding.

    All ids are in [0, vocab_size). `digest` identifies the tokenizer. `split_special_tokens` says
    whether special tokens that are spelled out in a text are split like other text. `special_ids`
    are the tokens that are not text: ends of documents and turns, roles, padding. `added_ids` are
    these and all other tokens that were added to the vocabulary of a text.
    `begin`, int32 [n], are the tokens that stand before a text, such as <|begin_of_text|>, mostly
    none. `special_tokens` are the variables of a chat template, such as "eos_token", and `folder`
    is where its files lie.
    """

    vocab_size = 258
    end_of_document = 256
    padding = 257
    digest = "bytes"
    split_special_tokens = False
    special_ids = frozenset((256, 257))
    added_ids = special_ids
    begin = np.empty(0, dtype=np.int32)
    # It has no such tokens as text, so a template that writes them writes nothing.
    special_tokens = {"bos_token": "", "eos_token": ""}
    folder = None

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of a text, int32 [length]. No special tokens are added."""
        # A lone surrogate, which UTF-8 cannot hold, becomes "?".
        raw = text.encode("utf-8", errors="replace")
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int32)

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Token ids as in encode(), int32 [length], and the letters [start, stop) of each in the
        text, int64 [length, 2]."""
        raw = self.encode(text)
        # All bytes of a letter but the first are 10xxxxxx.
        letters = np.cumsum(raw & 0xC0 != 0x80) - 1
        return raw, np.stack([letters, letters + 1], axis=1)

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids [length]; special tokens are left out."""
        ids = np.asarray(ids)
        raw = ids[ids < 256].astype(np.uint8).tobytes()
        return raw.decode("utf-8", errors="replace")

    def spell(self, ids: ArrayLike) -> str:
        """The text of token ids [length]; special tokens are spelled out."""
        names = {self.end_of_document: "<end>", self.padding: "<padding>"}
        parts = []
        for run in np.split(ids, np.flatnonzero(np.asarray(ids) >= 256)):
            special = names.get(int(run[0]), "") if len(run) else ""
            parts.append(special + self.decode(run))
        return "".join(parts)


class FileTokenizer:
    """The tokenizer that transformers reads from a folder, or from a tokenizer.json in it.

    Where no file names the end-of-document token, it is found by well-known names, and so is the
    padding token. Raises ValueError, naming data.tokenizer, if the tokenizer cannot be read or has
    no end-of-document token.
    """

    def __init__(self, name: str, split_special_tokens: bool) -> None:
        read = read_tokenizer(name)
        self.folder = tokenizer_folder(name)
        self.special_tokens: dict[str, str] = read.special_tokens_map
        self.end_of_document: int = read.eos_token_id
        backend = read.backend_tokenizer
        # Files saved after fine-tuning often cut or pad to a fixed length, which would silently
        # damage long documents.
        backend.no_truncation()
        backend.no_padding()
        self.begin = _added_in_front(backend)
        # We add tokens ourselves, and a processor removes blanks from the letters of a token.
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        backend.encode_special_tokens = False
        self._tokenizer = backend
        self._name = name
        # transformers 4 knows TokenizersBackend by its old name alone.
        self._class = type(read).__name__.replace("TokenizersBackend", "PreTrainedTokenizerFast")
        path = _file_of(name)
        # Whether tokenizer.json alone decides over the tokens.
        self._is_plain = path is not None and _is_as_in(path, backend)
        content = path.read_bytes() if self._is_plain else backend.to_str().encode()
        self.digest = hashlib.sha256(content).hexdigest()
        self.split_special_tokens = split_special_tokens or read.split_special_tokens
        backend.encode_special_tokens = self.split_special_tokens
        found = [read.pad_token_id, *map(backend.token_to_id, PADDING_TOKENS), self.end_of_document]
        self.padding: int = next(token_id for token_id in found if token_id is not None)
        # Not the number of tokens: ids may have gaps, and an embedding must hold the largest.
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        added = backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special | {self.end_of_document, self.padding})
        self.added_ids = self.special_ids | frozenset(added)

    def encode(self, text: str) -> NDArray[np.int32]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, dtype=np.int32), offsets

    def decode(self, ids: ArrayLike) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def spell(self, ids: ArrayLike) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def own_files(self) -> dict[str, bytes]:
        """Name -> content of what a copy of the tokenizer needs beside the files of its folder."""
        files = {}
        if _is_renamed(self._name):
            files[TOKENIZER_FILE] = Path(self._name).expanduser().read_bytes()
        path = self.folder / CONFIG_FILE
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        # Without an entry, the config.json of the copy would choose the class.
        named = str(config.get("tokenizer_class"))
        if named.removesuffix("Fast") != self._class.removesuffix("Fast"):
            config["tokenizer_class"] = self._class
            files[CONFIG_FILE] = json.dumps(config, indent=2).encode()
        return files

    def extends(self, other: "FileTokenizer") -> bool:
        """True if every token of `other` has the same id here, and texts are split in the same
        way. Tokens may have been added."""
        mine, theirs = self._tokenizer, other._tokenizer
        is_larger = theirs.get_vocab().items() <= mine.get_vocab().items()
        return is_larger and _has_same_tokens(mine, theirs)


def read_tokenizer(name: str) -> Any:
    """transformers' tokenizer of data.tokenizer = `name`, which runs no code of the folder.

    Raises ValueError, one line that names the key, if transformers cannot read it, if it has no
    backend of the tokenizers library, or if it has no end-of-document token.
    """
    folder = tokenizer_folder(name)
    # Only here, because the import takes a second.
    from transformers import AutoTokenizer

    own = {"tokenizer_file": str(_file_of(name))} if _is_renamed(name) else {}
    try:
        read = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **own
        )
    # The libraries raise errors of any kind.
    except Exception as error:
        raise ValueError(
            f"data.tokenizer = {show(name)} is not a tokenizer that transformers can read here, where "
            f"code of a folder is not run: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not read.is_fast:
        raise ValueError(
            f"data.tokenizer = {show(name)} has the class {type(read).__name__} of Python code alone; "
            "write a folder with a tokenizer.json"
        )
    _check_class(read, name)
    vocabulary = read.get_vocab()
    if read.eos_token_id is None:
        read.eos_token = next((end for end in END_OF_DOCUMENT_TOKENS if end in vocabulary), None)
    if read.eos_token_id is None:
        raise ValueError(
            f"data.tokenizer = {show(name)} has no end-of-document token; "
            'name one as "eos_token" in a tokenizer_config.json beside it'
        )
    return read


def _check_class(read: Any, name: str) -> None:
    """Raises ValueError if a tokenizer cannot turn texts into tokens, or its class in Python does
    more than its backend, which is all that we use."""
    for text in PROBE:
        try:
            theirs = read(text, add_special_tokens=False)["input_ids"]
        # The library raises plain Exception.
        except Exception as error:
            raise ValueError(
                f"data.tokenizer = {show(name)} cannot encode {show(text)}: {error}"
            ) from error
        require(
            theirs == _ids(read.backend_tokenizer, text),
            f"data.tokenizer = {show(name)} has the class {type(read).__name__}, which changes "
            f"{show(text)} before it is encoded; write a folder with the class TokenizersBackend",
        )


def _file_of(name: str) -> Path | None:
    """The tokenizer.json of data.tokenizer = `name`, if it has one."""
    path = Path(name).expanduser()
    path = path / TOKENIZER_FILE if path.is_dir() else path
    return path if path.is_file() else None


def _is_renamed(name: str) -> bool:
    """True if data.tokenizer is a file that transformers would not find by its name."""
    path = Path(name).expanduser()
    return path.is_file() and path.name != TOKENIZER_FILE


def _added_in_front(backend: tokenizers.Tokenizer) -> NDArray[np.int32]:
    """The tokens that a tokenizer puts before a text, int32 [n]."""
    text = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    starts = range(len(whole) - len(text) + 1)
    count = next((start for start in starts if whole[start:][: len(text)] == text), 0)
    return np.asarray(whole[:count], dtype=np.int32)


def _has_same_tokens(one: tokenizers.Tokenizer, other: tokenizers.Tokenizer) -> bool:
    """True if texts without added tokens become the same tokens.

    Tokenizers are compared by what they do. Their settings differ between a file and the class of
    transformers that reads it, but mostly in ways that do not matter.
    """
    return all(_ids(one, text) == _ids(other, text) for text in PROBE)


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def _added(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """The text of each added token, by its id."""
    return {number: repr(token) for number, token in backend.get_added_tokens_decoder().items()}


def _is_as_in(path: Path, backend: tokenizers.Tokenizer) -> bool:
    """True if texts become the tokens that tokenizer.json alone says: no other file and no class of
    transformers changes them."""
    plain = tokenizers.Tokenizer.from_file(str(path))
    plain.no_truncation()
    plain.no_padding()
    return (
        _added(plain) == _added(backend)
        and plain.get_vocab() == backend.get_vocab()
        and _has_same_tokens(plain, backend)
    )


Tokenizer = ByteTokenizer | FileTokenizer


def check_ids(ids: NDArray[np.integer], tokenizer: Tokenizer) -> None:
    """Raises ValueError if a token is beyond the vocabulary, because a GPU would crash."""
    largest = ids.max(initial=0)
    if largest >= tokenizer.vocab_size:
        raise ValueError(
            f"data.source holds the token {largest}, of a vocabulary of {tokenizer.vocab_size}; copy "
            "the folder again, or prepare it anew"
        )


def load_tokenizer(name: str, split_special_tokens: bool = False) -> Tokenizer:
    """The tokenizer of data.tokenizer. Raises ValueError, naming the key, if it cannot be used, and
    if special tokens are to be split but the tokenizer has none."""
    if name != "bytes":
        return FileTokenizer(name, split_special_tokens)
    if split_special_tokens:
        raise ValueError(
            'data.split_special_tokens would be ignored with data.tokenizer = "bytes", which has '
            "no special tokens; leave it out"
        )
    return ByteTokenizer()


def open_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run. Raises ValueError, one line, if it cannot be used, or has other
    tokens than that of model.initial_hf and data.other_tokenizer is false."""
    name = tokenizer_name(config)
    folder = config.model.initial_hf
    tokenizer = load_tokenizer(name, config.data.split_special_tokens)
    same, has_other = "has no other to differ from", False
    if folder and not config.model.random_weights and holds_tokenizer(folder):
        same = f"is that of model.initial_hf = {show(folder)}"
        has_other = name == "bytes" or not _has_tokens_of(tokenizer, folder, name)
    if has_other and not config.data.other_tokenizer:
        raise ValueError(
            f"data.tokenizer = {show(name)} has other tokens than model.initial_hf = {show(folder)}, "
            "whose weights are of no use with it; leave data.tokenizer out, or write "
            "data.other_tokenizer = true to train new embeddings"
        )
    if config.data.other_tokenizer and not has_other:
        raise ValueError(
            f"data.other_tokenizer = true: data.tokenizer = {show(name)} {same}; leave it out"
        )
    return tokenizer


def _has_tokens_of(tokenizer: FileTokenizer, folder: str, name: str) -> bool:
    """True if the tokenizer of data.tokenizer = `name` has the tokens of a model's folder, and
    perhaps more."""
    if tokenizer.folder.samefile(Path(folder).expanduser()) and not _is_renamed(name):
        return True
    try:
        own = FileTokenizer(folder, tokenizer.split_special_tokens)
    except ValueError as error:
        raise ValueError(str(error).replace("data.tokenizer", "model.initial_hf", 1)) from error
    return tokenizer.extends(own)


@dataclass(frozen=True)
class SampleFormat:
    """The way in which rows became tokens. For text, everything is learned."""

    format: str = "text"
    """data.format"""
    loss_on: str = ""
    """data.loss_on; empty for text"""
    template: str = ""
    """digest of the chat template; empty without one"""

    @property
    def takes_bos(self) -> bool:
        """True if data.add_bos counts. What stands in a chat of messages is up to its template."""
        return self.format != "messages"

    @property
    def is_chat(self) -> bool:
        """True if only some tokens are learned, and documents are never cut."""
        return self.format != "text"


class Encoded(NamedTuple):
    """A document: its tokens, closed by the end-of-document token."""

    tokens: NDArray[np.integer]
    """int [length]"""
    learned: NDArray[np.bool_] | None = None
    """[length], whether each token is predicted in training; None: all are"""


def begun(ids: NDArray[np.integer], begin: NDArray[np.integer]) -> NDArray[np.integer]:
    """Token ids, int [length], after `begin`, int [n], which is not written twice."""
    if np.array_equal(ids[: len(begin)], begin):
        return ids
    return np.concatenate([begin.astype(ids.dtype), ids])
