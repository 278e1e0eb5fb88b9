"""Where an answer ends, and tool calls as a template wants them, compared with transformers."""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken

from tests.data.helpers import CALL, encode, learned_texts, marked, trl_template, write_tokenizer
from titan_sparse.config import Data
from titan_sparse.data import chat_template
from titan_sparse.data.chat_template import ChatTemplate
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.rows import sample_text
from titan_sparse.data.tokenizer import Encoded, load_tokenizer

SPECIAL = ["<cat>", "<dog>", "</answer>", "</tool_call>", "[INST]", "[/INST]", "</s>", "<|eom_id|>"]
EOS = "<|endoftext|>"

TEMPLATE = """\
{%- set calls = namespace(text='') %}
{%- for message in messages %}
{%- set calls.text = '' %}
{%- for call in message.tool_calls or [] %}
{%- set calls.text = calls.text + CALL %}
{%- endfor %}
{%- if message.role == 'assistant' %}
{{- HEADER }}{% generation %}{{ CONTENT + calls.text + END }}{% endgeneration %}{{ BREAK }}
{%- else %}
{{- OTHERS }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ HEADER }}{% endif %}"""


def template(header: str, others: str, end: str, line_break: str = "''", **parts: str) -> str:
    """TEMPLATE with its parts, which are expressions of Jinja."""
    parts = {"CONTENT": "(message.content or '')", "CALL": CHATML_CALL} | parts
    parts |= {"HEADER": header, "OTHERS": others, "END": end, "BREAK": line_break}
    return re.sub("|".join(parts), lambda match: parts[match.group()], TEMPLATE)


CHATML_CALL = r"'\n<tool_call>\n' + (call | tojson) + '\n</tool_call>'"
GLM_CALL = (
    r"'\n<tool_call>' + call.function.name + '\n' + (call.function.arguments | tojson) + "
    "'</tool_call>'"
)
CHATML = (
    r"'<|im_start|>assistant\n'",
    r"'<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n'",
)
GLM = (
    r"'<|assistant|>\n'",
    (
        r"{'tool': '<|observation|>'}.get(message.role, '<|' + message.role + '|>') + '\n' + "
        "message.content"
    ),
)
LLAMA = (
    r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
    r"'<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>'",
)
MISTRAL = "''", "'[INST] ' + message.content + ' [/INST]'"
GEMMA = (
    r"'<start_of_turn>model\n'",
    r"'<start_of_turn>' + message.role + '\n' + message.content + '<end_of_turn>\n'",
)
DEEPSEEK_CALL = (
    r"'<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + "
    r"call.function.arguments | tojson + '\n<｜tool▁call▁end｜>'"
)
TRIMMED = "(message.content or '') | trim"
THINKING = (
    "('<think>\\n' + content.split('</think>')[0].split('<think>')[-1].strip() + '\\n</think>\\n\\n' "
    "if '</think>' in content else '') + content.split('</think>')[-1].lstrip('\\n')"
).replace("content", "(message.content or '')")

ENDED = {
    "chatml": template(*CHATML, "'<|im_end|>'", r"'\n'"),
    "chatml, trimmed": template(*CHATML, "'<|im_end|>'", r"'\n'", CONTENT=TRIMMED),
    "chatml, a break before": template(*CHATML, r"'\n<|im_end|>'", r"'\n'"),
    "chatml, no break after": template(*CHATML, "'<|im_end|>'"),
    "chatml, calls first": template(
        *CHATML, "(message.content or '') + '<|im_end|>'", r"'\n'", CONTENT="''"
    ),
    "chatml, calls after reasoning": template(*CHATML, "'<|im_end|>'", r"'\n'", CONTENT=THINKING),
    "llama": template(*LLAMA, "'<|eot_id|>'", CONTENT=TRIMMED),
    "mistral": template(*MISTRAL, "'</s>'"),
    "mistral, blanks": template(*MISTRAL, "' </s>'", CONTENT="' ' + (message.content or '')"),
    "gemma": template(*GEMMA, "'<end_of_turn>'", r"'\n'", CONTENT=TRIMMED),
    "deepseek": template(
        "'<｜Assistant｜>'",
        "'<｜User｜>' + message.content",
        "('<｜tool▁calls▁end｜>' if message.tool_calls else '') + '<｜end▁of▁sentence｜>'",
        CALL=DEEPSEEK_CALL,
    ),
    "end of document": template(*CHATML, "eos_token"),
}
ONE_CALL = {}
"""Templates that write one call of an answer, and some of them no content next to it."""
ONE = "'' if loop.index > 1 else "
REFUSED = "raise_exception('one call') if message.tool_calls | length > 1 else "
TAGGED = "'<cat>' + call.function.name + '.call(' + (call.function.arguments | tojson) + ')'"
for rule, kind in ((ONE, "only one call"), (REFUSED, "a second call refused")):
    ONE_CALL |= {
        f"{kind}, breaks around the end": template(
            *CHATML, r"'\n\n<|im_end|>'", r"'\n'", CALL=f"({rule}{CHATML_CALL})"
        ),
        f"{kind}, another end": template(
            *LLAMA,
            "('<|eom_id|>' if message.tool_calls else '<|eot_id|>')",
            CONTENT="('' if message.tool_calls else message.content or '')",
            CALL=f"({rule}{TAGGED})",
        ),
    }
OPEN = {
    "glm": template(*GLM, "''", CALL=GLM_CALL),
    "glm, a break at the end": template(*GLM, r"'\n'", CALL=GLM_CALL),
    "plain": template(
        r"'### assistant:\n'", r"'### user:\n' + message.content + '\n\n'", r"'\n\n'"
    ),
    # A blank alone is a token; before letters it is part of theirs.
    "a blank": template("'### assistant: '", r"'### user: ' + message.content + '\n\n'", r"'\n\n'"),
}
"""Templates that write nothing special at the end of an answer."""

CONTENTS = [
    "yes",
    "",
    " ",
    "\n",
    "<cat>",
    "<cat> <dog>",
    "<cat><dog>",
    "<cat>\n<dog>",
    "<cat>, <dog>",
    "<cat> yes <dog>\n",
    "the answer</answer>",
    "the answer</answer>\n",
    "</answer>\n\n",
    "</tool_call>\n",
    "yes\n",
    "\nyes",
    "  yes  ",
    "\t<cat>\t",
    "<|im_end|>",
    "yes<|im_end|>\n",
    "</s>",
    "yes <|endoftext|>",
    "<|eot_id|> <|im_start|>",
    "\U0001f600",
    "ä€ <cat>\U0001f600",
    "<think>\nso\n</think>\n\n<cat>",
    "<think>so <dog></think>",
    "\ue000",
    "<cat>\ue000\ue001",
]


def chats(content: str | None, **keys) -> list[list[dict]]:
    """The content as a last answer, and as an earlier one."""
    answer = {"role": "assistant", "content": content, **keys}
    first = [{"role": "user", "content": "hello"}, answer]
    role = "tool" if keys else "user"
    second = [{"role": role, "content": "the"}, {"role": "assistant", "content": "yes"}]
    return [first, first + second]


def calls(*arguments: dict) -> list[dict]:
    return [{**CALL, "function": {"name": "add", "arguments": one}} for one in arguments]


CHATS = [chat for content in CONTENTS for chat in chats(content)]
for found in (
    calls({}),
    calls({"a": "<cat>"}),
    calls({"a": "<cat>"}, {"b": [None, "</tool_call>\n"]}),
):
    CHATS += chats(None, tool_calls=found) + chats("yes <dog>\n", tool_calls=found)


class Both:
    """A template with marks and without, by us and by transformers."""

    def __init__(
        self, folder: Path, text: str, special: Sequence[str | AddedToken] = SPECIAL
    ) -> None:
        self.text = text
        self.encoders = []
        for name, form in (("marks", text), ("plain", unmarked(text))):
            path = write_tokenizer(folder / name, form, trims=False, special=special)
            data = Data(format="messages", tokenizer=path)
            self.tokenizer = load_tokenizer(path)
            self.encoders.append(ChatEncoder(data, self.tokenizer))
        self.theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{path}/tokenizer.json", eos_token=EOS, bos_token="<|begin_of_text|>"
        )

    def transformers(self, chat: list[dict], text: str = "") -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are marked, by another template if `text` is given."""
        without = ({k: v for k, v in message.items() if v is not None} for message in chat)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self.theirs.apply_chat_template(
            list(without), chat_template=text or self.text, **options
        )
        return found["input_ids"], [bool(mask) for mask in found["assistant_masks"]]

    def compare(self, chat: list[dict], ids: list[int], mask: list[bool]) -> Encoded:
        """The chat as it is trained, which must begin with the ids and their mask."""
        sample = sample_text("chats.jsonl, row 7", {"messages": chat}, "messages", "messages")
        for encoder in self.encoders:
            got = encoder.encode(sample)
            assert got.tokens[: len(ids)].tolist() == ids
            assert got.learned[: len(ids)].tolist() == mask, marked(got, self.tokenizer)
        return got


def unmarked(text: str) -> str:
    return text.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("strips", [{}, {"rstrip": True}, {"lstrip": True}])
@pytest.mark.parametrize("name", ENDED)
def test_the_end_of_an_answer_is_what_the_template_writes_after_it(tmp_path, name, strips):
    special = [*SPECIAL, "<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
    both = Both(tmp_path, ENDED[name], [AddedToken(one, special=True, **strips) for one in special])
    for chat in CHATS:
        ids, mask = both.transformers(chat)
        got = both.compare(chat, ids, mask)
        # The template has ended the answer.
        assert not got.learned[len(ids) :].any()


@pytest.mark.parametrize("strips", [{}, {"rstrip": True}, {"lstrip": True}])
@pytest.mark.parametrize("name", OPEN)
def test_an_answer_without_an_end_ends_with_what_follows(tmp_path, name, strips):
    """The special token of the next header, or the end of the document. Some tokens take blanks."""
    special = [AddedToken(token, special=True, **strips) for token in SPECIAL]
    both = Both(tmp_path, OPEN[name], special)
    end = both.tokenizer.end_of_document
    answer, *others = both.tokenizer.encode("<|assistant|><|user|><|observation|>").tolist()
    for chat in CHATS:
        ids, mask = both.transformers(chat)
        for place, token in enumerate(ids):
            mask[place] |= token in others and answer in ids[:place]
        got = both.compare(chat, ids, mask)
        # There is one end-of-document token, and it is learned.
        assert got.tokens[-1] == end != got.tokens[-2] and got.learned[-1]


@pytest.mark.parametrize("name", [name for name in ENDED if name != "deepseek"])
def test_marks_without_the_end_teach_it_all_the_same(tmp_path, name):
    """Some templates mark the content alone."""
    end, line_break = re.search(
        r" \+ ([^+]*) \}\}{% endgeneration %}{{ (.*) \}\}", ENDED[name]
    ).groups()
    text = ENDED[name].replace(f" + {end} }}}}{{% endg", " }}{% endg")
    text = text.replace(
        f"endgeneration %}}{{{{ {line_break}", f"endgeneration %}}{{{{ {end} + {line_break}"
    )
    both = Both(tmp_path, text)
    for chat in CHATS:
        both.compare(chat, *both.transformers(chat, ENDED[name]))


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_template_that_writes_one_call_only(tmp_path, name):
    both = Both(tmp_path, ONE_CALL[name])
    for chat in CHATS:
        _, answer, *_ = chat
        number = len(answer.get("tool_calls", []))
        if number > 1:
            with pytest.raises(ValueError, match="leaves out the (tool calls|content)|: one call"):
                both.compare(chat, [], [])
        elif not (number and answer["content"]):
            both.compare(chat, *both.transformers(chat))


@pytest.mark.parametrize("rule", [ONE, REFUSED])
def test_one_call_and_no_end(tmp_path, rule):
    """GLM's </tool_call> does not end a turn, even if nothing follows it in the turn."""
    both = Both(tmp_path, template(*GLM, "''", CALL=f"({rule}{GLM_CALL})"))
    first, both_turns = chats(None, tool_calls=calls({"a": "</tool_call>"}))
    text = '\n<tool_call>add\n{"a": "</tool_call>"}</tool_call>'
    for encoder in both.encoders:
        for chat, wanted in (
            (first, [text + EOS]),
            (both_turns, [text + "<|observation|>", "yes" + EOS]),
        ):
            sample = sample_text("f, row 1", {"messages": chat}, "messages", "messages")
            found = learned_texts(encoder.encode(sample), both.tokenizer)
            assert [text.strip() for text in found] == [text.strip() for text in wanted]


STRINGS = [
    '{"metric": true}',
    '{"b":null,"a":[1,[false,2.50]],"deep":{"k":{"city":"Z\u00fcrich"}}}',
    '{"city": "Z\\u00fcrich \\"<b>\\" \\n", "large": 123456789012345678901234567890, "e": 1e5}',
    ' { "a" : 1 } ',
    "{}",
]
GIVEN = [*STRINGS, *map(json.loads, STRINGS)]
"""As rows give arguments: JSON, and objects."""

CHAT = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{%- set args = call.function.arguments %}
{{- '<tool_call>' + call.function.name + ' ' }}WRITES{{- '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

WRITTEN = [
    "{{ args }}",
    "{{- '\\n```json\\n' + args + '\\n```' }}",
    "{{ args + '\\n' }}",
    "{{ '[' ~ args ~ ']' }}",
    "{{ args | string }}",
    "{{ args | trim }}",
    "{{ args.strip() }}",
    "{{ '%s' | format(args) }}",
    "{{ '{}'.format(args) }}",
    "{{ args | replace('\\n', ' ') }}",
    "{{ args if args is string else raise_exception('write a string') }}",
    "{%- if args is mapping %}{{ args }}{% else %}{{ 'x' + args }}{% endif %}",
]
"""What templates do that write a string."""

READ = [
    "{{ args | tojson }}",
    "{{ args | tojson(indent=2) }}",
    "{{ '{' + '\"parameters\": ' + args | tojson + '}' }}",
    "{{ call.function | tojson }}",
    "{{ message.tool_calls | tojson }}",
    "{% for k, v in args.items() %}{{ k }}={{ v | tojson if v is not string else v }}\\n{% endfor %}",
    "{% for k, v in args | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}",
    "{% for k in args %}{{ k }}: {{ args[k] | tojson }}{% endfor %}",
    "{% for k, v in args | dictsort %}{{ k }}{{ v | tojson }}{% endfor %}",
    "{% if args is string %}{{ args }}{% else %}{{ args | tojson }}{% endif %}",
    "{% if args is mapping %}{{ args | tojson }}{% else %}{{ args }}{% endif %}",
    "{{ args | tojson if args is not string else args }}",
    "{{ raise_exception('write a mapping') if args is string else args | tojson }}",
]
"""What templates do that want a mapping, or take both."""


def chat(arguments: dict | str) -> list[dict]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": "so", "tool_calls": [call]}
    return [{"role": "user", "content": "hello"}, answer]


def rendered(template: str, arguments: dict | str) -> str:
    """The chat as it is trained, from its row."""
    sample = sample_text("f, row 1", {"messages": chat(arguments)}, "messages", "messages")
    messages = json.loads(sample)["messages"]
    return ChatTemplate({"default": template}, {}).render(messages, [])[0]


def by_transformers(folder: str, template: str, arguments: dict | str) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    messages = chat(arguments)
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)


@pytest.mark.parametrize("writes", WRITTEN)
def test_a_template_that_writes_a_string_gets_the_json_of_the_row(tmp_path, writes):
    template = CHAT.replace("WRITES", writes)
    folder = write_tokenizer(tmp_path, template)
    for given in GIVEN:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        assert rendered(template, given) == by_transformers(folder, template, text)


@pytest.mark.parametrize("writes", READ)
def test_a_template_that_reads_a_mapping_gets_one(tmp_path, writes):
    template = CHAT.replace("WRITES", writes)
    folder = write_tokenizer(tmp_path, template)
    for given in GIVEN:
        arguments = json.loads(given) if isinstance(given, str) else given
        assert rendered(template, given) == by_transformers(folder, template, arguments)


@pytest.mark.parametrize(
    ("names", "wants"),
    [
        ("qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl", json.loads),
        ("glm4moe gptoss gemma4 lfm2_v2 llama3_1 llama3_2 nemotron_3_nano", json.loads),
        ("deepseekv3", str),
    ],
)
def test_published_templates(tmp_path, names, wants, monkeypatch):
    monkeypatch.setattr(chat_template, "_DAY", datetime.datetime.now())
    for name in names.split():
        template = trl_template(name)
        folder = write_tokenizer(tmp_path, template)
        for given in STRINGS:
            wanted = by_transformers(folder, template, wants(given))
            assert rendered(template, given) == wanted, name


def test_what_is_trained(tmp_path):
    folder = write_tokenizer(tmp_path, CHAT.replace("WRITES", WRITTEN[0]))
    (learned,) = learned_texts(encode(folder, chat('{"metric":true}')), folder)
    assert learned == 'so<tool_call>add {"metric":true}</tool_call><|im_end|>'
