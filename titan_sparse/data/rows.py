"""The rows of data files as texts; a chat is JSON. A file is read completely, or refused. It is
never used in part.

A few KB of a compressed file may unpack to any size, so at most one row of MOST_BYTES is held in
memory. Rows of chats become samples of one shape, which are checked before any of them is rendered:
{"where": file and row, "messages": [...], "tools": [...]}, or with "prompt" and "completion" in
place of "messages".
"""

import io
import json
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.config.sources import data_ending

CHUNK = 1 << 17
"""Bytes of a file that are unpacked at a time."""
MOST_BYTES = 1 << 28
"""The largest row of JSON, and the largest text or array in a compressed file."""
MOST_BYTES_OF_ARRAY = 1 << 32
"""The largest .json file that is one array, which is parsed as a whole; compressed: MOST_BYTES."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadSample(ValueError):
    """A mistake in a row, without its file and number."""


class Row(NamedTuple):
    text: str
    """empty for a bad row"""
    problem: str | None = None
    """the file, the row number, and what is wrong"""
    form: str = ""
    """of chat_form()"""


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
            return
        if ending == ".txt" and row_format != "text":
            raise ValueError(
                f'{path} holds text; data.format = "{row_format}" needs .jsonl or .parquet'
            )
        with _unpacked(path, compression) as file:
            size = path.stat().st_size
            if ending == ".txt":
                yield _text_row(str(path), _whole(path, file, MOST_BYTES if compression else size))
            elif ending == ".json" and file.peek().lstrip().startswith(b"["):
                most = MOST_BYTES if compression else min(size, MOST_BYTES_OF_ARRAY)
                elements = json.loads(_whole(path, file, most))
                for number, element in enumerate(elements, 1):
                    yield value_row(f"{path}, row {number}", element, field, row_format)
            else:
                yield from _lines(path, file, field, row_format)
    # Errors of pyarrow, JSON and the operating system; not all of them name the file.
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error


def _unpacked(path: Path, compression: str) -> io.BufferedReader:
    """The content of a file, without a byte order mark. Reading it raises OSError where a
    compressed file is damaged or cut off."""
    import pyarrow

    if compression and path.stat().st_size == 0:
        raise ValueError(f"{path} is cut off: it is empty")
    codec = {".gz": "gzip", ".zst": "zstd"}.get(compression)
    file = io.BufferedReader(pyarrow.input_stream(str(path), codec), CHUNK)
    if file.peek().startswith(BYTE_ORDER_MARK):
        file.read(len(BYTE_ORDER_MARK))
    return file


def _whole(path: Path, file: io.BufferedReader, most: int) -> bytes:
    content = file.read(most + 1)
    _require_size(str(path), len(content), most)
    return content


def _lines(path: Path, file: io.BufferedReader, field: str, row_format: str) -> Iterator[Row]:
    for number, line in enumerate(iter(partial(file.readline, MOST_BYTES + 1), b""), 1):
        where = f"{path}, row {number}"
        _require_size(where, len(line), MOST_BYTES)
        if line.isspace():
            continue
        row = _text_row(where, line)
        if not row.problem:
            try:
                row = value_row(where, json.loads(row.text), field, row_format)
            except (ValueError, RecursionError):
                row = Row("", f"{where}: not valid JSON")
        yield row


def _require_size(where: str, size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"{where} has more than {most >> 20} MiB; split it")


def _text_row(where: str, raw: bytes) -> Row:
    try:
        return Row(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row("", f"{where}: byte {error.start} is not UTF-8")


def value_row(where: str, row: Any, field: str, row_format: str) -> Row:
    """The row of an object with columns. `where` names its source and number."""
    try:
        if not isinstance(row, dict):
            raise BadSample("not a JSON object")
        if row_format != "text":
            text = sample_text(where, row, row_format, field)
            return Row(text, form=chat_form(row_format, field, _present(row)))
        if field not in row:
            raise BadSample(no_column(field, row_format, row))
        # A null becomes an empty document, which the loader skips.
        value = "" if row[field] is None else row[field]
        if not isinstance(value, str):
            raise BadSample(
                f'data.text_field = "{field}" holds no text; write a column of strings, '
                'or data.format = "messages"'
            )
        return Row(_whole_characters(value))
    except BadSample as error:
        return Row("", f"{where}: {error}")


def _whole_characters(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample("it holds half a pair of characters (a lone surrogate)") from error
    return text


def _parquet_rows(path: Path, field: str, row_format: str) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        names = file.schema_arrow.names
        if row_format == "text" and field not in names:
            raise ValueError(f"{path}: {no_column(field, row_format, names)}")
        taken = columns_to_read(row_format, field, names)
        batches = file.iter_batches(batch_size=64, columns=taken)
        rows = (batch.slice(row, 1) for batch in batches for row in range(len(batch)))
        for number, row in enumerate(rows, 1):
            yield table_row(f"{path}, row {number}", row, field, row_format)


def table_row(where: str, table: Any, field: str, row_format: str) -> Row:
    """The row of a pyarrow table of one row."""
    try:
        (row,) = table.to_pylist()
    except UnicodeDecodeError as error:
        return Row("", f"{where}: byte {error.start} is not UTF-8")
    if row_format != "text":
        row = without_nulls(row)
    return value_row(where, row, field, row_format)


ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that hold a message's reasoning. Templates read the first two."""

Message = dict[str, Any]
Arguments = dict[str, Any] | str
"""Of a tool call: an object, or its JSON where the row holds a string."""


FORMS = {
    "ShareGPT": (["conversations"], ["system"]),
    "Alpaca": (["instruction", "output"], ["input", "history", "system"]),
}
"""The columns that rows of a form must have, and those that they may have, next to "tools"."""

_TRAIN = 'write "train": true or false'
_TEXT_ALONE = "only text can be trained"
_NOT_READ = {
    "functions": 'write "tools"',
    "chat_template_kwargs": "write data.chat_template_kwargs, which counts for all rows",
    **dict.fromkeys(("image", "images", "videos", "audios"), _TEXT_ALONE),
}
"""Columns of chats that other trainers read, and what to write instead."""
_SYSTEM = {"system": "write it as the first message"}
"""The column that only FORMS have."""
_NOT_READ_IN_MESSAGE = {
    "weight": _TRAIN,
    "loss": _TRAIN,
    "function_call": 'write "tool_calls"',
    **dict.fromkeys(("images", "videos", "audios"), _TEXT_ALONE),
}
_KINDS_OF_TEXT = (None, "text", "input_text", "output_text")
"""The "type" of a part of a content that is text."""


def needed_columns(row_format: str, field: str) -> list[str]:
    """The columns that rows of data.format must have. field: the one of the text or messages."""
    return ["prompt", "completion"] if row_format == "prompt_completion" else [field]


def chat_form(row_format: str, field: str, columns: Collection[str]) -> str:
    """The form of FORMS of rows that have no column `field` of messages; empty for other rows."""
    if row_format == "messages" and field == "messages" and field not in columns:
        for form, (needed, _) in FORMS.items():
            if all(name in columns for name in needed):
                return form
    return ""


def columns_to_read(row_format: str, field: str, columns: Collection[str]) -> list[str]:
    """The columns of a table that its rows are made of. All others stay unread."""
    names = needed_columns(row_format, field)
    if row_format != "text":
        names += ["tools", *_SYSTEM, *_NOT_READ]
    if row_format == "messages":
        names += [name for needed, others in FORMS.values() for name in [*needed, *others]]
    return [name for name in dict.fromkeys(names) if name in columns]


def _present(row: dict[str, Any]) -> list[str]:
    return [name for name, value in row.items() if value is not None]


def sample_text(where: str, row: dict[str, Any], row_format: str, messages_field: str) -> str:
    """The sample of a row, as JSON. Raises BadSample.

    where: file and number of the row. row: its columns by name.
    """
    form = chat_form(row_format, messages_field, _present(row))
    if form:
        read = {"ShareGPT": _sharegpt_messages, "Alpaca": _alpaca_messages}[form]
        row = {**row, messages_field: read(row)}
    needed = needed_columns(row_format, messages_field)
    for name in needed:
        if row.get(name) is None:
            raise BadSample(no_column(name, row_format, _present(row)))
    _refuse_unread(row, "it", _NOT_READ if form else _NOT_READ | _SYSTEM)
    sample: dict[str, Any] = {"where": where}
    kinds = {type(row[name]) for name in needed}
    if row_format == "messages":
        name = FORMS[form][0][0] if form else messages_field
        sample["messages"] = _messages(row[messages_field], name, needs_answer=True)
    elif kinds == {str}:
        sample |= {name: row[name] for name in needed}
    elif kinds == {list}:
        sample["prompt"] = _messages(row["prompt"], "prompt")
        sample["completion"] = _messages(row["completion"], "completion", needs_answer=True)
    else:
        raise BadSample('"prompt" and "completion" must be two strings or two lists of messages')
    tools = _tools(row.get("tools"))
    if tools:
        sample["tools"] = tools
    return _whole_characters(json.dumps(sample, ensure_ascii=False))


def _refuse_unread(values: dict[str, Any], name: str, not_read: dict[str, str]) -> None:
    """Raises BadSample if a row or message, called `name`, has what would change the chat and is
    not read. Tables and files hold empty values where a row has none."""
    for key, instead in not_read.items():
        if values.get(key) not in (None, "", [], {}):
            raise BadSample(f'{name} has "{key}", which is not read; {instead}')


def no_column(name: str, row_format: str, columns: Iterable[str]) -> str:
    """The error message for rows of data.format that lack the column `name`."""
    columns = list(columns)
    if row_format == "text":
        chats = [
            f', or data.format = "{other}" if the rows are chats'
            for other in ("messages", "prompt_completion")
            if set(needed_columns(other, "messages")) <= set(columns)
            or chat_form(other, "messages", columns)
        ]
        choices = ", ".join(columns) + "".join(chats[:1])
        return f'data.text_field = "{name}" is not a column; write one of: {choices}'
    forms = ""
    if name == "messages":
        forms = "".join(
            f", or {' and '.join(needed)} ({form})" for form, (needed, _) in FORMS.items()
        )
    has = ", ".join(columns) or "none"
    return f'"{name}" is missing (columns: {has}); data.format = "{row_format}" needs it{forms}'


def _sharegpt_messages(row: dict[str, Any]) -> Any:
    messages = row["conversations"]
    messages = _parsed(messages, "conversations") if isinstance(messages, str) else messages
    if (
        not row.get("system")
        or not isinstance(messages, list)
        or not all(isinstance(message, dict) for message in messages)
    ):
        return messages
    if any("system" in (message.get("from"), message.get("role")) for message in messages):
        raise BadSample('it has a column "system" and a system message; write one of them')
    return [{"role": "system", "content": row["system"]}, *messages]


def _alpaca_messages(row: dict[str, Any]) -> list[Message]:
    """The chat of a row, as LLaMA-Factory reads it: the input follows the instruction on a new
    line."""
    history = row.get("history") or []
    pairs = history if isinstance(history, list) else [[]]
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in pairs):
        raise BadSample('"history" is not a list of pairs of a question and an answer')
    asked = [row[name] for name in ("instruction", "input") if row.get(name)]
    if not all(isinstance(text, str) for text in asked):
        raise BadSample('"instruction" and "input" must be strings')
    turns = [*history, ("\n".join(asked), row["output"])]
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}


def _sharegpt_message(message: dict[str, Any], name: str) -> Message:
    """A message with "from" and "value" as one with a role and content. The value of a
    function_call is the JSON of a call, or of a list of calls."""
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        roles = ", ".join(_SHAREGPT_ROLES)
        raise BadSample(f'{name} has "from": {json.dumps(speaker)}; write one of {roles}')
    read = {key: value for key, value in message.items() if key not in ("from", "value")}
    read["role"] = _SHAREGPT_ROLES[speaker]
    value = message.get("value")
    if speaker != "function_call":
        return {**read, "content": value}
    calls = _parsed(value, name) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    return {**read, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def without_nulls(value: Any) -> Any:
    """Leave out nulls at any depth. Tables fill the fields that a struct lacks with them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _messages(value: Any, name: str, needs_answer: bool = False) -> list[Message]:
    if isinstance(value, str):
        value = _parsed(value, name)
    if not isinstance(value, list):
        raise BadSample(f'"{name}" is not a list of messages')
    messages = [_message(message, f"{name}[{number}]") for number, message in enumerate(value)]
    if needs_answer and not any(message["role"] == "assistant" for message in messages):
        raise BadSample(f'"{name}" holds no message of the role "assistant"')
    return messages


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise BadSample(f"{name} is not an object with a role and content")
    if "from" in message and "role" not in message:
        message = _sharegpt_message(message, name)
    # As transformers does, because templates ask whether a key exists.
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise BadSample(f"{name} has the role {json.dumps(role)}; write one of {', '.join(ROLES)}")
    if type(message.get("train", True)) is not bool:
        raise BadSample(f'{name} has "train": {json.dumps(message["train"])}; write true or false')
    _refuse_unread(message, name, _NOT_READ_IN_MESSAGE)
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
        is_text = isinstance(part, dict) and part.get("type") in _KINDS_OF_TEXT
        if not is_text or not isinstance(part.get("text"), str):
            raise BadSample(f"{name} has content that is not text; write a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """The calls, whose arguments are checked and stay an object or its JSON."""
    if not isinstance(calls, list):
        raise BadSample(f'{name} has "tool_calls" that are not a list')
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSample(f"{name} has a tool call without the name of a function")
        arguments = given = function.get("arguments", {})
        if isinstance(given, str):
            arguments = _parsed(given, f"{name}, arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise BadSample(f"{name}: the arguments of {function['name']} are not a JSON object")
        read.append(with_arguments(call, given))
    return read


def with_arguments(call: dict[str, Any], arguments: Arguments) -> dict[str, Any]:
    """A tool call with other arguments."""
    if "function" not in call:
        return {**call, "arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def arguments_of(call: dict[str, Any]) -> Arguments:
    """The arguments of a tool call."""
    return call.get("function", call)["arguments"]


def with_argument(call: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    """A tool call with one argument more, after the others."""
    arguments = arguments_of(call)
    if not isinstance(arguments, str):
        return with_arguments(call, {**arguments, name: value})
    comma = ", " if json.loads(arguments) else ""
    start = arguments.rstrip().removesuffix("}").rstrip()
    return with_arguments(call, f"{start}{comma}{json.dumps({name: value})[1:]}")


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
