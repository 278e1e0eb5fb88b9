"""The loader makes batches of packed sequences for one rank. It is deterministic and resumable.

There is one endless global stream of sequences (stream.py). It is divided among the data-parallel
ranks, and the context-parallel ranks cut each sequence into blocks.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_sparse.config.changes import data_differences
from titan_sparse.config.reading import Refusal
from titan_sparse.config.sections import Data
from titan_sparse.config.sources import parts_of, source_weights
from titan_sparse.data.documents import open_documents
from titan_sparse.data.recipe import prepare_command
from titan_sparse.data.shards import DataError, TokenShards
from titan_sparse.data.stream import Cursor, Packed, SampleStream, Stream, WalkedStream, WholeStream
from titan_sparse.data.tokenizer import Tokenizer, load_tokenizer
from titan_sparse.options.values import show

_SAMPLES = 16
"""Number of documents of a part that content_digest() samples."""

_CURSOR_FIELDS = {field.name for field in fields(Cursor)}

Shard = Callable[[Tensor, int, Tensor | None], Tensor]
"""shard(x, dim, table): this context-parallel rank's blocks of x, which is whole along `dim`."""

BlockTable = Callable[[list[list[int]], int], Tensor]
"""block_table(lengths, S): int64 [ranks, n], the blocks of every context-parallel rank in a
batch."""


@dataclass
class Batch:
    """The b sequences of one data-parallel rank, cut to the blocks of this context-parallel
    rank."""

    tokens: Tensor
    """int64 [b, S_local]"""
    labels: Tensor
    """int64 [b, S_local], shifted before sharding; -100 where the document has no next token"""
    positions: Tensor
    """int64 [b, S_local], position in the piece, or in the sequence (restart_positions)"""
    lengths: list[list[int]]
    """tokens of each piece per sequence, in global order; the rest of S is padding"""
    table: Tensor | None = None
    """int64 [ranks, n], the blocks of every context-parallel rank, where the layout depends on the
    batch"""


Read = tuple[Batch | None, list[Cursor], Exception | None]
"""A batch, or why there is none, and where the streams go on after it."""


@dataclass(eq=False)
class PackedLoader:
    """Endless iterator of `Batch`. Sequence number n of the global stream is the same on any number
    of ranks.

    Each of the `streams` gives its share of the sequences (`shares` add up to 1). The next sequence
    comes from the stream that is furthest behind its share, by the counts so far. So the first n
    sequences hold n * share of each stream to within about one, on any number of ranks, and there
    is no random state to save.

    With R = `dp_size` data-parallel ranks and b = `batch_size`, a micro-batch is the next R * b
    sequences, and rank r takes number r * b ... r * b + b - 1 of them. S is training.seq_len padded
    up to `padding_multiple`. With `restart_positions`, positions count from 0 in each piece.
    Without it, they count from 0 to S - 1 in each sequence. Raises ValueError if no document is
    long enough.
    """

    streams: Sequence[Stream]
    shares: Sequence[float]
    batch_size: int
    dp_rank: int
    dp_size: int
    padding_multiple: int = 1
    restart_positions: bool = True
    shard: Shard | None = None
    """how to cut a batch to this context-parallel rank's blocks; set once there is a process group,
    because data is opened before, so that mistakes in it are reported at once"""
    block_table: BlockTable | None = None
    """for a layout that depends on the batch; `shard` and the batch receive the table"""

    def __post_init__(self) -> None:
        # Where the streams go on after the last batch returned. Their own cursors are ahead of
        # these while a thread reads.
        self._returned = self._cursors()
        self._reader: Thread | None = None
        # What the reader has read, and how many batches of it have not been returned.
        self._ahead: SimpleQueue[Read] = SimpleQueue()
        self._not_returned = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The one tokenizer of all parts of the mixture."""
        return self.streams[0].tokenizer

    @property
    def sequence(self) -> int:
        """Number of sequences returned so far."""
        return sum(cursor.sequence for cursor in self._returned)

    def fingerprint(self) -> list[dict[str, Any]]:
        """The settings that decide the stream of sequences, a dict for each part."""
        pairs = zip(self.streams, self.shares, strict=True)
        return [{**stream.fingerprint(), "share": round(share, 9)} for stream, share in pairs]

    def longest_document(self) -> int | None:
        """Tokens of the longest document of all parts. None: it is not known
        before texts are read."""
        lengths = [stream.documents.longest() for stream in self.streams]
        return None if None in lengths else max(lengths)

    def content_digest(self) -> str:
        """A digest of the content: of each part a sample of documents, evenly spaced, because
        reading all of them would take hours."""
        digest = hashlib.sha256()
        for stream in self.streams:
            count = len(stream.documents)
            for index in sorted({n * count // _SAMPLES for n in range(_SAMPLES)} | {count - 1}):
                digest.update(hashlib.sha256(stream.documents.raw(index)).digest())
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch. Raises DataError for a document that cannot be trained on."""
        if self._not_returned:
            self._not_returned -= 1
            # Not a Future: its wait() would look to the watch like waiting for other ranks.
            batch, cursors, error = self._ahead.get()
        else:
            batch, cursors, error = self._read()
        if error is None:
            self._returned = cursors
            return batch
        self.close()
        # Before training, a ValueError is a refusal. Now other ranks may be waiting for this one.
        if isinstance(error, ValueError):
            raise DataError(str(error)) from error
        raise error

    def read_ahead(self, count: int) -> None:
        """Begin to read the next `count` batches in a thread, while the caller trains on those it
        has. Batches, their order, states and errors are the same as without. Libraries that
        tokenize release the GIL. Call close() in the end.
        """
        self.close()
        self._not_returned = count
        self._reader = Thread(target=self._read_into, args=(self._ahead, count), name="loader")
        self._reader.start()

    def close(self) -> None:
        """Stop reading ahead. The next batch is the one after the last batch returned."""
        # The reader sees that its batches are not wanted any more.
        self._ahead = SimpleQueue()
        self._not_returned = 0
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        for stream, cursor in zip(self.streams, self._returned, strict=True):
            stream.cursor = replace(cursor)

    def _read_into(self, ahead: "SimpleQueue[Read]", count: int) -> None:
        error = None
        while count > 0 and error is None and ahead is self._ahead:
            batch, cursors, error = self._read()
            ahead.put((batch, cursors, error))
            count -= 1

    def _read(self) -> Read:
        try:
            return self._batch(), self._cursors(), None
        # Raised where the batch is asked for.
        except Exception as error:
            return None, [], error

    def advice(self) -> list[str]:
        """A line for each part that should be prepared first: raw text on several data-parallel
        ranks. (Lengths decide what the next sequence is, and without tokenizing they are not
        known.)"""
        lines = []
        for stream in self.streams if self.dp_size > 1 else ():
            documents = stream.documents
            # Packages can only be joined here.
            if isinstance(documents, TokenShards) or stream.data.join_packages:
                continue
            model_folder = documents.encoder.model_folder if documents.encoder else ""
            command = prepare_command(stream.data, stream.tokenizer, model_folder)
            lines.append(
                f"data.source = {show(stream.data.source)} is raw text, and each of the {self.dp_size} "
                f"data-parallel ranks tokenizes all of it; run `{command}` once, and train with what it "
                "prints"
            )
        return lines

    def check_unchanged(self) -> None:
        """Raises DataError if a file of prepared tokens has changed since it was opened."""
        for stream in self.streams:
            if isinstance(stream.documents, TokenShards):
                stream.documents.check_unchanged()

    def _batch(self) -> Batch:
        first = self.dp_rank * self.batch_size
        own_numbers = range(first, first + self.batch_size)
        sequences: list[Packed] = []
        # Go to the end of the micro-batch, not only of this rank's sequences, so that the cursor
        # is the same on all ranks.
        for number in range(self.dp_size * self.batch_size):
            stream = self._next_stream()
            spans = stream.next_sequence()
            if number in own_numbers:
                padding = -stream.seq_len % self.padding_multiple
                sequences.append(stream.pack(spans, stream.seq_len + padding))
        lengths = [sequence.lengths for sequence in sequences]
        # [b, S] each
        tokens = np.stack([sequence.tokens for sequence in sequences])
        labels = np.stack([sequence.labels for sequence in sequences])
        positions = np.stack([sequence.positions for sequence in sequences])
        if not self.restart_positions:
            positions[:] = np.arange(positions.shape[1])
        table = self.block_table(lengths, tokens.shape[1]) if self.block_table else None
        local = [torch.from_numpy(whole) for whole in (tokens, labels, positions)]
        if self.shard is not None:
            local = [self.shard(whole, 1, table) for whole in local]
        return Batch(*local, lengths, table)

    def _cursors(self) -> list[Cursor]:
        return [replace(stream.cursor) for stream in self.streams]

    def _next_stream(self) -> Stream:
        due = sum(stream.cursor.sequence for stream in self.streams) + 1
        pairs = zip(self.streams, self.shares, strict=True)
        behind = [share * due - stream.cursor.sequence for stream, share in pairs]
        return self.streams[behind.index(max(behind))]

    def state_dict(self) -> dict[str, Any]:
        """The state of what has been returned so far, the same on all ranks: a cursor and a
        fingerprint for each part of the mixture."""
        cursors = [asdict(cursor) for cursor in self._returned]
        return {
            "sequence": self.sequence,
            "dp_size": self.dp_size,
            "batch_size": self.batch_size,
            # As text, because a checkpoint is read into a state of equal shape, and another mixture
            # has a different number of cursors.
            "cursors": json.dumps(cursors),
            "fingerprint": json.dumps(self.fingerprint()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the first sequence that was not returned. The number of ranks and the batch
        size may differ.

        Raises Refusal, saying what differs, if the saved state belongs to another stream.
        """
        cursors = json.loads(state["cursors"])
        said = data_differences(json.loads(state["fingerprint"]), self.fingerprint())
        for name in sorted({name for cursor in cursors for name in cursor} - _CURSOR_FIELDS):
            said = said or f"its place in the data has {name}, which this version does not know"
        if said:
            raise Refusal(
                f"the checkpoint is of another stream of sequences: {said}; write what the run had, "
                "with the titan_sparse that saved it, or for a new run from these weights another "
                "training.output_dir and checkpoint.initial_load_path = the checkpoint's folder"
            )
        self._returned = [Cursor(**cursor) for cursor in cursors]
        self.close()


def build_loader(
    data: Data,
    seq_len: int,
    batch_size: int,
    seed: int,
    dp_rank: int,
    dp_size: int,
    padding_multiple: int = 1,
    tokenizer: Tokenizer | None = None,
    restart_positions: bool = True,
    model_folder: str = "",
) -> PackedLoader:
    """Open the [data] section's source or mixture, and its tokenizer unless one is given, and load
    sequences from it.

    model_folder: model.initial_hf, for its chat template. Raises ValueError, naming the key, if a
    source or the tokenizer cannot be opened.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(data.tokenizer or "bytes", data.split_special_tokens)
    streams: list[Stream] = []
    for part in parts_of(data):
        documents = open_documents(part, tokenizer, model_folder)
        kind: type[Stream] = WalkedStream
        if documents.sample_format.is_chat:
            kind = WholeStream
            if data.sequences != "packed":
                raise ValueError(
                    f'data.sequences = "{data.sequences}" would cut answers of data.source = '
                    f'"{part.source}"; write data.sequences = "packed", which keeps chats whole'
                )
        elif data.sequences != "packed" and isinstance(documents, TokenShards):
            kind = SampleStream
        streams.append(kind(documents, tokenizer, part, seq_len, seed))
    return PackedLoader(
        streams,
        list(source_weights(data.source).values()),
        batch_size,
        dp_rank,
        dp_size,
        padding_multiple,
        restart_positions,
    )
