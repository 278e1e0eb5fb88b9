"""What a row of a source becomes: tokens, and which of them are learned."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SampleFormat:
    """How rows became tokens; of text, everything is learned."""

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
    """The tokens of a text, int [length], with the end-of-document token behind; all are learned."""
    return Encoded(np.append(ids, np.asarray(end, dtype=ids.dtype)))
