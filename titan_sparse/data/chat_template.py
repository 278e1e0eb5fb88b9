"""The Jinja template that makes one text of a chat's messages: found, and rendered by transformers."""

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from titan_sparse.data.chat_rows import Message

FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")
_DAY = datetime.date(2024, 7, 26)
"""Some templates write today's date: samples must be the same on each day. This is Llama 3.1's."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """A template with the special tokens that it may name.

    texts: by name, "default" and perhaps "tool_use", which is for chats with tools. Raises
    ValueError without transformers.
    """

    def __init__(self, texts: dict[str, str], special_tokens: dict[str, str]) -> None:
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ValueError(
                'data.format = "messages" renders chats by transformers, which is missing here; '
                'pip install "titan-sparse[huggingface]"'
            ) from error
        self._render = render_jinja_template
        self._texts = {name: _with_fixed_date(text) for name, text in texts.items()}
        self.special_tokens = special_tokens
        whole = json.dumps([self._texts, special_tokens], sort_keys=True)
        self.digest = hashlib.sha256(whole.encode()).hexdigest()[:16]

    def marks_answers(self, tools: list[Any]) -> bool:
        """Whether the template has {% generation %} around what the assistant writes."""
        return _GENERATION.search(self._text(tools)) is not None

    def render(
        self, messages: list[Message], tools: list[Any], add_generation_prompt: bool = False
    ) -> str:
        """The text of the messages. Raises ValueError where the template refuses them."""
        return self._call(messages, tools, add_generation_prompt, False)[0]

    def render_with_marks(
        self, messages: list[Message], tools: list[Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and [start, stop) in letters of each {% generation %} block in it."""
        return self._call(messages, tools, False, True)

    def _call(
        self, messages: list[Message], tools: list[Any], add_generation_prompt: bool, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        shown = []
        for message in messages:
            shown.append({key: value for key, value in message.items() if key != "train"})
        try:
            texts, marked = self._render(
                conversations=[shown],
                tools=tools or None,
                chat_template=self._text(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # Jinja's errors, the template's own refusals, and what Python raises inside of it.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template cannot render it: {reason}") from error
        return texts[0], marked[0] if marks else []

    def _text(self, tools: list[Any]) -> str:
        if tools and "tool_use" in self._texts:
            return self._texts["tool_use"]
        return self._texts["default"]


def load_template(name: str, tokenizer: str, model_folder: str) -> ChatTemplate:
    """The template that data.chat_template names, else that of the tokenizer, else of the model.

    name: a file or a folder. tokenizer: data.tokenizer. Raises ValueError, naming the key, if there
    is none, or it cannot be read.
    """
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        folder = folder.parent
    is_file = tokenizer != "bytes"
    # Bytes have no tokens for these: a template that writes them writes nothing.
    special_tokens = _special_tokens(folder) if is_file else {"bos_token": "", "eos_token": ""}
    if name:
        path = Path(name).expanduser()
        texts = find_template(path) if path.is_dir() else {"default": _read(path)}
        if not texts:
            raise ValueError(f'data.chat_template = "{name}" holds no {FILE}; write a file')
        return ChatTemplate(texts, special_tokens)
    texts = find_template(folder) if is_file else {}
    if not texts and model_folder:
        texts = find_template(Path(model_folder).expanduser())
    if not texts:
        raise ValueError(
            f'neither data.tokenizer = "{tokenizer}" nor model.initial_hf = "{model_folder}" has a '
            f'chat template; write data.chat_template = "{FILE}"'
        )
    return ChatTemplate(texts, special_tokens)


def find_template(folder: Path) -> dict[str, str]:
    """The templates of a Hugging Face folder by name; none: empty."""
    if (folder / FILE).is_file():
        return {"default": _read(folder / FILE)}
    template = _read_config(folder).get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        return named if "default" in named else {}
    return {}


def _special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that tokenizer_config.json names, as templates know them: bos_token, ..."""
    config = _read_config(folder)
    tokens = {}
    for key in _SPECIAL:
        token = config.get(key)
        # Hugging Face writes the token itself, or a table about it.
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[key] = token
    return tokens


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f'data.chat_template = "{path}" cannot be read: {error}') from error


def _with_fixed_date(template: str) -> str:
    """The template with strftime_now("...") replaced by the date that it writes, always the same."""
    return _TODAY.sub(lambda call: json.dumps(_DAY.strftime(call["format"])), template)
