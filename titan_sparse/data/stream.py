"""Endless streams of sequences made from documents, and mixtures of several streams. They are
deterministic and resumable.

A stream first gives a sequence as spans of documents, which is cheap. Only the rank that needs the
sequence reads its tokens.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.documents import Documents
from titan_sparse.data.packing import Packed, Piece, pack
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.tokenizer import Tokenizer

logger = logging.getLogger("titan_sparse")


@dataclass
class Cursor:
    """The first token of a stream that has not been taken."""

    sequence: int = 0
    """number of the stream's next sequence"""
    epoch: int = 0
    document: int = 0
    """place in the order of the epoch, which counts documents, or samples for prepared tokens"""
    offset: int = 0
    """tokens of that document already taken"""
    documents_seen: int = 0
    """documents begun, over all epochs and ranks"""


class Span(NamedTuple):
    """Tokens [start, stop) of document `index`."""

    index: int
    start: int
    stop: int


class Order:
    """The order of 0 ... count-1, shuffled anew in every epoch, or unchanged.

    Raises ValueError for a negative seed.
    """

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        if seed < 0:
            raise ValueError(
                f"training.seed = {seed} cannot seed the order of documents; write 0 or more"
            )
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        # Only the most recently used epoch's order is kept.
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, epoch: int, place: int) -> int:
        """The number at a place of an epoch."""
        if not self.shuffle:
            return place
        if self._epoch != epoch:
            # The pair, not the sum. Otherwise seed 0 in epoch 1 and seed 1 in epoch 0 would read
            # in the same order.
            generator = np.random.default_rng([self.seed, epoch])
            self._order = generator.permutation(self.count)
            self._epoch = epoch
        return int(self._order[place])


class Stream(ABC):
    """Cuts documents into an endless stream of sequences of at most `seq_len` tokens."""

    kind: str
    """data.sequences"""

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_len: int,
        count: int,
        seed: int,
        shuffle: bool,
        min_document_length: int,
    ) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.min_document_length = min_document_length
        self.order = Order(count, seed, shuffle)
        self.cursor = Cursor()

    @abstractmethod
    def next_sequence(self) -> list[Span]:
        """Take the next sequence. To skip a sequence, take it and drop it.

        Raises ValueError if no document is long enough.
        """

    @property
    @abstractmethod
    def documents_left_out(self) -> int:
        """Documents passed over as too short, over all epochs and ranks."""

    def fingerprint(self) -> dict[str, int | str]:
        """What decides the stream. With another fingerprint, a cursor points to other tokens."""
        return {
            "documents": len(self.documents),
            "tokens": self.documents.total_tokens,
            "vocab_size": self.tokenizer.vocab_size,
            "split_special_tokens": int(self.tokenizer.split_special_tokens),
            "sequences": self.kind,
            "seq_len": self.seq_len,
            "seed": self.order.seed,
            "shuffle": int(self.order.shuffle),
            "min_document_length": self.min_document_length,
            **asdict(self.documents.sample_format),
        }

    def pack(self, spans: list[Span]) -> Packed:
        """Read the tokens of a sequence just taken by `next_sequence`, padded to `seq_len`.

        Raises ValueError if a token is beyond the vocabulary, because a GPU would crash.
        """
        pieces = []
        for span in spans:
            document = self.documents.tokens(span.index)
            learned = self.documents.learned(span.index)
            pieces.append(Piece(document, span.start, span.stop, learned))
        packed = pack(pieces, self.seq_len, self.tokenizer.padding)
        largest = max(packed.tokens.max(), packed.labels.max())
        if largest >= self.tokenizer.vocab_size:
            raise ValueError(
                f"data.source holds the token {largest}, of a vocabulary of "
                f"{self.tokenizer.vocab_size}; copy the folder again, or prepare it anew"
            )
        return packed

    def release(self, spans: list[Span]) -> None:
        """Forget the tokens of a sequence, except those of its last document if the next sequence
        continues it."""
        finished = {span.index for span in spans}
        if self.cursor.offset:
            finished.discard(spans[-1].index)
        for index in finished:
            self.documents.forget(index)

    def _go_to_next_place(self) -> None:
        cursor = self.cursor
        cursor.document += 1
        cursor.offset = 0
        if cursor.document == self.order.count:
            cursor.epoch += 1
            cursor.document = 0


class WalkedStream(Stream):
    """Goes through the documents in the order of each epoch. A document is not read before its
    turn.

    Documents of fewer than `shortest` tokens, their end-of-document token not counted, are left
    out. Raises ValueError if this leaves none.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        shuffle: bool,
        min_document_length: int,
        shortest: int,
    ) -> None:
        count = len(documents)
        super().__init__(documents, tokenizer, seq_len, count, seed, shuffle, min_document_length)
        self.shortest = shortest
        # Fail here, before the first step. Later, the other ranks would hang waiting for this one.
        self._find_document()

    @property
    def documents_left_out(self) -> int:
        """Documents passed over as too short, over all epochs and ranks."""
        cursor = self.cursor
        # All places before the cursor's, and its own if that document has been begun.
        passed = cursor.epoch * self.order.count + cursor.document + (cursor.offset > 0)
        return passed - cursor.documents_seen

    @abstractmethod
    def _no_document(self, longest: int) -> ValueError:
        """The error for a longest document of `longest` tokens that is too short.

        The end-of-document token is not counted.
        """

    def _find_document(self) -> tuple[int, int]:
        """Index and length (end-of-document token included) of the cursor's document, skipping
        those that are too short."""
        # Wherever the cursor is, two passes contain one whole epoch. After that we know that no
        # document is long enough.
        longest = 0
        for _ in range(2 * self.order.count):
            index = self.order.at(self.cursor.epoch, self.cursor.document)
            length = self.documents.length(index)
            if length > self.shortest:
                return index, length
            longest = max(longest, length - 1)
            self.documents.forget(index)
            self._go_to_next_place()
        if longest == 0:
            raise ValueError("data.source holds only empty documents; write another data.source")
        raise self._no_document(longest)

    def _go_to_next_place(self) -> None:
        super()._go_to_next_place()
        cursor = self.cursor
        # A pass that began no document is part of a search that fails.
        if (cursor.epoch, cursor.document) == (1, 0) and cursor.documents_seen:
            tell_left_out(self.documents_left_out, self.order.count, self.shortest)


class PackedStream(WalkedStream):
    """data.sequences = packed: documents follow each other and are cut where a sequence is full.

    Raises ValueError if no document is long enough.
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
        shortest = max(min_document_length, 1)
        super().__init__(
            documents, tokenizer, seq_len, seed, shuffle, min_document_length, shortest
        )

    def next_sequence(self) -> list[Span]:
        """Take the next sequence as spans of `seq_len` tokens together."""
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
            if span.stop == length:
                self._go_to_next_place()
        cursor.sequence += 1
        return spans

    def _no_document(self, longest: int) -> ValueError:
        return ValueError(
            f"data.min_document_length = {self.min_document_length} leaves no document, as the "
            f"longest of data.source has {longest} tokens; write {longest} or less, or another "
            "data.source"
        )


class TextSampleStream(WalkedStream):
    """data.sequences = fixed, for texts: every sequence is `seq_len` tokens of one document.

    A document is cut from its beginning. Its samples follow each other, because the lengths of
    texts are not known before they are tokenized. The rest of a document is dropped. With
    `keep_rest`, it becomes a shorter sequence if it has at least two tokens, because a single token
    has no label.
    Raises ValueError if there is no sample.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        shuffle: bool,
        min_document_length: int,
        keep_rest: bool,
    ) -> None:
        self.kind = sample_kind(keep_rest)
        # The fewest tokens of a document, its end-of-document token included, that give a sample.
        self._least = 2 if keep_rest else seq_len
        shortest = max(min_document_length, self._least - 1, 1)
        super().__init__(
            documents, tokenizer, seq_len, seed, shuffle, min_document_length, shortest
        )

    def next_sequence(self) -> list[Span]:
        """Take the next sample: one span."""
        cursor = self.cursor
        index, length = self._find_document()
        span = Span(index, cursor.offset, min(length, cursor.offset + self.seq_len))
        if span.start == 0:
            cursor.documents_seen += 1
        cursor.sequence += 1
        cursor.offset = span.stop
        if length - span.stop < self._least:
            self._go_to_next_place()
        return [span]

    def _no_document(self, longest: int) -> ValueError:
        return no_sample(self.kind, self.seq_len, self.min_document_length, longest + 1)


class SampleStream(Stream):
    """data.sequences = fixed, for prepared tokens: like TextSampleStream, but samples are permuted.

    All lengths are known at once, so the samples of a document need not follow each other.
    (MTraining trains this way, on rows of exactly 524288 tokens.) Raises ValueError if there is no
    sample.
    """

    def __init__(
        self,
        documents: TokenShards,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        shuffle: bool,
        min_document_length: int,
        keep_rest: bool,
    ) -> None:
        self.kind = sample_kind(keep_rest)
        # int64 [documents]: the samples that each document gives
        lengths = documents.lengths()
        samples = lengths // seq_len
        if keep_rest:
            samples += lengths % seq_len >= 2
        samples[lengths <= min_document_length] = 0
        # The documents that give samples: their indices, and for each the number of samples up to
        # and including its own.
        self._index = np.flatnonzero(samples)
        self._stop = np.cumsum(samples[self._index])
        if len(self._index) == 0:
            raise no_sample(self.kind, seq_len, min_document_length, int(lengths.max()))
        count = int(self._stop[-1])
        super().__init__(documents, tokenizer, seq_len, count, seed, shuffle, min_document_length)
        self._left_out = len(documents) - len(self._index)
        least = 2 if keep_rest else seq_len
        tell_left_out(self._left_out, len(documents), max(min_document_length, least - 1))

    @property
    def documents_left_out(self) -> int:
        """Documents passed over as too short, over all epochs and ranks. They are counted at the
        beginning of each epoch."""
        return self._left_out * (self.cursor.epoch + 1)

    def next_sequence(self) -> list[Span]:
        """Take the next sample: one span."""
        cursor = self.cursor
        sample = self.order.at(cursor.epoch, cursor.document)
        place = int(np.searchsorted(self._stop, sample, side="right"))
        index = int(self._index[place])
        first_sample = int(self._stop[place - 1]) if place else 0
        start = (sample - first_sample) * self.seq_len
        stop = min(start + self.seq_len, self.documents.length(index))
        if start == 0:
            cursor.documents_seen += 1
        cursor.sequence += 1
        self._go_to_next_place()
        return [Span(index, start, stop)]


def sample_kind(keep_rest: bool) -> str:
    """data.sequences of samples of one document each."""
    return "fixed_and_rest" if keep_rest else "fixed"


def no_sample(kind: str, seq_len: int, min_document_length: int, longest: int) -> ValueError:
    """The error for documents that give no sample.

    longest: tokens of the longest document, its end-of-document token included.
    """
    return ValueError(
        f'data.sequences = "{kind}": no document of data.source has '
        f"training.seq_len = {seq_len} tokens and more than data.min_document_length = "
        f"{min_document_length} (the longest has {longest}); write smaller ones, or "
        'data.sequences = "packed"'
    )


def tell_left_out(left_out: int, documents: int, shortest: int) -> None:
    """Log how many documents of fewer than `shortest` tokens there are, if there are any."""
    if left_out:
        logger.info(
            "data: %d of %d documents are left out: they have fewer than %d tokens",
            left_out,
            documents,
            shortest,
        )


class Mixture:
    """Streams, each with its share of the sequences. A single stream is also a mixture.

    The next sequence comes from the stream that is furthest behind its share, by the counts so far.
    So the first n sequences hold n * share of each stream to within about one, on any number of
    ranks, and there is no random state to save.
    """

    def __init__(self, streams: Sequence[Stream], shares: Sequence[float]) -> None:
        self.streams = streams
        self.shares = shares

    @property
    def sequence(self) -> int:
        """Sequences taken so far."""
        return sum(stream.cursor.sequence for stream in self.streams)

    def next_stream(self) -> Stream:
        """The stream that gives the next sequence."""
        due = self.sequence + 1
        behind = []
        for stream, share in zip(self.streams, self.shares, strict=True):
            behind.append(share * due - stream.cursor.sequence)
        return self.streams[behind.index(max(behind))]

    def fingerprint(self) -> list[dict[str, Any]]:
        """What decides the stream of sequences, a dict for each part."""
        parts = []
        for stream, share in zip(self.streams, self.shares, strict=True):
            parts.append({**stream.fingerprint(), "share": round(share, 9)})
        return parts
