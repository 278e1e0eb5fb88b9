"""Rows of chats -> samples of one shape, checked before any of them is rendered.

A sample is kept as JSON: {"where": file and row, "messages": [...], "tools": [...]}, or with
"prompt" and "completion" in place of "messages".
"""

import json
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first two."""

Message = dict[str, Any]


class BadSample(ValueError):
    """What is wrong with a row, without its file and number."""


def columns(row_format: str, messages_field: str) -> tuple[list[str], list[str]]:
    """The columns that a sample needs, and those that it may have."""
    if row_format == "messages":
        return [messages_field], ["tools"]
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
    text = json.dumps(sample, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample("it holds half a pair of characters (a lone surrogate)") from error
    return text


def without_nulls(value: Any) -> Any:
    """Tables fill the fields that a struct lacks with nulls: they are left out again, at any depth."""
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
        raise BadSample(f'"{name}" is no list of messages')
    return [_message(message, f"{name}[{number}]") for number, message in enumerate(value)]


def _message(message: Any, name: str) -> Message:
    """The message in the shape that templates read."""
    if not isinstance(message, dict):
        raise BadSample(f"{name} is no object with a role and content")
    # As transformers does: templates ask whether a key is there.
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
            # Templates differ in the name that they read.
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
            raise BadSample(f"{name} has content that is no text; write a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """The calls with their arguments as objects: servers hand them to templates so."""
    if not isinstance(calls, list):
        raise BadSample(f'{name} has "tool_calls" that are no list')
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSample(f"{name} has a tool call without the name of a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{name}, arguments of {function['name']}")
        if not isinstance(arguments, dict):
            raise BadSample(f"{name}: the arguments of {function['name']} are no JSON object")
        function = {**function, "arguments": arguments}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample('"tools" is no list of JSON schemas')
    return tools


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{name}: a string that is no JSON") from error
