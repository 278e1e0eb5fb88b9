"""titan_sparse.data.sources: where texts come from."""

import pytest

from tests.data.helpers import TEXTS, prepared, write_rows, write_texts
from titan_sparse.config import Data
from titan_sparse.data.documents import open_documents
from titan_sparse.data.sources import open_source
from titan_sparse.data.tokenizer import ByteTokenizer


def test_python_source_is_deterministic_and_not_empty():
    first, second = open_source(Data()), open_source(Data())
    assert len(first) == len(second) > 500
    assert [name for name, _ in first.items] == sorted(name for name, _ in second.items)
    assert any("import" in first[i] for i in range(5))
    assert {name.split("/")[0] for name, _ in first.items} == {"stdlib", "torch"}
    assert not any("site-packages" in name for name, _ in first.items)


def test_join_packages_makes_fewer_and_longer_documents():
    files, packages = open_source(Data()), open_source(Data(join_packages=True))
    assert len(packages) < len(files) / 2
    members = next(group for group in packages.items if group[0][0].startswith("stdlib/json/"))
    document = packages[packages.items.index(members)]
    assert [name for name, _ in members] == sorted(name for name, _ in members)
    assert document.startswith(f"# {members[0][0]}\n")
    assert all(f"# {name}\n{path.read_text()}" in document for name, path in members)


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.zst", ".parquet"])
def test_files_of_each_ending_hold_the_same_texts(tmp_path, ending):
    source = open_source(Data(source=str(write_texts(tmp_path / "data", ending))))
    assert list(source) == TEXTS
    single = open_source(Data(source=str(tmp_path / "data" / f"0{ending}")))
    assert single[0] == TEXTS[0]


@pytest.mark.usefixtures("datasets_cache")
def test_text_field_is_read_and_null_is_empty(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"body": "one"}, {"body": None}])
    source = open_source(Data(source=str(tmp_path / "a.jsonl"), text_field="body"))
    assert list(source) == ["one", ""]


@pytest.mark.usefixtures("datasets_cache")
def test_missing_and_wrong_text_field_name_the_key_and_the_columns(tmp_path):
    folder = write_texts(tmp_path / "data", ".jsonl", field="body")
    with pytest.raises(ValueError, match=r"data\.text_field.*body, number"):
        open_source(Data(source=str(folder)))
    with pytest.raises(ValueError, match=r"data\.text_field = \"number\" holds no text"):
        open_source(Data(source=str(folder), text_field="number"))


@pytest.mark.parametrize(
    "source",
    [
        "./nowhere",
        "/nowhere/at/all",
        "~/nowhere-at-all",
        "nowhere.txt",
        "no/where.jsonl.zst",
        "a.parquet",
    ],
)
def test_a_missing_path_is_refused_without_the_hub(monkeypatch, source):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="data.source.*no such file or folder") as error:
        open_source(Data(source=source))
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("datasets_cache")
def test_folders_of_mixed_or_no_endings_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.source.*holds no data files"):
        open_source(Data(source=str(tmp_path)))
    (tmp_path / "a.jsonl").write_text("{broken")
    with pytest.raises(ValueError, match="data.source.*row 1: no JSON"):
        open_source(Data(source=str(tmp_path / "a.jsonl")))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data.source.*mixes \.jsonl, \.txt"):
        open_source(Data(source=str(tmp_path)))


@pytest.mark.parametrize("option", [{"subset": "en"}, {"split": "test"}])
def test_options_of_the_hub_are_refused_for_files(tmp_path, option):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="data.subset and data.split"):
        open_source(Data(source=str(tmp_path), **option))


def test_hub_dataset(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return datasets.Dataset.from_dict({"text": TEXTS, "other": [1] * len(TEXTS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(open_source(Data(source="owner/name", subset="en", split="test"))) == TEXTS
    assert list(open_source(Data(source="owner/name"))) == TEXTS
    assert calls == [
        (("owner/name", "en"), {"split": "test"}),
        (("owner/name", None), {"split": "train"}),
    ]


@pytest.mark.parametrize("kind", ["DatasetNotFoundError", "ConnectionError", "ValueError"])
def test_hub_dataset_not_found_is_one_line(monkeypatch, kind):
    datasets = pytest.importorskip("datasets")
    error = {"ConnectionError": ConnectionError, "ValueError": ValueError}.get(kind)
    error = error or datasets.exceptions.DatasetNotFoundError

    def load_dataset(*_, **__):
        raise error("not\nthere")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match='data.source = "owner/nothing".*not there') as raised:
        open_source(Data(source="owner/nothing"))
    assert "\n" not in str(raised.value)


def test_empty_source_is_refused(monkeypatch):
    datasets = pytest.importorskip("datasets")
    empty = datasets.Dataset.from_dict({"text": ["a"]}).select([])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: empty)
    with pytest.raises(ValueError, match="data.source.*holds no documents"):
        open_source(Data(source="owner/name"))


def test_a_bad_byte_in_a_hub_dataset_is_refused_or_skipped(monkeypatch, caplog):
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    raw = pyarrow.array([b"good", b"bad \xe9"], pyarrow.binary())
    strings = pyarrow.Array.from_buffers(pyarrow.string(), 2, raw.buffers())
    table = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.table({"text": strings})))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    source = open_source(Data(source="owner/name"))
    assert source[0] == "good"
    with pytest.raises(ValueError, match='data.source = "owner/name", row 2: no UTF-8'):
        source[1]
    assert list(open_source(Data(source="owner/name", bad_rows="skip"))) == ["good", ""]
    assert 'data.bad_rows = "skip"' in caplog.text and "row 2" in caplog.text


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("option", [{"bad_rows": "skip"}, {"split_special_tokens": True}])
def test_options_of_texts_are_refused_for_prepared_tokens(tmp_path, option):
    with pytest.raises(ValueError, match=f"data.{next(iter(option))} would be ignored"):
        open_documents(Data(source=prepared(tmp_path), **option), ByteTokenizer())
