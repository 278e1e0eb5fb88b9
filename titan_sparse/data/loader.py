"""One endless global stream of packed sequences, shared out to the data-parallel ranks; deterministic and resumable."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.data.packing import Packed, Piece, pack, pad_to_multiple
from titan_sparse.data.sources import Source, open_source
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from titan_sparse.config import Data

logger = logging.getLogger("titan_sparse")

# What fixes the global stream -> how to name it to the user.
FINGERPRINT_KEYS = {
    "documents": "the number of documents of data.source",
    "vocab_size": "the vocabulary size of data.tokenizer",
    "seq_len": "training.seq_len",
    "seed": "training.seed",
    "shuffle": "data.shuffle",
    "min_document_length": "data.min_document_length",
}


@dataclass
class Batch:
    """The sequences of one data-parallel rank (b of them), this context-parallel rank's blocks of each."""

    tokens: Tensor
    """int64 [b, S_local]"""
    labels: Tensor
    """int64 [b, S_local], shifted before sharding; -100 where there is no next token in the document"""
    positions: Tensor
    """int64 [b, S_local], position in the piece"""
    lengths: list[list[int]]
    """per sequence the tokens of each piece in global order; what they leave of S is padding"""
    table: Tensor | None = None
    """int64 [ranks, n], the blocks of every context-parallel rank, where the layout depends on the batch"""


@dataclass
class Cursor:
    """The first token of the stream that has not been taken."""

    sequence: int = 0
    """global number of the next sequence"""
    epoch: int = 0
    document: int = 0
    """place in the epoch's order"""
    offset: int = 0
    """tokens of that document already taken"""
    documents_seen: int = 0
    """documents begun, over all epochs and ranks"""


class Span(NamedTuple):
    """Tokens [start, stop) of the source's document `index`."""

    index: int
    start: int
    stop: int


class DocumentStream:
    """Cuts the endless stream of documents to sequences: first as spans, which are cheap, then as tokens."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, seq_len: int, seed: int, shuffle: bool, min_document_length: int
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.min_document_length = min_document_length
        self.cursor = Cursor()
        # With the end-of-document token, so 0 can stand for "not known yet".
        self._lengths = np.zeros(len(source), dtype=np.int64)
        self._tokens: dict[int, NDArray[np.int32]] = {}
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def fingerprint(self) -> dict[str, int]:
        """What fixes the stream: with another fingerprint a cursor points to other tokens."""
        return {
            "documents": len(self.source),
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "min_document_length": self.min_document_length,
        }

    def next_sequence(self) -> list[Span]:
        """Take the next sequence as spans of `seq_len` tokens together; to pass over a sequence, drop them.

        Raises ValueError if no document is long enough.
        """
        cursor, spans, room = self.cursor, [], self.seq_len
        while room > 0:
            index, length = self._find_document()
            span = Span(index, cursor.offset, min(length, cursor.offset + room))
            cursor.documents_seen += span.start == 0
            cursor.offset = span.stop
            room -= span.stop - span.start
            spans.append(span)
            if span.stop == length:
                self._next_document()
        cursor.sequence += 1
        return spans

    def pack(self, spans: list[Span]) -> Packed:
        """Read the tokens of a sequence just taken by `next_sequence`."""
        pieces = [Piece(self._tokenize(span.index), span.start, span.stop) for span in spans]
        return pack(pieces, self.seq_len, self.tokenizer.padding)

    def release(self, spans: list[Span]) -> None:
        """Forget the tokens of a sequence, save those of its last document: the next sequence may go on with it."""
        last = spans[-1].index
        self._tokens = {last: self._tokens[last]} if last in self._tokens else {}

    def _find_document(self) -> tuple[int, int]:
        """Index and length (end-of-document token included) of the cursor's document, skipping those too short."""
        # Wherever the cursor stands, two passes hold one whole epoch: after that, no document is long enough.
        for _ in range(2 * len(self.source)):
            index = self._index()
            length = self._length(index)
            if length > max(self.min_document_length, 1):
                return index, length
            self._tokens.pop(index, None)
            self._next_document()
        raise ValueError(
            f"no document of data.source has data.min_document_length = {self.min_document_length} tokens, or any at "
            "all; write a smaller data.min_document_length or another data.source"
        )

    def _index(self) -> int:
        cursor = self.cursor
        if not self.shuffle:
            return cursor.document
        if self._order_epoch != cursor.epoch:
            # The pair, not the sum: else seed 0 in epoch 1 and seed 1 in epoch 0 would read in the same order.
            self._order = np.random.default_rng([self.seed, cursor.epoch]).permutation(len(self.source))
            self._order_epoch = cursor.epoch
        return int(self._order[cursor.document])

    def _next_document(self) -> None:
        cursor = self.cursor
        cursor.document += 1
        cursor.offset = 0
        if cursor.document == len(self.source):
            cursor.epoch += 1
            cursor.document = 0

    def _length(self, index: int) -> int:
        if self._lengths[index] == 0:
            self._lengths[index] = len(self._tokenize(index))
        return int(self._lengths[index])

    def _tokenize(self, index: int) -> NDArray[np.int32]:
        if index not in self._tokens:
            ids = self.tokenizer.encode(self.source[index])
            self._tokens[index] = np.append(ids, np.int32(self.tokenizer.end_of_document))
        return self._tokens[index]


class PackedLoader:
    """Endless iterator of `Batch`; sequence number n of the global stream is the same on any number of ranks.

    In each micro-batch data-parallel rank r of R takes the b = `batch_size` sequences r*b ... r*b + b-1 of the next
    R*b. S is `seq_len` padded up to `padding_multiple`. `shard(x, dim, table)` keeps this context-parallel rank's blocks of
    a [b, S] tensor (None: all); table: what `place(lengths, S)` says of the batch, from Batch.lengths and so on every rank
    alike (None: the layout does not depend on the batch). Documents with fewer than `min_document_length` tokens (the end-of-document token not
    counted) and empty ones are skipped. Raises ValueError for a negative seed, or when no document is long enough.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        seq_len: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        min_document_length: int,
        dp_rank: int,
        dp_size: int,
        padding_multiple: int = 1,
        shard: Callable[[Tensor, int, Tensor | None], Tensor] | None = None,
        place: Callable[[list[list[int]], int], Tensor] | None = None,
    ) -> None:
        if seed < 0:
            raise ValueError(f"training.seed = {seed} cannot seed the order of documents; write 0 or more")
        self.stream = DocumentStream(source, tokenizer, seq_len, seed, shuffle, min_document_length)
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.padding_multiple = padding_multiple
        self.shard = shard
        self.place = place

    @property
    def epoch(self) -> int:
        """Number of whole passes over the source (all ranks together)."""
        return self.stream.cursor.epoch

    @property
    def documents_seen(self) -> int:
        """Number of documents begun, over all epochs and ranks."""
        return self.stream.cursor.documents_seen

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        first = self.dp_rank * self.batch_size
        own = range(first, first + self.batch_size)
        packed = []
        # To the end of the micro-batch, not of the own sequences: the cursor is then the same on all ranks.
        for number in range(self.dp_size * self.batch_size):
            spans = self.stream.next_sequence()
            if number in own:
                packed.append(self.stream.pack(spans))
            self.stream.release(spans)
        return self._batch(packed)

    def state_dict(self) -> dict[str, Any]:
        """What has been handed out, as plain ints; the same on all ranks."""
        return {
            **asdict(self.stream.cursor),
            "dp_size": self.dp_size,
            "batch_size": self.batch_size,
            "fingerprint": self.stream.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the first sequence that was not handed out; the number of ranks and the batch size may differ.

        Raises ValueError, saying what differs, if the saved stream was another one.
        """
        _check_fingerprint(state["fingerprint"], self.stream.fingerprint())
        self.stream.cursor = Cursor(**{field: state[field] for field in asdict(self.stream.cursor)})
        if (state["dp_size"], state["batch_size"]) != (self.dp_size, self.batch_size):
            logger.info(
                "loader: saved with %d data-parallel ranks x %d sequences, "
                "goes on with %d x %d from global sequence %d",
                state["dp_size"], state["batch_size"], self.dp_size, self.batch_size, state["sequence"],
            )  # fmt: skip

    def _batch(self, packed: list[Packed]) -> Batch:
        padding_id = self.stream.tokenizer.padding
        padded = [pad_to_multiple(sequence, self.padding_multiple, padding_id) for sequence in packed]
        lengths = [sequence.lengths for sequence in padded]
        table = None if self.place is None else self.place(lengths, len(padded[0].tokens))
        return Batch(
            tokens=self._local([sequence.tokens for sequence in padded], table),
            labels=self._local([sequence.labels for sequence in padded], table),
            positions=self._local([sequence.positions for sequence in padded], table),
            lengths=lengths,
            table=table,
        )

    def _local(self, rows: list[NDArray[np.int64]], table: Tensor | None) -> Tensor:
        full = torch.from_numpy(np.stack(rows))
        return full if self.shard is None else self.shard(full, 1, table)


def _check_fingerprint(saved: dict[str, int], current: dict[str, int]) -> None:
    differences = [
        f"{name} was {saved[key]} and is {current[key]}"
        for key, name in FINGERPRINT_KEYS.items()
        if saved[key] != current[key]
    ]
    if differences:
        raise ValueError(f"the saved loader state is of another stream of sequences: {'; '.join(differences)}")


def build_loader(
    data: "Data",
    seq_len: int,
    batch_size: int,
    seed: int,
    dp_rank: int,
    dp_size: int,
    padding_multiple: int = 1,
    shard: Callable[[Tensor, int, Tensor | None], Tensor] | None = None,
    tokenizer: Tokenizer | None = None,
) -> PackedLoader:
    """Open the [data] section's source, and its tokenizer unless one is given, and load packed sequences from it.

    Raises ValueError, naming the key, if the source or the tokenizer cannot be opened.
    """
    return PackedLoader(
        source=open_source(data),
        tokenizer=load_tokenizer(data.tokenizer) if tokenizer is None else tokenizer,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        shuffle=data.shuffle,
        min_document_length=data.min_document_length,
        dp_rank=dp_rank,
        dp_size=dp_size,
        padding_multiple=padding_multiple,
        shard=shard,
    )
