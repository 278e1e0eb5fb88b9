"""Find the Jinja template of a chat, and render the messages of a chat as transformers does.

For some families, the published template is replaced by a form for training. This form has
{% generation %} blocks that begin after the header of an answer and end with the token that ends
the answer. No answer loses its reasoning when another one follows. We recognize templates by their
structure and not by their whole text, because revisions of a template differ in other places.
"""

import datetime
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.config.checking import chat_template_kwargs
from titan_sparse.config.sections import Data
from titan_sparse.config.sources import source_weights
from titan_sparse.data.rows import Arguments, BadSample, Message, arguments_of, with_arguments
from titan_sparse.data.shards import read_meta
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.models.huggingface_files import CHAT_TEMPLATE, MORE_TEMPLATES, files_to_copy
from titan_sparse.options.values import one_line

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DAY = datetime.datetime(2024, 7, 26)
"""Some templates write today's date, but samples must be the same on every day. This is Llama 3.1's
date."""
_SECONDS = 10
"""Time limit of a template for one chat. Milliseconds are usual."""


class ChatTemplate:
    """A template with the special tokens that it may name.

    texts: templates by name: "default", and optionally "tool_use" for chats with tools. kwargs:
    values of the template's own variables, such as enable_thinking. Raises ValueError if a text is
    not a template, and for a variable that the template does not read.
    """

    def __init__(
        self,
        texts: dict[str, str],
        special_tokens: dict[str, str],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        # Only here, because the import takes seconds.
        from jinja2 import meta
        from transformers.utils.chat_template_utils import (
            _compile_jinja_template,
            _render_with_assistant_indices,
        )

        self._render = _render_with_assistant_indices
        # Past the cache: what is changed in this environment must not reach other users.
        environment = _compile_jinja_template.__wrapped__("").environment
        environment.globals |= {
            "strftime_now": _DAY.strftime,
            "lipsum": _refuse_chance,
            "_check_time": self._check_time,
        }
        environment.filters["random"] = _refuse_chance
        # One operation on constants can take hours, even when the template is compiled.
        environment.intercepted_binops = frozenset(["**", "*"])
        environment.binop_table |= {"**": _refuse_power, "*": _product}
        # Jinja's hook for what becomes of a parsed template.
        environment._generate = partial(_generate_with_checks, environment._generate)
        self._deadline = 0.0
        self._texts = texts
        self._kwargs = kwargs or {}
        self.special_tokens = special_tokens
        try:
            self._compiled = {name: environment.from_string(text) for name, text in texts.items()}
        except Exception as error:  # Jinja's, and what Python raises inside of it
            raise ValueError(
                f"the chat template cannot be compiled: {one_line(error)}; write another "
                "data.chat_template"
            ) from error
        parsed = [environment.parse(text) for text in texts.values()]
        known = set().union(*(meta.find_undeclared_variables(tree) for tree in parsed))
        for name in sorted(self._kwargs.keys() - known):
            raise ValueError(
                f'data.chat_template_kwargs: the chat template does not read "{name}"; leave it out'
            )
        whole = [texts, special_tokens, *([self._kwargs] if kwargs else [])]
        written = json.dumps(whole, sort_keys=True)
        self.digest = hashlib.sha256(written.encode()).hexdigest()[:16]

    def marks_answers(self, tools: list[Any]) -> bool:
        """True if the template has {% generation %} around what the assistant writes."""
        return _GENERATION.search(self._texts[self._name(tools)]) is not None

    def for_training(self) -> "tuple[ChatTemplate, TemplateFamily] | None":
        """The template that marks answers in place of this one, if it is of a known family."""
        forms = {name: training_form(text) for name, text in self._texts.items()}
        _, family = forms["default"]
        if family is None:
            return None
        texts = {name: text for name, (text, _) in forms.items()}
        return ChatTemplate(texts, self.special_tokens, self._kwargs), family

    def render(
        self, messages: list[Message], tools: list[Any], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and [start, stop) in letters of each {% generation %} block in it.

        The arguments of tool calls are mappings, which servers pass to templates. Templates that
        write them as they are get JSON: the row's own, if it holds a string. Raises BadSample where
        the template refuses the messages.
        """
        try:
            return self._render_as(_MappingArguments, messages, tools, add_generation_prompt)
        except BadSample as error:
            if not any(message.get("tool_calls") for message in messages):
                raise
            refusal = error
        try:
            return self._render_as(_json_arguments, messages, tools, add_generation_prompt)
        except BadSample:
            raise refusal from None

    def _render_as(
        self,
        form: Callable[[Arguments], Any],
        messages: list[Message],
        tools: list[Any],
        add_generation_prompt: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        """As render(), with arguments in one form."""
        shown = []
        for message in messages:
            shown.append({key: value for key, value in message.items() if key != "train"})
            if calls := message.get("tool_calls"):
                formed = [with_arguments(call, form(arguments_of(call))) for call in calls]
                shown[-1]["tool_calls"] = formed
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
            raise BadSample(f"the chat template cannot render it: {one_line(error)}") from error

    def _name(self, tools: list[Any]) -> str:
        return "tool_use" if tools and "tool_use" in self._texts else "default"

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError


class _MappingArguments(dict):
    """The arguments of a tool call as a mapping, which cannot be written as Python writes it."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(json.loads(arguments) if isinstance(arguments, str) else arguments)

    def __repr__(self) -> str:
        raise TypeError("it writes the arguments of a tool call as Python and not as JSON")


def _json_arguments(arguments: Arguments) -> str:
    """The arguments of a tool call as JSON; the row's own, where it holds a string."""
    is_json = isinstance(arguments, str)
    return arguments if is_json else json.dumps(arguments, ensure_ascii=False)


def _refuse_chance(*_: Any, **__: Any) -> str:
    raise ValueError("it draws at random, so that ranks would train on different texts")


def _refuse_power(left: Any, right: Any) -> Any:
    raise ValueError(f"it computes {left} ** {right}, which may take forever")


def _product(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if hasattr(one, "__len__") and len(one) * other > 1_000_000:
            raise ValueError(f"it repeats a text or list {other:,} times")
    return left * right


def _generate_with_checks(generate: Any, tree: Any, *args: Any, **kwargs: Any) -> str:
    """Python code of a template that checks the clock in each pass of a loop and each call
    of a macro or block."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.For, nodes.Macro, nodes.Block)):
        call = nodes.Call(nodes.Name("_check_time", "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
    tree.set_environment(tree.environment)
    return generate(tree, *args, **kwargs)


def load_template(data: Data, model_folder: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Load the template that data.chat_template names, else that of the tokenizer, else of the
    model.

    data.chat_template is a file or a folder. Prepared chats have that with which they were made.
    Raises ValueError, naming the key, if there is no template or it cannot be read.
    """
    data = as_prepared(data)
    texts = run_texts(data, model_folder, tokenizer)
    if not texts:
        raise ValueError(
            f'neither data.tokenizer = "{data.tokenizer}" nor model.initial_hf = "{model_folder}" '
            f'has a chat template; write data.chat_template = "{CHAT_TEMPLATE}"'
        )
    return ChatTemplate(texts, tokenizer.special_tokens, chat_template_kwargs(data))


def as_prepared(data: Data) -> Data:
    """`data` with the template, the variables, and loss_on of its prepared chats, unless it names
    others."""
    for source in source_weights(data.source):
        made = read_meta(source)
        if made.get("row_format", "text") == "text":
            continue
        if data.loss_on == Data().loss_on:
            data = replace(data, loss_on=made["loss_on"])
        if not data.chat_template and find_template(Path(source).expanduser()):
            kwargs = data.chat_template_kwargs or made.get("chat_template_kwargs", "")
            data = replace(data, chat_template=source, chat_template_kwargs=kwargs)
    return data


def run_texts(data: Data, model_folder: str, tokenizer: Tokenizer) -> dict[str, str]:
    """The templates of a run by name: of data.chat_template, else of its prepared chats, else of
    the tokenizer, else of the model; empty if there is none."""
    data = as_prepared(data)
    if not data.chat_template:
        folders = filter(None, (tokenizer.folder, model_folder))
        found = [find_template(Path(folder).expanduser()) for folder in folders]
        return next((texts for texts in found if texts), {})
    path = Path(data.chat_template).expanduser()
    texts = find_template(path) if path.is_dir() else {"default": _read(path)}
    if not texts:
        raise ValueError(
            f'data.chat_template = "{data.chat_template}" does not hold {CHAT_TEMPLATE}; write a file'
        )
    return texts


def exported_files(data: Data, model_folder: str, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name -> content of the files that are saved next to a trained model: the tokenizer and the
    chat template of its run.

    transformers has no byte tokenizer, so a run on bytes exports none. Raises ValueError, naming
    the key, for a file that cannot be read, and for a link that leaves its folder.
    """
    contents: dict[str, bytes] = {}
    if tokenizer.folder is not None:
        files = files_to_copy(str(tokenizer.folder), "data.tokenizer")
        contents = {name: path.read_bytes() for name, path in files.items()}
        contents |= tokenizer.own_files()
    texts = run_texts(data, model_folder, tokenizer)
    if texts:
        of_templates = (CHAT_TEMPLATE, MORE_TEMPLATES, "chat_template.json")
        contents = {
            name: raw for name, raw in contents.items() if not name.startswith(of_templates)
        }
    for name, text in texts.items():
        place = CHAT_TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"
        contents[place] = text.encode()
    return contents


def find_template(folder: Path) -> dict[str, str]:
    """The templates of a Hugging Face folder by name; empty if it has no default one.

    A folder may have a template without a tokenizer, so transformers' AutoTokenizer cannot read it.
    As there, files come before the entry of tokenizer_config.json.
    """
    files = files_to_copy(str(folder), "data.chat_template")
    texts = {}
    for place, path in files.items():
        if place.endswith(".jinja"):
            name = "default" if place == CHAT_TEMPLATE else Path(place).stem
            texts[name] = _read(path)
    if not texts:
        texts = _templates_of(folder / "tokenizer_config.json")
    return texts if "default" in texts else {}


def _templates_of(path: Path) -> dict[str, str]:
    """The templates by name that a tokenizer_config.json holds; empty without the file."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data.chat_template: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"data.chat_template: {path} holds no table; write a JSON object")
    entry = config.get("chat_template") or {}
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return {"default": entry} if isinstance(entry, str) else entry


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f'data.chat_template = "{path}" cannot be read: {error}') from error


class TemplateFamily(NamedTuple):
    """Templates that are replaced for training."""

    name: str
    only_marks: bool
    """whether the new form writes chats without reasoning as the published template does"""
    sign: str
    """of a template of this family"""
    edits: tuple[tuple[str, str], ...]
    """regular expressions and what replaces each match"""


_END = "<｜end▁of▁sentence｜>"

_FAMILIES = (
    TemplateFamily(
        "Qwen3",
        False,
        r"loop\.index0 > ns\.last_query_index",
        (
            # Answers before the last question lost their <think>. Here all answers have it.
            (
                r"\{%- if [^%]*loop\.index0 > ns\.last_query_index[^%]*%\}.*?"
                r"\{\{- '<\|im_start\|>' \+ message\.role \+ '\\n(<think>.*?) \}\}"
                r".*?(?=\{%- if message\.tool_calls)",
                r"{{- '<|im_start|>assistant\\n' }}{%- generation %}{{- '\1 }}",
            ),
            (
                r"""\{\{- '<\|im_end\|>\\n' \}\}(\s*\{%- elif message\.role == "tool" %\})""",
                r"{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\1",
            ),
        ),
    ),
    TemplateFamily(
        "Nemotron 3",
        True,
        r"truncate_history_thinking and loop\.index0 < ns\.last_user_idx",
        (
            (
                r"\{\{- '<\|im_start\|>assistant\\n' ~ (.+?) ~ '<\|im_end\|>\\n' \}\}",
                r"{{- '<|im_start|>assistant\\n' }}{%- generation %}"
                r"{{- \1 ~ '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}",
            ),
            (
                r"\{\{- '<\|im_start\|>assistant\\n<\|im_end\|>\\n' \}\}",
                r"{{- '<|im_start|>assistant\\n' }}{%- generation %}"
                r"{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}",
            ),
            (r"(?<=truncate_history_thinking is defined else )True", "False"),
            # An answer with tool calls.
            (
                r"(\{%- if message\.tool_calls is defined[^%]*%\}\s*(?:\{#[^#]*#\}\s*)?"
                r"\{\{- '<\|im_start\|>assistant\\n' \}\})",
                r"\1{%- generation %}",
            ),
            (
                r"(</tool_call>\\n' -?\}\}\s*\{%- endfor %\}\s*)\{\{- '<\|im_end\|>\\n' \}\}",
                r"\1{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}",
            ),
        ),
    ),
    TemplateFamily(
        "DeepSeek-V3",
        True,
        r"'<｜Assistant｜>' \+ content \+ '<｜end▁of▁sentence｜>'",
        (
            # Reasoning within the content was dropped.
            (r"\{% if '</think>' in content %\}.*?\{% endif %\}", ""),
            (
                r"\{\{'(<｜Assistant｜>|<｜tool▁outputs▁end｜>)' \+ (content|message\['content'\]) "
                rf"\+ '{_END}'\}}\}}",
                rf"{{{{'\1'}}}}{{% generation %}}{{{{\2 + '{_END}'}}}}{{% endgeneration %}}",
            ),
            # An answer with tool calls; what is before its loop is written once in a chat.
            (
                r"\{%- for tool in message\['tool_calls'\] ?%\}(?=.*?\{%- endfor %\}\{\{)",
                r"{%- if not ns.is_first %}{{'<｜Assistant｜>'}}{%- endif %}{% generation %}\g<0>",
            ),
            (r"\{\{'<｜Assistant｜>' \+ (?=message)", "{{"),
            (r"'<｜Assistant｜>(?=<｜tool▁calls▁begin｜>)", "'"),
            (
                rf"\{{%- endfor %\}}\{{\{{'<｜tool▁calls▁end｜>{_END}'\}}\}}",
                r"\g<0>{% endgeneration %}",
            ),
            # In our chats, missing content is an absent key.
            (r"message\['content'\] is not none", "message['content'] is string"),
            (r"message\['content'\] is none", "message['content'] is not string"),
        ),
    ),
)


def training_form(text: str) -> tuple[str, TemplateFamily | None]:
    """A template in its form for training, and its family; unchanged, and None, if the family is
    not known or the template marks answers."""
    if _GENERATION.search(text):
        return text, None
    for family in _FAMILIES:
        if re.search(family.sign, text):
            for pattern, replacement in family.edits:
                text = re.sub(pattern, replacement, text, flags=re.DOTALL)
            return text, family
    return text, None
