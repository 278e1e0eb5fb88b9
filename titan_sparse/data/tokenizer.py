"""Convert between text and token ids, by raw bytes or a local tokenizer.json. Also defines what a
row of a source becomes: tokens, and which of them are learned."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray

from titan_sparse.config.sources import tokenizer_file

END_OF_DOCUMENT_TOKENS = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>"]
PADDING_TOKENS = ["<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"]


class ByteTokenizer:
    """One token per UTF-8 byte: 256 bytes, 256 = end of document, 257 = padding.

    All ids are in [0, vocab_size). `digest` identifies the tokenizer. `split_special_tokens` says
    whether special tokens that are spelled out in a text are split like other text. `special_ids`
    are the tokens that are not text: ends of documents and turns, roles, padding. `added_ids` are
    these and all other tokens that were added to the vocabulary of a text.
    """

    vocab_size = 258
    end_of_document = 256
    padding = 257
    digest = "bytes"
    split_special_tokens = False
    special_ids = frozenset((256, 257))
    added_ids = special_ids

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
    """A tokenizer.json. The tokenizer_config.json next to it names the special tokens. Without it,
    they are found by well-known names.

    Raises ValueError, naming data.tokenizer, if the file cannot be read or has no end-of-document
    token.
    """

    def __init__(self, path: Path, split_special_tokens: bool) -> None:
        self._tokenizer = _read_tokenizer(path)
        self._tokenizer.encode_special_tokens = split_special_tokens
        self.split_special_tokens = split_special_tokens
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        config = read_config(path.parent, "data.tokenizer")
        end = _special_token(self._tokenizer, config, "eos_token", END_OF_DOCUMENT_TOKENS)
        if end is None:
            raise ValueError(
                f'data.tokenizer = "{path}" has no end-of-document token; '
                'name one as "eos_token" in a tokenizer_config.json beside it'
            )
        padding = _special_token(self._tokenizer, config, "pad_token", PADDING_TOKENS)
        self.end_of_document: int = end
        self.padding: int = end if padding is None else padding
        # Not the number of tokens: ids may have gaps, and an embedding must hold the largest.
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids) + 1
        added = self._tokenizer.get_added_tokens_decoder()
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
        return FileTokenizer(tokenizer_file(name), split_special_tokens)
    if split_special_tokens:
        raise ValueError(
            'data.split_special_tokens would be ignored with data.tokenizer = "bytes", which has '
            "no special tokens; leave it out"
        )
    return ByteTokenizer()


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception.
    except Exception as error:
        raise ValueError(
            f'data.tokenizer = "{path}" is not a readable tokenizer.json: {error}'
        ) from error
    # Files saved after fine-tuning often cut or pad to a fixed length, which would silently damage
    # long documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # We do not want the tokens that it adds, and it removes blanks from the letters of a token.
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    return tokenizer


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """The tokenizer_config.json of a folder; empty without one."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{key}: {path} holds no table; write a JSON object")
    return config


def token_text(entry: Any) -> Any:
    """The token of an entry of tokenizer_config.json: a token, or a dict that describes one."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _special_token(
    tokenizer: tokenizers.Tokenizer, config: dict[str, Any], key: str, candidates: list[str]
) -> int | None:
    """Id of the token that the config names under `key`, else of the first candidate in the
    vocabulary, else None."""
    named = config.get(key)
    if named is None:
        found = [tokenizer.token_to_id(token) for token in candidates]
        return next((token_id for token_id in found if token_id is not None), None)
    token = token_text(named)
    if not isinstance(token, str):
        raise ValueError(
            f"data.tokenizer: {key} of tokenizer_config.json is {json.dumps(named)}; write the "
            "token as a string"
        )
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f'data.tokenizer: {key} "{token}" of tokenizer_config.json is not in tokenizer.json'
        )
    return token_id


@dataclass(frozen=True)
class SampleFormat:
    """How rows became tokens. For text, everything is learned."""

    format: str = "text"
    """data.format"""
    loss_on: str = ""
    """data.loss_on; empty for text"""
    template: str = ""
    """digest of the chat template; empty without one"""

    @property
    def is_chat(self) -> bool:
        """Whether only some tokens are learned, and documents are never cut."""
        return self.format != "text"


class Encoded(NamedTuple):
    """A document: its tokens, closed by the end-of-document token."""

    tokens: NDArray[np.integer]
    """int [length]"""
    learned: NDArray[np.bool_] | None = None
    """[length], whether each token is predicted in training; None: all are"""


def closed(ids: NDArray[np.integer], end: int) -> Encoded:
    """The tokens of a text, int [length], followed by the end-of-document token. All are
    learned."""
    return Encoded(np.append(ids, np.asarray(end, dtype=ids.dtype)))
