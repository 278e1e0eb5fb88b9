"""titan_sparse.data.rows: what is taken from a file of chats, and what is refused by its row."""

import json

import pytest

from tests.data.chat_helpers import CALL, CHAT, TOOLS
from tests.data.helpers import write_rows
from titan_sparse.config import Data
from titan_sparse.data.documents import open_source
from titan_sparse.data.rows import sample_text, without_nulls

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}


def read(row: dict, row_format: str = "messages") -> dict:
    return json.loads(sample_text("f, row 1", row, row_format, "messages"))


@pytest.mark.parametrize("ending", [".jsonl.zst", ".parquet"])
def test_files_give_the_same_samples(tmp_path, ending):
    """Parquet adds nulls for the fields that other messages and calls have. They are removed again."""
    called = {"role": "assistant", "tool_calls": [CALL]}
    path = tmp_path / f"chats{ending}"
    rows = [{"messages": CHAT, "tools": json.dumps(TOOLS)}, {"messages": [HI, called]}]
    named = {"role": "assistant", "tool_calls": [{**CALL, "id": "1"}]}
    rows.append({"messages": [HI, named]})
    if ending == ".parquet":
        rows[1]["tools"] = None
    write_rows(path, rows)
    source = open_source(Data(source=str(path), format="messages"))
    first, second = (json.loads(source[number]) for number in range(2))
    assert first == {"where": f"{path}, row 1", "messages": CHAT, "tools": TOOLS}
    function = {"name": "add", "arguments": {"a": 1, "b": "x"}}
    assert second["messages"][1]["tool_calls"] == [{"type": "function", "function": function}]
    assert "content" not in second["messages"][1] and "tools" not in second


def test_shapes_that_templates_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "assistant", "content": parts, "name": None, "reasoning": "why"}
    (got,) = read({"messages": [message], "tools": " "})["messages"]
    reasons = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "why")
    assert got == {"role": "assistant", "content": "ab", **reasons}
    assert read({"messages": json.dumps([HI, YES])})["messages"] == [HI, YES]
    bare = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    (got,) = read({"messages": [bare]})["messages"]
    assert got["tool_calls"] == [{"name": "f", "arguments": {}}]
    assert without_nulls({"a": [{"b": None, "c": 0}], "d": None}) == {"a": [{"c": 0}]}


def with_call(call: dict) -> list[dict]:
    return [HI, {**YES, "tool_calls": [call]}]


MESSAGES = [
    (None, '"messages" is missing; data.format = "messages" needs it'),
    ({"role": "user"}, '"messages" is not a list of messages'),
    ("[{", "messages: a string that is not JSON"),
    ([HI], '"messages" holds no message of the role "assistant"'),
    ([], '"messages" holds no message of the role "assistant"'),
    (["hi", YES], "messages[0] is not an object with a role and content"),
    ([{"from": "human", "value": "x"}, YES], "messages[0] has the role null"),
    ([{**HI, "role": "human"}, YES], 'has the role "human"; write one of system'),
    ([HI, {"role": "assistant"}], "messages[1] has no content"),
    ([{**HI, "content": [{"type": "image"}]}, YES], "content that is not text"),
    ([{**HI, "content": 7}, YES], "content that is not text"),
    ([HI, {**YES, "train": 0}], '"train": 0; write true or false'),
    ([HI, {**YES, "weight": 0}], 'has a "weight", which is not read'),
    ([HI, {**YES, "tool_calls": {}}], '"tool_calls" that are not a list'),
    (with_call({}), "call without the name of a function"),
    (with_call({"function": 1}), "call without the name of a function"),
    (with_call({"name": "f", "arguments": "[1]"}), "the arguments of f are not a JSON object"),
    (with_call({"name": "f", "arguments": "{"}), "arguments of f: a string that is not JSON"),
    ([HI, {**YES, "content": "\ud800"}], "half a pair of characters"),
]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *(({"messages": messages}, message) for messages, message in MESSAGES),
        ({"messages": [HI, YES], "tools": {"a": 1}}, '"tools" is not a list of JSON schemas'),
        ({"messages": [HI, YES], "tools": [1]}, '"tools" is not a list of JSON schemas'),
        ({"prompt": "x"}, '"completion" is missing; data.format = "prompt_completion" needs it'),
        ({"prompt": "x", "completion": [YES]}, "two strings or two lists of messages"),
        ({"prompt": [HI], "completion": "x"}, "two strings or two lists of messages"),
        ({"prompt": [HI], "completion": [HI]}, '"completion" holds no message of the role'),
    ],
)
def test_a_row_that_is_no_chat_is_refused(row, message):
    with pytest.raises(ValueError) as caught:
        read(row, "prompt_completion" if "prompt" in row else "messages")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_bad_rows_and_other_sources_are_named_when_the_source_is_opened(tmp_path):
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": [HI, YES]}, {"messages": [HI]}])
    source = open_source(Data(source=str(path), format="messages", bad_rows="skip"))
    assert (len(source), source.skipped, source[1]) == (2, 1, "")
    (tmp_path / "a.txt").write_text("text")
    write_rows(tmp_path / "b.parquet", [{"text": "x"}])
    for name, data_format, field, words in (
        ("chats.jsonl", "messages", "text", 'chats.jsonl, row 2: .*data.bad_rows = "skip"'),
        ("a.txt", "messages", "text", 'data.format = "messages" needs .jsonl or .parquet'),
        ("b.parquet", "messages", "text", 'row 1: "messages" is missing'),
        ("chats.jsonl", "text", "messages", 'holds no text; .* or data.format = "messages"'),
    ):
        data = Data(source=str(tmp_path / name), format=data_format, text_field=field)
        with pytest.raises(ValueError, match=words):
            open_source(data)
