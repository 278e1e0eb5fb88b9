"""titan_sparse.data.rows: what is taken from a file of chats, and what is refused by its row."""

import json

import pytest

from tests.data.chat_helpers import CALL, CHAT, CHATML, TOOLS, write_tokenizer
from tests.data.helpers import write_rows
from titan_sparse.config import Data
from titan_sparse.data import sources
from titan_sparse.data.documents import open_documents
from titan_sparse.data.rows import sample_text, without_nulls
from titan_sparse.data.sources import open_source
from titan_sparse.data.tokenizer import load_tokenizer

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}


def read(row: dict, row_format: str = "messages") -> dict:
    return json.loads(sample_text("f, row 1", row, row_format, "messages"))


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".parquet"])
def test_files_give_the_same_samples(tmp_path, ending):
    """Parquet adds nulls for the message fields that other messages have. They are removed again."""
    called = {"role": "assistant", "tool_calls": [CALL]}
    path = tmp_path / f"chats{ending}"
    rows = [{"messages": CHAT, "tools": json.dumps(TOOLS)}, {"messages": [HI, called]}]
    if ending == ".parquet":
        rows[1]["tools"] = None
    write_rows(path, rows)
    source = open_source(Data(source=str(path), format="messages"))
    first, second = (json.loads(source[number]) for number in range(2))
    assert first == {"where": f"{path}, row 1", "messages": CHAT, "tools": TOOLS}
    arguments = {"a": 1, "b": "x"}
    function = {"name": "add", "arguments": arguments}
    assert second["messages"][1]["tool_calls"] == [{"type": "function", "function": function}]
    assert "content" not in second["messages"][1] and "tools" not in second


@pytest.mark.usefixtures("datasets_cache")
def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"talk": [HI, YES], "id": 1}, {"talk": [HI], "id": 2}]
    dataset = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(sources, "_load_from_hub", lambda data: dataset)
    data = Data(source="owner/chats", format="messages", messages_field="talk")
    source = open_source(data)
    assert json.loads(source[0])["messages"] == [HI, YES]
    with pytest.raises(ValueError, match='owner/chats, row 2: "talk" holds no message of the role'):
        source[1]
    data.bad_rows = "skip"
    assert open_source(data)[1] == ""
    data.messages_field = "messages"
    with pytest.raises(ValueError, match='has no column "messages".*it has: talk, id'):
        open_source(data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, '"messages" is missing; data.format = "messages" needs it'),
        ({"messages": None}, '"messages" is missing'),
        ({"messages": {"role": "user"}}, '"messages" is no list of messages'),
        ({"messages": "[{"}, "messages: a string that is no JSON"),
        ({"messages": [HI]}, '"messages" holds no message of the role "assistant"'),
        ({"messages": []}, '"messages" holds no message of the role "assistant"'),
        ({"messages": ["hi", YES]}, r"messages\[0\] is no object with a role and content"),
        ({"messages": [{"from": "human", "value": "x"}, YES]}, r"messages\[0\] has the role null"),
        ({"messages": [{**HI, "role": "human"}, YES]}, 'has the role "human"; write one of system'),
        ({"messages": [HI, {"role": "assistant"}]}, r"messages\[1\] has no content"),
        ({"messages": [{**HI, "content": [{"type": "image"}]}, YES]}, "content that is no text"),
        ({"messages": [HI, {**YES, "train": 0}]}, '"train": 0; write true or false'),
        ({"messages": [HI, {**YES, "weight": 0}]}, 'has a "weight", which is not read'),
        ({"messages": [HI, {**YES, "tool_calls": {}}]}, '"tool_calls" that are no list'),
        ({"messages": [HI, {**YES, "tool_calls": [{}]}]}, "call without the name of a function"),
        (
            {"messages": [HI, {**YES, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "the arguments of f are no JSON object",
        ),
        ({"messages": [HI, YES], "tools": {"a": 1}}, '"tools" is no list of JSON schemas'),
        ({"messages": [HI, {**YES, "content": "\ud800"}]}, "half a pair of characters"),
    ],
)
def test_a_row_that_is_no_chat_is_refused(row, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(row)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, '"completion" is missing; data.format = "prompt_completion" needs it'),
        ({"prompt": "x", "completion": [YES]}, "two strings or two lists of messages"),
        ({"prompt": [HI], "completion": [HI]}, '"completion" holds no message of the role'),
    ],
)
def test_a_row_that_is_no_prompt_and_completion_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        read(row, "prompt_completion")


def test_shapes_that_templates_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "assistant", "content": parts, "name": None, "reasoning": "why"}
    (got,) = read({"messages": [message]})["messages"]
    reasons = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "why")
    assert got == {"role": "assistant", "content": "ab", **reasons}
    assert without_nulls({"a": [{"b": None, "c": 0}], "d": None}) == {"a": [{"c": 0}]}


@pytest.mark.usefixtures("datasets_cache")
def test_a_bad_row_is_named_when_the_source_is_opened(tmp_path):
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": [HI, YES]}, {"messages": [HI]}])
    data = Data(source=str(path), format="messages")
    with pytest.raises(ValueError, match=r'chats.jsonl, row 2: .*data.bad_rows = "skip"'):
        open_source(data)
    data.bad_rows = "skip"
    source = open_source(data)
    assert (len(source), source.skipped, source[1]) == (2, 1, "")


@pytest.mark.usefixtures("datasets_cache")
def test_other_sources_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match='data.format = "messages" needs .jsonl or .parquet'):
        open_source(Data(source=str(tmp_path / "a.txt"), format="messages"))
    write_rows(tmp_path / "b.parquet", [{"text": "x"}])
    with pytest.raises(ValueError, match='row 1: "messages" is missing'):
        open_source(Data(source=str(tmp_path / "b.parquet"), format="messages"))
    write_rows(tmp_path / "c.jsonl", [{"messages": [HI, YES]}])
    with pytest.raises(
        ValueError, match='"messages" holds no text; .* or data.format = "messages"'
    ):
        open_source(Data(source=str(tmp_path / "c.jsonl"), text_field="messages"))


@pytest.mark.usefixtures("datasets_cache")
def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": [HI, YES]}])
    monkeypatch.setitem(__import__("sys").modules, "transformers.utils.chat_template_utils", None)
    data = Data(source=str(path), format="messages", tokenizer=folder)
    with pytest.raises(ValueError, match=r'pip install "titan-sparse\[huggingface\]"'):
        open_documents(data, load_tokenizer(folder))
