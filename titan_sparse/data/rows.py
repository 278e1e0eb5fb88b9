"""The rows of data files as texts, a chat as JSON. A file is read to its end, or refused: none is
taken in part."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.data.chat_rows import BadSample, columns, sample_text, without_nulls

CHUNK = 1 << 17
"""Bytes of a compressed file that are unpacked at one time."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A text, or "" and what is wrong with the row, beginning with its file and number."""

    text: str
    problem: str = ""


def file_rows(path: Path, field: str, row_format: str = "text") -> Iterator[Row]:
    """The rows of a file, told by its ending; `field` is the column of the text or the messages.

    row_format: of data.format; a row of another than text becomes JSON (chat_rows). A row of .txt
    is the file, one of .jsonl a line. Rows count from 1; blank lines count, but give no row. Raises
    ValueError, naming the file, if it is damaged or cut off, or has no such column.
    """
    try:
        if path.name.endswith(".txt"):
            if row_format != "text":
                raise ValueError(
                    f'{path} holds text; data.format = "{row_format}" needs .jsonl or .parquet'
                )
            yield _text_row(str(path), path.read_bytes())
        elif path.name.endswith(".parquet"):
            read = _parquet_rows if row_format == "text" else _parquet_samples
            yield from read(path, field, row_format)
        else:
            lines = _unpacked_lines(path) if path.name.endswith(".zst") else _lines(path)
            yield from _json_rows(path, lines, field, row_format)
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


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _unpacked_lines(path: Path) -> Iterator[bytes]:
    parts: list[bytes] = []
    for piece in _unpacked(path):
        first, *others = piece.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]
    yield b"".join(parts)


def _unpacked(path: Path) -> Iterator[bytes]:
    """The content of a .zst file, all frames of it.

    Frame by frame, because zstandard's reader takes the end of the file for the end of a frame.
    """
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    frames = 0
    with path.open("rb") as file:
        while rest := file.read(CHUNK):
            while rest:
                if frame is None:
                    frame = unpacker.decompressobj()
                yield frame.decompress(rest)
                rest = b""
                if frame.eof:
                    rest = frame.unused_data
                    frame = None
                    frames += 1
    if frame is not None or frames == 0:
        raise ValueError(f"{path} is cut off: frame {frames + 1} has no end")


def _json_rows(path: Path, lines: Iterator[bytes], field: str, row_format: str) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.isspace() and line:
            yield _json_row(f"{path}, row {number}", line, field, row_format)


def _json_row(where: str, line: bytes, field: str, row_format: str) -> Row:
    line_text, problem = _text_row(where, line)
    if problem:
        return Row("", problem)
    try:
        row = json.loads(line_text)
    except (ValueError, RecursionError):
        return Row("", f"{where}: no JSON")
    if not isinstance(row, dict):
        return Row("", f"{where}: no JSON object")
    if row_format != "text":
        return sample_row(where, row, field, row_format)
    if field not in row:
        return Row("", f"{where}: {_no_column(field, list(row))}")
    return _value_row(where, row[field], field)


def sample_row(where: str, row: dict[str, Any], field: str, row_format: str) -> Row:
    """The sample of a row of chats, as JSON."""
    try:
        return Row(sample_text(where, row, row_format, field))
    except BadSample as error:
        return Row("", f"{where}: {error}")


def _value_row(where: str, value: Any, field: str) -> Row:
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
