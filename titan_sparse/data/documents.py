"""Documents of tokens, from texts that are tokenized when first needed, or from prepared shards."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from titan_sparse.config.sections import Data
from titan_sparse.data.shards import TokenShards, is_prepared
from titan_sparse.data.sources import Source, open_source
from titan_sparse.data.tokenizer import Tokenizer


class Documents(Protocol):
    """What a stream cuts into sequences; lengths and tokens include the end-of-document token."""

    total_tokens: int
    """of all documents; 0: not known before reading them"""

    def __len__(self) -> int: ...

    def length(self, index: int) -> int: ...

    def tokens(self, index: int) -> NDArray[np.integer]: ...

    def forget(self, index: int) -> None:
        """Drop the tokens of a document from memory; tokens() brings them back."""
        ...


class TokenizedTexts:
    """Texts, tokenized when a length or tokens are asked for. Lengths are remembered for good."""

    total_tokens = 0

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source = source
        self.tokenizer = tokenizer
        # With the end-of-document token, so 0 can stand for "not known yet".
        self._lengths = np.zeros(len(source), dtype=np.int64)
        self._tokens: dict[int, NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self.source)

    def length(self, index: int) -> int:
        """Tokens of a document, its end-of-document token included."""
        if self._lengths[index] == 0:
            self._lengths[index] = len(self.tokens(index))
        return int(self._lengths[index])

    def tokens(self, index: int) -> NDArray[np.int32]:
        """Tokens of a document, its end-of-document token included; int32 [length]."""
        if index not in self._tokens:
            ids = self.tokenizer.encode(self.source[index])
            self._tokens[index] = np.append(ids, np.int32(self.tokenizer.end_of_document))
        return self._tokens[index]

    def forget(self, index: int) -> None:
        """Drop the tokens of a document from memory; its length stays."""
        self._tokens.pop(index, None)


def open_documents(data: Data, tokenizer: Tokenizer) -> Documents:
    """Open one part of data.source.

    Raises ValueError, naming the key, if that is impossible or an option would be ignored.
    """
    if is_prepared(data.source):
        for name in ("text_field", "subset", "split", "bad_rows", "split_special_tokens"):
            if getattr(data, name) != getattr(Data(), name):
                raise ValueError(
                    f"data.{name} would be ignored with the prepared tokens of "
                    f'data.source = "{data.source}"; leave it out'
                )
        return TokenShards(data.source, tokenizer)
    return TokenizedTexts(open_source(data), tokenizer)
