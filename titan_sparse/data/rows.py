"""The rows of data files as texts, a chat as JSON. A file is read to its end, or refused: none is
taken in part.

A few KB of a compressed file may unpack to any size, so no more than a row of MOST_BYTES is held.
"""

import codecs
import gzip
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.config.sources import data_ending
from titan_sparse.data.chat_rows import BadSample, columns, sample_text, without_nulls

CHUNK = 1 << 17
"""Bytes of a file that are read at one time."""
ZSTD_CHUNK = 1 << 10
"""The same of a .zst file. They unpack to 32 MiB at the most."""
MOST_BYTES = 1 << 28
"""Of a row of JSON, or of a text that is compressed."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BETWEEN_ELEMENTS = re.compile(r"[\s,]*")


class Row(NamedTuple):
    """A text, or "" and what is wrong with the row, beginning with its file and number."""

    text: str
    problem: str = ""


def file_rows(path: Path, field: str, row_format: str = "text") -> Iterator[Row]:
    """The rows of a file, told by its ending; `field` is the column of the text or the messages.

    row_format: of data.format; a row of another than text becomes JSON (chat_rows). A row of .txt
    is the file, one of .jsonl a line, one of .json a line or an element of the array. Rows count
    from 1; blank lines count, but give no row. Raises ValueError, naming the file, if it is damaged
    or cut off, or has no such column.
    """
    ending, compression = data_ending(path.name)
    try:
        if ending == ".txt":
            if row_format != "text":
                raise ValueError(
                    f'{path} holds text; data.format = "{row_format}" needs .jsonl or .parquet'
                )
            raw = _whole(path) if compression else path.read_bytes()
            yield _text_row(str(path), raw.removeprefix(BYTE_ORDER_MARK))
        elif ending == ".parquet":
            read = _parquet_rows if row_format == "text" else _parquet_samples
            yield from read(path, field, row_format)
        else:
            yield from _json_rows(path, ending, field, row_format)
    # zstandard's error, pyarrow's, the operating system's; not all of them name the file.
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error


def _text_row(where: str, raw: bytes) -> Row:
    try:
        return Row(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row("", f"{where}: byte {error.start} is no UTF-8")


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, unpacked, 32 MiB at a time at the most."""
    _, compression = data_ending(path.name)
    if compression == ".zst":
        yield from _unpacked(path)
        return
    if compression and path.stat().st_size == 0:
        raise ValueError(f"{path} is cut off: it is empty")
    with gzip.open(path) if compression else path.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


def _unpacked(path: Path) -> Iterator[bytes]:
    """The content of a .zst file, all frames of it.

    Frame by frame, because zstandard's reader takes the end of the file for the end of a frame.
    """
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    frames = 0
    with path.open("rb") as file:
        while rest := file.read(ZSTD_CHUNK):
            while rest:
                if frame is None:
                    frame = unpacker.decompressobj()
                piece = frame.decompress(rest)
                if piece:
                    yield piece
                rest = b""
                if frame.eof:
                    rest = frame.unused_data
                    frame = None
                    frames += 1
    if frame is not None or frames == 0:
        raise ValueError(f"{path} is cut off: frame {frames + 1} has no end")


def _whole(path: Path) -> bytes:
    parts = []
    size = 0
    for piece in _pieces(path):
        parts.append(piece)
        size += len(piece)
        _require_size(str(path), size)
    return b"".join(parts)


def _lines(path: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    size = 0
    number = 1
    for piece in pieces:
        first, *others = piece.split(b"\n")
        parts.append(first)
        size += len(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]
            size = len(other)
            number += 1
        _require_size(f"{path}, row {number}", size)
    yield b"".join(parts)


def _require_size(where: str, size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"{where} has more than {MOST_BYTES >> 20} MiB; split it")


def _json_rows(path: Path, ending: str, field: str, row_format: str) -> Iterator[Row]:
    pieces = _pieces(path)
    first = next(pieces, b"").removeprefix(BYTE_ORDER_MARK)
    pieces = chain([first], pieces)
    if ending == ".json" and first.lstrip().startswith(b"["):
        for number, element in enumerate(_elements(path, pieces), 1):
            yield _value_row(f"{path}, row {number}", element, field, row_format)
        return
    for number, line in enumerate(_lines(path, pieces), 1):
        if not line.isspace() and line:
            yield _json_row(f"{path}, row {number}", line, field, row_format)


def _elements(path: Path, pieces: Iterator[bytes]) -> Iterator[Any]:
    """The elements of the array that a file holds, of which one is in memory at a time."""
    decoder = json.JSONDecoder()
    to_text = codecs.getincrementaldecoder("utf-8")()
    text = ""
    number = 0
    # An element that had no end is tried again when there is twice as much of it.
    needed = 0
    for piece in chain(pieces, [b""]):
        text += to_text.decode(piece, final=not piece)
        if len(text) < needed and piece:
            continue
        place = 0
        if number == 0:
            text = text.lstrip().removeprefix("[")
            number = 1
        while True:
            place = _BETWEEN_ELEMENTS.match(text, place).end()
            if text.startswith("]", place):
                rest = chain([text[place + 1 :].encode()], pieces)
                if any(part.strip() for part in rest):
                    raise ValueError(f"{path} goes on behind its array; write one array")
                return
            try:
                element, place = decoder.raw_decode(text, place)
            except ValueError:
                break
            yield element
            number += 1
        text = text[place:]
        needed = 2 * len(text)
        _require_size(f"{path}, row {number}", len(text))
    raise ValueError(f"{path}, row {number}: no JSON, or no end of the array")


def _json_row(where: str, line: bytes, field: str, row_format: str) -> Row:
    line_text, problem = _text_row(where, line)
    if problem:
        return Row("", problem)
    try:
        value = json.loads(line_text)
    except (ValueError, RecursionError):
        return Row("", f"{where}: no JSON")
    return _value_row(where, value, field, row_format)


def _value_row(where: str, row: Any, field: str, row_format: str) -> Row:
    if not isinstance(row, dict):
        return Row("", f"{where}: no JSON object")
    if row_format != "text":
        return sample_row(where, row, field, row_format)
    if field not in row:
        return Row("", f"{where}: {_no_column(field, list(row))}")
    return _text_value_row(where, row[field], field)


def sample_row(where: str, row: dict[str, Any], field: str, row_format: str) -> Row:
    """The sample of a row of chats, as JSON."""
    try:
        return Row(sample_text(where, row, row_format, field))
    except BadSample as error:
        return Row("", f"{where}: {error}")


def _text_value_row(where: str, value: Any, field: str) -> Row:
    # A null becomes an empty document, which the loader skips.
    if value is None:
        return Row("")
    if not isinstance(value, str):
        return Row("", f"{where}: {_no_text(field)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return Row("", f"{where}: character {error.start} is half a pair (a lone surrogate)")
    return Row(value)


def _parquet_rows(path: Path, field: str, row_format: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        schema = file.schema_arrow
        if field not in schema.names:
            raise ValueError(f"{path}: {_no_column(field, schema.names)}")
        kind = schema.field(field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise ValueError(f"{path}: {_no_text(field)}")
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=[field]):
            # As bytes: pyarrow does not look whether a string is UTF-8.
            for raw in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                number += 1
                yield _text_row(f"{path}, row {number}", raw or b"")
        if number != file.metadata.num_rows:
            raise ValueError(f"{path} has {number} rows instead of {file.metadata.num_rows}")


def _parquet_samples(path: Path, field: str, row_format: str) -> Iterator[Row]:
    import pyarrow.parquet

    needed, optional = columns(row_format, field)
    with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        names = file.schema_arrow.names
        taken = [name for name in [*needed, *optional] if name in names]
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=taken):
            for row in batch.to_pylist():
                number += 1
                where = f"{path}, row {number}"
                yield sample_row(where, without_nulls(row), field, row_format)
        if number != file.metadata.num_rows:
            raise ValueError(f"{path} has {number} rows instead of {file.metadata.num_rows}")


def _no_column(field: str, columns: list[str]) -> str:
    return f'data.text_field = "{field}" is no column; write one of: {", ".join(columns)}'


def _no_text(field: str) -> str:
    return (
        f'data.text_field = "{field}" holds no text; write a column of strings, '
        'or data.format = "messages"'
    )
