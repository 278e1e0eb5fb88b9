"""titan_sparse.data.rows and open_source(): a file is read whole, or refused with its name."""

import gzip
import json
import logging
import os
import random
import struct
import tracemalloc
from pathlib import Path

import filelock
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from titan_sparse.config import Data
from titan_sparse.data import rows, sources
from titan_sparse.data.recipe import open_folder
from titan_sparse.data.rows import file_rows
from titan_sparse.data.sources import open_source


def lines_of(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def many_texts(count: int) -> list[str]:
    """Lines that barely compress."""
    generator = random.Random(0)
    return [f"{i} {generator.getrandbits(400):x}" for i in range(count)]


def texts_of(path: Path, **options) -> list[str]:
    return list(open_source(Data(source=str(path), **options)))


def refusal(path: Path, **options) -> str:
    with pytest.raises(ValueError) as raised:
        open_source(Data(source=str(path), **options))
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("data.")
    return str(raised.value)


def two_frames(texts: list[str], **options) -> tuple[bytes, bytes]:
    compressor = zstandard.ZstdCompressor(**options)
    half = len(texts) // 2
    return compressor.compress(lines_of(texts[:half])), compressor.compress(lines_of(texts[half:]))


def test_all_frames_of_a_zst_are_read(tmp_path):
    """Frames, frames to skip, and a frame written without its size in between."""
    texts = many_texts(3000)
    first, second = two_frames(texts)
    skipped = struct.pack("<II", 0x184D2A50, 4) + b"note"
    streamed = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(skipped + first + skipped + second + streamed.compress(lines_of(texts[:7])))
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        expected = [json.loads(line)["text"] for line in reader.read().splitlines()]
    assert texts_of(path) == expected == texts + texts[:7]


FIRST, SECOND = two_frames(many_texts(300), write_checksum=True)
GZIP = gzip.compress(lines_of(many_texts(100)))
DAMAGED = {
    "second_frame.jsonl.zst": (
        FIRST + SECOND[: len(SECOND) // 2],
        "is cut off: frame 2 has no end",
    ),
    "first_byte.jsonl.zst": (FIRST + SECOND[:1], "is cut off: frame 2 has no end"),
    "last_byte.jsonl.zst": (FIRST + SECOND[:-1], "is cut off: frame 2 has no end"),
    "garbage.jsonl.zst": (b"no zst at all", "cannot be read"),
    "after.jsonl.zst": (FIRST + b"garbage", "cannot be read"),
    "sum.jsonl.zst": (FIRST + SECOND[:-1] + bytes([SECOND[-1] ^ 1]), "cannot be read"),
    "cut.jsonl.gz": (GZIP[:-9], "cannot be read"),
    "sum.jsonl.gz": (GZIP[:-5] + b"abcde", "cannot be read"),
    "after.jsonl.gz": (GZIP + b"garbage", "cannot be read"),
    "open.json": (
        b'[{"text": "a"}, {"text": "b"}',
        "row 3: not valid JSON, or the array does not end",
    ),
    "broken.json": (b'[{"text": "a"}, {"text": b}]', "row 2: not valid JSON"),
    "behind.json": (b'[{"text": "a"}]\n{}', "goes on behind its array"),
    "letters.json": (b'[{"text": "a\xff"}]', "cannot be read"),
    "broken.jsonl": (b"{broken", "row 1: not valid JSON"),
    "blank.jsonl": (b"\n \n", "holds no documents"),
    "empty.jsonl": (b"", "only empty files"),
    "folder/a.jsonl.zst": (FIRST, ""),
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
            refused = refusal(path if path.parent == tmp_path else path.parent)
            assert str(path) in refused and reason in refused
    compressor = zstandard.ZstdCompressor().compressobj()
    flushed = compressor.compress(lines_of(many_texts(1000)))
    flushed += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    (tmp_path / "flush.jsonl.zst").write_bytes(flushed)
    assert "is cut off: frame 1 has no end" in refusal(tmp_path / "flush.jsonl.zst")


@pytest.mark.parametrize("name", ["part[1].jsonl", "a*.jsonl", "a?.jsonl", "{a,b}.jsonl", "**"])
def test_file_names_are_no_patterns(tmp_path, name):
    """A file name with special characters names only that file, which is read once."""
    for other in ("part1.jsonl", "ab.jsonl", "a.jsonl", "b.jsonl"):
        (tmp_path / other).write_bytes(lines_of([other]))
    if name == "**":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(lines_of([name]))
    else:
        (tmp_path / name).write_bytes(lines_of([name]))
    assert texts_of(tmp_path / name) == [name]
    everything = [path for path in sorted(tmp_path.rglob("*.jsonl")) if path.is_file()]
    expected = [json.loads(path.read_text())["text"] for path in everything]
    assert texts_of(tmp_path) == expected and len(expected) == 5


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_a_file_that_was_written_anew_with_the_same_time_is_read_anew(tmp_path, ending):
    path = tmp_path / f"a{ending}"

    def write(text: str) -> None:
        path.write_bytes(lines_of([text]) if ending == ".jsonl" else text.encode())
        os.utime(path, (10**9, 10**9))

    write("old text")
    assert texts_of(path) == ["old text"]
    write("new text")
    assert texts_of(path) == ["new text"]


def test_a_file_that_is_changed_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def rows_and_change(file, field, row_format):
        yield from file_rows(file, field, row_format)
        path.write_text("new text")

    monkeypatch.setattr(sources, "file_rows", rows_and_change)
    assert "was changed while it was read" in refusal(path)


def test_a_cache_that_lost_rows_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of(many_texts(200)))
    assert len(texts_of(path)) == 200
    (cache,) = (tmp_path / "cache").rglob("*.arrow")
    cache.write_bytes(cache.read_bytes()[:-100])
    refused = refusal(path)
    assert "its cache is damaged" in refused and f"delete {cache}" in refused
    assert not list(cache.parent.glob("*.tmp"))


def test_what_is_in_the_cache_is_opened_without_waiting_for_other_ranks(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    assert texts_of(tmp_path / "a.txt") == ["text"]
    monkeypatch.setattr(filelock.BaseFileLock, "acquire", lambda *_, **__: pytest.fail("waited"))
    assert texts_of(tmp_path / "a.txt") == ["text"]


BAD_LINES = {
    b'{"text": "a\xff"}': "byte 11 is not UTF-8",
    b'{"text": "a"': "not valid JSON",
    b'["text"]': "not a JSON object",
    b'{"body": "a", "id": 1}': 'data.text_field = "text" is not a column; write one of: body, id',
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
    assert f"{path}, row 7: {BAD_LINES[line]}" in refusal(path)
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
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}
    for name in ("a.jsonl", "B.JSONL", "sub/c.jsonl.gz", "d.Json", "e.json.zst"):
        texts[name] = lines_of([name])
        (folder / name).write_bytes(packed.get(Path(name).suffix, bytes)(texts[name]))
    for place in (elsewhere, elsewhere / "deep"):
        (place / "f.jsonl").write_bytes(lines_of([place.name]))
    for name in (".b.txt", ".ipynb_checkpoints/a.jsonl", "._a.jsonl", "x.csv", "README"):
        (folder / name).write_text("not read")
    os.mkfifo(folder / "pipe.jsonl")
    links = {"disk": elsewhere, "round": folder, "sub/again": elsewhere / "deep", "up": ".."}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    with caplog.at_level(logging.INFO, "titan_sparse"):
        found = texts_of(folder)
    assert sorted(found) == sorted([*texts, "disk", "deep"])
    for words in (
        "1 .csv (x.csv)",
        "3 hidden (._a.jsonl, .b.txt, .ipynb_checkpoints)",
        "1 neither file nor folder (pipe.jsonl)",
        "1 without an ending (README)",
        "links to folders that are read already",
    ):
        assert words in caplog.text
    assert texts_of(folder / "B.JSONL") == ["B.JSONL"]
    (folder / "g.jsonl").symlink_to(tmp_path / "unmounted" / "g.jsonl")
    assert f"the link {folder / 'g.jsonl'} leads to nothing" in refusal(folder)


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
    assert f'{path}: data.text_field = "text" is not a column; write one of: body, id' in refusal(
        path
    )
    assert 'data.text_field = "id" holds no text' in refusal(path, text_field="id")
    assert texts_of(path, text_field="body") == ["a", ""]
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


def test_a_dictionary_of_strings_is_text(tmp_path):
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_rows_are_those_of_a_loop_of_json(tmp_path):
    """Lines longer than a chunk, too."""
    expected = [*many_texts(50), "x" * 500_000, "", "] \u00e4", "2024-01-02", "12", "null"]
    table = [{"text": text} for text in expected]
    lines = lines_of(expected)
    contents = {
        "a.jsonl": lines,
        "a.jsonl.zst": zstandard.compress(lines),
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
def test_a_small_file_that_unpacks_to_a_huge_row_is_refused_in_little_memory(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr(rows, "MOST_BYTES", 1 << 24)
    pack = zstandard.compress if name.endswith("zst") else gzip.compress
    size = 1 << (28 if name.endswith("zst") else 27)
    start = b'[{"text": "' if ".json." in name else b""
    (tmp_path / name).write_bytes(pack(start + bytes(size)))
    tracemalloc.start()
    try:
        assert "has more than 16 MiB" in refusal(tmp_path / name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 27


def test_a_byte_order_mark_is_not_text(tmp_path):
    for name in ("a.txt", "b.txt.gz"):
        raw = "text \ufeff".encode("utf-8-sig")
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert texts_of(tmp_path) == ["text \ufeff"] * 2
    (source,) = open_folder(str(tmp_path), whole=True)
    assert source.startswith("# a.txt\ntext \ufeff")
