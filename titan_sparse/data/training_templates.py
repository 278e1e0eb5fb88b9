"""Published chat templates -> forms of them for training, which mark what the assistant writes.

A form has {% generation %} blocks, which begin behind the header of an answer and end with the token
that ends the answer. No answer loses its reasoning when another one follows. Templates are known by their
structure rather than by their whole text, as their revisions differ in other places.
"""

import re
from typing import NamedTuple


class TrainingForm(NamedTuple):
    """A template for training."""

    family: str
    text: str
    only_marks: bool
    """whether it writes chats without reasoning as the published template does"""


class _Family(NamedTuple):
    name: str
    only_marks: bool
    sign: str
    """of a template of this family"""
    edits: tuple[tuple[str, str], ...]
    """regular expressions and what replaces each match"""


_END = "<｜end▁of▁sentence｜>"

_FAMILIES = (
    _Family(
        "Qwen3",
        False,
        r"loop\.index0 > ns\.last_query_index",
        (
            # Answers before the last question lost their <think>: all have it.
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
    _Family(
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
    _Family(
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
            # Chats have no content in place of none, and objects as arguments.
            (r"message\['content'\] is not none", "message['content'] is string"),
            (r"message\['content'\] is none", "message['content'] is not string"),
            (r"tool\['function'\]\['arguments'\] \+", r"tool['function']['arguments'] | tojson +"),
        ),
    ),
)


def training_form(text: str) -> TrainingForm | None:
    """The form of a template for training; None if it is of no known family, or marks answers."""
    if re.search(r"\{%-?\s*generation\s*-?%\}", text):
        return None
    for family in _FAMILIES:
        if re.search(family.sign, text):
            for pattern, replacement in family.edits:
                text = re.sub(pattern, replacement, text, flags=re.DOTALL)
            return TrainingForm(family.name, text, family.only_marks)
    return None
