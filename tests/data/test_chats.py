"""titan_sparse.data.chats: what is learned of a chat, compared with transformers' own masks."""

import copy
import datetime
import json

import numpy as np
import pytest
import transformers

from tests.data.helpers import (
    ANSWER,
    CALL,
    CHAT,
    CHATML,
    GLM,
    TOOL_CHAT,
    TOOLS,
    encode,
    learned_texts,
    marked,
    trl_template,
    write_tokenizer,
)
from titan_sparse.config import Data
from titan_sparse.data import chat_template
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.tokenizer import Encoded, load_tokenizer


def reference(folder: str, template: str, messages: list[dict]) -> dict:
    """Token ids and the assistant's mask as transformers makes them."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        eos_token="<|endoftext|>",
        bos_token="<|begin_of_text|>",
    )
    return tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )


@pytest.mark.parametrize("name", ["qwen3_training", "glm4moe_training"])
def test_marked_answers_are_those_of_transformers(tmp_path, name):
    template = trl_template(name)
    folder = write_tokenizer(tmp_path, template)
    got = encode(folder, CHAT)
    wanted = reference(folder, template, CHAT)
    count = len(wanted["input_ids"])
    assert got.tokens[:count].tolist() == wanted["input_ids"]
    assert got.learned[:count].tolist() == [bool(mask) for mask in wanted["assistant_masks"]]
    # What closes the document is not learned where the template has ended the answer.
    assert sum(wanted["assistant_masks"]) == got.learned.sum() > 0
    assert count + 1 == len(got.tokens)


def with_objects(chat: list[dict]) -> list[dict]:
    """The chat as transformers' templates want it, with arguments of calls that are objects."""
    chat = copy.deepcopy(chat)
    for message in chat:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return chat


def trl_masks(folder: str, name: str, messages: list[dict]) -> Encoded:
    """A chat with TRL's masks, without the header of an answer and a line break after its end."""
    wanted = reference(folder, trl_template(f"{name}_training"), messages)
    ids, mask = np.array(wanted["input_ids"]), np.array(wanted["assistant_masks"], dtype=bool)
    encode_text = load_tokenizer(folder).encode
    for header in ("<|start|>assistant", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"):
        header_ids = encode_text(header)
        for start in np.flatnonzero(mask & ~np.append(False, mask[:-1])):
            if ids[start : start + len(header_ids)].tolist() == header_ids.tolist():
                mask[start : start + len(header_ids)] = False
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
    mask[[place for place in ends if ids[place] == encode_text("\n")]] = False
    return Encoded(ids, mask)


EMPTY = [CHAT[1], {"role": "assistant", "content": ""}, *CHAT[3:]]
BLANK = [CHAT[1], {"role": "assistant", "content": " \n"}, *CHAT[3:]]
REASONED = [CHAT[1], {**ANSWER, "reasoning_content": "two and two"}, *CHAT[3:]]
THINKING = [CHAT[1], {"role": "assistant", "content": "<think>\nso\n</think>\n\nit"}, *CHAT[3:]]


@pytest.mark.parametrize(
    ("names", "chats"),
    [
        ("qwen3_instruct_2507 llama3 gemma3 lfm2 cohere", [CHAT, EMPTY, BLANK]),
        ("gptoss", [CHAT, EMPTY, BLANK]),
        # A form for training takes the place of these templates.
        ("qwen3 qwen3_5_think qwen3_6", [CHAT, EMPTY, TOOL_CHAT, REASONED, THINKING]),
        ("qwen3_5_nothink qwen3_8", [CHAT, TOOL_CHAT]),
        ("deepseekv3", [CHAT, EMPTY, BLANK, TOOL_CHAT]),
        ("deepseek_r1_distill", [CHAT, EMPTY, THINKING]),
        ("nemotron_3_nano", [CHAT, EMPTY, BLANK, TOOL_CHAT]),
        ("nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning", [CHAT, TOOL_CHAT]),
    ],
)
def test_answers_are_those_of_the_templates_that_trl_marks(tmp_path, names, chats, monkeypatch):
    monkeypatch.setattr(chat_template, "_DAY", datetime.datetime.now())
    for name in names.split():
        end = {"g": "<|return|>", "d": "<｜end▁of▁sentence｜>"}.get(name[0], "<|endoftext|>")
        folder = write_tokenizer(tmp_path, trl_template(name), end=end, trims=False)
        for chat in chats:
            # Theirs has no content only as a string, and arguments only as objects.
            chat = [{**message, "content": message["content"] or ""} for message in chat]
            got = encode(folder, chat)
            wanted = trl_masks(folder, name, with_objects(chat))
            count = len(wanted.tokens)
            got = Encoded(got.tokens[:count], got.learned[:count])
            assert marked(got, folder) == marked(wanted, folder)


def test_a_template_that_marks_an_answer_without_its_end_still_teaches_it(tmp_path):
    template = CHATML.replace(
        "message.content + '<|im_end|>\\n' }}",
        "'' }}{% generation %}{{- message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}",
    )
    folder = write_tokenizer(tmp_path, template)
    got = encode(folder, [CHAT[1], ANSWER], loss_on="assistant")
    # This template marks users too, which makes more blocks than answers: all are what it says.
    assert learned_texts(got, folder)[-1] == FOUR
    with pytest.raises(ValueError, match="marks 2 {% generation %} blocks in 1 answers"):
        encode(folder, [CHAT[1], {**ANSWER, "train": False}])


@pytest.mark.parametrize(
    ("name", "extra", "lost"),
    [
        ("llama3", {"tool_calls": [CALL]}, "tool calls"),
        ("qwen2_5", {"reasoning_content": "two and two"}, "reasoning"),
        ("llama3_training", {"reasoning_content": "two and two"}, "reasoning"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tmp_path, name, extra, lost):
    folder = write_tokenizer(tmp_path, trl_template(name))
    chat = [{"role": "user", "content": "2+2"}, {**ANSWER, **extra}]
    with pytest.raises(ValueError, match=rf"row 7: .*leaves out the {lost} of messages\[1\]"):
        encode(folder, chat)
    chat[1]["train"] = False
    assert not encode(folder, chat).learned.any()


def test_a_template_that_drops_earlier_reasoning(tmp_path):
    """Stock Qwen3 writes another first answer when a second one follows, and is used where only the
    last one is learned. Of an unknown family, such a template is refused."""
    folder = write_tokenizer(tmp_path, trl_template("qwen3"))
    last = encode(folder, CHAT, loss_on="last_assistant")
    assert learned_texts(last, folder) == ["<think>\n\n</think>\n\nyes<|im_end|>"]
    stock = reference(folder, trl_template("qwen3"), CHAT)["input_ids"]
    assert last.tokens[: len(stock)].tolist() == stock
    unknown = tmp_path / "unknown.jinja"
    unknown.write_text(trl_template("qwen3").replace("last_query_index", "last_question"))
    refused = r"row 7: .*up to messages\[2\] otherwise.*data.chat_template"
    with pytest.raises(ValueError, match=refused):
        encode(folder, CHAT, chat_template=str(unknown))


def test_a_template_that_closes_every_chat_is_taken(tmp_path):
    """Phi-3 ends every chat with the end-of-document token, which earlier turns do not have."""
    folder = write_tokenizer(tmp_path, trl_template("phi3"))
    texts = learned_texts(encode(folder, CHAT[1:]), folder)
    assert texts == ["the answer\n\nis \U0001f600 4<|end|>", "yes<|end|>"]


def test_every_message_is_learned_if_asked_for(tmp_path):
    folder = write_tokenizer(tmp_path, CHATML)
    whole = encode(folder, CHAT, loss_on="all")
    assert whole.learned[:-1].all() and not whole.learned[-1]
    # Nothing but the header of the last answer is a special token: it does not end the answer.
    glm = write_tokenizer(tmp_path / "glm", GLM)
    assert encode(glm, [CHAT[1], {"role": "assistant", "content": ""}], loss_on="all").learned.all()


FOUR, YES = "the answer\n\nis \U0001f600 4<|im_end|>", "yes<|im_end|>"


def spoken(folder: str, row: dict | list, loss_on: str) -> list[str]:
    """What is learned, without blanks and empty thoughts."""
    found = learned_texts(encode(folder, row, loss_on=loss_on), folder)
    return [text.replace("<think>\n\n</think>\n\n", "").strip() for text in found]


@pytest.mark.parametrize(
    "template", [CHATML, trl_template("qwen3_training")], ids=["derived", "marked"]
)
def test_which_messages_are_learned_and_the_flag_of_a_message_wins(tmp_path, template):
    folder = write_tokenizer(tmp_path, template)

    def texts(loss_on: str, **flags) -> list[str]:
        chat = copy.deepcopy(CHAT)
        for number, flag in flags.items():
            chat[int(number[1:])]["train"] = flag
        return spoken(folder, chat, loss_on)

    assert texts("assistant") == [FOUR, YES] and texts("last_assistant") == [YES]
    assert texts("assistant", m2=False) == [YES]
    assert texts("last_assistant", m2=True) == [FOUR, YES]
    assert texts("last_assistant", m4=False) == []
    assert texts("assistant", m1=True) == ["<|im_start|>user\nhello<|im_end|>", FOUR, YES]
    assert not any(FOUR in text for text in texts("all", m2=False))
    assert len(texts("all", m2=False)) == 2


@pytest.mark.parametrize(
    ("prompt", "completion", "learned"),
    [
        ("hello ", "world", "world<|endoftext|>"),
        ("hello", " world", " world<|endoftext|>"),
        # Alone and joined, the seam has other tokens: the prompt is as a model is asked.
        ("hel", "lo", "lo<|endoftext|>"),
        ("", "yes", "yes<|endoftext|>"),
        ("hello", "", "<|endoftext|>"),
        ("hello", "yes<|endoftext|>", "yes<|endoftext|>"),
        ("hello<|endoftext|>", "", "<|endoftext|>"),
        ("<|begin_of_text|>hello", " world", " world<|endoftext|>"),
    ],
)
def test_prompt_and_completion(tmp_path, prompt, completion, learned):
    folder = write_tokenizer(tmp_path, CHATML)
    got = encode(folder, {"prompt": prompt, "completion": completion})
    tokenizer = load_tokenizer(folder)
    begin = "<|begin_of_text|>"
    assert marked(got, folder) == f"{begin}{prompt.removeprefix(begin)}[[{learned}]]"
    asked = tokenizer.encode(begin + prompt.removeprefix(begin))
    assert got.tokens[: len(asked)].tolist() == asked.tolist()
    assert encode(folder, {"prompt": prompt, "completion": completion}, loss_on="all").learned.all()


@pytest.mark.parametrize("template", [CHATML, trl_template("qwen3_training")])
def test_answers_in_a_prompt_are_not_learned(tmp_path, template):
    """They are examples, or what was said before. A flag of a message can change that."""
    folder = write_tokenizer(tmp_path, template)
    prompt = [CHAT[1], ANSWER, {"role": "user", "content": "more"}]
    row = {"prompt": prompt, "completion": [*CHAT[4:], CHAT[1], {**ANSWER, "content": "the"}]}
    last = "the<|im_end|>"
    assert spoken(folder, row, "assistant") == [YES, last]
    assert spoken(folder, row, "last_assistant") == [last]
    (everything,) = spoken(folder, row, "all")
    assert everything.startswith("<|im_start|>user\nhello")
    row["prompt"] = [CHAT[1], {**ANSWER, "train": True}, prompt[2]]
    assert spoken(folder, row, "assistant") == [FOUR, YES, last]
    assert spoken(folder, row, "last_assistant") == [FOUR, last]


def test_a_template_that_writes_the_date_is_the_same_each_day(tmp_path):
    template = """{{- strftime_now("%d %b %Y") }}{%- set format = ' %Y-%m-%d' %}
{{- strftime_now(format) }}{{- strftime_now(' %d' + ' %B') }}
{%- macro day() %}{{- strftime_now(" %A") }}{% endmacro %}{{- day() }}"""
    text = marked(encode(write_tokenizer(tmp_path, template + CHATML), CHAT), str(tmp_path))
    assert text.startswith("26 Jul 2024 2024-07-26 26 July Friday<|im_start|>")


ENDLESS = (
    "{% for i in range(100000) %}" * 2 + "{% endfor %}" * 2,
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(40) }}",
    "{% set n = namespace(n=40) %}{% block a %}{% if n.n %}{% set n.n = n.n - 1 %}"
    "{{ self.a() }}{{ self.a() }}{% set n.n = n.n + 1 %}{% endif %}{% endblock %}",
)


@pytest.mark.parametrize("template", ENDLESS, ids=["loops", "macros", "blocks"])
def test_a_template_that_never_ends(tmp_path, template, monkeypatch):
    """Its chats are not skipped: on another rank it may be fast enough."""
    monkeypatch.setattr(chat_template, "_SECONDS", 0.1)
    folder = write_tokenizer(tmp_path, template + CHATML)
    with pytest.raises(ValueError, match="more than 0.1 seconds for one chat; write another data"):
        encode(folder, CHAT, bad_rows="skip")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ [1, 2] | random }}", "cannot render it: it draws at random"),
        ("{{ lipsum() }}", "cannot render it: it draws at random"),
        ("{{ 10 ** 10 ** 10 }}", r"cannot render it: it computes 10 \*\* 10, which may take fore"),
        ("{{ 'a' * 10000000000 }}", "cannot render it: it repeats a text or list 10,000,000,000"),
        ("{{ 1000001 * [0] }}", "cannot render it: it repeats a text or list 1,000,001 times"),
        ("{% for %}", "cannot be compiled: .*; write another data.chat_template"),
    ],
)
def test_a_template_that_no_rank_should_render(tmp_path, template, message):
    folder = write_tokenizer(tmp_path, template + CHATML)
    with pytest.raises(ValueError, match=message):
        encode(folder, CHAT)


def test_variables_of_a_template(tmp_path):
    """What the published template writes with them, by transformers."""
    folder = write_tokenizer(tmp_path, trl_template("nemotron_3_nano"))
    got = encode(folder, REASONED)
    assert learned_texts(got, folder)[0].startswith("<think>\ntwo and two\n</think>\nthe answer")
    with pytest.raises(ValueError, match=r"leaves out the reasoning of messages\[1\]"):
        encode(folder, REASONED, chat_template_kwargs='{"truncate_history_thinking": true}')
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    options = {"chat_template": trl_template("nemotron_3_nano"), "tokenize": False}
    wanted = tokenizer.apply_chat_template(REASONED, **options, truncate_history_thinking=False)
    assert load_tokenizer(folder).spell(got.tokens[:-1]) == wanted

    data = Data(format="messages", tokenizer=folder, chat_template_kwargs='{"enable_thinking": 0}')
    template = chat_template.load_template(data, "", load_tokenizer(folder))
    asked, _ = template.render(CHAT[:4], [], add_generation_prompt=True)
    options["add_generation_prompt"] = True
    assert asked == tokenizer.apply_chat_template(CHAT[:4], **options, enable_thinking=False)


def test_variables_that_would_be_ignored_are_refused(tmp_path):
    folder = write_tokenizer(tmp_path, trl_template("qwen3"))
    for kwargs, message in (
        ('{"enable_thought": true}', 'the chat template does not read "enable_thought"'),
        ("enable_thinking", "is not a JSON object; write one"),
        ("[1]", "is not a JSON object; write one"),
        ('{"messages": []}', 'names "messages", which a chat itself gives'),
    ):
        with pytest.raises(ValueError, match=f"data.chat_template_kwargs.*{message}"):
            encode(folder, CHAT, chat_template_kwargs=kwargs)


def test_templates_are_found_in_the_folders_of_tokenizer_and_model(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    model = write_tokenizer(tmp_path / "model", GLM)
    data = Data(format="messages", tokenizer=folder)
    tokenizer = load_tokenizer(folder)

    def digest(**options) -> str:
        data = Data(format="messages", tokenizer=folder, **options)
        return ChatEncoder(data, tokenizer, model).sample_format.template

    chatml = digest()
    assert digest(chat_template=folder) == chatml
    glm = digest(chat_template=model)
    assert glm != chatml
    # The same template writes another beginning with another bos_token.
    tokens = tmp_path / "tokenizer/tokenizer_config.json"
    written = tokens.read_text()
    tokens.write_text(written.replace("<|begin_of_text|>", "<bos>"))
    tokenizer = load_tokenizer(folder)
    assert digest() != chatml
    tokens.write_text(written)
    tokenizer = load_tokenizer(folder)
    (tmp_path / "tokenizer/chat_template.jinja").unlink()
    assert digest() == glm
    refused = 'model.initial_hf = "" has a chat template; write data.ch'
    with pytest.raises(ValueError, match=refused):
        ChatEncoder(data, tokenizer)
    named = '[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]'
    tokens.write_text('{"eos_token": "<|endoftext|>", "chat_template": ' + named + "}")
    assert digest() not in (chatml, glm)
    template = ChatEncoder(data, tokenizer)._template
    assert [template.render([], tools)[0] for tools in ([], TOOLS)] == ["d", "t"]
    with pytest.raises(ValueError, match="data.chat_template = .*missing.jinja.* cannot be read"):
        digest(chat_template=str(tmp_path / "missing.jinja"))
