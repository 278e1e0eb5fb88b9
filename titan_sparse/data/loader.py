"""One endless global stream of packed sequences, shared out to the data-parallel ranks; deterministic and resumable."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.config.mixture import source_weights
from titan_sparse.data.documents import open_documents
from titan_sparse.data.packing import Packed, pad_to_multiple
from titan_sparse.data.stream import Cursor, Mixture, PackedStream, SampleStream, Stream
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from titan_sparse.config import Data

logger = logging.getLogger("titan_sparse")

# What fixes the global stream -> how to name it to the user.
FINGERPRINT_KEYS = {
    "share": "a part's share of data.source",
    "documents": "the number of documents of data.source",
    "tokens": "the number of prepared tokens of data.source (0: texts)",
    "vocab_size": "the vocabulary size of data.tokenizer",
    "sequences": "data.sequences",
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


class PackedLoader:
    """Endless iterator of `Batch`; sequence number n of the global stream is the same on any number of ranks.

    In each micro-batch data-parallel rank r of R takes the b = `batch_size` sequences r*b ... r*b + b-1 of the next
    R*b. S is training.seq_len padded up to `padding_multiple`. `shard(x, dim, table)` keeps this context-parallel rank's blocks of
    a [b, S] tensor (None: all); table: what `place(lengths, S)` says of the batch, from Batch.lengths and so on every rank
    alike (None: the layout does not depend on the batch). Raises ValueError when no document is long enough.
    """

    def __init__(
        self,
        mixture: Mixture,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
        padding_multiple: int = 1,
        shard: Callable[[Tensor, int, Tensor | None], Tensor] | None = None,
        place: Callable[[list[list[int]], int], Tensor] | None = None,
    ) -> None:
        self.mixture = mixture
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.padding_multiple = padding_multiple
        self.shard = shard
        self.place = place

    @property
    def tokenizer(self) -> Tokenizer:
        """The one of all parts of the mixture."""
        return self.mixture.streams[0].tokenizer

    @property
    def epoch(self) -> int:
        """Number of whole passes over the source, all ranks together; in a mixture over the part that is passed most."""
        return max(stream.cursor.epoch for stream in self.mixture.streams)

    @property
    def documents_seen(self) -> int:
        """Number of documents begun, over all epochs and ranks."""
        return sum(stream.cursor.documents_seen for stream in self.mixture.streams)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        first = self.dp_rank * self.batch_size
        own = range(first, first + self.batch_size)
        packed = []
        # To the end of the micro-batch, not of the own sequences: the cursor is then the same on all ranks.
        for number in range(self.dp_size * self.batch_size):
            stream = self.mixture.next_stream()
            spans = stream.next_sequence()
            if number in own:
                packed.append(self._pad(stream, stream.pack(spans)))
            stream.release(spans)
        return self._batch(packed)

    def state_dict(self) -> dict[str, Any]:
        """What has been handed out, the same on all ranks; a cursor and a fingerprint for each part of the mixture."""
        return {
            "sequence": self.mixture.sequence,
            "dp_size": self.dp_size,
            "batch_size": self.batch_size,
            # As text: a checkpoint is read into a state of the same shape, and another mixture has another.
            "cursors": json.dumps([asdict(stream.cursor) for stream in self.mixture.streams]),
            "fingerprint": json.dumps(self.mixture.fingerprint()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the first sequence that was not handed out; the number of ranks and the batch size may differ.

        Raises ValueError, saying what differs, if the saved stream was another one.
        """
        _check_fingerprint(json.loads(state["fingerprint"]), self.mixture.fingerprint())
        for stream, cursor in zip(self.mixture.streams, json.loads(state["cursors"]), strict=True):
            stream.cursor = Cursor(**cursor)
        if (state["dp_size"], state["batch_size"]) != (self.dp_size, self.batch_size):
            logger.info(
                "loader: saved with %d data-parallel ranks x %d sequences, "
                "goes on with %d x %d from global sequence %d",
                state["dp_size"], state["batch_size"], self.dp_size, self.batch_size, state["sequence"],
            )  # fmt: skip

    def _pad(self, stream: Stream, sequence: Packed) -> Packed:
        return pad_to_multiple(sequence, self.padding_multiple, stream.tokenizer.padding)

    def _batch(self, padded: list[Packed]) -> Batch:
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


def _check_fingerprint(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    if len(saved) != len(current):
        raise ValueError(
            "the saved loader state is of another stream of sequences: "
            f"data.source had {len(saved)} parts and has {len(current)}"
        )
    differences = [
        f"{name} was {old[key]} and is {new[key]}"
        for old, new in zip(saved, current, strict=True)
        for key, name in FINGERPRINT_KEYS.items()
        if old[key] != new[key]
    ]
    if differences:
        raise ValueError(
            f"the saved loader state is of another stream of sequences: {'; '.join(differences)}"
        )


def build_stream(data: "Data", tokenizer: Tokenizer, seq_len: int, seed: int) -> Stream:
    """The stream of one part of a mixture, `data.source`. Raises ValueError, naming the key, if it cannot be opened."""
    documents = open_documents(data, tokenizer)
    options = (tokenizer, seq_len, seed, data.shuffle, data.min_document_length)
    if data.sequences == "packed":
        return PackedStream(documents, *options)
    return SampleStream(documents, *options, keep_rest=data.sequences == "fixed_and_rest")


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
    """Open the [data] section's source or mixture, and its tokenizer unless one is given, and load sequences from it.

    Raises ValueError, naming the key, if a source or the tokenizer cannot be opened, and for a negative seed.
    """
    tokenizer = load_tokenizer(data.tokenizer) if tokenizer is None else tokenizer
    weights = source_weights(data.source)
    streams = [
        build_stream(replace(data, source=source), tokenizer, seq_len, seed) for source in weights
    ]
    return PackedLoader(
        Mixture(streams, list(weights.values())),
        batch_size,
        dp_rank,
        dp_size,
        padding_multiple,
        shard,
    )
