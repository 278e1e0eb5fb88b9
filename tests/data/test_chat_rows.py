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
    # Arguments stay the string that they are: some templates write it.
    assert second["messages"][1]["tool_calls"] == [CALL]
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
    (None, '"messages" is missing (columns: none); data.format = "messages" needs it'),
    ({"role": "user"}, '"messages" is not a list of messages'),
    ("[{", "messages: a string that is not JSON"),
    ([HI], '"messages" holds no message of the role "assistant"'),
    ([], '"messages" holds no message of the role "assistant"'),
    (["hi", YES], "messages[0] is not an object with a role and content"),
    ([{"value": "x"}, YES], "messages[0] has the role null"),
    (
        [{"from": "bot", "value": "x"}, YES],
        'messages[0] has "from": "bot"; write one of human, gpt',
    ),
    ([{"from": ["gpt"], "value": "x"}, YES], 'messages[0] has "from": ["gpt"]; write one of human'),
    ([HI, {"from": "function_call", "value": "f()"}], "messages[1]: a string that is not JSON"),
    ([HI, {"from": "function_call", "value": "[1]"}], "a tool call without the name of a function"),
    ([HI, {"from": "gpt", "value": "x", "weight": 0}], 'has a "weight", which is not read'),
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
        (
            {"prompt": "x"},
            '"completion" is missing (columns: prompt); data.format = "prompt_completion" needs it',
        ),
        ({"prompt": "x", "completion": [YES]}, "two strings or two lists of messages"),
        ({"prompt": [HI], "completion": "x"}, "two strings or two lists of messages"),
        ({"prompt": [HI], "completion": [HI]}, '"completion" holds no message of the role'),
    ],
)
def test_a_row_that_is_no_chat_is_refused(row, message):
    with pytest.raises(ValueError) as caught:
        read(row, "prompt_completion" if "prompt" in row else "messages")
    assert message in str(caught.value) and "\n" not in str(caught.value)


CALLS = '{"name": "add", "arguments": {"a": 1}}'
SHAREGPT = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hi"},
    {"from": "function_call", "value": CALLS},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "yes"},
    {"from": "human", "value": "hi"},
    {"from": "function_call", "value": f"[{CALLS}, {CALLS}]"},
    {"from": "tool", "value": "1"},
    {"from": "gpt", "value": "yes"},
]
"""As LLaMA-Factory's glaive_toolcall and Hermes' function calling write chats."""


def test_rows_in_the_sharegpt_form():
    called = {"type": "function", "function": json.loads(CALLS)}
    answer = {"role": "assistant", "tool_calls": [called]}
    told = {"role": "tool", "content": "1"}
    twice = {"role": "assistant", "tool_calls": [called, called]}
    wanted = [{"role": "system", "content": "be kind"}, HI, answer, told, YES, HI, twice, told, YES]
    got = read({"conversations": SHAREGPT, "tools": json.dumps(TOOLS), "id": 7})
    assert got == {"where": "f, row 1", "messages": wanted, "tools": TOOLS}
    for row in (
        {"conversations": SHAREGPT[1:], "system": "be kind"},
        {"conversations": json.dumps(SHAREGPT), "system": ""},
        {"messages": SHAREGPT, "instruction": "x", "output": "y"},
    ):
        assert read(row)["messages"] == wanted
    with pytest.raises(ValueError, match='a column "system" and a system message; write one'):
        read({"conversations": SHAREGPT, "system": "be kind"})


def test_sharegpt_roles_that_trl_reads():
    trl = pytest.importorskip("trl")
    row = {
        "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]
    }
    wanted = trl.maybe_convert_to_chatml(json.loads(json.dumps(row)))["messages"]
    assert read(row)["messages"] == wanted == [HI, YES]


def test_rows_in_the_alpaca_form():
    """As LLaMA-Factory reads them."""
    row = {"instruction": "add", "input": "1 and 2", "output": "3", "text": "unread"}
    asked = [{"role": "user", "content": "add\n1 and 2"}, {"role": "assistant", "content": "3"}]
    assert read(row)["messages"] == asked
    assert read({**row, "input": ""})["messages"][0]["content"] == "add"
    assert read({**row, "input": None})["messages"][0]["content"] == "add"
    more = read({**row, "system": "be kind", "history": [["hi", "yes"]]})["messages"]
    assert more == [{"role": "system", "content": "be kind"}, HI, YES, *asked]
    for change, words in (
        ({"history": ["hi"]}, '"history" is not a list of pairs'),
        ({"history": 7}, '"history" is not a list of pairs'),
        ({"instruction": 7}, '"instruction" and "input" must be strings'),
        ({"output": ["3"]}, "content that is not text"),
        ({"output": None}, "or instruction and output (Alpaca)"),
    ):
        with pytest.raises(ValueError) as caught:
            read({**row, **change})
        assert words in str(caught.value)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_form_of_rows_is_logged_once(tmp_path, ending, caplog):
    for name, rows, line in (
        (
            "s",
            [{"conversations": SHAREGPT[1:2] + SHAREGPT[-1:], "id": 1}] * 3,
            '"conversations" (the ShareGPT form)',
        ),
        (
            "a",
            [{"instruction": "hi", "input": "", "output": "yes"}] * 3,
            '"instruction" and "output" (the Alpaca form)',
        ),
        ("m", [{"messages": [HI, YES]}] * 3, ""),
    ):
        path = tmp_path / f"{name}{ending}"
        write_rows(path, rows)
        with caplog.at_level("INFO", "titan_sparse"):
            source = open_source(Data(source=str(path), format="messages"))
        assert json.loads(source[2])["messages"] == [HI, YES]
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ([f"data.source = {path}: rows with {line}"] if line else [])
        caplog.clear()
    # Another column of messages was asked for.
    with pytest.raises(ValueError, match='"dialog" is missing'):
        open_source(Data(source=str(path), format="messages", messages_field="dialog"))


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
