"""titan_sparse.data.recipe: folders of source files, and MDS shards."""

import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.helpers import no_progress, read_shards, train_tokenizer
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import MDSRows, Recipe
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
        prepare(Recipe(str(root), document="folder"), str(tmp_path / "folders"), 1, no_progress)
    assert "not read: 1 binary, 1 empty, 2 hidden, 1 links" in caplog.text
    assert [decode(ids) for ids in read_shards(str(tmp_path / "folders"))] == [
        "# loose.txt\nl",
        "# a/A.md\nA\n# a/sub/z.c\nz",
        "# b/x.py\nx\n# b/y.bat\none\r\ntwo\n",
    ]
    prepare(Recipe(str(root), document="source"), str(tmp_path / "whole"), 1, no_progress)
    joined = [decode(ids) for ids in read_shards(str(tmp_path / "whole"))]
    assert joined == [
        "# loose.txt\nl\n# a/A.md\nA\n# a/sub/z.c\nz\n# b/x.py\nx\n# b/y.bat\none\r\ntwo\n"
    ]
    with pytest.raises(ValueError, match="--split would be ignored"):
        prepare(
            Recipe(str(root), document="folder", split="test"), str(tmp_path / "x"), 1, no_progress
        )


def test_mds_shards_need_the_streaming_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "streaming", None)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"mosaicml-streaming.*pip install"):
        prepare(Recipe(str(tmp_path)), str(tmp_path / "out"), 1, no_progress)


def test_a_row_that_is_no_utf8_is_named(tmp_path, monkeypatch):
    """With a stand-in for the package, which decodes a row, as the package does, when it is read."""
    texts = [b"first", "zweites: \u00e4".encode("latin-1"), b"last"]

    class LocalDataset:
        shards = [SimpleNamespace(column_names=["text"])]

        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def __len__(self) -> int:
            return len(texts)

        def __getitem__(self, row: int) -> dict[str, str]:
            return {"text": texts[row].decode("utf-8")}

    monkeypatch.setitem(sys.modules, "streaming", SimpleNamespace(LocalDataset=LocalDataset))
    rows = MDSRows(str(tmp_path), "text", ByteTokenizer(), None)
    assert len(rows) == 3
    for row in (0, 2):
        (document,) = rows.documents(row)
        assert bytes(document.tokens[:-1].tolist()) == texts[row]
    expected = re.escape(f"{tmp_path}, row 2: not UTF-8 (unexpected end of data)")
    with pytest.raises(ValueError, match=f"^{expected}$"):
        list(rows.documents(1))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("same", [True, False])
def test_mds_shards_of_tokens_are_decoded_and_encoded_anew(tmp_path, compression, same):
    streaming = pytest.importorskip("streaming")
    train_tokenizer(tmp_path, ["</s>"])
    source = load_tokenizer(str(tmp_path))
    target = str(tmp_path) if same else "bytes"
    expected = ["first", "second document", "third", "zweites: \u00e4"]
    encoded = [
        np.append(source.encode(text), source.end_of_document).astype(np.uint32)
        for text in expected
    ]
    columns = {"input_ids": "ndarray", "indices": "ndarray", "domain": "str"}
    with streaming.MDSWriter(
        out=str(tmp_path / "mds"), columns=columns, compression=compression, size_limit=200
    ) as writer:
        for first, second in (encoded[:2], encoded[2:]):
            bounds = np.array(
                [[0, len(first)], [len(first), len(first) + len(second)]], dtype=np.uint32
            )
            writer.write(
                {"input_ids": np.concatenate([first, second]), "indices": bounds, "domain": "book"}
            )
    with pytest.raises(ValueError, match="--source-tokenizer"):
        prepare(Recipe(str(tmp_path / "mds"), target), str(tmp_path / "none"), 1, no_progress)
    recipe = Recipe(str(tmp_path / "mds"), target, str(tmp_path), shard_rows=1)
    prepare(recipe, str(tmp_path / "out"), 1, no_progress)
    prepare(recipe, str(tmp_path / "out"), 1, no_progress)  # unpacking has not changed the source
    tokenizer = load_tokenizer(target)
    written = read_shards(str(tmp_path / "out"), tokenizer)
    assert [tokenizer.decode(ids) for ids in written] == expected
    assert not same or written == [ids.tolist() for ids in encoded]
