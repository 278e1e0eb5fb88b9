"""Put pieces of documents into one packed sequence. Pure numpy functions.

Documents follow each other, each closed by its end-of-document token. A document that does not fit
is cut at the end of the sequence and continues in the next sequence as a new piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.tokenizer import Encoded
from titan_sparse.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Packed:
    """One packed sequence of S tokens. What is not in `lengths` is padding."""

    tokens: NDArray[np.int64]
    """[S]"""
    labels: NDArray[np.int64]
    """[S], the next token of the same document, already shifted; -100 where that is not learned, at
    a document's last token and on padding"""
    positions: NDArray[np.int64]
    """[S], position in the piece; 0 on padding"""
    lengths: list[int]
    """tokens of each piece, in order; the sum is at most S"""


def pack(pieces: Sequence[tuple[Encoded, int, int]], seq_len: int, padding_id: int) -> Packed:
    """Lay the pieces, tokens [start, stop) of a document each, one after the other in a sequence of
    `seq_len` tokens and fill the rest with padding."""
    packed = Packed(
        tokens=np.full(seq_len, padding_id, dtype=np.int64),
        labels=np.full(seq_len, IGNORE_INDEX, dtype=np.int64),
        positions=np.zeros(seq_len, dtype=np.int64),
        lengths=[stop - start for _, start, stop in pieces],
    )
    begin = 0
    for (tokens, learned), start, stop in pieces:
        end = begin + stop - start
        packed.tokens[begin:end] = tokens[start:stop]
        # The last piece of a document has one label fewer than tokens, because its last token keeps
        # the ignored label.
        next_tokens = tokens[start + 1 : stop + 1]
        labels = packed.labels[begin : begin + len(next_tokens)]
        labels[:] = next_tokens
        if learned is not None:
            labels[~learned[start + 1 : stop + 1]] = IGNORE_INDEX
        # From 0 in each piece: attention cannot see earlier pieces, which are in another sequence.
        packed.positions[begin:end] = np.arange(stop - start)
        begin = end
    return packed


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of the documents in each sequence of `room` tokens. The longest document comes first,
    and each goes into the first sequence that has room for it.

    Documents stay in order within a sequence, and sequences are ordered by their first document.
    Every length must be at most `room`.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    sequences: list[list[int]] = []
    left: list[int] = []
    for number in order:
        place = next((i for i, free in enumerate(left) if free >= lengths[number]), len(left))
        if place == len(left):
            sequences.append([])
            left.append(room)
        sequences[place].append(number)
        left[place] -= lengths[number]
    return sorted(sorted(numbers) for numbers in sequences)
