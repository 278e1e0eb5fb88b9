"""titan_sparse.data.rows and open_source(): a file is read whole, or refused with its name."""

import gzip
import json
import logging
import os
import random
import re
import struct
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.helpers import write_rows, zstd
from tests.refusals import refused
from titan_sparse.commands import prepare_data
from titan_sparse.config import Data
from titan_sparse.data import documents, rows
from titan_sparse.data.documents import open_source
from titan_sparse.data.rows import file_rows
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.tokenizer import ByteTokenizer


def lines_of(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def many_texts(count: int) -> list[str]:
    """Lines that barely compress."""
    generator = random.Random(0)
    return [f"{i} {generator.getrandbits(400):x}" for i in range(count)]


def texts_of(path: Path, **options) -> list[str]:
    return list(open_source(Data(source=str(path), **options)))


def refusal(path: Path, **options) -> str:
    with refused(r"^data\.") as raised:
        open_source(Data(source=str(path), **options))
    return str(raised.value)


SKIPPED_FRAME = struct.pack("<II", 0x184D2A50, 4) + b"note"
FRAME = zstd(lines_of(many_texts(300)))
GZIP = gzip.compress(lines_of(many_texts(100)))
DAMAGED = {
    "half_a_frame.jsonl.zst": (FRAME + FRAME[: len(FRAME) // 2], "cannot be read: Truncated"),
    "first_byte.jsonl.zst": (FRAME + FRAME[:1], "cannot be read: Truncated"),
    "last_byte.jsonl.zst": (FRAME + FRAME[:-1], "cannot be read: Truncated"),
    "after.jsonl.zst": (FRAME + b"garbage", "cannot be read"),
    "cut.jsonl.gz": (GZIP[:-9], "cannot be read: Truncated"),
    "sum.jsonl.gz": (GZIP[:-5] + b"abcde", "cannot be read"),
    "after.jsonl.gz": (GZIP + b"garbage", "cannot be read"),
    "open.json": (b'[{"text": "a"}, {"text": "b"}', "cannot be read: Expecting ',' delimiter"),
    "behind.json": (b'[{"text": "a"}]\n{}', "cannot be read: Extra data"),
    "letters.json": (b'[{"text": "a\xff"}]', "cannot be read"),
    "broken.jsonl": (b"{broken", "row 1: not valid JSON"),
    "blank.jsonl": (b"\n \n", "holds no documents"),
    "empty.jsonl": (b"", "only empty files"),
    "folder/a.jsonl.zst": (FRAME, ""),
    "folder/b.jsonl.zst": (b"", "is cut off"),
    "another/a.jsonl.gz": (GZIP, ""),
    "another/b.jsonl.gz": (b"", "is cut off"),
}


def test_damaged_files_are_refused(tmp_path):
    for name, (content, reason) in DAMAGED.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        if reason:
            message = refusal(path if path.parent == tmp_path else path.parent)
            assert str(path) in message and reason in message


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_a_file_that_was_written_anew_with_the_same_time_is_read_anew(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    for text in ("old text", "new text"):
        write_rows(path, [{"text": text}])
        os.utime(path, (10**9, 10**9))
        assert texts_of(path) == [text]


def test_a_file_that_is_changed_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def rows_and_change(file, field, row_format):
        yield from file_rows(file, field, row_format)
        path.write_text("new text")

    monkeypatch.setattr(documents, "file_rows", rows_and_change)
    assert "was changed while it was read" in refusal(path)


def test_a_cache_that_lost_rows_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of(many_texts(200)))
    assert len(texts_of(path)) == 200
    (cache,) = (tmp_path / "cache").rglob("*.arrow")
    cache.write_bytes(cache.read_bytes()[:-100])
    message = refusal(path)
    assert "its cache is damaged" in message and f"delete {cache}" in message
    assert not list(cache.parent.glob("*.tmp"))


BAD_LINES = {
    b'{"text": "a\xff"}': "byte 11 is not UTF-8",
    b'{"text": "a"': "not valid JSON",
    b'["text"]': "not a JSON object",
    b'{"body": "a", "id": 1}': 'data.text_field = "text" is not a column; write one of: body, id',
    b'{"messages": []}': 'write one of: messages, or data.format = "messages" if the rows are chats',
    b'{"instruction": "a", "output": "b"}': 'or data.format = "messages" if',
    b'{"prompt": "a", "completion": "b"}': 'or data.format = "prompt_completion" if',
    b'{"text": 7}': 'data.text_field = "text" holds no text',
    b'{"text": "\\ud800"}': "it holds half a pair of characters",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_row_is_refused_with_file_and_row_or_skipped_and_counted(tmp_path, line, caplog):
    texts = many_texts(10)
    lines = lines_of(texts).splitlines()
    lines[6] = line
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert re.search(f"{path}, row 7: .*{re.escape(BAD_LINES[line])}", refusal(path))
    expected = [*texts[:6], "", *texts[7:]]
    # The second time from the cache, which must not hide the count.
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "titan_sparse"):
            source = open_source(Data(source=str(path), bad_rows="skip"))
        assert list(source) == expected and source.skipped == 1
        assert "1 of 10 rows" in caplog.text and f"{path}, row 7" in caplog.text
    path.write_bytes(line)
    assert "has only bad rows" in refusal(path, bad_rows="skip")


def test_a_bad_byte_in_txt_and_parquet_is_refused_or_skipped(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"good")
    (folder / "b.txt").write_bytes(b"bad \xe9")
    assert f"{folder / 'b.txt'}: byte 4 is not UTF-8" in refusal(folder)
    assert texts_of(folder, bad_rows="skip") == ["good", ""]
    raw = pyarrow.array([b"good"] * 6 + [b"bad \xe9", None], pyarrow.binary())
    for kind in (pyarrow.string(), pyarrow.large_string()):
        column = raw.cast(pyarrow.large_binary()) if "large" in str(kind) else raw
        strings = pyarrow.Array.from_buffers(kind, len(column), column.buffers())
        path = tmp_path / f"{kind}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": strings}), path)
        assert f"{path}, row 7: byte 4 is not UTF-8" in refusal(path)
        assert texts_of(path, bad_rows="skip") == ["good"] * 6 + ["", ""]


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
def test_line_ends_are_kept(tmp_path, ending):
    text = "a\r\nb\rc\n\u2028d\x85e\n"
    path = tmp_path / f"a{ending}"
    if ending == ".txt":
        path.write_bytes(text.encode())
    elif ending == ".jsonl":
        path.write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n\r\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    assert texts_of(path) == [text]


def test_all_of_a_folder_is_read_or_named_and_counted(tmp_path, caplog):
    folder = tmp_path / ".hidden_parent" / "texts"
    elsewhere = tmp_path / "disk"
    for path in (folder / "sub", folder / ".ipynb_checkpoints", elsewhere / "deep"):
        path.mkdir(parents=True)
    texts = {}
    packed = {".gz": gzip.compress, ".zst": zstd}
    for name in ("a.jsonl", "B.JSONL", "sub/c.jsonl.gz", "d.Json", "e.json.zst"):
        texts[name] = lines_of([name])
        (folder / name).write_bytes(packed.get(Path(name).suffix, bytes)(texts[name]))
    for place in (elsewhere, elsewhere / "deep"):
        (place / "f.jsonl").write_bytes(lines_of([place.name]))
    for name in (
        ".b.txt",
        ".ipynb_checkpoints/a.jsonl",
        "._a.jsonl",
        "x.csv",
        "README",
        "log.2026-11-27T10:31",
    ):
        (folder / name).write_text("not read")
    os.mkfifo(folder / "pipe.jsonl")
    links = {"disk": elsewhere, "round": folder, "sub/again": elsewhere / "deep", "up": ".."}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    with caplog.at_level(logging.INFO, "titan_sparse"):
        found = texts_of(folder)
    assert sorted(found) == sorted([*texts, "disk", "deep"])
    assert (
        "not read: 3 hidden, 3 links to folders that are read already, 2 without an ending, "
        "1 neither file nor folder, 1 .csv\n" in caplog.text
    )
    assert texts_of(folder / "B.JSONL") == ["B.JSONL"]
    (folder / "g.jsonl").symlink_to(tmp_path / "unmounted" / "g.jsonl")
    assert f"the link {folder / 'g.jsonl'} leads to nothing" in refusal(folder)


def test_many_kinds_of_files_that_are_not_read_are_one_short_line(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("text")
    for number in range(30):
        for copy in range(2000 if number == 7 else 2):
            (tmp_path / f"a file with a long name {copy}.e{number}").touch()
    with caplog.at_level(logging.INFO, "titan_sparse"):
        assert texts_of(tmp_path) == ["text"]
    (record,) = [r.getMessage() for r in caplog.records if "not read" in r.getMessage()]
    counts = record.partition("not read: ")[2]
    assert counts.startswith("2,000 .e7, 2 .e0, 2 .e1, ")
    assert counts.endswith(", 44 of 22 other kinds") and len(counts) < 120


def test_a_parquet_file_that_is_cut_off_is_refused_with_its_name(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        table = pyarrow.table({"text": many_texts(100)})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", write_page_checksum=True)
    assert len(texts_of(folder)) == 200
    path = folder / "b.parquet"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[200] ^= 1
    for content in (whole[:-20], whole[:50], b"", damaged):
        path.write_bytes(content)
        assert f"{path} cannot be read" in refusal(folder)


def test_columns_and_folders_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", None], "id": [1, 2]}), path)
    message = f'{path}: data.text_field = "text" is not a column; write one of: body, id'
    assert message in refusal(path)
    assert 'data.text_field = "id" holds no text' in refusal(path, text_field="id")
    assert texts_of(path, text_field="body") == ["a", ""]
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"body": column}), path)
    assert texts_of(path, text_field="body") == ["a", "b", "a"]
    for option in ({"subset": "en"}, {"split": "test"}):
        assert "data.subset and data.split choose" in refusal(path, text_field="body", **option)
    (tmp_path / "b.txt").write_text("text")
    assert "mixes .parquet, .txt" in refusal(tmp_path)
    path.rename(tmp_path / "info.json")
    assert texts_of(tmp_path) == ["text"]
    (tmp_path / "b.txt").unlink()
    (tmp_path / "info.json").unlink()
    (tmp_path / "cache").mkdir(exist_ok=True)
    assert "holds no data files" in refusal(tmp_path)


def test_a_folder_of_markdown_and_code_is_sent_to_prepare_data(tmp_path):
    """The command that the refusal names reads it, and its result can be trained on."""
    folder = tmp_path / "notes"
    folder.mkdir()
    texts = {"a.md": "# title\n", "b.rst": "words\n", "c.py": "x = 1\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    command = re.search('"titan-sparse prepare_data (.*)" reads', refusal(folder)).group(1)
    words = command.replace("OUT", str(tmp_path / "out")).split()
    assert prepare_data.main(words) == 0
    (document,) = TokenShards(str(tmp_path / "out"), ByteTokenizer())
    text = ByteTokenizer().decode(document.tokens)
    assert all(part in text for part in texts.values())
    assert "--document" not in refusal(folder / "a.md")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_another_column_of_the_same_file_is_not_that_of_the_cache(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    write_rows(path, [{"text": "one", "body": "two"}])
    for field, text in (("text", "one"), ("body", "two"), ("text", "one")):
        assert texts_of(path, text_field=field) == [text]
    chats = tmp_path / "chats.jsonl"
    answers = {
        name: [{"role": "user", "content": "?"}, {"role": "assistant", "content": name}]
        for name in ("messages", "talk")
    }
    chats.write_text(json.dumps(answers | {"text": "as text"}))
    for name in ("messages", "talk"):
        (sample,) = texts_of(chats, format="messages", messages_field=name)
        assert json.loads(sample)["messages"][1]["content"] == name
    assert texts_of(chats) == ["as text"]


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_link_is_read_by_its_own_ending_and_read_anew_when_it_leads_elsewhere(tmp_path, ending):
    """As `hf download` lays files out: a name that leads to a digest."""
    link = tmp_path / f"a{ending}"
    for text in ("one", "two"):
        blob = tmp_path / f"{text}5e7f"
        write_rows(blob, [{"text": text}], link.suffix)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
        assert texts_of(link) == [text]


def test_rows_are_those_of_a_loop_of_json(tmp_path):
    """Lines longer than a chunk, too."""
    expected = [*many_texts(50), "x" * 500_000, "", "] \u00e4", "2024-01-02", "12", "null"]
    table = [{"text": text} for text in expected]
    lines = lines_of(expected)
    contents = {
        "a.jsonl": lines,
        "a.jsonl.zst": zstd(lines[:999]) + SKIPPED_FRAME + zstd(lines[999:]),
        "a.JSONL.GZ": gzip.compress(lines[:999]) + gzip.compress(lines[999:]),
        "lines.json": lines,
        "mark.jsonl": b"\xef\xbb\xbf" + lines,
        "array.json": b"\xef\xbb\xbf \n" + json.dumps(table, ensure_ascii=False, indent=1).encode(),
        "array.json.gz": gzip.compress(json.dumps(table).encode()),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert [row.text for row in file_rows(tmp_path / name, "text")] == expected


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.json.zst", "a.txt.zst"])
def test_a_small_file_that_unpacks_to_a_huge_row_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(rows, "MOST_BYTES", 1 << 22)
    pack = zstd if name.endswith("zst") else gzip.compress
    start = b'[{"text": "' if ".json." in name else b""
    (tmp_path / name).write_bytes(pack(start + bytes(1 << 26)))
    tracemalloc.start()
    try:
        assert "has more than 4 MiB" in refusal(tmp_path / name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 25
