"""titan_sparse.data.shards: the files that prepared tokens are kept in."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import lettered_texts, prepared, read_shards, train_tokenizer
from titan_sparse.data.shards import TokenShards, token_dtype, write_shard
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer


def test_large_vocabularies_take_uint32(tmp_path):
    assert [token_dtype(size) for size in (258, 65536, 65537, 151936)] == [
        "uint16",
        "uint16",
        "uint32",
        "uint32",
    ]
    ids = np.array([0, 65536, 151935], dtype=np.int32)
    assert write_shard(tmp_path, 0, [ids, ids[:1]], 151643, "uint32") == 6
    assert np.fromfile(tmp_path / "shard_00000.bin", "<u4").tolist() == [
        0,
        65536,
        151935,
        151643,
        0,
        151643,
    ]
    assert np.load(tmp_path / "shard_00000.idx.npy").tolist() == [0, 4, 6]


@pytest.mark.usefixtures("datasets_cache")
def test_a_shard_that_was_cut_off_is_refused(tmp_path):
    folder = prepared(tmp_path)
    path = Path(folder, "shard_00001.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="data.source.*shard_00001.bin has"):
        TokenShards(folder, ByteTokenizer())


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("damage", ["missing", "cut off", "garbage"])
def test_a_damaged_index_of_a_shard_is_refused(tmp_path, damage):
    folder = prepared(tmp_path)
    path = Path(folder, "shard_00001.idx.npy")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2] if damage == "cut off" else b"garbage")
    with pytest.raises(ValueError, match="data.source.*shard_00001.idx.npy cannot be read"):
        TokenShards(folder, ByteTokenizer())


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("key", ["dtype", "shards", "tokens", "tokenizer_digest"])
def test_a_meta_json_without_its_counts_is_refused(tmp_path, key):
    path = Path(prepared(tmp_path), "meta.json")
    meta = json.loads(path.read_text())
    del meta[key]
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=f"data.source.*meta.json has no {key}"):
        TokenShards(str(path.parent), ByteTokenizer())


@pytest.mark.usefixtures("datasets_cache")
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
