"""PackedLoader.read_ahead(): a thread reads the next batches, and nothing else changes."""

import random
import shlex
import threading
import time

import numpy as np
import pytest

from tests.data.helpers import (
    PLAIN,
    check_resume,
    counters,
    lettered_texts,
    loaders,
    make_loader,
    open_loader,
    prepared,
    rows,
    train_tokenizer,
    write_rows,
)
from titan_sparse.commands import prepare_data
from titan_sparse.config import Data
from titan_sparse.data.loader import PackedLoader, build_loader
from titan_sparse.data.shards import DataError
from titan_sparse.data.tokenizer import ByteTokenizer


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def taken(loader: PackedLoader) -> tuple:
    """The next batch, and the state after it."""
    return list(rows(next(loader))), loader.state_dict(), loader.sequence


@pytest.mark.parametrize("kind", ["packed", "fixed", "fixed_and_rest"])
@pytest.mark.parametrize("source", ["texts", "tokens", "mixture"])
def test_batches_and_states_are_those_of_a_loader_that_waits(tmp_path, kind, source):
    """With 1 to 4 batches ahead, of which some are not taken, and rewinds to any state before."""
    write_rows(tmp_path / "t.jsonl", [{"text": text} for text in lettered_texts("t")])
    parts = {"texts": str(tmp_path / "t.jsonl"), "tokens": prepared(tmp_path, "a")}
    parts["mixture"] = f"{parts['texts']}:0.6, {parts['tokens']}:0.4"
    data = Data(source=parts[source], sequences=kind)
    (plain,) = loaders(data, batch_size=2)
    before = [plain.state_dict()]
    expected = []
    for _ in range(30):
        expected.append(taken(plain))
        before.append(plain.state_dict())

    choose = random.Random(1)
    (loader,) = loaders(data, batch_size=2)
    place = 0
    for _ in range(40):
        ahead = choose.randint(0, 4)
        if ahead:
            loader.read_ahead(ahead)
        for _ in range(min(choose.randint(0, ahead + 1), len(expected) - place)):
            assert taken(loader) == expected[place]
            place += 1
        if place == len(expected) or choose.random() < 0.3:
            place = choose.randint(0, place)
            loader.load_state_dict(before[place])
        assert loader.state_dict() == before[place]
    loader.close()
    assert not reader_threads()
    if place < len(expected):
        assert taken(loader) == expected[place]


def test_a_state_is_that_of_the_batches_returned_on_any_ranks(tmp_path, monkeypatch):
    """check_resume() with loaders that always read ahead."""
    plain_next = PackedLoader.__next__

    def next_and_read_ahead(self: PackedLoader):
        batch = plain_next(self)
        if not self._not_returned:
            self.read_ahead(2)
        return batch

    opened = []
    open_plain = open_loader

    def open_noted(*arguments) -> PackedLoader:
        opened.append(open_plain(*arguments))
        return opened[-1]

    write_rows(tmp_path / "t.jsonl", [{"text": text} for text in lettered_texts("t")])
    monkeypatch.setattr("tests.data.helpers.open_loader", open_noted)
    # The cursors of the streams are ahead.
    monkeypatch.setattr("tests.data.helpers.counters", lambda loader: loader.close())
    monkeypatch.setattr(PackedLoader, "__next__", next_and_read_ahead)
    check_resume(Data(source=str(tmp_path / "t.jsonl")), 9)
    for loader in opened:
        loader.close()
    assert len(opened) > 4 and not reader_threads()


class SlowTokenizer(ByteTokenizer):
    """Reads a text in 20 ms, and notes the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def encode(self, text: str) -> np.ndarray:
        self.threads.append(threading.current_thread().name)
        time.sleep(0.02)
        return super().encode(text)


def test_the_next_batches_are_read_while_the_caller_works():
    tokenizer = SlowTokenizer()
    loader = make_loader(["x" * 15] * 9, tokenizer=tokenizer, shuffle=False)
    next(loader)
    in_caller = len(tokenizer.threads)
    assert set(tokenizer.threads) == {threading.current_thread().name}
    loader.read_ahead(3)
    time.sleep(1)
    began = time.perf_counter()
    for _ in range(3):
        next(loader)
    assert time.perf_counter() - began < 0.05
    assert set(tokenizer.threads[in_caller:]) == {"loader"}
    # Not more than was asked for.
    assert len(tokenizer.threads) <= in_caller + 4
    loader.close()


class RefusingTokenizer(ByteTokenizer):
    """Cannot read texts that hold a "!"."""

    error: type[Exception] = ValueError

    def encode(self, text: str) -> np.ndarray:
        if "!" in text:
            raise self.error(f"{text[:1]} cannot be read")
        return super().encode(text)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, DataError, MemoryError])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_an_error_is_raised_where_its_batch_is_asked_for(ahead, error):
    """And again when it is asked for again."""
    tokenizer = RefusingTokenizer()
    tokenizer.error = error
    texts = [letter * 15 for letter in "abcd"] + ["e!"]
    loader = make_loader(texts, tokenizer=tokenizer, shuffle=False)
    for letter in "abcd":
        if ahead and not loader._not_returned:
            loader.read_ahead(ahead)
        assert chr(next(loader).tokens[0, 0]) == letter
    state = loader.state_dict()
    assert state["sequence"] == 4
    expected = DataError if error is ValueError else error
    for _ in range(2):
        if ahead and not loader._not_returned:
            loader.read_ahead(ahead)
        with pytest.raises(expected, match="^e cannot be read$") as raised:
            next(loader)
        assert type(raised.value) is expected
        assert loader.state_dict() == state
    assert not reader_threads()


def test_an_error_of_a_batch_that_is_not_asked_for_is_none():
    texts = [letter * 15 for letter in "ab"] + ["c!"]
    loader = make_loader(texts, tokenizer=RefusingTokenizer(), shuffle=False)
    first = loader.state_dict()
    loader.read_ahead(4)
    next(loader)
    loader.load_state_dict(first)
    loader.read_ahead(2)
    assert [chr(next(loader).tokens[0, 0]) for _ in range(2)] == ["a", "b"]
    loader.close()
    assert not reader_threads() and counters(loader) == (0, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"text_field": "body", "bad_rows": "skip"}, " --text-field body --bad-rows skip"),
        ({"tokenizer": "t", "split_special_tokens": True}, " --tokenizer t --split-special-tokens"),
        ({"add_bos": False}, " --no-add-bos"),
        (
            {"format": "messages", "chat_template": "plain.jinja", "messages_field": "talk"},
            " --format messages --messages-field talk --chat-template plain.jinja",
        ),
        # The template is the model's, as the tokenizer has none.
        (
            {"format": "messages", "messages_field": "talk", "tokenizer": "t"},
            " --tokenizer t --format messages --messages-field talk --chat-template model",
        ),
    ],
)
def test_raw_text_on_several_ranks_should_be_prepared_first(tmp_path, monkeypatch, options, words):
    """By a command that makes what is trained on now."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    train_tokenizer(tmp_path / "t", ["</s>"])
    (tmp_path / "plain.jinja").write_text(PLAIN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/chat_template.jinja").write_text(PLAIN)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_rows(tmp_path / "my texts.jsonl", [{"text": "ab", "body": "cd", "talk": talk}] * 3)
    data = Data(source="my texts.jsonl", **options)
    assert build_loader(data, 64, 1, 3, 0, 1, model_folder="model").advice() == []
    loader = build_loader(data, 64, 1, 3, 0, 4, model_folder="model")
    (line,) = loader.advice()
    command = f"titan-sparse prepare_data 'my texts.jsonl' FOLDER{words}"
    assert line == (
        'data.source = "my texts.jsonl" is raw text, and each of the 4 data-parallel ranks '
        f"tokenizes all of it; run `{command}` once, and train with what it prints"
    )
    assert prepare_data.main([*shlex.split(command)[2:], "--processes", "1"]) == 0
    prepared_loader = open_loader(Data(source="FOLDER", tokenizer=data.tokenizer), 64, dp_size=4)
    assert prepared_loader.advice() == []
    assert list(rows(next(prepared_loader))) == list(rows(next(loader)))
