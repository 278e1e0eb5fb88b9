"""The rows of data files as texts; a chat is JSON. A file is read completely, or refused. It is
never used in part.

A few KB of a compressed file may unpack to any size, so at most one row of MOST_BYTES is held in
memory. Rows of chats become samples of one shape, which are checked before any of them is rendered:
{"where": file and row, "messages": [...], "tools": [...]}, or with "prompt" and "completion" in
place of "messages".
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

CHUNK = 1 << 17
"""Bytes of a file that are read at a time."""
ZSTD_CHUNK = 1 << 10
"""The same for a .zst file. These bytes unpack to at most 32 MiB."""
MOST_BYTES = 1 << 28
"""The largest row of JSON, and the largest text in a compressed file."""
STRING_TYPES = {"string", "large_string", "string_view"}
"""Names of pyarrow's types of text."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BETWEEN_ELEMENTS = re.compile(r"[\s,]*")


class Row(NamedTuple):
    """A text. For a bad row, the text is "" and `problem` names the file, the row number, and what
    is wrong."""

    text: str
    problem: str = ""


def file_rows(path: Path, field: str, row_format: str = "text") -> Iterator[Row]:
    """The rows of a file, whose ending names its type. `field` is the column of the text or
    messages.

    row_format: of data.format. A row of a format other than text becomes JSON. A row of .txt is the
    file, one of .jsonl a line, one of .json a line or an element of the array. Rows count from 1.
    Blank lines count, but give no row. Raises ValueError, naming the file, if it is damaged or cut
    off, or has no such column.
    """
    ending, compression = data_ending(path.name)
    try:
        if ending == ".parquet":
            yield from _parquet_rows(path, field, row_format)
        elif ending != ".txt":
            yield from _json_rows(path, ending, field, row_format)
        elif row_format == "text":
            raw = _whole(path) if compression else path.read_bytes()
            yield _text_row(str(path), raw.removeprefix(BYTE_ORDER_MARK))
        else:
            raise ValueError(
                f'{path} holds text; data.format = "{row_format}" needs .jsonl or .parquet'
            )
    # Errors of zstandard, pyarrow and the operating system; not all of them name the file.
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error


def _text_row(where: str, raw: bytes) -> Row:
    try:
        return Row(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row("", f"{where}: byte {error.start} is not UTF-8")


def _pieces(path: Path) -> Iterator[bytes]:
    """The unpacked content of a file, at most 32 MiB at a time."""
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
    """The content of all frames of a .zst file.

    We read frame by frame, because zstandard's reader accepts a file that ends within a frame.
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
            yield value_row(f"{path}, row {number}", element, field, row_format)
        return
    for number, line in enumerate(_lines(path, pieces), 1):
        if not line.isspace() and line:
            yield _json_row(f"{path}, row {number}", line, field, row_format)


def _elements(path: Path, pieces: Iterator[bytes]) -> Iterator[Any]:
    """The elements of the array in a file. Only one of them is in memory at a time."""
    decoder = json.JSONDecoder()
    to_text = codecs.getincrementaldecoder("utf-8")()
    text = ""
    number = 0
    # An incomplete element is parsed again when twice as much of it has been read.
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
    raise ValueError(f"{path}, row {number}: not valid JSON, or the array does not end")


def _json_row(where: str, line: bytes, field: str, row_format: str) -> Row:
    row = _text_row(where, line)
    if row.problem:
        return row
    try:
        value = json.loads(row.text)
    except (ValueError, RecursionError):
        return Row("", f"{where}: not valid JSON")
    return value_row(where, value, field, row_format)


def value_row(where: str, row: Any, field: str, row_format: str) -> Row:
    """The row of an object with columns. `where` names its source and number."""
    try:
        return Row(_value_text(where, row, field, row_format))
    except BadSample as error:
        return Row("", f"{where}: {error}")


def _value_text(where: str, row: Any, field: str, row_format: str) -> str:
    if not isinstance(row, dict):
        raise BadSample("not a JSON object")
    if row_format != "text":
        return sample_text(where, row, row_format, field)
    if field not in row:
        raise BadSample(_no_column(field, list(row)))
    # A null becomes an empty document, which the loader skips.
    value = "" if row[field] is None else row[field]
    if not isinstance(value, str):
        raise BadSample(_no_text(field))
    return _whole_characters(value)


def _whole_characters(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample("it holds half a pair of characters (a lone surrogate)") from error
    return text


def _parquet_rows(path: Path, field: str, row_format: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    is_text = row_format == "text"
    with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        schema = file.schema_arrow
        if is_text:
            _require_text_column(path, schema, field)
        needed, optional = columns(row_format, field)
        taken = [name for name in [*needed, *optional] if name in schema.names]
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=taken):
            # As bytes, because pyarrow does not check whether a string is UTF-8.
            rows = batch.column(0).cast(pyarrow.large_binary()) if is_text else batch
            for row in rows.to_pylist():
                number += 1
                where = f"{path}, row {number}"
                if is_text:
                    yield _text_row(where, row or b"")
                else:
                    yield value_row(where, without_nulls(row), field, row_format)
        if number != file.metadata.num_rows:
            raise ValueError(f"{path} has {number} rows instead of {file.metadata.num_rows}")


def _require_text_column(path: Path, schema: Any, field: str) -> None:
    import pyarrow

    if field not in schema.names:
        raise ValueError(f"{path}: {_no_column(field, schema.names)}")
    kind = schema.field(field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in STRING_TYPES:
        raise ValueError(f"{path}: {_no_text(field)}")


def _no_column(field: str, columns: list[str]) -> str:
    return f'data.text_field = "{field}" is not a column; write one of: {", ".join(columns)}'


def _no_text(field: str) -> str:
    return (
        f'data.text_field = "{field}" holds no text; write a column of strings, '
        'or data.format = "messages"'
    )


ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that hold a message's reasoning. Templates read the first two."""

Message = dict[str, Any]


class BadSample(ValueError):
    """What is wrong with a row, without its file and number."""


def columns(row_format: str, field: str) -> tuple[list[str], list[str]]:
    """The columns that a row needs, and those that it may have.

    field: the column of the text or messages.
    """
    if row_format == "text":
        return [field], []
    if row_format == "messages":
        return [field], ["tools"]
    return ["prompt", "completion"], ["tools"]


def sample_text(where: str, row: dict[str, Any], row_format: str, messages_field: str) -> str:
    """The sample of a row, as JSON. Raises BadSample.

    where: file and number of the row. row: its columns by name.
    """
    needed, _ = columns(row_format, messages_field)
    for name in needed:
        if row.get(name) is None:
            raise BadSample(f'"{name}" is missing; data.format = "{row_format}" needs it')
    sample: dict[str, Any] = {"where": where}
    if row_format == "messages":
        sample["messages"] = _messages(row[messages_field], messages_field)
        _require_assistant(sample["messages"], messages_field)
    else:
        sample |= _prompt_and_completion(row["prompt"], row["completion"])
    tools = _tools(row.get("tools"))
    if tools:
        sample["tools"] = tools
    return _whole_characters(json.dumps(sample, ensure_ascii=False))


def without_nulls(value: Any) -> Any:
    """Leave out nulls at any depth. Tables fill the fields that a struct lacks with them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _prompt_and_completion(prompt: Any, completion: Any) -> dict[str, Any]:
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadSample('"prompt" and "completion" must be two strings or two lists of messages')
    sample = {
        "prompt": _messages(prompt, "prompt"),
        "completion": _messages(completion, "completion"),
    }
    _require_assistant(sample["completion"], "completion")
    return sample


def _require_assistant(messages: list[Message], name: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadSample(f'"{name}" holds no message of the role "assistant"')


def _messages(value: Any, name: str) -> list[Message]:
    if isinstance(value, str):
        value = _parsed(value, name)
    if not isinstance(value, list):
        raise BadSample(f'"{name}" is not a list of messages')
    return [_message(message, f"{name}[{number}]") for number, message in enumerate(value)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise BadSample(f"{name} is not an object with a role and content")
    # As transformers does, because templates ask whether a key exists.
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise BadSample(f"{name} has the role {json.dumps(role)}; write one of {', '.join(ROLES)}")
    if type(message.get("train", True)) is not bool:
        raise BadSample(f'{name} has "train": {json.dumps(message["train"])}; write true or false')
    if "weight" in message:
        raise BadSample(f'{name} has a "weight", which is not read; write "train": true or false')
    if "content" in message:
        message["content"] = _content(message["content"], name)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], name)
    for key in REASONING:
        if isinstance(message.get(key), str):
            # Templates differ in which key they read.
            message = {"thinking": message[key], **message, "reasoning_content": message[key]}
            break
    if not {"content", "tool_calls", "reasoning_content"} & message.keys():
        raise BadSample(f"{name} has no content")
    return message


def _content(content: Any, name: str) -> str:
    """A string, or the text of a list of text parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadSample(f"{name} has content that is not text; write a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """The calls with their arguments as objects, the form in which servers pass them to
    templates."""
    if not isinstance(calls, list):
        raise BadSample(f'{name} has "tool_calls" that are not a list')
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSample(f"{name} has a tool call without the name of a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{name}, arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise BadSample(f"{name}: the arguments of {function['name']} are not a JSON object")
        function = {**function, "arguments": arguments}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample('"tools" is not a list of JSON schemas')
    return tools


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{name}: a string that is not JSON") from error
