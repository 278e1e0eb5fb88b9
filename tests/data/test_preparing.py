"""titan_sparse.data.preparing: shards hold what files, folders, and MDS shards hold."""

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.helpers import (
    CHATML,
    END,
    GLM,
    PLAIN,
    TEXTS,
    prepared,
    read_shards,
    train_tokenizer,
    write_rows,
    write_texts,
    write_tokenizer,
)
from tests.refusals import error_of, room_for
from titan_sparse.commands.prepare_data import main, show_histogram
from titan_sparse.data import preparing
from titan_sparse.data.documents import READER
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import MDSRows, Recipe, open_rows
from titan_sparse.data.shards import TokenShards, write_shard
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer

ASKED = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("ending", [".txt", ".jsonl.zst", ".parquet"])
def test_shards_hold_the_documents_of_the_source_in_order(tmp_path, ending):
    source = write_texts(tmp_path / "texts", ending)
    meta = prepare(Recipe(source, shard_rows=2), str(tmp_path / "out"))
    expected = [[*text.encode(), END] for text in TEXTS if text]
    assert read_shards(str(tmp_path / "out")) == expected
    assert (meta["documents"], meta["tokens"]) == (len(expected), sum(map(len, expected)))
    assert meta["dtype"] == "uint16" and len(meta["shards"]) == 3


def test_processes_make_the_same_files_as_one_and_print_a_histogram(tmp_path, capsys):
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
    assert meta["histogram"] == {"4": [1, 5], "8": [1, 15], "16": [2, 33], "32": [2, 73]}
    assert (meta["empty"], meta["filtered"]) == (1, 3)
    assert show_histogram(meta).splitlines()[-1].split() == "32 - 63 2 73 57.9%".split()
    recipe = Recipe(str(tmp_path / "a.jsonl"), min_length=1000)
    with pytest.raises(ValueError, match="no document"):
        prepare(recipe, str(tmp_path / "none"))


@contextlib.contextmanager
def interrupted_before(count: int) -> Iterator[None]:
    """prepare() in here stops in shard number `count`."""

    def write_or_stop(folder, number, *rest):
        if number == count:
            (folder / f"shard_{number:05}.bin").write_bytes(b"half a sh")
            raise KeyboardInterrupt
        return write_shard(folder, number, *rest)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(preparing, "write_shard", write_or_stop)
        yield


def test_interrupted_it_goes_on_and_keeps_finished_shards(tmp_path):
    expected = read_shards(prepared(tmp_path))
    recipe = Recipe(str(tmp_path / "a.jsonl"), shard_rows=3)
    out = str(tmp_path / "out")
    with interrupted_before(2):
        prepare(recipe, out)
    with pytest.raises(ValueError, match="data.source.*not finished"):
        TokenShards(out, ByteTokenizer())
    finished = [Path(out, f"shard_0000{number}.bin") for number in (0, 1)]
    before = [path.stat().st_mtime_ns for path in finished]
    prepare(recipe, out)
    assert [path.stat().st_mtime_ns for path in finished] == before
    assert read_shards(out) == expected


def test_a_folder_of_other_files_is_refused(tmp_path, capsys):
    prepared(tmp_path)
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path), "--processes", "1"]) == 2
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("a.jsonl:0.5,b.jsonl:0.5 out", "is a mixture; prepare each part, such as a.jsonl, in a"),
        ("a out", "a holds prepared tokens already; write the source that they were made of"),
        ("a.jsonl out --min-length 1kb", "--min-length: 1kb is not a number of tokens; write for"),
        ("a.jsonl out --min-length 1k", "no document is within --min-length and --max-length"),
    ],
)
def test_what_cannot_be_prepared_is_refused(tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.chdir(tmp_path)
    prepared(tmp_path)
    assert reason in error_of(capsys, main, *words.split(), "--processes=1")


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ({"text": 5}, "", 'correct it, or write (--bad-rows "skip")'),
        ({"text": "\ud800"}, "", 'correct it, or write (--bad-rows "skip")'),
        ({"prompt": "a", "completion": "b"}, "", 'or (--format "prompt_completion") if the rows'),
        (
            {"messages": ASKED},
            "--format messages --tokenizer tokenizer",
            '(--bad-rows "skip")',
        ),
    ],
)
def test_refusals_advise_options_of_the_command(tmp_path, monkeypatch, capsys, row, words, said):
    """What they advise is taken. Configurations have the same options as keys of [data]."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_tokenizer(tmp_path / "tokenizer", CHATML)
    good = {"text": "b", "messages": [*ASKED, {"role": "assistant", "content": "b"}]}
    good = {name: good[name] for name in row if name in good} or row
    write_rows(tmp_path / "rows.jsonl", [row, good])
    words = ["rows.jsonl", "out", "--processes=1", *words.split()]
    error = error_of(capsys, main, *words)
    assert (found := re.search(said, error))
    assert not re.search(r"data\.(?!source)", error.partition("; ")[2])
    assert main([*words, *shlex.split(found[1])]) == 0


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    """That of the cache, or that of the folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path / "rows.jsonl", [{"text": "a" * 5000}])
    words = [f"{tmp_path}/rows.jsonl", f"{tmp_path}/out", "--processes=1"]
    with room_for(100):
        error = error_of(capsys, main, *words)
    assert f"{tmp_path}/cache/titan_sparse'" in error and "File too large" in error
    with room_for(8000):
        error = error_of(capsys, main, *words)
    assert f"File too large: '{tmp_path}/out'" in error
    assert main(words) == 0


@pytest.mark.parametrize("place", ["texts/z.jsonl", "disk/deep/z.jsonl", "blobs/4f2a"])
def test_a_source_that_has_changed_is_not_continued(tmp_path, place):
    """Of six rows in two files, four are written before the stop. The second file may be reached by
    a link to its folder's folder, or by a name that leads to a digest, as of `hf download`."""
    late = tmp_path / place
    for folder in (tmp_path / "texts", late.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if "disk" in place:
        (tmp_path / "texts/disk").symlink_to(tmp_path / "disk")
        (tmp_path / "texts/round").symlink_to(tmp_path / "texts")
    if "blobs" in place:
        (tmp_path / "texts/z.jsonl").symlink_to(late)
    table = [{"text": letter * 5} for letter in "abcdef"]
    write_rows(tmp_path / "texts/a.jsonl", table[:3])
    write_rows(late, table[3:])
    recipe, out = Recipe(str(tmp_path / "texts"), shard_rows=2), tmp_path / "out"
    with interrupted_before(2):
        prepare(recipe, str(out))

    # What the reader does not read may change.
    (tmp_path / "texts/notes.csv").write_text("not read")
    stat = late.stat()
    before = late.read_bytes()
    late.write_bytes(before.replace(b"fffff", b"FFFFF"))
    os.utime(late, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match="the source's files have changed"):
        prepare(recipe, str(out))

    shutil.rmtree(out)
    prepare(recipe, str(out))
    texts = [bytes(ids[:-1]).decode() for ids in read_shards(str(out))]
    assert texts == ["aaaaa", "bbbbb", "ccccc", "ddddd", "eeeee", "FFFFF"]
    # Complete, it is not written anew.
    assert prepare(recipe, str(out))["documents"] == 6


@pytest.mark.parametrize("document", ["row", "folder"])
def test_a_file_that_is_replaced_while_it_is_read_ends_the_run(tmp_path, monkeypatch, document):
    """Rows come from a cache, and folders are read when their turn comes."""
    source = tmp_path / "texts"
    for name in "ab":
        (source / name).mkdir(parents=True)
        (source / name / "x.txt").write_text("old " + name)

    def write_and_replace(folder, number, *rest):
        counts = write_shard(folder, number, *rest)
        new = tmp_path / "new.txt"
        new.write_text("new b")
        new.rename(source / "b/x.txt")
        return counts

    monkeypatch.setattr(preparing, "write_shard", write_and_replace)
    recipe, out = Recipe(str(source), document=document, shard_rows=1), tmp_path / "out"
    with pytest.raises(ValueError, match="have changed while they were read; delete .*/out"):
        prepare(recipe, str(out))
    assert not (out / "meta.json").exists() and not (out / "shard_00000.json").exists()


def test_a_worker_process_that_reads_other_files_is_refused(tmp_path, monkeypatch):
    """The files change after the first process has opened them."""
    source, out = tmp_path / "z.jsonl", tmp_path / "out"
    write_rows(source, [{"text": "old"}] * 4)
    write_shards = preparing._write_shards

    def replace_and_write(*arguments):
        write_rows(source, [{"text": "new"}] * 4)
        return write_shards(*arguments)

    monkeypatch.setattr(preparing, "_write_shards", replace_and_write)
    with pytest.raises(ValueError, match="out was begun with something else .the source's files"):
        prepare(Recipe(str(source), shard_rows=1), str(out), processes=2)
    assert not list(out.glob("shard_*.json"))


@pytest.mark.parametrize("version", [READER - 1, READER + 1, None])
def test_a_folder_of_other_rules_is_trained_on_but_not_continued(tmp_path, version):
    """None: a version that wrote none. Its first shard has an end of turn of
    its own, so to speak."""
    expected = read_shards(prepared(tmp_path))
    recipe, out = Recipe(str(tmp_path / "a.jsonl"), shard_rows=3), tmp_path / "out"

    def as_of_that_version(name: str) -> None:
        plan = json.loads((out / name).read_text())
        assert plan.pop("reader") == READER
        if version is not None:
            plan["reader"] = version
        (out / name).write_text(json.dumps(plan))

    with interrupted_before(2):
        prepare(recipe, str(out))
    as_of_that_version("plan.json")
    refused = "out was begun .*another version of titan_sparse, .* write another folder, or delete"
    for processes in (1, 2):
        with pytest.raises(ValueError, match=refused):
            prepare(recipe, str(out), processes)
    assert not (out / "shard_00002.json").exists()

    shutil.rmtree(out)
    prepare(recipe, str(out))
    for name in ("plan.json", "meta.json"):
        as_of_that_version(name)
    assert read_shards(str(out)) == expected
    # Nor is a finished folder taken for one of these rules.
    with pytest.raises(ValueError, match=refused):
        prepare(recipe, str(out))


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
CHATS = [{"text": "a", "body": "b", "messages": MESSAGES, "talk": MESSAGES[:1] + MESSAGES}] * 3
CHAT = {"format": "messages", "chat_template": "plain.jinja"}


@pytest.mark.parametrize(
    ("first", "then", "named"),
    [
        ({}, {"text_field": "body"}, "text_field was text and is body"),
        ({}, {"bad_rows": "skip"}, "bad_rows was refuse and is skip"),
        ({}, CHAT, "row_format was text and is messages"),
        (CHAT, {"loss_on": "last_assistant"}, "loss_on was assistant and is last_assistant"),
        (CHAT, {"messages_field": "talk"}, "messages_field was messages and is talk"),
        (CHAT, {"chat_template": "glm.jinja"}, "template_digest was"),
        ({}, {"document": "source"}, "document was row and is source"),
        ({"document": "folder"}, {"document": "source"}, "document was folder and is source"),
        ({}, {"max_length": 9}, "max_length was 0 and is 9"),
        ({}, {"min_length": 2}, "min_length was 0 and is 2"),
        ({}, {"tokenizer": "tokenizer.json"}, "tokenizer_digest was bytes and is"),
    ],
)
def test_an_option_that_changes_the_text_is_refused(tmp_path, monkeypatch, first, then, named):
    monkeypatch.chdir(tmp_path)
    for name, template in (("plain", PLAIN), ("glm", GLM)):
        Path(f"{name}.jinja").write_text(template)
    train_tokenizer(tmp_path, ["</s>"])
    (tmp_path / "texts").mkdir()
    write_rows(tmp_path / "texts/z.jsonl", CHATS)
    recipe, out = Recipe(str(tmp_path / "texts"), shard_rows=1, **first), str(tmp_path / "out")
    with interrupted_before(0 if "document" in first else 1):
        prepare(recipe, out)
    with pytest.raises(ValueError, match=named):
        prepare(replace(recipe, **then), out)


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


def test_the_printed_options_are_words_of_a_shell(tmp_path, capsys):
    texts = write_texts(tmp_path / "texts", ".txt")
    out = str(tmp_path / "Bücher $HOME 'neu'")
    assert main([texts, out, "--processes=1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    words = subprocess.check_output(
        f"printf '%s\\n' {line.removeprefix('train with:')}", shell=True
    )
    assert words.decode().split("\n")[:-1] == ["--data.source", out, "--data.tokenizer", "bytes"]
    notes = tmp_path / "my notes"
    notes.mkdir()
    (notes / "a.md").write_text("a")
    error = error_of(capsys, main, str(notes), out, "--processes=1")
    assert f"titan-sparse prepare_data '{notes}' OUT --document folder" in error


def test_rare_reasons_for_skipping_chats_are_counted_together(tmp_path, capsys):
    """As a template may give a reason for each chat."""
    text = "messages[0].content"
    refusing = f"{{% if {text} < 'n' %}}{{{{ raise_exception({text}) }}}}{{% endif %}}"
    (tmp_path / "refusing.jinja").write_text(refusing + PLAIN)
    asked = [{**MESSAGES[0], "content": letter} for letter in "aaaabcdefghijklmn"]
    write_rows(tmp_path / "a.jsonl", [{"messages": [one, MESSAGES[1]]} for one in asked])
    words = f"--format messages --chat-template {tmp_path}/refusing.jinja --bad-rows skip".split()
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--processes=1", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if line.startswith("skipped")]
    assert len(lines) == 11 and lines[0].startswith("skipped 4 chats: ")
    assert lines[-1] == "skipped 3 chats for 3 other reasons, which meta.json names"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"documents": 2}, "shard_00001.idx.npy does not say where 2 documents"),
        (None, "shard_00001.json cannot be read"),
    ],
)
def test_a_shard_that_does_not_match_its_counts_is_refused(tmp_path, change, named):
    out = Path(prepared(tmp_path))
    (out / "meta.json").unlink()
    path = out / "shard_00001.json"
    counts = json.loads(path.read_text())
    path.write_text(json.dumps({**counts, **change}) if change else "")
    with pytest.raises(ValueError, match=named):
        prepare(Recipe(str(tmp_path / "a.jsonl"), shard_rows=3), str(out))
    assert not (out / "meta.json").exists()


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
    """For mosaicml-streaming, which does not go with our numpy. Reading a row decodes its text."""

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
