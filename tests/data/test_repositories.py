"""titan_sparse.data.recipe: folders of source code as documents."""

import logging

import pytest

from tests.data.helpers import no_progress, read_shards
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.tokenizer import ByteTokenizer


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
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "link.py").symlink_to(root / "b/x.py")
    decode = ByteTokenizer().decode
    with caplog.at_level(logging.INFO, "titan_sparse"):
        prepare(Recipe(str(root), document="folder"), str(tmp_path / "folders"), 1, no_progress)
    assert "not read: 1 binary, 1 empty, 2 hidden, 1 links" in caplog.text
    assert [decode(ids) for ids in read_shards(str(tmp_path / "folders"))] == [
        "# loose.txt\nl",
        "# a/A.md\nA\n# a/sub/z.c\nz",
        "# b/x.py\nx",
    ]
    prepare(Recipe(str(root), document="source"), str(tmp_path / "whole"), 1, no_progress)
    joined = [decode(ids) for ids in read_shards(str(tmp_path / "whole"))]
    assert joined == ["# loose.txt\nl\n# a/A.md\nA\n# a/sub/z.c\nz\n# b/x.py\nx"]
    with pytest.raises(ValueError, match="--split would be ignored"):
        prepare(
            Recipe(str(root), document="folder", split="test"), str(tmp_path / "x"), 1, no_progress
        )


def test_line_ends_of_source_code_are_kept(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.bat").write_bytes(b"one\r\ntwo\n")
    prepare(
        Recipe(str(tmp_path / "code"), document="source"), str(tmp_path / "out"), 1, no_progress
    )
    (ids,) = read_shards(str(tmp_path / "out"))
    assert ByteTokenizer().decode(ids) == "# a.bat\none\r\ntwo\n"
