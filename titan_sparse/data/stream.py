"""Endless streams of sequences made from documents. They are deterministic and resumable.

A stream first gives a sequence as spans of documents, which is cheap. Only the rank that needs the
sequence reads its tokens. There, documents follow each other, each closed by its end-of-document
token. One that does not fit is cut, and continues in the next sequence as a new piece.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_sparse.config.sections import Data
from titan_sparse.data.documents import Documents
from titan_sparse.data.tokenizer import Encoded, Tokenizer, check_ids
from titan_sparse.loss import IGNORE_INDEX

logger = logging.getLogger("titan_sparse")

WINDOW = 32
"""Number of sequences that chats are packed into at a time. A quarter of one sequence is left free,
because chats never fit exactly. Leftover chats would each fill a sequence of their own, mostly with
padding."""


@dataclass
class Cursor:
    """The first token of a stream that has not been taken."""

    sequence: int = 0
    """number of the stream's next sequence"""
    epoch: int = 0
    document: int = 0
    """place in the order of the epoch, which counts documents, or samples for prepared tokens"""
    offset: int = 0
    """tokens of that document already taken; for chats, sequences of the window"""
    documents_seen: int = 0
    """documents begun, over all epochs and ranks"""


class Span(NamedTuple):
    """Tokens [start, stop) of document `index`."""

    index: int
    start: int
    stop: int


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


@dataclass(eq=False)
class Stream(ABC):
    """Cuts documents into an endless stream of sequences of at most `seq_len` tokens.

    `data` is the [data] section of one part of the mixture. Raises ValueError if no document can be
    used: here, before the first step. Later, the other ranks would hang waiting for this one.
    """

    documents: Documents
    tokenizer: Tokenizer
    data: Data
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        # Places of an epoch: documents, or samples for prepared tokens.
        self.count = len(self.documents)
        self.cursor = Cursor()
        # The order of one epoch.
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Look for the first sequence."""

    @abstractmethod
    def next_sequence(self) -> list[Span]:
        """Take the next sequence: whole or cut documents of at most `seq_len` tokens together."""

    def fingerprint(self) -> dict[str, int | float | str]:
        """The settings that decide the stream. With another fingerprint, a cursor points to other
        tokens."""
        adds_bos = len(self.documents.begin) and self.documents.sample_format.takes_bos
        return {
            "documents": len(self.documents),
            "tokens": self.documents.total_tokens,
            "vocab_size": self.tokenizer.vocab_size,
            "split_special_tokens": int(self.tokenizer.split_special_tokens),
            "add_bos": int(adds_bos),
            "sequences": self.data.sequences,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": int(self.data.shuffle),
            "min_document_length": self.data.min_document_length,
            **asdict(self.documents.sample_format),
        }

    def pack(self, spans: list[Span], length: int) -> Packed:
        """Read the tokens of a sequence just taken by `next_sequence`, padded to `length`.

        Raises ValueError if a token is beyond the vocabulary.
        """
        pieces = [(self.documents[index], start, stop) for index, start, stop in spans]
        packed = pack(pieces, length, self.tokenizer.padding)
        check_ids(np.stack([packed.tokens, packed.labels]), self.tokenizer)
        return packed

    def _at(self, place: int) -> int:
        """The document, or the sample, at a place of the cursor's epoch."""
        epoch = self.cursor.epoch
        if not self.data.shuffle:
            return place
        if self._epoch != epoch:
            # The pair, not the sum. Otherwise seed 0 in epoch 1 and seed 1 in epoch 0 would read
            # in the same order.
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._epoch = epoch
        return int(self._order[place])

    def _go_to(self, place: int) -> None:
        """Move the cursor to the beginning of a place, which may be the end of the epoch."""
        cursor = self.cursor
        cursor.document = place
        cursor.offset = 0
        if place == self.count:
            cursor.epoch += 1
            cursor.document = 0

    def _no_document(self, longest: int) -> ValueError:
        """`longest`: tokens of the longest document, its end-of-document token included."""
        kind = self.data.sequences
        smaller = []
        if longest <= self.data.min_document_length:
            smaller.append(f"data.min_document_length = {longest - 1} or less")
        if kind == "fixed" and longest < self.seq_len:
            smaller.append(f'training.seq_len = {longest} or less (or data.sequences = "packed")')
        advice = "write " + " and ".join(smaller)
        if longest < 2:
            advice = "name documents that have text"
        return ValueError(
            f'data.sequences = "{kind}": no document of data.source is long enough for '
            f"training.seq_len = {self.seq_len} and data.min_document_length = "
            f"{self.data.min_document_length} (the longest has {longest} tokens); {advice}"
        )


class WalkedStream(Stream):
    """Goes through the documents in the order of each epoch, each from its beginning. A document is
    not read before its turn, because texts are tokenized then.

    data.sequences = packed: documents follow each other and are cut where a sequence is full.
    fixed: every sequence is `seq_len` tokens of one document, and the rest of a document is
    dropped. fixed_and_rest: the rest becomes a shorter sequence if it has at least two tokens,
    because a single token has no label.
    """

    def _open(self) -> None:
        # The fewest tokens of a document, its end-of-document token included, that are taken.
        self._least = {"packed": 1, "fixed": self.seq_len, "fixed_and_rest": 2}[self.data.sequences]
        # Shorter documents are left out. Their end-of-document token is not counted.
        self._shortest = max(self.data.min_document_length, self._least - 1, 1)
        self._find_document()

    def next_sequence(self) -> list[Span]:
        cursor = self.cursor
        spans = []
        room = self.seq_len
        while room > 0:
            index, length = self._find_document()
            span = Span(index, cursor.offset, min(length, cursor.offset + room))
            spans.append(span)
            room -= span.stop - span.start
            if span.start == 0:
                cursor.documents_seen += 1
            cursor.offset = span.stop
            if length - span.stop < self._least:
                self._go_to(cursor.document + 1)
            if self.data.sequences != "packed":
                break
        cursor.sequence += 1
        return spans

    def _find_document(self) -> tuple[int, int]:
        """Index and length (end-of-document token included) of the cursor's document, skipping
        those that are too short."""
        # Wherever the cursor is, two passes contain one whole epoch. After that we know that no
        # document is long enough.
        longest = 0
        for _ in range(2 * self.count):
            index = self._at(self.cursor.document)
            length = self.documents.length(index)
            if length > self._shortest:
                return index, length
            longest = max(longest, length)
            self._go_to(self.cursor.document + 1)
        raise self._no_document(longest)


class SampleStream(Stream):
    """data.sequences = fixed or fixed_and_rest, for prepared tokens: samples are permuted.

    All lengths are known at once, so the samples of a document need not follow each other.
    (MTraining trains this way, on rows of exactly 524288 tokens.)
    """

    def _open(self) -> None:
        lengths = self.documents.lengths()
        least = self.seq_len if self.data.sequences == "fixed" else 2
        # int64 [documents]: the samples that each document gives
        samples = (lengths + self.seq_len - least) // self.seq_len
        shortest = max(self.data.min_document_length, least - 1)
        samples[lengths <= shortest] = 0
        # The documents that give samples: their indices, and for each the number of samples up to
        # and including its own.
        self._index = np.flatnonzero(samples)
        self._stop = np.cumsum(samples[self._index])
        if len(self._index) == 0:
            raise self._no_document(int(lengths.max()))
        self.count = int(self._stop[-1])
        logger.info(
            "data: %d of %d documents are left out: they have fewer than %d tokens",
            len(lengths) - len(self._index),
            len(lengths),
            shortest,
        )

    def next_sequence(self) -> list[Span]:
        cursor = self.cursor
        sample = self._at(cursor.document)
        place = int(np.searchsorted(self._stop, sample, side="right"))
        index = int(self._index[place])
        first_sample = int(self._stop[place - 1]) if place else 0
        start = (sample - first_sample) * self.seq_len
        stop = min(start + self.seq_len, self.documents.length(index))
        if start == 0:
            cursor.documents_seen += 1
        cursor.sequence += 1
        self._go_to(cursor.document + 1)
        return [Span(index, start, stop)]


class WholeStream(Stream):
    """data.sequences = packed, for chats: sequences hold whole documents, which are never cut.

    Training on an answer that is cut teaches the model not to stop, so documents that are longer
    than a sequence are dropped. Windows of documents in the order of each epoch are packed
    together. The rest of a sequence is padding. cursor.document is the place of the current window,
    and cursor.offset the number of sequences taken from it.
    """

    def _open(self) -> None:
        self._window_at = (-1, -1)
        # The place after the window's last document, and the indices of the documents in each of
        # its sequences.
        self._window: tuple[int, list[list[int]]] = (0, [])
        self._current()
        self._log_kept()

    def next_sequence(self) -> list[Span]:
        stop, sequences = self._current()
        cursor = self.cursor
        indices = sequences[cursor.offset]
        cursor.sequence += 1
        cursor.documents_seen += len(indices)
        cursor.offset += 1
        if cursor.offset == len(sequences):
            self._go_to(stop)
        return [Span(index, 0, self.documents.length(index)) for index in indices]

    def _current(self) -> tuple[int, list[list[int]]]:
        """The window at the cursor. The cursor skips windows without a sequence."""
        cursor = self.cursor
        # As in _find_document().
        for _ in range(2 * self.count):
            if self._window_at != (cursor.epoch, cursor.document):
                self._window = self._pack_window()
                self._window_at = (cursor.epoch, cursor.document)
            stop, sequences = self._window
            if sequences:
                return self._window
            self._go_to(stop)
        raise ValueError(
            f"no sample of data.source has at most training.seq_len = {self.seq_len} tokens and at "
            f"least data.min_document_length = {self.data.min_document_length}; write other ones"
        )

    def _pack_window(self) -> tuple[int, list[list[int]]]:
        """Read as many documents from the cursor on as fill WINDOW sequences."""
        place = self.cursor.document
        lengths: dict[int, int] = {}
        room = WINDOW * self.seq_len - self.seq_len // 4
        while place < self.count:
            index = self._at(place)
            length = self.documents.length(index)
            if max(self.data.min_document_length, 1) < length <= self.seq_len:
                if length > room:
                    break
                lengths[index] = length
                room -= length
            place += 1
        indices = list(lengths)
        packed = first_fit(list(lengths.values()), self.seq_len)
        return place, [[indices[number] for number in numbers] for numbers in packed]

    def _log_kept(self) -> None:
        """Log how many samples fit a sequence: of the first window, which has just been read."""
        stop, sequences = self._window
        indices = [self._at(place) for place in range(self.cursor.document, stop)]
        lengths = np.array([self.documents.length(index) for index in indices])
        learned = [self.documents[index].learned for kept in sequences for index in kept]
        logger.info(
            "data: %d of the first %d samples are longer than a sequence and dropped; %.1f%% of the "
            "tokens are learned",
            int((lengths > self.seq_len).sum()),
            len(lengths),
            100 * np.concatenate(learned).mean(),
        )


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of the documents in each sequence of `room` tokens. The longest document comes first,
    and each goes into the first sequence that has room for it.

    Documents stay in order within a sequence, and sequences are ordered by their first document.
    Every length must be at most `room`.
    """
    sequences: list[list[int]] = []
    left: list[int] = []
    # Of equal lengths, the first comes first.
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = next((i for i, free in enumerate(left) if free >= lengths[number]), len(left))
        if place == len(left):
            sequences.append([])
            left.append(room)
        sequences[place].append(number)
        left[place] -= lengths[number]
    return sorted(sorted(numbers) for numbers in sequences)
