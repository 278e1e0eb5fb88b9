"""data.sequences = packed, of chats: whole documents in a sequence, none of them cut.

An answer that is cut teaches never to stop, so a document longer than a sequence is dropped.
"""

import logging
from typing import NamedTuple

import numpy as np

from titan_sparse.data.documents import Documents
from titan_sparse.data.packing import first_fit, kept_shares
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.stream import Span, Stream
from titan_sparse.data.tokenizer import Tokenizer

logger = logging.getLogger("titan_sparse")

WINDOW = 32
"""Sequences that documents are packed into at one time. A quarter of one is left free: documents
never fit exactly, and what is over would have a sequence almost to itself."""


class Window(NamedTuple):
    """Documents that follow each other in an epoch's order, packed into sequences."""

    stop: int
    """place behind the last of them"""
    sequences: list[list[int]]
    """indices of the documents of each"""


class WholeStream(Stream):
    """Packs windows of documents in the order of each epoch; what is left of a sequence is padding.

    cursor.document is the place of the window in hand, cursor.offset the sequences taken of it.
    Documents of fewer than `min_document_length` tokens are left out, and those that are longer than
    a sequence. Raises ValueError if all are.
    """

    kind = "packed"

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        shuffle: bool,
        min_document_length: int,
    ) -> None:
        count = len(documents)
        super().__init__(documents, tokenizer, seq_len, count, seed, shuffle, min_document_length)
        self._window_at = (-1, -1)
        self._window = Window(0, [])
        # Now, rather than in the first step, when other ranks would wait for this one.
        self._current()
        self._tell_kept()

    @property
    def documents_left_out(self) -> int:
        """Documents passed over as too short or too long, over all epochs and ranks."""
        cursor = self.cursor
        begun = 0
        if cursor.offset:
            begun = sum(len(numbers) for numbers in self._current().sequences[: cursor.offset])
        passed = cursor.epoch * self.order.count + cursor.document
        return passed - (cursor.documents_seen - begun)

    def next_sequence(self) -> list[Span]:
        """Take the next sequence: whole documents."""
        window = self._current()
        cursor = self.cursor
        indices = window.sequences[cursor.offset]
        cursor.sequence += 1
        cursor.documents_seen += len(indices)
        cursor.offset += 1
        if cursor.offset == len(window.sequences):
            self._go_behind(window)
        return [Span(index, 0, self.documents.length(index)) for index in indices]

    def release(self, spans: list[Span]) -> None:
        """Forget the tokens of a sequence."""
        for span in spans:
            self.documents.forget(span.index)

    def _current(self) -> Window:
        """The window at the cursor; the cursor moves over windows without a sequence."""
        cursor = self.cursor
        # Wherever the cursor stands, two passes hold one whole epoch.
        for _ in range(2 * self.order.count):
            if self._window_at != (cursor.epoch, cursor.document):
                self._window = self._pack_window()
                self._window_at = (cursor.epoch, cursor.document)
            if self._window.sequences:
                return self._window
            self._go_behind(self._window)
        raise ValueError(
            f"no sample of data.source has at most training.seq_len = {self.seq_len} tokens and at "
            f"least data.min_document_length = {self.min_document_length}; write a longer "
            "training.seq_len, or a smaller data.min_document_length"
        )

    def _pack_window(self) -> Window:
        """Read documents from the cursor's place on, as many as fill WINDOW sequences."""
        cursor = self.cursor
        place = cursor.document
        indices: list[int] = []
        lengths: list[int] = []
        room = WINDOW * self.seq_len - self.seq_len // 4
        while place < self.order.count:
            index = self.order.at(cursor.epoch, place)
            length = self.documents.length(index)
            if max(self.min_document_length, 1) < length <= self.seq_len:
                if length > room:
                    break
                indices.append(index)
                lengths.append(length)
                room -= length
            else:
                self.documents.forget(index)
            place += 1
        sequences = []
        for numbers in first_fit(lengths, self.seq_len):
            sequences.append([indices[number] for number in numbers])
        return Window(place, sequences)

    def _go_behind(self, window: Window) -> None:
        cursor = self.cursor
        cursor.document = window.stop
        cursor.offset = 0
        if cursor.document == self.order.count:
            cursor.epoch += 1
            cursor.document = 0
        # A pass that began no document is the search of one that fails.
        if (cursor.epoch, cursor.document) == (1, 0) and cursor.documents_seen:
            logger.info(
                "data: %d of %d samples are left out: longer than training.seq_len = %d tokens, or "
                "shorter than data.min_document_length = %d",
                self.order.count - cursor.documents_seen,
                self.order.count,
                self.seq_len,
                self.min_document_length,
            )

    def _tell_kept(self) -> None:
        """Log the share of samples that a sequence of some lengths keeps, as far as it is known."""
        documents = self.documents
        if isinstance(documents, TokenShards):
            lengths = documents.lengths()
            learned = documents.total_learned / documents.total_tokens
        else:
            # Those of the first window, which has just been read: lengths are remembered.
            places = range(self.cursor.document, self._window.stop)
            indices = [self.order.at(self.cursor.epoch, place) for place in places]
            lengths = np.array([documents.length(index) for index in indices])
            kept = sum(self._window.sequences, [])
            learned = np.concatenate([documents.learned(index) for index in kept]).mean()
        logger.info(
            "data: %d of %s%d samples are longer than a sequence and dropped; one of so many tokens "
            "keeps whole: %s; %.1f%% of the tokens are learned",
            int((lengths > self.seq_len).sum()),
            "" if len(lengths) == len(documents) else "the first ",
            len(lengths),
            kept_shares(lengths, self.seq_len),
            100 * learned,
        )
