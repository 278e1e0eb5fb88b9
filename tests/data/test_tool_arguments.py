"""titan_sparse.data.chat_template: the arguments of tool calls as a template wants them, compared with
transformers, which is given the form that fits the template."""

import datetime
import json

import pytest

from tests.data.chat_helpers import encode, learned_texts, trl_template, write_tokenizer
from titan_sparse.data import chat_template
from titan_sparse.data.chat_template import ChatTemplate
from titan_sparse.data.rows import sample_text

transformers = pytest.importorskip("transformers")

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
