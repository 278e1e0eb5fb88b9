"""data.sequences = fixed of texts: samples of one document each, cut as the text is tokenized."""

import json
import logging
from pathlib import Path

import pytest

from tests.data.helpers import (
    LENGTHS,
    global_stream,
    lettered_texts,
    open_loader,
    prepared,
    write_rows,
)
from titan_sparse.config import Data
from titan_sparse.data.loader import PackedLoader

pytestmark = pytest.mark.usefixtures("datasets_cache")

KINDS = ["fixed", "fixed_and_rest"]


def texts(folder: Path, ending: str = ".jsonl", letter: str = "a") -> str:
    """A source of raw texts of LENGTHS letters, the same as prepared() makes tokens of."""
    documents = [text for text in lettered_texts(letter) if text or ending != ".txt"]
    if ending != ".txt":
        path = folder / f"{letter}{ending}"
        write_rows(path, [{"text": text} for text in documents])
        return str(path)
    for number, text in enumerate(documents):
        (folder / f"{letter}{number}.txt").write_text(text)
    return str(folder)


def loaders(data: Data, dp_size: int, batch_size: int = 1) -> list[PackedLoader]:
    return [open_loader(data, 16, rank, dp_size, batch_size) for rank in range(dp_size)]


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("sequences", KINDS)
def test_every_kind_of_file_gives_the_samples_of_the_prepared_tokens(tmp_path, ending, sequences):
    (tmp_path / "raw").mkdir()
    (tmp_path / "tokens").mkdir()
    options = {"sequences": sequences, "shuffle": False, "min_document_length": 4}
    raw = Data(source=texts(tmp_path / "raw", ending), **options)
    tokens = Data(source=prepared(tmp_path / "tokens"), **options)
    assert global_stream(loaders(raw, 1), 30) == global_stream(loaders(tokens, 1), 30)


@pytest.mark.parametrize(("sequences", "samples"), [("fixed", 12), ("fixed_and_rest", 19)])
def test_an_epoch_hands_out_each_sample_once_and_counts_documents(tmp_path, sequences, samples):
    loader = open_loader(Data(source=texts(tmp_path), sequences=sequences))
    stream = loader.streams[0]
    epochs = []
    for number in (1, 2):
        epochs.append([stream.next_sequence()[0] for _ in range(samples)])
        # What is left of the epoch is too short; the next call goes on to the next one.
        begun = sum(span.start == 0 for span in epochs[-1])
        assert loader.documents_seen == number * begun
        stream._find_document()
        assert loader.epoch == number
        assert loader.documents_seen + loader.documents_left_out >= number * len(LENGTHS)
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert len(set(epochs[0])) == samples
    assert all(span.stop - span.start == 16 for span in epochs[0]) == (sequences == "fixed")


@pytest.mark.parametrize(
    ("sequences", "spans", "counters"),
    [
        (
            "fixed",
            [(0, 0, 4), (0, 4, 8), (2, 0, 4), (0, 0, 4)],
            [(0, 1, 0), (0, 1, 0), (1, 2, 1), (1, 3, 1)],
        ),
        (
            "fixed_and_rest",
            [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 3), (2, 0, 4), (0, 0, 4)],
            [(0, 1, 0), (0, 1, 0), (0, 1, 0), (0, 2, 0), (1, 3, 0), (1, 4, 0)],
        ),
    ],
)
def test_samples_and_counters_by_hand(tmp_path, sequences, spans, counters):
    """Of documents of 10, 3 and 5 tokens, in samples of 4; the last token of 5 is left over."""
    path = tmp_path / "a.jsonl"
    write_rows(path, [{"text": "a" * length} for length in (9, 2, 4)])
    loader = open_loader(Data(source=str(path), sequences=sequences, shuffle=False), seq_len=4)
    (stream,) = loader.streams
    seen = []
    for span in spans:
        assert stream.next_sequence() == [span]
        seen.append((loader.epoch, loader.documents_seen, loader.documents_left_out))
    assert seen == counters
    assert loader.state_dict()["sequence"] == len(spans)


@pytest.mark.parametrize("is_prepared", [True, False], ids=["tokens", "texts"])
def test_another_kind_of_samples_is_another_stream(tmp_path, is_prepared):
    source = prepared(tmp_path) if is_prepared else texts(tmp_path)
    fixed, rest = (open_loader(Data(source=source, sequences=kind)) for kind in KINDS)
    with pytest.raises(ValueError, match="data.sequences was fixed and is fixed_and_rest"):
        rest.load_state_dict(fixed.state_dict())


@pytest.mark.parametrize("sequences", KINDS)
@pytest.mark.parametrize("consumed", [1, 9])
@pytest.mark.parametrize(("dp_size", "batch_size"), [(1, 1), (3, 2)])
def test_resume_equals_uninterrupted_on_any_ranks(
    tmp_path, sequences, consumed, dp_size, batch_size
):
    data = Data(source=texts(tmp_path), sequences=sequences)
    saved = loaders(data, 2)
    start = global_stream(saved, consumed)
    state = json.loads(json.dumps(saved[0].state_dict()))
    assert state == saved[1].state_dict()
    ranks = loaders(data, dp_size, batch_size)
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = global_stream(ranks, 6)
    alone = loaders(data, 1)
    assert start + resumed == global_stream(alone, len(start) + len(resumed))
    counters = {(rank.epoch, rank.documents_seen, rank.documents_left_out) for rank in ranks}
    assert counters == {(alone[0].epoch, alone[0].documents_seen, alone[0].documents_left_out)}


def test_texts_and_prepared_tokens_mix(tmp_path):
    parts = {"a": texts(tmp_path), "b": prepared(tmp_path, "b")}
    data = Data(source=f"{parts['a']}:0.6, {parts['b']}:0.4", sequences="fixed")
    taken = global_stream(loaders(data, 2), 20)
    for letter, share in (("a", 24), ("b", 16)):
        own = [row for row in taken if ord(letter) in row[0]]
        alone = global_stream(loaders(Data(source=parts[letter], sequences="fixed"), 1), share)
        assert own == alone


@pytest.mark.parametrize(
    ("sequences", "min_document_length", "needed"),
    [
        ("packed", 0, 1),
        ("fixed", 0, 15),
        ("fixed_and_rest", 0, 1),
        ("fixed_and_rest", 4, 4),
    ],
)
@pytest.mark.parametrize("is_prepared", [True, False], ids=["tokens", "texts"])
def test_documents_left_out_are_counted_and_logged_once(
    tmp_path, caplog, sequences, min_document_length, needed, is_prepared
):
    # An empty document is not even prepared.
    left_out = sum(length < needed for length in LENGTHS) - is_prepared
    count = len(LENGTHS) - is_prepared
    source = prepared(tmp_path) if is_prepared else texts(tmp_path)
    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        loader = open_loader(
            Data(source=source, sequences=sequences, min_document_length=min_document_length)
        )
        while loader.epoch < 2:
            next(loader)
    line = (
        f"data: {left_out} of {count} documents are left out: they have fewer than {needed} tokens"
    )
    assert [message for message in caplog.messages if "left out" in message] == [line] * (
        left_out > 0
    )
    assert 2 * left_out <= loader.documents_left_out <= 3 * left_out


@pytest.mark.parametrize(
    ("seq_len", "min_document_length", "message"),
    [
        (92, 0, r"training.seq_len = 92 .*\(the longest has 91\)"),
        (16, 91, "more than data.min_document_length = 91"),
    ],
)
def test_a_source_without_a_sample_is_refused_when_opened(
    tmp_path, caplog, seq_len, min_document_length, message
):
    source = texts(tmp_path)
    data = Data(source=source, sequences="fixed", min_document_length=min_document_length)
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=message):
        open_loader(data, seq_len)
    assert not caplog.messages
