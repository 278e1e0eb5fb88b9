"""titan_sparse.data.shards: the files that prepared tokens are kept in."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import lettered_texts, open_loader, prepared, read_shards, train_tokenizer
from tests.refusals import refused
from titan_sparse.config import Data
from titan_sparse.data.shards import DataError, TokenShards
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer


def test_a_tokenizer_file_travels_with_the_shards_and_another_is_refused(tmp_path):
    tokens = tmp_path / "tokenizer"
    tokens.mkdir()
    train_tokenizer(tokens, ["</s>"])
    folder = prepared(tmp_path, tokenizer=str(tokens))
    shutil.rmtree(tokens)
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode(ids) for ids in read_shards(folder, tokenizer)] == [
        text for text in lettered_texts("a") if text
    ]
    with pytest.raises(ValueError, match=rf'data.tokenizer = "{folder}"'):
        TokenShards(folder, ByteTokenizer())


def change_tokens(folder: Path, place: int, token: int) -> None:
    tokens = np.memmap(folder / "shard_00001.bin", "<u2", "r+")
    tokens[place] = token
    tokens.flush()


def change_offsets(folder: Path, change) -> None:
    path = folder / "shard_00001.idx.npy"
    np.save(path, change(np.load(path)))


def change_meta(folder: Path, change) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


def cut(path: Path, count: int = 2) -> None:
    path.write_bytes(path.read_bytes()[:-count])


# Documents of the second shard: 1, 15 and 16 tokens, and the one that closes each.
OFFSETS = [
    lambda x: x + [1, 0, 0, 0],
    lambda x: x - [0, 0, 0, 1],
    lambda x: x[[0, 2, 1, 3]],
    lambda x: x[[0, 1, 1, 3]],
    lambda x: x[[0, 2, 3]],
    lambda x: x * 1.0,
    lambda x: x[:, None],
]
METAS = {
    "has 8 documents, its shards 9": lambda meta: meta.update(documents=8),
    "has 9 documents, its shards": lambda meta: meta["shards"].pop(),
    "has 0 documents": lambda meta: meta.update(shards=[], documents=0, tokens=0),
    r"is damaged \(TypeError": lambda meta: meta.update(shards=[3]),
    **{
        rf"is damaged \(KeyError\('{key}'": lambda meta, key=key: meta.pop(key)
        for key in ("dtype", "tokenizer_digest", "end_of_document", "shards", "tokens")
    },
}
FILES = {
    "shard_00001.bin has 68 bytes instead of 70": lambda folder: cut(folder / "shard_00001.bin"),
    "shard_00001.bin has 0 bytes": lambda folder: (folder / "shard_00001.bin").unlink(),
    "idx.npy cannot be read": lambda folder: (folder / "shard_00001.idx.npy").unlink(),
    "idx.npy cannot be read:": lambda folder: cut(folder / "shard_00001.idx.npy"),
    "idx.npy cannot be read: ": lambda folder: cut(folder / "shard_00001.idx.npy", 1000),
    **{
        f"meta.json {name}": lambda folder, c=c: change_meta(folder, c) for name, c in METAS.items()
    },
}


def test_shards_that_are_damaged_or_contradict_their_counts_are_refused(tmp_path):
    good = Path(prepared(tmp_path))
    assert np.load(good / "shard_00001.idx.npy").tolist() == [0, 2, 18, 35]
    cases = list(FILES.items())
    for change in OFFSETS:
        named = "idx.npy does not say where 3 documents of together 35 tokens begin"
        cases.append((named, lambda folder, c=change: change_offsets(folder, c)))
    for number, (named, change) in enumerate(cases):
        folder = tmp_path / f"damaged{number}"
        shutil.copytree(good, folder)
        change(folder)
        with refused(f"data.source.*{named}"):
            TokenShards(str(folder), ByteTokenizer())


def test_a_document_that_is_not_closed_is_refused(tmp_path):
    """As in a copy that was never finished, whose rest is zeros."""
    folder = Path(prepared(tmp_path))
    change_tokens(folder, 17, 0)
    shards = TokenShards(str(folder), ByteTokenizer())
    with pytest.raises(ValueError, match="shard_00001.bin, document 2 does not end"):
        for index in range(len(shards)):
            assert len(shards[index].tokens) == shards.length(index)


@pytest.mark.parametrize("row", [0, 2, 39], ids=["first", "between", "last"])
def test_the_digest_of_content_is_of_the_first_the_last_and_documents_between(tmp_path, row):
    folder = Path(prepared(tmp_path, lengths=[5] * 40, shard_rows=40))
    before = open_loader(Data(source=str(folder))).content_digest()
    tokens = np.memmap(folder / "shard_00000.bin", "<u2", "r+")
    tokens[6 * row] += 1
    tokens.flush()
    assert open_loader(Data(source=str(folder))).content_digest() != before


def with_old_time(path: Path, change) -> None:
    stat = path.stat()
    change(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


CHANGES = {
    "cut off": (lambda path: os.truncate(path, 34), "shard_00001.bin was changed during the run"),
    "gone": (Path.unlink, "shard_00001.bin was changed during the run"),
    "written anew": (
        lambda path: path.write_bytes(path.read_bytes()),
        "shard_00001.bin was changed during the run",
    ),
    "large token": (
        lambda path: with_old_time(path, lambda p: change_tokens(p.parent, 20, 258)),
        "holds the token 258, of a vocabulary of 258",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mapped_above", [10, 100])
def test_shards_that_change_end_a_run_before_the_batch(tmp_path, monkeypatch, change, mapped_above):
    monkeypatch.setattr("titan_sparse.data.shards.MAPPED_ABOVE", mapped_above)
    folder = prepared(tmp_path)
    whole = open_loader(Data(source=folder, shuffle=False), seq_len=60)
    expected = [next(whole).tokens.tolist() for _ in range(2)]
    loader = open_loader(Data(source=folder, shuffle=False), seq_len=60)
    loader.check_unchanged()
    # Of the first shard, which has 48 tokens, and the beginning of the second.
    assert next(loader).tokens.tolist() == expected[0]
    damage, named = CHANGES[change]
    damage(Path(folder, "shard_00001.bin"))
    with refused(named, DataError):
        next(loader)
    if change != "large token":
        with pytest.raises(DataError, match=named):
            loader.check_unchanged()
