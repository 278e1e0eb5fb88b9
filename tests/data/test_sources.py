"""titan_sparse.data: sources, tokenizers and packing; the loader is in test_loader.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard

from titan_sparse.config import Data
from titan_sparse.data.packing import Piece, pack, pad_to_multiple
from titan_sparse.data.sources import open_source
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer

TEXTS = ["first\nline", "", "zweites: \u00e4\u00f6\u20ac \U0001f600", "x" * 50, "last\n"]
END, PADDING = ByteTokenizer.end_of_document, ByteTokenizer.padding


# ---- sources


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_texts(folder: Path, ending: str, field: str = "text") -> Path:
    """TEXTS in a folder of two files, or of one file a document for .txt."""
    folder.mkdir()
    if ending == ".txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    for part, texts in enumerate([TEXTS[:2], TEXTS[2:]] if ending != ".txt" else []):
        write_rows(
            folder / f"{part}{ending}", [{field: text, "number": i} for i, text in enumerate(texts)]
        )
    return folder


def write_rows(path: Path, table: list[dict]) -> None:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return
    raw = "".join(json.dumps(row) + "\n" for row in table).encode()
    path.write_bytes(zstandard.compress(raw) if path.suffix == ".zst" else raw)


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.zst", ".parquet"])
def test_files_of_each_ending_hold_the_same_texts(cache, tmp_path, ending):
    source = open_source(Data(source=str(write_texts(tmp_path / "data", ending))))
    assert list(source) == TEXTS
    single = open_source(Data(source=str(tmp_path / "data" / f"0{ending}")))
    assert single[0] == TEXTS[0]


def test_text_field_is_read_and_null_is_empty(cache, tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"body": "one"}, {"body": None}])
    source = open_source(Data(source=str(tmp_path / "a.jsonl"), text_field="body"))
    assert list(source) == ["one", ""]


def test_missing_and_wrong_text_field_name_the_key_and_the_columns(cache, tmp_path):
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


def test_folders_of_mixed_or_no_endings_and_unreadable_files_are_refused(cache, tmp_path):
    with pytest.raises(ValueError, match="data.source.*holds no data files"):
        open_source(Data(source=str(tmp_path)))
    (tmp_path / "a.jsonl").write_text("{broken")
    with pytest.raises(ValueError, match="data.source.*cannot be read"):
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


# ---- tokenizers


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) == len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document, tokenizer.padding]) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padding) == (258, 256, 257)


def train_tokenizer(folder: Path, special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_file_round_trip_ignores_stored_truncation_and_padding(tmp_path, text):
    train_tokenizer(tmp_path, ["</s>", "<pad>"])
    by_folder, by_file = (
        load_tokenizer(str(tmp_path)),
        load_tokenizer(str(tmp_path / "tokenizer.json")),
    )
    ids = by_folder.encode(text)
    assert ids.dtype == np.int32 and (ids == by_file.encode(text)).all()
    assert len(ids) == 0 or ids.max() < by_folder.vocab_size
    assert by_folder.decode(ids) == text
    assert by_folder.decode([*ids, by_folder.end_of_document]) == text


@pytest.mark.parametrize(
    ("special", "config", "end", "padding"),
    [
        (["<eos>", "<|endoftext|>"], None, "<|endoftext|>", "<|endoftext|>"),
        (["<eos>", "<pad>"], None, "<eos>", "<pad>"),
        (["<eos>", "<stop>"], {"eos_token": "<stop>"}, "<stop>", "<stop>"),
        (
            ["<eos>", "<stop>"],
            {"eos_token": {"content": "<stop>"}, "pad_token": "<eos>"},
            "<stop>",
            "<eos>",
        ),
        (["</s>"], {"eos_token": None}, "</s>", "</s>"),
    ],
)
def test_special_tokens_of_a_tokenizer_file(tmp_path, special, config, end, padding):
    trained = train_tokenizer(tmp_path, special)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.end_of_document == trained.token_to_id(end)
    assert tokenizer.padding == trained.token_to_id(padding)
    assert tokenizer.vocab_size == trained.get_vocab_size()


def test_tokenizer_errors_name_the_key(tmp_path):
    with pytest.raises(ValueError, match="data.tokenizer.*no such file"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="data.tokenizer.*no readable tokenizer.json"):
        load_tokenizer(str(tmp_path))
    train_tokenizer(tmp_path, ["<other>"])
    with pytest.raises(ValueError, match="data.tokenizer.*no end-of-document token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<absent>"}')
    with pytest.raises(ValueError, match="data.tokenizer.*<absent>"):
        load_tokenizer(str(tmp_path))


# ---- packing


def test_pack_by_hand():
    first, second = np.array([10, 11, 12, END]), np.array([20, 21, 22, 23, END])
    packed = pack([Piece(first, 2, 4), Piece(second, 0, 3)], 7, PADDING)
    assert packed.tokens.tolist() == [12, END, 20, 21, 22, PADDING, PADDING]
    assert packed.labels.tolist() == [END, -100, 21, 22, 23, -100, -100]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert packed.lengths == [2, 3]
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == np.int64


def test_pack_of_nothing_is_padding_and_of_too_much_is_refused():
    assert pack([], 2, PADDING).tokens.tolist() == [PADDING, PADDING]
    with pytest.raises(ValueError, match="do not fit"):
        pack([Piece(np.arange(5), 0, 5)], 4, PADDING)


@pytest.mark.parametrize(("multiple", "total"), [(1, 5), (4, 8), (5, 5), (8, 8)])
def test_pad_to_multiple(multiple, total):
    packed = pack([Piece(np.arange(9), 2, 7)], 5, PADDING)
    padded = pad_to_multiple(packed, multiple, PADDING)
    extra = total - 5
    assert padded.tokens.tolist() == [2, 3, 4, 5, 6] + [PADDING] * extra
    assert padded.labels.tolist() == [3, 4, 5, 6, 7] + [-100] * extra
    assert padded.positions.tolist() == [0, 1, 2, 3, 4] + [0] * extra
    assert padded.lengths == [5]
