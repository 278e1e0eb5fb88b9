"""Text to hide things in, as tokens; and the words that keys are made of."""

import random
import re

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.sources import Source
from titan_sparse.data.tokenizer import Tokenizer

_ADJECTIVES = ("amber", "brave", "calm", "dusty", "early", "fancy", "gentle", "hollow", "icy", "jolly", "kind", "lazy",
               "misty", "noble", "olive", "proud", "quiet", "rusty", "silent", "tidy", "urban", "vivid", "windy", "young")
_NOUNS = ("anchor", "barrel", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
          "ladder", "market", "needle", "orchard", "pillow", "quarry", "river", "saddle", "temple", "umbrella", "valley",
          "window", "yard")


_EMPTY = "the text to hide needles in is empty; write another data.source"


class Haystack:
    """The documents of `source` one after the other, from the beginning again after the last; read as far as asked for."""

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer = source, tokenizer
        self._tokens, self._next = np.empty(0, dtype=np.int64), 0
        self._sentences: list[str] = []
        self._documents_split = 0

    def tokens(self, start: int, count: int) -> NDArray[np.int64]:
        """int64 [count], from token `start` on. Raises ValueError if no document holds any text."""
        if len(self._tokens) < start + count:
            self._read(start + count)
        return self._tokens[start : start + count]

    def sentences(self, count: int) -> list[str]:
        """`count` sentences or lines from the first document on. Raises ValueError if no document holds any text."""
        while len(self._sentences) < count:
            if self._documents_split >= len(self.source) and not self._sentences:
                raise ValueError(_EMPTY)
            pieces = re.split(r"(?<=[.!?])\s+|\n+", self.source[self._documents_split % len(self.source)])
            self._sentences += [piece.strip() for piece in pieces if piece.strip()]
            self._documents_split += 1
        return self._sentences[:count]

    def _read(self, count: int) -> None:
        parts, length = [self._tokens], len(self._tokens)
        while length < count:
            parts.append(self.tokenizer.encode(self.source[self._next % len(self.source)] + "\n").astype(np.int64))
            length, self._next = length + len(parts[-1]), self._next + 1
            if self._next == len(self.source) and length <= len(self.source):
                raise ValueError(_EMPTY)
        self._tokens = np.concatenate(parts)


def key(draw: random.Random) -> str:
    """A key of two words, such as "misty-harbor"."""
    return f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}"


def number(draw: random.Random) -> str:
    """A number of seven digits."""
    return str(draw.randint(1_000_000, 9_999_999))
