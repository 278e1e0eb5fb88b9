"""titan_sparse.data.documents: Python files and datasets of the hub. test_rows.py has data files."""

import json

import datasets
import pytest

from tests.data.helpers import TEXTS, write_rows
from titan_sparse.config import Data
from titan_sparse.data import documents
from titan_sparse.data.documents import open_source

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
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
def test_other_forms_of_chats_of_the_hub(monkeypatch, tmp_path, caplog, form, rows):
    """A dataset gives the same samples as a file of its rows, and one line says the form."""
    path = tmp_path / "chats.jsonl"
    write_rows(path, rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    hub(
        monkeypatch, datasets.Dataset.from_list([{**dict.fromkeys(columns), **row} for row in rows])
    )
    with caplog.at_level("INFO", "titan_sparse"):
        of_file = open_source(Data(source=str(path), format="messages"))
        source = open_source(Data(source="owner/chats", format="messages"))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"rows with {form}"
    ] * 2
    samples = [json.loads(text) for text in source]
    assert samples == [
        {**json.loads(text), "where": f"owner/chats, row {number}"}
        for number, text in enumerate(of_file, 1)
    ]
    assert samples[0]["messages"] == [{"role": "system", "content": "be kind"}, HI, YES]
    assert samples[1]["messages"][-1] == YES and "tools" not in samples[1]
    # Another column was asked for, and text is not guessed from chats.
    for data in (Data(source="o/c", format="messages", messages_field="x"), Data(source="o/c")):
        with pytest.raises(ValueError, match='("x" is missing|"text" is not a column)'):
            open_source(data)


def test_chats_of_the_hub(monkeypatch, caplog):
    rows = [{"talk": [HI, YES], "id": 1}, {"talk": [HI], "id": 2}]
    hub(monkeypatch, datasets.Dataset.from_list(rows))
    data = Data(source="owner/chats", format="messages", messages_field="talk")
    source = open_source(data)
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
    with pytest.raises(ValueError, match=message) as raised:
        open_source(Data(source="owner/name", **options))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere.txt", "no/where.jsonl.zst"],
)
def test_a_missing_path_is_refused_without_the_hub(monkeypatch, source):
    calls = hub(monkeypatch, NUMBERS)
    with pytest.raises(ValueError, match="data.source.*this file or folder does not exist"):
        open_source(Data(source=source))
    assert not calls
