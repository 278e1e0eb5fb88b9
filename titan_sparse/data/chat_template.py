"""The Jinja template that makes one text of a chat's messages: found, and rendered as transformers
does."""

import datetime
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from titan_sparse.config.checking import chat_template_kwargs
from titan_sparse.config.sections import Data
from titan_sparse.data.chat_rows import BadSample, Message
from titan_sparse.data.training_templates import TrainingForm, training_form

FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DAY = datetime.datetime(2024, 7, 26)
"""Some templates write today's date: samples must be the same on each day. This is Llama 3.1's."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_SECONDS = 10
"""that a template may take for one chat; milliseconds are usual"""


class ChatTemplate:
    """A template with the special tokens that it may name.

    texts: by name, "default" and perhaps "tool_use", which is for chats with tools. kwargs: values of
    the template's own variables, such as enable_thinking. Raises ValueError without transformers, for
    a text that is not a template, and for a variable that it does not read.
    """

    def __init__(
        self,
        texts: dict[str, str],
        special_tokens: dict[str, str],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        try:
            from transformers.utils.chat_template_utils import (
                _compile_jinja_template,
                _render_with_assistant_indices,
            )
        except ImportError as error:
            raise ValueError(
                'data.format = "messages" renders chats by transformers, which is missing here; '
                'pip install "titan-sparse[huggingface]"'
            ) from error
        self._render = _render_with_assistant_indices
        # Past the cache: what is changed in this environment must not reach other users.
        self._environment = _compile_jinja_template.__wrapped__("").environment
        self._texts = texts
        self._kwargs = kwargs or {}
        self.special_tokens = special_tokens
        self._deadline = 0.0
        self._forbid_chance_and_endless_loops()
        try:
            self._compiled = {name: self._compile(text) for name, text in texts.items()}
        except Exception as error:  # Jinja's, and what Python raises inside of it
            reason = " ".join(str(error).split())
            raise ValueError(
                f"the chat template cannot be compiled: {reason}; write another data.chat_template"
            ) from error
        self._refuse_unread_kwargs()
        whole = [texts, special_tokens, *([self._kwargs] if kwargs else [])]
        written = json.dumps(whole, sort_keys=True)
        self.digest = hashlib.sha256(written.encode()).hexdigest()[:16]

    def marks_answers(self, tools: list[Any]) -> bool:
        """Whether the template has {% generation %} around what the assistant writes."""
        return _GENERATION.search(self._texts[self._name(tools)]) is not None

    def for_training(self) -> tuple["ChatTemplate", TrainingForm] | None:
        """The template that marks answers in place of this one, if it is of a known family."""
        forms = {name: training_form(text) for name, text in self._texts.items()}
        if forms["default"] is None:
            return None
        texts = {name: form.text if form else self._texts[name] for name, form in forms.items()}
        return ChatTemplate(texts, self.special_tokens, self._kwargs), forms["default"]

    def render(
        self, messages: list[Message], tools: list[Any], add_generation_prompt: bool = False
    ) -> str:
        """The text of the messages. Raises BadSample where the template refuses them."""
        return self.render_with_marks(messages, tools, add_generation_prompt)[0]

    def render_with_marks(
        self, messages: list[Message], tools: list[Any], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and [start, stop) in letters of each {% generation %} block in it."""
        shown = []
        for message in messages:
            shown.append({key: value for key, value in message.items() if key != "train"})
        self._deadline = time.monotonic() + _SECONDS
        try:
            return self._render(
                compiled_template=self._compiled[self._name(tools)],
                messages=shown,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens | self._kwargs,
            )
        # Never skipped as a bad row: on another rank it may have been fast enough.
        except TimeoutError as error:
            raise ValueError(
                f"the chat template took more than {_SECONDS} seconds for one chat; write another "
                "data.chat_template"
            ) from error
        # Jinja's errors, the template's own refusals, and what Python raises inside of it.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise BadSample(f"the chat template cannot render it: {reason}") from error

    def _name(self, tools: list[Any]) -> str:
        return "tool_use" if tools and "tool_use" in self._texts else "default"

    def _forbid_chance_and_endless_loops(self) -> None:
        """What a template writes depends on the chat alone, on each rank and each day."""

        def check_time(*_: Any) -> str:
            if time.monotonic() > self._deadline:
                raise TimeoutError
            return ""

        def refuse(*_: Any, **__: Any) -> str:
            raise ValueError("it draws at random, so that ranks would train on different texts")

        self._environment.globals |= {
            "_check_time": check_time,
            "strftime_now": _DAY.strftime,
            "lipsum": refuse,
        }
        self._environment.filters["random"] = refuse
        # One operation on constants can take hours, even when the template is compiled.
        self._environment.intercepted_binops = frozenset(["**", "*"])
        self._environment.binop_table |= {"**": _refuse_power, "*": _product}

    def _compile(self, text: str) -> Any:
        """The template, which looks at the clock in each pass of a loop and each call of a macro."""
        import jinja2

        tree = self._environment.parse(text)
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro)):
            function = jinja2.nodes.Name("_check_time", "load")
            call = jinja2.nodes.Call(function, [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        tree.set_environment(self._environment)
        code = self._environment.compile(tree)
        return jinja2.Template.from_code(
            self._environment, code, self._environment.make_globals(None)
        )

    def _refuse_unread_kwargs(self) -> None:
        from jinja2 import meta

        read: set[str] = set()
        for text in self._texts.values():
            read |= meta.find_undeclared_variables(self._environment.parse(text))
        for name in self._kwargs:
            if name not in read:
                raise ValueError(
                    f'data.chat_template_kwargs: the chat template does not read "{name}"; leave it '
                    "out"
                )


def _refuse_power(left: Any, right: Any) -> Any:
    raise ValueError(f"it computes {left} ** {right}, which may take for ever")


def _product(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if hasattr(one, "__len__") and len(one) * other > 1_000_000:
            raise ValueError(f"it repeats a text or list {other:,} times")
    return left * right


def load_template(data: Data, model_folder: str) -> ChatTemplate:
    """The template that data.chat_template names, else that of the tokenizer, else of the model.

    data.chat_template is a file or a folder. Raises ValueError, naming the key, if there is none, or
    it cannot be read.
    """
    tokenizer = data.tokenizer
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        folder = folder.parent
    is_file = tokenizer != "bytes"
    # Bytes have no tokens for these: a template that writes them writes nothing.
    special_tokens = _special_tokens(folder) if is_file else {"bos_token": "", "eos_token": ""}
    if data.chat_template:
        path = Path(data.chat_template).expanduser()
        texts = find_template(path) if path.is_dir() else {"default": _read(path)}
        if not texts:
            raise ValueError(
                f'data.chat_template = "{data.chat_template}" does not hold {FILE}; write a file'
            )
    else:
        texts = find_template(folder) if is_file else {}
        if not texts and model_folder:
            texts = find_template(Path(model_folder).expanduser())
    if not texts:
        raise ValueError(
            f'neither data.tokenizer = "{tokenizer}" nor model.initial_hf = "{model_folder}" has a '
            f'chat template; write data.chat_template = "{FILE}"'
        )
    return ChatTemplate(texts, special_tokens, chat_template_kwargs(data))


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
