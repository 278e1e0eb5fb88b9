"""Endless streams of sequences out of documents, and the mixture of several; deterministic and resumable.

A sequence is taken first as spans, which are cheap, and only where it is needed as tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan_sparse.data.documents import Documents
from titan_sparse.data.packing import Packed, Piece, pack
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.tokenizer import Tokenizer


@dataclass
class Cursor:
    """The first token of a stream that has not been taken."""

    sequence: int = 0
    """number of the stream's next sequence"""
    epoch: int = 0
    document: int = 0
    """place in the epoch's order: of documents, or of samples where each sequence is one"""
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
    """0 ... count-1 in an order of its own in every epoch, or as they are. Raises ValueError for a negative seed."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        if seed < 0:
            raise ValueError(
                f"training.seed = {seed} cannot seed the order of documents; write 0 or more"
            )
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, epoch: int, place: int) -> int:
        """What stands at a place of an epoch."""
        if not self.shuffle:
            return place
        if self._epoch != epoch:
            # The pair, not the sum: else seed 0 in epoch 1 and seed 1 in epoch 0 would read in the same order.
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._epoch = epoch
        return int(self._order[place])


class Stream(ABC):
    """Cuts documents to an endless stream of sequences of at most `seq_len` tokens."""

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
        self.documents, self.tokenizer, self.seq_len = documents, tokenizer, seq_len
        self.min_document_length = min_document_length
        self.order = Order(count, seed, shuffle)
        self.cursor = Cursor()

    @abstractmethod
    def next_sequence(self) -> list[Span]:
        """Take the next sequence; to pass over one, drop it. Raises ValueError if no document is long enough."""

    def fingerprint(self) -> dict[str, int | str]:
        """What fixes the stream: with another fingerprint a cursor points to other tokens."""
        return {
            "documents": len(self.documents),
            "tokens": self.documents.total_tokens,
            "vocab_size": self.tokenizer.vocab_size,
            "sequences": self.kind,
            "seq_len": self.seq_len,
            "seed": self.order.seed,
            "shuffle": int(self.order.shuffle),
            "min_document_length": self.min_document_length,
        }

    def pack(self, spans: list[Span]) -> Packed:
        """Read the tokens of a sequence just taken by `next_sequence`, padded to `seq_len`."""
        pieces = [Piece(self.documents.tokens(span.index), span.start, span.stop) for span in spans]
        return pack(pieces, self.seq_len, self.tokenizer.padding)

    def release(self, spans: list[Span]) -> None:
        """Forget the tokens of a sequence, save those of its last document where the next sequence goes on with it."""
        kept = spans[-1].index if self.cursor.offset else None
        for index in {span.index for span in spans} - {kept}:
            self.documents.forget(index)

    def _next_place(self) -> None:
        cursor = self.cursor
        cursor.document += 1
        cursor.offset = 0
        if cursor.document == self.order.count:
            cursor.epoch += 1
            cursor.document = 0


class PackedStream(Stream):
    """data.sequences = packed: documents one after the other, cut where a sequence is full."""

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
        super().__init__(
            documents, tokenizer, seq_len, len(documents), seed, shuffle, min_document_length
        )

    def next_sequence(self) -> list[Span]:
        """Take the next sequence as spans of `seq_len` tokens together. Raises ValueError if no document is long enough."""
        cursor, spans, room = self.cursor, [], self.seq_len
        while room > 0:
            index, length = self._find_document()
            span = Span(index, cursor.offset, min(length, cursor.offset + room))
            cursor.documents_seen += span.start == 0
            cursor.offset = span.stop
            room -= span.stop - span.start
            spans.append(span)
            if span.stop == length:
                self._next_place()
        cursor.sequence += 1
        return spans

    def _find_document(self) -> tuple[int, int]:
        """Index and length (end-of-document token included) of the cursor's document, skipping those too short."""
        # Wherever the cursor stands, two passes hold one whole epoch: after that, no document is long enough.
        for _ in range(2 * self.order.count):
            index = self.order.at(self.cursor.epoch, self.cursor.document)
            length = self.documents.length(index)
            if length > max(self.min_document_length, 1):
                return index, length
            self.documents.forget(index)
            self._next_place()
        raise ValueError(
            f"no document of data.source has data.min_document_length = {self.min_document_length} tokens, or any at "
            "all; write a smaller data.min_document_length or another data.source"
        )


class SampleStream(Stream):
    """data.sequences = fixed: every sequence is `seq_len` tokens of one document, cut from its beginning on.

    A document's rest is dropped, or with `keep_rest` a shorter sequence (if it has two tokens: one has no label).
    Samples, not documents, are permuted. (MTraining trains on rows of exactly 524288 tokens so.)
    Raises ValueError if there is no sample.
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
        self.kind = "fixed_and_rest" if keep_rest else "fixed"
        lengths = documents.lengths()
        counts = lengths // seq_len + (lengths % seq_len >= 2 if keep_rest else 0)
        counts[lengths <= min_document_length] = 0
        # Of documents that give samples: their index, and the number of samples up to and including theirs.
        self._index = np.flatnonzero(counts)
        self._stop = np.cumsum(counts[self._index])
        if len(self._index) == 0:
            raise ValueError(
                f'data.sequences = "{self.kind}": no document of data.source has training.seq_len = {seq_len} '
                f'tokens (the longest has {lengths.max()}); write a smaller one, or data.sequences = "packed"'
            )
        super().__init__(
            documents, tokenizer, seq_len, int(self._stop[-1]), seed, shuffle, min_document_length
        )

    def next_sequence(self) -> list[Span]:
        """Take the next sample: one span."""
        sample = self.order.at(self.cursor.epoch, self.cursor.document)
        place = int(np.searchsorted(self._stop, sample, side="right"))
        first = int(self._stop[place - 1]) if place else 0
        index = int(self._index[place])
        start = (sample - first) * self.seq_len
        span = Span(index, start, min(start + self.seq_len, self.documents.length(index)))
        self.cursor.documents_seen += start == 0
        self.cursor.sequence += 1
        self._next_place()
        return [span]


class Mixture:
    """Streams, each with its share of the sequences; one stream alone is a mixture too.

    Which stream gives sequence n follows from the counts so far: the one that is furthest behind its share. So the first n
    sequences hold n * share of each stream to within about one, on any number of ranks, and there is nothing random to save.
    """

    def __init__(self, streams: Sequence[Stream], shares: Sequence[float]) -> None:
        self.streams, self.shares = streams, shares

    @property
    def sequence(self) -> int:
        """Sequences taken so far."""
        return sum(stream.cursor.sequence for stream in self.streams)

    def next_stream(self) -> Stream:
        """The stream that the next sequence has to be taken from."""
        due = self.sequence + 1
        behind = [
            share * due - stream.cursor.sequence
            for stream, share in zip(self.streams, self.shares, strict=True)
        ]
        return self.streams[behind.index(max(behind))]

    def fingerprint(self) -> list[dict[str, Any]]:
        """What fixes the stream of sequences, a dict for each part."""
        return [
            {**stream.fingerprint(), "share": round(share, 9)}
            for stream, share in zip(self.streams, self.shares, strict=True)
        ]
