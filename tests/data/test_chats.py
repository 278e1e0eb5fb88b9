"""titan_sparse.data.chats: what is learned of a chat, compared with transformers' own masks."""

import copy

import numpy as np
import pytest

from tests.data.chat_helpers import (
    ANSWER,
    CALL,
    CHAT,
    CHATML,
    GLM,
    PLAIN,
    TOOL_CHAT,
    TOOLS,
    encode,
    learned_texts,
    marked,
    trl_template,
    write_tokenizer,
)
from titan_sparse.config import Data
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

FAMILIES = ["qwen3_training", "llama3_training", "glm4moe_training", "gemma3_training"]
DERIVED = ["qwen3_instruct_2507", "llama3", "gemma3", "lfm2", "cohere"]


def reference(folder: str, template: str, messages: list[dict], tools=None) -> dict:
    """Token ids and the assistant's mask as transformers makes them."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        eos_token="<|endoftext|>",
        bos_token="<|begin_of_text|>",
    )
    return tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_marked_answers_are_those_of_transformers(tmp_path, name):
    template = trl_template(name)
    folder = write_tokenizer(tmp_path, template, adds_bos=True)
    got = encode(folder, CHAT)
    wanted = reference(folder, template, CHAT)
    count = len(wanted["input_ids"])
    assert got.tokens[:count].tolist() == wanted["input_ids"]
    assert got.learned[:count].tolist() == [bool(mask) for mask in wanted["assistant_masks"]]
    # What closes the document is not learned where the template has ended the answer.
    assert sum(wanted["assistant_masks"]) == got.learned.sum() > 0
    assert count + 1 == len(got.tokens)


@pytest.mark.parametrize("name", DERIVED)
def test_derived_answers_are_those_of_the_template_that_marks_them(tmp_path, name):
    """TRL's templates mark a line break behind the end of a turn too, which no model is asked for."""
    folder = write_tokenizer(tmp_path, trl_template(name))
    got = encode(folder, CHAT)
    wanted = reference(folder, trl_template(f"{name}_training"), CHAT)
    ids, mask = np.array(wanted["input_ids"]), np.array(wanted["assistant_masks"], dtype=bool)
    assert got.tokens[: len(ids)].tolist() == ids.tolist()
    line_break = load_tokenizer(folder).encode("\n")
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
    mask[[place for place in ends if ids[place] == line_break]] = False
    assert got.learned[: len(ids)].tolist() == mask.tolist() and mask.any()


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["the answer\n\nis \U0001f600 4<|im_end|>", "yes<|im_end|>"]),
        # <|user|> belongs to the next message, and tells the model to stop.
        (GLM, ["\nthe answer\n\nis \U0001f600 4<|user|>", "\nyes<|endoftext|>"]),
        (PLAIN, ["the answer\n\nis \U0001f600 4\n\n", "yes\n\n<|endoftext|>"]),
    ],
    ids=["chatml", "glm", "plain"],
)
def test_the_token_that_ends_an_answer_is_learned(tmp_path, template, wanted):
    folder = write_tokenizer(tmp_path, template)
    assert learned_texts(encode(folder, CHAT), folder) == wanted


def test_a_document_is_closed_once(tmp_path):
    """Llama 3's last token of a chat is its end-of-document token already."""
    folder = write_tokenizer(tmp_path, trl_template("llama3"), end="<|eot_id|>", adds_bos=True)
    text = marked(encode(folder, CHAT), folder)
    assert text.endswith("yes<|eot_id|>]]") and text.count("<|eot_id|>") == len(CHAT)
    assert text.startswith("<|begin_of_text|><|start_header_id|>")
    assert text.count("<|begin_of_text|>") == 1


def test_a_template_that_marks_an_answer_without_its_end_still_teaches_it(tmp_path):
    template = CHATML.replace(
        "message.content + '<|im_end|>\\n' }}",
        "'' }}{% generation %}{{- message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}",
    )
    folder = write_tokenizer(tmp_path, template)
    got = encode(folder, [{"role": "user", "content": "hi"}, ANSWER], loss_on="assistant")
    # This template marks users too, which makes more blocks than answers: all are what it says.
    assert learned_texts(got, folder)[-1] == "the answer\n\nis \U0001f600 4<|im_end|>"
    with pytest.raises(ValueError, match="marks 2 {% generation %} blocks in 1 answers"):
        encode(folder, [{"role": "user", "content": "hi"}, {**ANSWER, "train": False}])


def test_tool_calls_and_results(tmp_path):
    """Arguments that are a string reach the template as an object, as servers do it."""
    template = trl_template("qwen2_5")
    folder = write_tokenizer(tmp_path, template)
    got = encode(folder, {"messages": TOOL_CHAT, "tools": TOOLS})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call><|im_end|>'
    assert learned_texts(got, folder) == [call, "six<|im_end|>", "bye<|im_end|>"]
    messages = copy.deepcopy(TOOL_CHAT)
    messages[1]["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": "x"}
    wanted = reference(folder, template, messages, TOOLS)["input_ids"]
    assert got.tokens[: len(wanted)].tolist() == wanted
    assert '"name": "add", "parameters"' in marked(got, folder)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_learned(tmp_path, key):
    folder = write_tokenizer(tmp_path, trl_template("qwen3_training"))
    chat = [{"role": "user", "content": "2+2"}, {**ANSWER, key: "two and two"}]
    (text,) = learned_texts(encode(folder, chat), folder)
    assert text.startswith("<think>\ntwo and two\n</think>\n\nthe answer")


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


def test_a_template_that_drops_earlier_reasoning_is_refused(tmp_path):
    """Stock Qwen3 writes another first answer when a second follows."""
    folder = write_tokenizer(tmp_path, trl_template("qwen3"))
    with pytest.raises(
        ValueError, match=r"row 7: .*up to messages\[2\] otherwise.*data.chat_template"
    ):
        encode(folder, CHAT)
    last = learned_texts(encode(folder, CHAT, loss_on="last_assistant"), folder)
    assert last == ["<think>\n\n</think>\n\nyes<|im_end|>"]
    patched = tmp_path / "patched.jinja"
    patched.write_text(trl_template("qwen3_training"))
    texts = learned_texts(encode(folder, CHAT, chat_template=str(patched)), folder)
    assert len(texts) == 2 and texts[0].startswith("<think>")


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        # A blank alone is a token; before letters it is part of theirs.
        (PLAIN.replace(":\\n' ", ": ' ").replace("assistant:\\n", "assistant: "), "world"),
        (PLAIN, "\nyes"),
    ],
)
def test_a_token_over_the_seam_is_refused(tmp_path, template, answer):
    folder = write_tokenizer(tmp_path, template)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    with pytest.raises(ValueError, match=r"messages\[1\] a token goes over the seam"):
        encode(folder, chat)


def test_a_template_that_closes_every_chat_is_taken(tmp_path):
    """Phi-3 ends what it is given with the end-of-document token, which no earlier turn has."""
    folder = write_tokenizer(tmp_path, trl_template("phi3"))
    texts = learned_texts(encode(folder, CHAT[1:]), folder)
    assert texts == ["the answer\n\nis \U0001f600 4<|end|>", "yes<|end|>"]


def test_which_messages_are_learned(tmp_path):
    folder = write_tokenizer(tmp_path, CHATML)
    texts = ["the answer\n\nis \U0001f600 4<|im_end|>", "yes<|im_end|>"]
    assert learned_texts(encode(folder, CHAT), folder) == texts
    assert learned_texts(encode(folder, CHAT, loss_on="last_assistant"), folder) == texts[1:]
    whole = encode(folder, CHAT, loss_on="all")
    assert whole.learned[:-1].all() and not whole.learned[-1]


@pytest.mark.parametrize(
    "template", [CHATML, trl_template("qwen3_training")], ids=["derived", "marked"]
)
def test_the_flag_of_a_message_wins(tmp_path, template):
    folder = write_tokenizer(tmp_path, template)

    def texts(loss_on: str, **flags) -> list[str]:
        chat = copy.deepcopy(CHAT)
        for number, flag in flags.items():
            chat[int(number[1:])]["train"] = flag
        found = learned_texts(encode(folder, chat, loss_on=loss_on), folder)
        return [text.replace("<think>\n\n</think>\n\n", "").strip() for text in found]

    answer, yes = "the answer\n\nis \U0001f600 4<|im_end|>", "yes<|im_end|>"
    assert texts("assistant", m2=False) == [yes]
    assert texts("last_assistant", m2=True) == [answer, yes]
    assert texts("last_assistant", m4=False) == []
    assert texts("assistant", m1=True) == ["<|im_start|>user\nhello<|im_end|>", answer, yes]
    assert not any(answer in text for text in texts("all", m2=False))
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
        ("hello", "yes<|endoftext|>", "yes<|endoftext|><|endoftext|>"),
    ],
)
def test_prompt_and_completion(tmp_path, prompt, completion, learned):
    folder = write_tokenizer(tmp_path, CHATML)
    got = encode(folder, {"prompt": prompt, "completion": completion})
    tokenizer = load_tokenizer(folder)
    assert marked(got, folder) == f"{prompt}[[{learned}]]"
    asked = tokenizer.encode(prompt)
    assert got.tokens[: len(asked)].tolist() == asked.tolist()
    assert encode(folder, {"prompt": prompt, "completion": completion}, loss_on="all").learned.all()


def test_prompt_and_completion_of_messages(tmp_path):
    """An answer within the prompt is not learned; stock Qwen3 does not matter for one turn."""
    folder = write_tokenizer(tmp_path, trl_template("qwen3"))
    got = encode(folder, {"prompt": CHAT[:4], "completion": CHAT[4:]})
    assert learned_texts(got, folder) == ["<think>\n\n</think>\n\nyes<|im_end|>"]


def test_bytes_take_a_template_too(tmp_path):
    path = tmp_path / "a.jinja"
    path.write_text(trl_template("llama3"))
    data = {"format": "messages", "chat_template": str(path)}
    got = encode("bytes", CHAT[:3], chat_template=str(path))
    text = ANSWER["content"] + "<|eot_id|><end>"
    # No special token in a text of bytes: the closing one ends the answer.
    assert learned_texts(got, load_tokenizer("bytes")) == [text]
    assert ChatEncoder(Data(**data), load_tokenizer("bytes")).sample_format.template


def test_a_template_that_writes_the_date_is_the_same_each_day(tmp_path):
    date = """{{- 'Today: ' + strftime_now("%d %b %Y") + '\\n' }}"""
    folder = write_tokenizer(tmp_path, date + CHATML)
    assert marked(encode(folder, CHAT), folder).startswith("Today: 26 Jul 2024\n<|im_start|>")


def test_a_template_that_refuses_a_chat_names_its_row(tmp_path):
    folder = write_tokenizer(tmp_path, trl_template("gemma3"))
    chat = [{"role": "user", "content": "hi"}, {"role": "user", "content": "?"}, ANSWER]
    with pytest.raises(
        ValueError, match="^chats.jsonl, row 7: the chat template cannot render it: "
    ):
        encode(folder, chat)


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
    (tmp_path / "tokenizer/chat_template.jinja").unlink()
    assert digest() == glm
    with pytest.raises(
        ValueError, match='model.initial_hf = "" has a chat template; write data.ch'
    ):
        ChatEncoder(data, tokenizer)
    config = tmp_path / "tokenizer/tokenizer_config.json"
    named = '[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]'
    config.write_text('{"eos_token": "<|endoftext|>", "chat_template": ' + named + "}")
    assert digest() not in (chatml, glm)
    template = ChatEncoder(data, tokenizer)._template
    assert (template.render([], []), template.render([], TOOLS)) == ("d", "t")
    with pytest.raises(ValueError, match="data.chat_template = .*missing.jinja.* cannot be read"):
        digest(chat_template=str(tmp_path / "missing.jinja"))
