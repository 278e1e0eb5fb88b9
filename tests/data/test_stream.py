"""titan_sparse.data.packing and .stream: packed documents, samples of fixed length, and mixtures."""

import json
import logging
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import (
    END,
    PADDING,
    global_stream,
    lettered_texts,
    make_loader,
    open_loader,
    prepared,
    random_documents,
    write_rows,
)
from titan_sparse.config import Data
from titan_sparse.data.loader import PackedLoader
from titan_sparse.data.packing import Piece, pack
from titan_sparse.data.stream import Order
from titan_sparse.data.tokenizer import ByteTokenizer


def test_pack_by_hand():
    first, second = np.array([10, 11, 12, END]), np.array([20, 21, 22, 23, END])
    packed = pack([Piece(first, 2, 4), Piece(second, 0, 3)], 7, PADDING)
    assert packed.tokens.tolist() == [12, END, 20, 21, 22, PADDING, PADDING]
    assert packed.labels.tolist() == [END, -100, 21, 22, 23, -100, -100]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert packed.lengths == [2, 3]
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == np.int64


@pytest.mark.parametrize("seq_len", [1, 7, 100])
@pytest.mark.parametrize("multiple", [1, 5])
def test_pieces_of_the_stream_are_the_documents_in_order(seq_len, multiple):
    source = random_documents([5, 40, 1, 15, 16, 17, 0, 3])
    loader = make_loader(source, seq_len=seq_len, shuffle=False, padding_multiple=multiple)
    expected_tokens = []
    expected_labels = []
    for text in source:
        if not text:
            continue
        document = [*text.encode(), END]
        expected_tokens += document
        expected_labels += [*document[1:], -100]

    padded_length = math.ceil(seq_len / multiple) * multiple
    tokens = []
    labels = []
    # Two epochs and more.
    while len(tokens) < 2 * len(expected_tokens):
        batch = next(loader)
        lengths = batch.lengths[0]
        assert sum(lengths) == seq_len
        assert batch.tokens.shape == (1, padded_length)

        positions = batch.positions[0, :seq_len].tolist()
        assert positions == [position for length in lengths for position in range(length)]
        assert (batch.tokens[0, seq_len:] == PADDING).all()
        assert (batch.labels[0, seq_len:] == -100).all()
        assert (batch.positions[0, seq_len:] == 0).all()

        tokens += batch.tokens[0, :seq_len].tolist()
        labels += batch.labels[0, :seq_len].tolist()
    epochs = len(tokens) // len(expected_tokens) + 1
    assert tokens == (epochs * expected_tokens)[: len(tokens)]
    assert labels == (epochs * expected_labels)[: len(labels)]


def test_pieces_end_where_documents_or_sequences_end():
    for batch in islice(make_loader(random_documents([5, 40, 1, 15, 30])), 50):
        ends = np.cumsum(batch.lengths[0])
        closed = (batch.tokens[0] == END).nonzero().flatten() + 1
        assert set(closed.tolist()) | {16} == set(ends.tolist())


def test_short_documents_are_skipped_in_tokens_without_the_end():
    loader = make_loader(
        ["a", "bb", "ccc", "", "dd"], min_document_length=2, shuffle=False, seq_len=10
    )
    first = bytes(int(token) for token in next(loader).tokens[0] if token != END)
    assert first == b"bbcccdd"
    assert loader.documents_seen == 3


@pytest.mark.parametrize(
    "source, expected",
    [
        (["a", "bb", ""], "data.min_document_length = 3 leaves .* has 2 tokens; write 2 or less"),
        (["a"], "data.min_document_length = 3 leaves .* has 1 tokens; write 1 or less"),
        ([""], "data.source holds only empty documents"),
        ([], "data.source holds only empty documents"),
    ],
)
def test_all_documents_skipped_is_refused_when_opened(source, expected):
    with pytest.raises(ValueError, match=expected):
        make_loader(source, min_document_length=3)
    if "write 2 or less" in expected:
        next(make_loader(source, min_document_length=2))


def test_one_long_document_among_many_is_found_in_each_epoch():
    loader = make_loader(["a"] * 9 + ["long enough"], min_document_length=5, seq_len=12)
    texts = {ByteTokenizer().decode(next(loader).tokens[0].numpy()) for _ in range(20)}
    assert texts == {"long enough"} and loader.epoch >= 19


def test_counters_by_hand():
    """Sequences of two tokens: aa, a|, cc, |a, aa, |c. The document b is too short."""
    loader = make_loader(["aaa", "b", "cc"], seq_len=2, shuffle=False, min_document_length=2)
    counters = []
    for _ in range(6):
        next(loader)
        counters.append((loader.epoch, loader.documents_seen, loader.documents_left_out))
    assert counters == [(0, 1, 0), (0, 1, 0), (0, 2, 1), (1, 3, 1), (1, 3, 1), (1, 4, 2)]


def test_documents_left_out_are_logged_when_the_first_epoch_ends(caplog):
    """They are logged only once: the first document of the next epoch is left out again."""
    loader = make_loader(["b", "aaa"], seq_len=2, shuffle=False, min_document_length=2)
    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        for _ in range(6):
            next(loader)
    assert caplog.messages == ["data: 1 of 2 documents are left out: they have fewer than 2 tokens"]


def test_only_the_document_that_goes_on_is_kept_in_memory():
    """Of 4, 41, 4 and 21 tokens in sequences of 16; the short ones are left out."""
    texts = ["x" * length for length in (3, 40, 3, 20)]
    loader = make_loader(texts, min_document_length=5, shuffle=False)
    documents = loader.streams[0].documents
    held = []
    for _ in range(4):
        next(loader)
        held.append(sorted(documents._encoded))
    assert held == [[1], [1], [3], [1]]


def test_the_order_of_an_epoch_is_shuffled_once(monkeypatch):
    """A shuffle of many documents takes seconds. A resumed run asks for a later epoch first."""
    shuffles = []
    generator = np.random.default_rng

    def counted(seed: list[int]) -> np.random.Generator:
        shuffles.append(seed)
        return generator(seed)

    monkeypatch.setattr(np.random, "default_rng", counted)
    order = Order(20, 3, True)
    for epoch in (1, 0, 2):
        expected = generator([3, epoch]).permutation(20).tolist()
        assert [order.at(epoch, place) for place in range(20)] == expected
    assert shuffles == [[3, 1], [3, 0], [3, 2]]


@pytest.mark.usefixtures("datasets_cache")
def test_packed_shards_give_the_stream_of_the_texts(tmp_path):
    dp_size = 3
    folder = prepared(tmp_path)
    nonempty = tmp_path / "nonempty.jsonl"
    write_rows(nonempty, [{"text": text} for text in lettered_texts("a") if text])
    ranks = [
        open_loader(Data(source=folder), dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
    ]
    assert global_stream(ranks, 24 // dp_size) == global_stream(
        [open_loader(Data(source=str(nonempty)))], 24
    )


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("sequences", ["fixed", "fixed_and_rest"])
def test_fixed_samples_cut_each_document_from_its_beginning(tmp_path, sequences):
    folder = prepared(tmp_path, lengths=[5, 40, 15, 16, 0, 31, 33])
    data = Data(source=folder, sequences=sequences, shuffle=False, min_document_length=6)
    samples = []
    for tokens, labels, positions, (lengths,) in global_stream([open_loader(data)], 12):
        samples.append(lengths)
        assert positions == [*range(lengths), *[0] * (16 - lengths)]
        assert tokens[lengths:] == [PADDING] * (16 - lengths) and labels[lengths:] == [-100] * (
            16 - lengths
        )
        assert labels[: lengths - 1] == tokens[1:lengths]
        assert labels[lengths - 1] == (
            -100 if tokens[lengths - 1] == END else tokens[0] if END not in labels else END
        )
    # With their end: 41, 16, 17, 32, 34 tokens.
    whole = [16, 16, 16, 16, 16, 16, 16, 16]
    rests = [16, 16, 9, 16, 16, 16, 16, 16, 16, 2]
    assert samples == ([*whole, *whole] if sequences == "fixed" else [*rests, *rests])[:12]


@pytest.mark.usefixtures("datasets_cache")
def test_fixed_samples_are_each_handed_out_once_an_epoch_in_a_new_order(tmp_path):
    folder = prepared(tmp_path, lengths=[100, 100, 40, 3])
    one = open_loader(Data(source=folder, sequences="fixed"), seq_len=8)
    stream_ = one.streams[0]
    epochs = [[stream_.next_sequence()[0] for _ in range(29)] for _ in range(2)]
    expected = [
        (index, start, start + 8)
        for index, count in enumerate([12, 12, 5])
        for start in range(0, 8 * count, 8)
    ]
    assert all(sorted(map(tuple, epoch)) == expected for epoch in epochs) and epochs[0] != epochs[1]
    assert one.epoch == 2 and one.documents_seen == 6
    assert one.state_dict()["sequence"] == 2 * 29


@pytest.mark.usefixtures("datasets_cache")
def test_what_prepared_tokens_cannot_do_is_refused(tmp_path):
    folder = prepared(tmp_path)
    with pytest.raises(ValueError, match="training.seq_len = 1000"):
        open_loader(Data(source=folder, sequences="fixed"), seq_len=1000)
    with pytest.raises(ValueError, match="data.text_field"):
        open_loader(Data(source=folder, text_field="body"))


def mixed(*parts: tuple[str, float]) -> PackedLoader:
    """A mixture of (letters, share): every letter is a document, and with its end a sequence."""
    streams = []
    for letters, _ in parts:
        loader = make_loader(list(letters), seq_len=2, shuffle=False)
        streams.append(loader.streams[0])
    return PackedLoader(streams, [share for _, share in parts], 1, 0, 1)


def test_the_part_furthest_behind_its_share_is_next():
    """By hand, with ties to the first part: other versions must continue a checkpoint in the same order."""
    loader = mixed(("a", 0.5), ("b", 0.3), ("c", 0.2))
    taken = "".join(chr(next(loader).tokens[0, 0]) for _ in range(10))
    assert taken == "abcaabacba"


def test_the_epoch_of_a_mixture_is_that_of_its_most_passed_part():
    loader = mixed(("a", 0.5), ("bbb", 0.5))
    epochs = []
    for _ in range(8):
        next(loader)
        epochs.append(loader.epoch)
    assert epochs == [1, 1, 2, 2, 3, 3, 4, 4] and loader.documents_seen == 8
    assert [stream.cursor.epoch for stream in loader.streams] == [4, 1]


def test_shares_are_compared_to_nine_digits():
    """0.1 / (0.1 + 0.2) differs from 1 / 3 in the last digit."""
    parts = mixed(("a", 1 / 3), ("b", 2 / 3)).fingerprint()
    assert [part["share"] for part in parts] == [0.333333333, 0.666666667]


def mixture(tmp_path: Path, weights: tuple[float, ...] = (5, 3, 2)) -> Data:
    folders = [
        prepared(tmp_path, letter) if not (tmp_path / letter).exists() else str(tmp_path / letter)
        for letter in "abc"
    ]
    return Data(
        source=", ".join(
            f"{folder}:{weight}" for folder, weight in zip(folders, weights, strict=False)
        )
    )


def origin(row: tuple) -> str:
    return chr(min(token for token in row[0] if token < 256))


@pytest.mark.usefixtures("datasets_cache")
def test_a_mixture_keeps_its_shares_and_each_part_its_own_stream(tmp_path):
    data = mixture(tmp_path)
    taken = global_stream([open_loader(data)], 50)
    letters = [origin(row) for row in taken]
    for count in range(1, 51):
        assert all(
            abs(letters[:count].count(letter) - share * count) <= 1.0
            for letter, share in zip("abc", (0.5, 0.3, 0.2))
        )
    for letter in "abc":
        alone = global_stream([open_loader(Data(source=str(tmp_path / letter)))], 50)
        own = [row for row in taken if origin(row) == letter]
        assert own == alone[: len(own)]


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize(("dp_size", "batch_size"), [(1, 1), (3, 1), (2, 2)])
def test_a_mixture_resumes_on_any_number_of_ranks(tmp_path, dp_size, batch_size):
    data = mixture(tmp_path)
    saved = [open_loader(data, dp_rank=rank, dp_size=2) for rank in range(2)]
    start = global_stream(saved, 7)
    state = json.loads(json.dumps(saved[1].state_dict()))
    assert state == saved[0].state_dict()
    ranks = [open_loader(data, 16, rank, dp_size, batch_size) for rank in range(dp_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = global_stream(ranks, 6)
    assert start + resumed == global_stream([open_loader(data)], len(start) + len(resumed))
    with pytest.raises(ValueError, match="share of data.source was 0.5 and is 0.6"):
        open_loader(mixture(tmp_path, (6, 2, 2))).load_state_dict(state)
    with pytest.raises(ValueError, match="data.source had 3 parts and has 1"):
        open_loader(Data(source=str(tmp_path / "a"))).load_state_dict(state)
    with pytest.raises(ValueError, match="data.sequences was packed and is fixed"):
        open_loader(replace(data, sequences="fixed")).load_state_dict(state)
