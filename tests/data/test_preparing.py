"""titan_sparse.data.preparing: the shards hold what the source holds, whatever happens on the way."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.helpers import (
    END,
    TEXTS,
    prepared,
    read_shards,
    train_tokenizer,
    write_texts,
)
from titan_sparse.commands.prepare_data import main, show_histogram
from titan_sparse.data import preparing
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.shards import TokenShards, write_shard
from titan_sparse.data.tokenizer import ByteTokenizer


@pytest.mark.parametrize("ending", [".txt", ".jsonl.zst", ".parquet"])
def test_shards_hold_the_documents_of_the_source_in_order(tmp_path, ending):
    source = write_texts(tmp_path / "texts", ending)
    meta = prepare(Recipe(str(source), shard_rows=2), str(tmp_path / "out"))
    texts = [text.encode() for text in TEXTS]
    if ending == ".txt":
        texts = [path.read_bytes() for path in sorted(source.iterdir())]
    expected = [[*text, END] for text in texts if text]
    assert read_shards(str(tmp_path / "out")) == expected
    assert (meta["documents"], meta["tokens"]) == (len(expected), sum(map(len, expected)))
    assert meta["dtype"] == "uint16" and len(meta["shards"]) == 3


def test_processes_make_the_same_files_as_one_and_the_command_line_prints_a_histogram(
    tmp_path, capsys
):
    one = prepared(tmp_path)
    words = [str(tmp_path / "a.jsonl"), str(tmp_path / "two"), "--shard-rows", "3"]
    assert main([*words, "--processes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "16 - 31           2" in " ".join(printed.split(",")) and "9 documents" in printed
    for path in Path(one).iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize(("rows", "shards"), [(9, 9), (128, 128), (300, 100)])
def test_a_source_takes_at_most_128_shards(tmp_path, rows, shards):
    folder = Path(prepared(tmp_path, lengths=[3] * rows, shard_rows=0))
    assert len(list(folder.iterdir())) == 3 * shards + 2
    assert TokenShards(str(folder), ByteTokenizer()).lengths().tolist() == [4] * rows


def test_filters_and_histogram(tmp_path):
    folder = prepared(tmp_path, min_length=5, max_length=40)
    assert [len(ids) - 1 for ids in read_shards(folder)] == [5, 40, 15, 16, 17, 33]
    meta = json.loads((tmp_path / "a/meta.json").read_text())
    assert meta["histogram"] == {
        "4": [1, 5],
        "8": [1, 15],
        "16": [2, 33],
        "32": [2, 73],
    }
    assert (meta["empty"], meta["filtered"]) == (1, 3)
    assert show_histogram(meta).splitlines()[-1].split() == "32 - 63 2 73 57.9%".split()
    recipe = Recipe(str(tmp_path / "a.jsonl"), min_length=1000)
    with pytest.raises(ValueError, match="no document"):
        prepare(recipe, str(tmp_path / "none"))


def test_interrupted_it_goes_on_and_keeps_finished_shards(tmp_path, monkeypatch):
    expected = read_shards(prepared(tmp_path))
    recipe = Recipe(str(tmp_path / "a.jsonl"), shard_rows=3)
    out = tmp_path / "out"
    written = []

    def write_or_stop(folder, number, *rest):
        written.append(number)
        if len(written) == 3:
            (folder / "shard_00002.bin").write_bytes(b"half a sh")
            raise KeyboardInterrupt
        return write_shard(folder, number, *rest)

    monkeypatch.setattr(preparing, "write_shard", write_or_stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(recipe, str(out))
    with pytest.raises(ValueError, match="data.source.*not finished"):
        TokenShards(str(out), ByteTokenizer())
    prepare(recipe, str(out))
    assert written == [0, 1, 2, 2, 3] and read_shards(str(out)) == expected


def test_another_source_tokenizer_or_option_is_refused(tmp_path, capsys):
    prepared(tmp_path)
    train_tokenizer(tmp_path, ["</s>"])
    recipe, out = Recipe(str(tmp_path / "a.jsonl"), shard_rows=3), str(tmp_path / "a")
    with pytest.raises(ValueError, match="min_length was 0 and is 2"):
        prepare(replace(recipe, min_length=2), out)
    with pytest.raises(ValueError, match="tokenizer_digest was bytes and is"):
        prepare(replace(recipe, tokenizer=str(tmp_path)), out)
    source = tmp_path / "a.jsonl"
    stat = source.stat()
    source.write_bytes(source.read_bytes().replace(b"aaa", b"bbb"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match="source's files have changed"):
        prepare(recipe, out)
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path), "--processes", "1"]) == 2
    assert "holds other files" in capsys.readouterr().err


def test_bad_rows_are_refused_or_skipped_and_counted(tmp_path, capsys):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(b'{"text": "one"}\n{"text": "t\xff"}\n{"text": ""}\n{"text": "four"}\n')
    words = [str(source), str(out), "--processes", "1"]
    assert main(words) == 2
    assert f"{source}, row 2: byte 11 is not UTF-8" in capsys.readouterr().err
    assert main([*words, "--bad-rows", "skip"]) == 0
    assert "left out: 1 empty documents, 1 bad rows, 0 shorter" in capsys.readouterr().out
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["documents"], meta["empty"], meta["bad_rows_skipped"]) == (2, 2, 1)
    assert read_shards(str(out)) == [[*b"one", END], [*b"four", END]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"documents": 2}, "shard_00001.idx.npy does not say where 2 documents"),
        (None, "shard_00001.json cannot be read"),
    ],
)
def test_a_shard_of_an_interrupted_run_that_does_not_match_its_counts_is_refused(
    tmp_path, change, named
):
    out = Path(prepared(tmp_path))
    (out / "meta.json").unlink()
    path = out / "shard_00001.json"
    counts = json.loads(path.read_text())
    path.write_text(json.dumps({**counts, **change}) if change else "")
    with pytest.raises(ValueError, match=named):
        prepare(Recipe(str(tmp_path / "a.jsonl"), shard_rows=3), str(out))
    assert not (out / "meta.json").exists()
