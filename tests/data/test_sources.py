"""open_source(): chats in files, datasets of the hub, and Python files. Texts: test_rows.py."""

import json
import re

import datasets
import pytest
import trl

from tests.data.helpers import CALL, CHAT, TEXTS, TOOLS, write_rows
from tests.refusals import refused
from titan_sparse.config import Data
from titan_sparse.data import documents
from titan_sparse.data.documents import open_source
from titan_sparse.data.rows import sample_text, without_nulls

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}


def read(row: dict, row_format: str = "messages") -> dict:
    return json.loads(sample_text("f, row 1", row, row_format, "messages"))


@pytest.mark.parametrize("ending", [".jsonl.zst", ".parquet"])
def test_files_give_the_same_samples(tmp_path, ending):
    """Parquet adds nulls for the fields that other messages and calls have.
    They are removed again."""
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
    ([{"from": "bot", "value": "x"}, YES], 'messages[0] has "from": "bot"; write one of human, '),
    ([{"from": ["gpt"], "value": "x"}, YES], 'messages[0] has "from": ["gpt"]; write one of human'),
    ([HI, {"from": "function_call", "value": "f()"}], "messages[1]: a string that is not JSON"),
    ([HI, {"from": "function_call", "value": "[1]"}], "a tool call without the name of a function"),
    ([HI, {"from": "gpt", "value": "x", "weight": 0}], 'has "weight", which is not read'),
    ([{**HI, "role": "human"}, YES], 'has the role "human"; write one of system'),
    ([HI, {"role": "assistant"}], "messages[1] has no content"),
    ([{**HI, "content": [{"type": "image"}]}, YES], "content that is not text"),
    ([{**HI, "content": 7}, YES], "content that is not text"),
    ([HI, {**YES, "train": 0}], '"train": 0; write true or false'),
    ([HI, {**YES, "weight": 0}], 'has "weight", which is not read; write "train"'),
    ([HI, {**YES, "loss": False}], 'has "loss", which is not read; write "train"'),
    ([HI, {**YES, "function_call": {"name": "f"}}], 'is not read; write "tool_calls"'),
    ([{**HI, "images": ["a.png"]}, YES], "is not read; only text can be trained"),
    ([{**HI, "content": [{"type": "image", "text": "a cat"}]}, YES], "content that is not text"),
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
        ({"messages": [HI, YES], "system": "be kind"}, "not read; write it as the first message"),
        ({"prompt": "x", "completion": "y", "system": "be kind"}, "write it as the first message"),
        ({"messages": [HI, YES], "functions": [{}]}, 'is not read; write "tools"'),
        (
            {"conversations": [{"from": "gpt", "value": "x"}], "image": "a.png"},
            'it has "image", which is not read; only text can be trained',
        ),
        (
            {"prompt": [HI], "completion": [YES], "chat_template_kwargs": {"thinks": False}},
            "is not read; write data.chat_template_kwargs",
        ),
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
    with refused(re.escape(message)):
        read(row, "prompt_completion" if "prompt" in row else "messages")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_what_would_change_a_chat_is_not_left_out(tmp_path, ending):
    """Also in tables, of which only some columns are read. Empty values say nothing."""
    empty = {"images": [], "chat_template_kwargs": None}
    path = tmp_path / f"chats{ending}"
    write_rows(path, [{"messages": [HI, YES], **empty}, {"messages": [HI, YES], **empty}])
    data = Data(source=str(path), format="messages")
    assert len(open_source(data)) == 2
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    write_rows(path, [{"messages": [HI, YES], **empty}, {"messages": [HI, YES], **kwargs}])
    with pytest.raises(ValueError, match="row 2: it has .chat_template_kwargs., which is not read"):
        open_source(data)


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
    talk = [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]
    row = {"conversations": talk}
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
        with refused(re.escape(words)):
            read({**row, **change})


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


SHAREGPT_ROWS = [
    {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
        "system": "be kind",
        "id": 1,
    },
    # A column that only one row has is null in the others.
    {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yes"}]},
]
ALPACA_ROWS = [
    {"instruction": "hi", "input": "", "output": "yes", "system": "be kind"},
    {"instruction": "hi", "input": "all", "output": "yes", "history": [["hi", "yes"]], "id": 2},
]


def test_python_files_alone_and_joined(monkeypatch):
    """Of a part of them: there are thousands."""
    every = list(documents._python_files())
    assert {name.split("/")[0] for name, _ in every} == {"stdlib", "torch"} and len(every) > 500
    assert not any("site-packages" in name for name, _ in every)
    some = [file for file in every if file[0].startswith(("stdlib/json/", "stdlib/email/"))]
    monkeypatch.setattr(documents, "_python_files", lambda: reversed(some))
    files, packages = open_source(Data()), open_source(Data(join_packages=True))
    assert [name for name, _ in files.items] == sorted(name for name, _ in some)
    assert list(files) == [path.read_text() for _, path in sorted(some)]
    for package, members in zip(packages, packages.items, strict=True):
        texts = [f"# {name}\n{path.read_text()}" for name, path in members]
        assert package == "\n".join(texts)
        assert len({name.rpartition("/")[0] for name, _ in members}) == 1
    assert sorted(sum(packages.items, [])) == files.items and len(packages) < len(files) / 4


def hub(monkeypatch, dataset: datasets.Dataset | Exception) -> list[tuple]:
    """A hub that has this dataset, and what it is asked for."""
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        if isinstance(dataset, Exception):
            raise dataset
        return dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_dataset_of_the_hub(monkeypatch):
    rows = {"text": [*TEXTS, None], "other": range(len(TEXTS) + 1)}
    calls = hub(monkeypatch, datasets.Dataset.from_dict(rows))
    assert list(open_source(Data(source="owner/name", subset="en", split="test"))) == [*TEXTS, ""]
    assert list(open_source(Data(source="owner/name"))) == [*TEXTS, ""]
    assert calls == [
        (("owner/name", "en"), {"split": "test"}),
        (("owner/name", None), {"split": "train"}),
    ]


@pytest.mark.parametrize(
    "form, rows",
    [
        ('"conversations" (the ShareGPT form)', SHAREGPT_ROWS),
        ('"instruction" and "output" (the Alpaca form)', ALPACA_ROWS),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_other_forms_of_chats_in_files_and_of_the_hub(
    monkeypatch, tmp_path, caplog, form, rows, ending
):
    """A dataset gives the same samples as a file of its rows, and one line each says the form."""
    path = tmp_path / f"chats{ending}"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    filled = [{**dict.fromkeys(columns), **row} for row in rows]
    write_rows(path, rows if ending == ".jsonl" else filled)
    hub(monkeypatch, datasets.Dataset.from_list(filled))
    with caplog.at_level("INFO", "titan_sparse"):
        of_file = open_source(Data(source=str(path), format="messages"))
        source = open_source(Data(source="owner/chats", format="messages"))
    said = [f"data.source = {place}: rows with {form}" for place in (path, "owner/chats")]
    assert caplog.messages == said
    samples = [json.loads(text) for text in source]
    assert samples == [
        {**json.loads(text), "where": f"owner/chats, row {number}"}
        for number, text in enumerate(of_file, 1)
    ]
    assert samples[0]["messages"] == [{"role": "system", "content": "be kind"}, HI, YES]
    assert samples[1]["messages"][-1] == YES and "tools" not in samples[1]
    # Another column was asked for, and text is not guessed from chats.
    with pytest.raises(ValueError, match='"x" is missing'):
        open_source(Data(source=str(path), format="messages", messages_field="x"))
    for data in (Data(source="o/c", format="messages", messages_field="x"), Data(source="o/c")):
        with pytest.raises(ValueError, match='("x" is missing|"text" is not a column)'):
            open_source(data)


def test_chats_of_the_hub(monkeypatch, caplog):
    caplog.set_level("INFO", "titan_sparse")
    rows = [{"talk": [HI, YES], "id": 1}, {"talk": [HI], "id": 2}]
    hub(monkeypatch, datasets.Dataset.from_list(rows))
    data = Data(source="owner/chats", format="messages", messages_field="talk")
    source = open_source(data)
    assert not caplog.messages
    assert json.loads(source[0]) == {"where": "owner/chats, row 1", "messages": [HI, YES]}
    with pytest.raises(ValueError, match='owner/chats, row 2: "talk" holds no message of the role'):
        source[1]
    data.bad_rows = "skip"
    assert open_source(data)[1] == "" and "owner/chats, row 2" in caplog.text


NUMBERS = datasets.Dataset.from_dict({"body": ["a"], "id": [1]})


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (NUMBERS, {}, 'data.text_field = "text" is not a column; write one of: body, id'),
        (NUMBERS, {"format": "messages"}, '"messages" is missing .columns: body, id.; data.format'),
        (NUMBERS.select([]), {"text_field": "body"}, "data.source.*holds no documents"),
        (datasets.exceptions.DatasetNotFoundError("not\nthere"), {}, "data.source.*not there"),
        (ConnectionError("not\nthere"), {"subset": "en"}, 'data.subset = "en".*not there'),
        (ValueError("not\nthere"), {"split": "x"}, 'data.split = "x".*not there'),
    ],
)
def test_what_the_hub_does_not_have_is_refused_in_one_line(monkeypatch, dataset, options, message):
    hub(monkeypatch, dataset)
    with refused(message):
        open_source(Data(source="owner/name", **options))


@pytest.mark.parametrize(
    "source",
    ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere.txt", "no/where.jsonl.zst"],
)
def test_a_missing_path_is_refused_without_the_hub(monkeypatch, source):
    calls = hub(monkeypatch, NUMBERS)
    with pytest.raises(ValueError, match="data.source.*this file or folder does not exist"):
        open_source(Data(source=source))
    assert not calls
