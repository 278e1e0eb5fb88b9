"""titan_sparse.data.loader: the global stream, resuming on any number of ranks, epochs, sharding."""

import json
import logging
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from tests.data.test_sources import END, PADDING, TEXTS, cache, write_texts  # noqa: F401  (cache is a fixture)
from titan_sparse.config import Data
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.loader import Batch, PackedLoader, build_loader
from titan_sparse.data.stream import Mixture, PackedStream
from titan_sparse.data.tokenizer import ByteTokenizer


def documents(lengths: list[int]) -> list[str]:
    """Documents of the given byte lengths, no two alike."""
    generator = np.random.default_rng(len(lengths))
    return ["".join(map(chr, generator.integers(32, 127, length))) for length in lengths]


def make_loader(source: list[str], **options) -> PackedLoader:
    stream = dict(
        tokenizer=ByteTokenizer(), seq_len=16, seed=3, shuffle=True, min_document_length=0
    )
    stream |= {name: options.pop(name) for name in stream if name in options}
    mixture = Mixture([PackedStream(TokenizedTexts(source, stream["tokenizer"]), **stream)], [1.0])
    return PackedLoader(mixture, **{**dict(batch_size=1, dp_rank=0, dp_size=1), **options})


def rows(batch: Batch) -> Iterator[tuple]:
    """Each sequence of a batch as something that can be compared with ==."""
    fields = (batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist(), batch.lengths)
    return zip(*fields, strict=True)


def stream(ranks: list[PackedLoader], batches: int) -> list[tuple]:
    """The global stream that the ranks together hand out."""
    return [row for _ in range(batches) for rank in ranks for row in rows(next(rank))]


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("multiple", [1, 5])
def test_pieces_of_the_stream_are_the_documents_in_order(seq_len, multiple):
    source = documents([5, 40, 1, 15, 16, 17, 0, 3])
    loader = make_loader(source, seq_len=seq_len, shuffle=False, padding_multiple=multiple)
    whole = [[*text.encode(), END] for text in source if text]
    expected = [token for document in whole for token in document]
    expected_labels = [label for document in whole for label in [*document[1:], -100]]
    tokens, labels = [], []
    while len(tokens) < 2 * len(expected):
        batch = next(loader)
        used = sum(batch.lengths[0])
        assert used == seq_len and batch.tokens.shape == (1, -(-seq_len // multiple) * multiple)
        assert batch.positions[0, :used].tolist() == [
            i for length in batch.lengths[0] for i in range(length)
        ]
        assert (batch.tokens[0, used:] == PADDING).all() and (batch.labels[0, used:] == -100).all()
        assert (batch.positions[0, used:] == 0).all()
        tokens += batch.tokens[0, :used].tolist()
        labels += batch.labels[0, :used].tolist()
    assert tokens == (expected * (len(tokens) // len(expected) + 1))[: len(tokens)]
    assert labels == (expected_labels * (len(labels) // len(expected) + 1))[: len(labels)]


def test_pieces_end_where_documents_or_sequences_end():
    for batch in islice(make_loader(documents([5, 40, 1, 15, 30])), 50):
        ends = np.cumsum(batch.lengths[0])
        closed = (batch.tokens[0] == END).nonzero().flatten() + 1
        assert set(closed.tolist()) | {16} == set(ends.tolist())


RAGGED = documents([5, 40, 1, 15, 16, 17, 3, 90])


@pytest.mark.parametrize("dp_size", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_global_stream_is_the_same_on_any_number_of_ranks(dp_size, batch_size):
    ranks = [
        make_loader(RAGGED, dp_rank=r, dp_size=dp_size, batch_size=batch_size)
        for r in range(dp_size)
    ]
    alone = make_loader(RAGGED)
    batches = 12
    assert stream(ranks, batches) == stream([alone], batches * dp_size * batch_size)
    assert all(rank.epoch == alone.epoch >= 1 for rank in ranks)
    assert all(rank.documents_seen == alone.documents_seen for rank in ranks)
    assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)


@pytest.mark.parametrize("consumed", [0, 1, 5, 13])
@pytest.mark.parametrize(("dp_size", "batch_size"), [(2, 1), (1, 1), (3, 2), (4, 1)])
def test_resume_equals_uninterrupted_also_on_other_ranks(consumed, dp_size, batch_size):
    saved = [make_loader(RAGGED, dp_rank=r, dp_size=2) for r in range(2)]
    start = stream(saved, consumed)
    state = json.loads(json.dumps(saved[0].state_dict()))
    ranks = [
        make_loader(RAGGED, dp_rank=r, dp_size=dp_size, batch_size=batch_size)
        for r in range(dp_size)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = stream(ranks, 6)
    assert start + resumed == stream([make_loader(RAGGED)], len(start) + len(resumed))
    assert state["sequence"] == 2 * consumed


def test_resume_on_other_ranks_is_logged(caplog):
    saved = make_loader(RAGGED, dp_size=2)
    stream([saved], 6)
    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        make_loader(RAGGED, dp_size=2).load_state_dict(saved.state_dict())
        assert not caplog.messages
        make_loader(RAGGED, dp_size=4).load_state_dict(saved.state_dict())
    message = "loader: saved with 2 data-parallel ranks x 1 sequences, goes on with 4 x 1 from global sequence 12"
    assert caplog.messages == [message]


@pytest.mark.parametrize(
    ("source", "option", "message"),
    [
        (RAGGED, {"seq_len": 32}, "training.seq_len was 16 and is 32"),
        (RAGGED, {"seed": 4}, "training.seed was 3 and is 4"),
        (RAGGED[1:], {}, "documents of data.source was 8 and is 7"),
        (RAGGED, {"shuffle": False}, "data.shuffle was 1 and is 0"),
        (RAGGED, {"min_document_length": 2}, "data.min_document_length was 0 and is 2"),
    ],
)
def test_resume_on_another_stream_is_refused(source, option, message):
    state = make_loader(RAGGED).state_dict()
    with pytest.raises(ValueError, match=message):
        make_loader(source, **option).load_state_dict(state)


def one_byte_documents(count: int, **options) -> PackedLoader:
    """Documents of one byte and its end: one document a sequence."""
    return make_loader([chr(65 + i) for i in range(count)], seq_len=2, **options)


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_hold_each_document_once_and_reshuffle(shuffle):
    orders = {}
    for seed in (3, 4):
        loader = one_byte_documents(20, shuffle=shuffle, seed=seed)
        taken = [int(next(loader).tokens[0, 0]) - 65 for _ in range(60)]
        orders[seed] = [taken[0:20], taken[20:40], taken[40:60]]
        assert all(sorted(order) == list(range(20)) for order in orders[seed])
        assert loader.epoch == 3 and loader.documents_seen == 60
    distinct = {tuple(order) for seed in orders for order in orders[seed]}
    assert len(distinct) == (6 if shuffle else 1)


def test_shard_is_applied_alike_and_lengths_stay_global():
    calls = []

    def shard(x: torch.Tensor, dim: int, table: torch.Tensor | None) -> torch.Tensor:
        calls.append((tuple(x.shape), dim, table))
        return x.unflatten(dim, (-1, 4))[:, 1::2].flatten(1)

    options = dict(batch_size=3, padding_multiple=8, seq_len=13)
    full, local = make_loader(RAGGED, **options), make_loader(RAGGED, **options, shard=shard)
    for _ in range(5):
        whole, part = next(full), next(local)
        for field in ("tokens", "labels", "positions"):
            expected = getattr(whole, field)[:, [4, 5, 6, 7, 12, 13, 14, 15]]
            assert getattr(part, field).dtype == torch.int64 and torch.equal(
                getattr(part, field), expected
            )
        assert part.lengths == whole.lengths and all(sum(lengths) == 13 for lengths in part.lengths)
    assert calls == [((3, 16), 1, None)] * 15


def test_a_layout_may_depend_on_the_batch():
    """The table that `place` makes of a batch's lengths shards this batch, and comes with it."""
    seen = []

    def place(lengths: list[list[int]], seq_len: int) -> torch.Tensor:
        seen.append((lengths, seq_len))
        return torch.arange(2).add(len(seen)).remainder(2)[:, None]

    shard = lambda x, dim, table: x.unflatten(dim, (2, -1))[:, table[0, 0]]
    options = dict(batch_size=2, padding_multiple=8, seq_len=13)
    full, local = (
        make_loader(RAGGED, **options),
        make_loader(RAGGED, **options, shard=shard, place=place),
    )
    for number in range(3):
        whole, part = next(full), next(local)
        assert whole.table is None and part.table.tolist() == [[(number + 1) % 2], [number % 2]]
        assert seen[number] == (whole.lengths, 16)
        for field in ("tokens", "labels", "positions"):
            assert torch.equal(
                getattr(part, field),
                getattr(whole, field)[:, :8] if number % 2 else getattr(whole, field)[:, 8:],
            )


def test_short_documents_are_skipped_in_tokens_without_the_end():
    loader = make_loader(
        ["a", "bb", "ccc", "", "dd"], min_document_length=2, shuffle=False, seq_len=10
    )
    first = bytes(int(token) for token in next(loader).tokens[0] if token != END)
    assert first == b"bbcccdd"
    assert loader.documents_seen == 3


@pytest.mark.parametrize("source", [["a", "bb", ""], [""], []])
def test_all_documents_skipped_is_refused(source):
    with pytest.raises(ValueError, match="data.min_document_length = 3"):
        next(make_loader(source, min_document_length=3))


def test_one_long_document_among_many_is_found_in_each_epoch():
    loader = make_loader(["a"] * 9 + ["long enough"], min_document_length=5, seq_len=12)
    texts = {ByteTokenizer().decode(next(loader).tokens[0].numpy()) for _ in range(20)}
    assert texts == {"long enough"} and loader.epoch >= 19


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="training.seed = -1"):
        make_loader(RAGGED, seed=-1)


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> np.ndarray:
        self.calls += 1
        return super().encode(text)


def test_each_document_is_tokenised_once_an_epoch_and_passed_over_without_later():
    alone, skipping = CountingTokenizer(), CountingTokenizer()
    loader = make_loader(RAGGED, tokenizer=alone)
    stream([loader], 11)
    assert loader.epoch == 0 and alone.calls == loader.documents_seen
    far = one_byte_documents(20, tokenizer=skipping, dp_rank=0, dp_size=10)
    stream([far], 2)
    assert skipping.calls == 20
    stream([far], 2)
    assert skipping.calls == 22


@pytest.mark.usefixtures("cache")
def test_build_loader_opens_source_and_tokenizer(tmp_path):
    folder = write_texts(tmp_path / "data", ".jsonl")
    data = Data(source=str(folder), shuffle=False, min_document_length=1)
    batch = next(build_loader(data, 24, 2, 0, 0, 1, padding_multiple=16))
    assert isinstance(batch, Batch) and batch.tokens.shape == (2, 32)
    assert batch.tokens[0, : len(TEXTS[0]) + 1].tolist() == [*TEXTS[0].encode(), END]
    given = CountingTokenizer()
    loader = build_loader(data, 24, 1, 0, 0, 1, 1, None, given)
    assert next(loader).lengths[0][0] == len(TEXTS[0]) + 1 and given.calls > 0
