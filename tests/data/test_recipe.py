"""titan_sparse.data.recipe: folders of source files, and MDS shards."""

import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.helpers import read_shards, train_tokenizer
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import MDSRows, Recipe, open_rows
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer


def test_folders_of_source_code_become_one_document_each(tmp_path, caplog):
    root = tmp_path / "repositories"
    for name, content in {
        "b/x.py": "x",
        "a/sub/z.c": "z",
        "a/A.md": "A",
        "loose.txt": "l",
        ".git/config": "no",
        "a/.hidden": "no",
        "a/image.png": "\0png",
        "a/empty.py": "",
        "b/y.bat": "one\r\ntwo\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    (root / "link.py").symlink_to(root / "b/x.py")
    decode = ByteTokenizer().decode
    with caplog.at_level(logging.INFO, "titan_sparse"):
        prepare(Recipe(str(root), document="folder"), str(tmp_path / "folders"))
    assert "not read: 2 hidden, 1 links, 1 empty .py, 1 binary .png\n" in caplog.text
    assert [decode(ids) for ids in read_shards(str(tmp_path / "folders"))] == [
        "# loose.txt\nl",
        "# a/A.md\nA\n# a/sub/z.c\nz",
        "# b/x.py\nx\n# b/y.bat\none\r\ntwo\n",
    ]
    prepare(Recipe(str(root), document="source"), str(tmp_path / "whole"))
    joined = [decode(ids) for ids in read_shards(str(tmp_path / "whole"))]
    assert joined == [
        "# loose.txt\nl\n# a/A.md\nA\n# a/sub/z.c\nz\n# b/x.py\nx\n# b/y.bat\none\r\ntwo\n"
    ]
    with pytest.raises(ValueError, match="--split would be ignored"):
        prepare(Recipe(str(root), document="folder", split="test"), str(tmp_path / "x"))


def stand_in(rows: list[dict], seen: list[str]) -> SimpleNamespace:
    """For mosaicml-streaming, which cannot be installed beside our numpy. Texts are decoded when a
    row is read, as by the package."""

    class LocalDataset:
        shards = [SimpleNamespace(column_names=list(rows[0]), file_pairs=[])]

        def __init__(self, folder: str) -> None:
            seen.append(folder)

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, row: int) -> dict:
            cells = rows[row].items()
            return {name: x.decode() if type(x) is bytes else x for name, x in cells}

    return SimpleNamespace(LocalDataset=LocalDataset)


def test_rows_of_mds_shards(tmp_path, monkeypatch):
    """Of text, and of the ids of the same or another tokenizer, several documents to a row."""
    train_tokenizer(tmp_path, ["</s>"])
    source = load_tokenizer(str(tmp_path))
    expected = ["first", "second document", "third", "zweites: \u00e4"]
    ids = [np.append(source.encode(text), source.end_of_document) for text in expected]
    pairs = []
    for first, second in (ids[:2], ids[2:]):
        stops = [0, len(first), len(first), len(first) + len(second)]
        row = {"input_ids": np.concatenate([first, second]), "indices": np.reshape(stops, (2, 2))}
        pairs.append({name: values.astype(np.uint32) for name, values in row.items()})
    seen: list[str] = []
    alone = [{"input_ids": one.astype(np.uint32)[:, None]} for one in ids]
    texts = [{"text": text.encode()} for text in expected]
    by_source = Recipe(str(tmp_path), source_tokenizer=str(tmp_path))
    for rows, recipe in ((pairs, by_source), (alone, by_source), (texts, Recipe(str(tmp_path)))):
        monkeypatch.setitem(sys.modules, "streaming", stand_in(rows, seen))
        for target in (source, ByteTokenizer()):
            found = MDSRows(recipe, target)
            written = []
            for row in range(len(found)):
                for document in found.documents(row):
                    assert document.tokens[-1] == target.end_of_document
                    written.append(target.decode(document.tokens[:-1]))
                    assert target.end_of_document not in document.tokens[:-1]
            assert written == expected
    assert set(seen) == {str(tmp_path)}
    with pytest.raises(ValueError, match="has the columns text; write .*--source-tokenizer"):
        MDSRows(by_source, source)
    (tmp_path / "index.json").write_text("{}")
    recipe = Recipe(str(tmp_path), text_field="body", source_tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="--text-field would be ignored with this source"):
        open_rows(recipe, source)
    rows = [{"text": b"good"}, {"text": "zweites: \u00e4".encode("latin-1")}]
    monkeypatch.setitem(sys.modules, "streaming", stand_in(rows, seen))
    expected = re.escape(f"{tmp_path}, row 2: not UTF-8 (unexpected end of data)")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        list(MDSRows(Recipe(str(tmp_path)), ByteTokenizer()).documents(1))
