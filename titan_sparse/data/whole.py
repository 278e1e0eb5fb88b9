"""data.sequences = packed, for chats: sequences hold whole documents, which are never cut.

Training on an answer that is cut teaches the model not to stop, so documents that are longer than a
sequence are dropped.
"""

import logging
from typing import NamedTuple

import numpy as np

from titan_sparse.config.sections import Data
from titan_sparse.data.documents import Documents
from titan_sparse.data.packing import first_fit, kept_shares
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.stream import Span, Stream
from titan_sparse.data.tokenizer import Tokenizer

logger = logging.getLogger("titan_sparse")

WINDOW = 32
"""Number of sequences that documents are packed into at a time. A quarter of one sequence is left
free, because documents never fit exactly. Leftover documents would each fill a sequence of their
own, mostly with padding."""


class Window(NamedTuple):
    """Documents that follow each other in an epoch's order, packed into sequences."""

    stop: int
    """place after the last of them"""
    sequences: list[list[int]]
    """indices of the documents in each sequence"""


class WholeStream(Stream):
    """Packs windows of documents in the order of each epoch. The rest of a sequence is padding.

    cursor.document is the place of the current window, cursor.offset the number of sequences taken
    from it. Documents of fewer than `min_document_length` tokens, and documents that are longer
    than a sequence, are left out. Raises ValueError if this leaves none.
    """

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, data: Data, seq_len: int, seed: int
    ) -> None:
        super().__init__(documents, tokenizer, data, seq_len, seed)
        self._window_at = (-1, -1)
        self._window = Window(0, [])
        # Fail here, before the first step. Later, the other ranks would hang waiting for this one.
        self._current()
        self._log_kept()

    @property
    def documents_left_out(self) -> int:
        cursor = self.cursor
        begun = 0
        if cursor.offset:
            begun = sum(len(numbers) for numbers in self._current().sequences[: cursor.offset])
        passed = cursor.epoch * self.order.count + cursor.document
        return passed - (cursor.documents_seen - begun)

    def next_sequence(self) -> list[Span]:
        window = self._current()
        cursor = self.cursor
        indices = window.sequences[cursor.offset]
        cursor.sequence += 1
        cursor.documents_seen += len(indices)
        cursor.offset += 1
        if cursor.offset == len(window.sequences):
            self._go_to(window.stop)
        return [Span(index, 0, self.documents.length(index)) for index in indices]

    def release(self, spans: list[Span]) -> None:
        for span in spans:
            self.documents.forget(span.index)

    def _current(self) -> Window:
        """The window at the cursor. The cursor skips windows without a sequence."""
        cursor = self.cursor
        # Wherever the cursor is, two passes contain one whole epoch.
        for _ in range(2 * self.order.count):
            if self._window_at != (cursor.epoch, cursor.document):
                self._window = self._pack_window()
                self._window_at = (cursor.epoch, cursor.document)
            if self._window.sequences:
                return self._window
            self._go_to(self._window.stop)
        raise ValueError(
            f"no sample of data.source has at most training.seq_len = {self.seq_len} tokens and at "
            f"least data.min_document_length = {self.data.min_document_length}; write a longer "
            "training.seq_len, or a smaller data.min_document_length"
        )

    def _pack_window(self) -> Window:
        """Read as many documents from the cursor on as fill WINDOW sequences."""
        cursor = self.cursor
        place = cursor.document
        indices: list[int] = []
        lengths: list[int] = []
        room = WINDOW * self.seq_len - self.seq_len // 4
        while place < self.order.count:
            index = self.order.at(cursor.epoch, place)
            length = self.documents.length(index)
            if max(self.data.min_document_length, 1) < length <= self.seq_len:
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

    def _log_left_out(self) -> None:
        logger.info(
            "data: %d of %d samples are left out: longer than training.seq_len = %d tokens, or "
            "shorter than data.min_document_length = %d",
            self.documents_left_out,
            self.order.count,
            self.seq_len,
            self.data.min_document_length,
        )

    def _log_kept(self) -> None:
        """Log the share of samples that fit a sequence, for some lengths, by the lengths known so
        far."""
        documents = self.documents
        if isinstance(documents, TokenShards):
            lengths = documents.lengths()
            learned = documents.total_learned / documents.total_tokens
        else:
            # Use the first window, which has just been read. Its lengths are in memory.
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
