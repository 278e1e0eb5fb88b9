"""Text to hide things in, as tokens; and the words that keys are made of."""

import random

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.documents import Documents
from titan_sparse.data.tokenizer import Tokenizer

_ADJECTIVES = tuple(
    (
        "amber brave calm dusty early fancy gentle hollow icy jolly kind lazy "
        "misty noble olive proud quiet rusty silent tidy urban vivid windy young"
    ).split()
)
_NOUNS = tuple(
    (
        "anchor barrel candle desert engine forest garden harbor island jacket kettle ladder "
        "market needle orchard pillow quarry river saddle temple umbrella valley window yard"
    ).split()
)
_EMPTY = "the text to hide needles in is empty; write another data.source"


class Haystack:
    """The documents one after the other, again from the first after the last, read when needed."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self._tokens = np.empty(0, dtype=np.int64)
        self._documents_read = 0

    def tokens(self, start: int, count: int) -> NDArray[np.int64]:
        """int64 [count], from token `start` on, a line break between documents.

        Raises ValueError if no document holds text.
        """
        if len(self._tokens) < start + count:
            self._read(start + count)
        return self._tokens[start : start + count]

    def _read(self, count: int) -> None:
        line_break = self.tokenizer.encode("\n")
        parts = [self._tokens]
        length = len(self._tokens)
        while length < count:
            if self._documents_read >= len(self.documents) and length == 0:
                raise ValueError(_EMPTY)
            index = self._documents_read % len(self.documents)
            # Without the end-of-document token.
            ids = self.documents.tokens(index)[:-1]
            self.documents.forget(index)
            self._documents_read += 1
            if len(ids):
                parts += [ids, line_break]
                length += len(ids) + len(line_break)
        self._tokens = np.concatenate(parts).astype(np.int64)


def key(draw: random.Random) -> str:
    """A key of two words, such as "misty-harbor"."""
    return f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}"


def number(draw: random.Random) -> str:
    """A number of seven digits."""
    return str(draw.randint(1_000_000, 9_999_999))
