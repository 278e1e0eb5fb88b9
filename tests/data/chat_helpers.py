"""Chats, templates and tokenizers that the tests of chats share."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from titan_sparse.config import Data
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.rows import sample_text
from titan_sparse.data.tokenizer import Encoded, Tokenizer, load_tokenizer

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Without {% generation %}: what is learned has to be derived."""

GLM = """\
[gMASK]<sop>
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""The token that ends an answer is the first of the next message."""

PLAIN = """\
{%- for message in messages %}
{{- '### ' + message.role + ':\\n' + message.content + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant:\\n' }}{% endif %}"""
"""No special token at all."""

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|end_of_text|> <|start_header_id|> "
    "<|end_header_id|> <|eot_id|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> "
    "<|end|> <bos> <start_of_turn> <end_of_turn>"
).split()

MORE_SPECIAL = (
    "<|start|> <|channel|> <|message|> <|return|> <|call|> <｜User｜> <｜Assistant｜> "
    "<｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
).split()
"""Of GPT-OSS and DeepSeek; added after training, which they would leave fewer tokens for."""

ANSWER = {"role": "assistant", "content": "the answer\n\nis \U0001f600 4"}
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    ANSWER,
    {"role": "user", "content": " world? "},
    {"role": "assistant", "content": "yes"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
TOOL_CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "6"},
    {"role": "assistant", "content": "six"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "bye"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def trl_template(name: str) -> str:
    """A template of TRL, as published or patched for training."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def write_tokenizer(
    folder: Path,
    template: str,
    end: str = "<|endoftext|>",
    trims: bool = True,
    special: Sequence[str | tokenizers.AddedToken] = (),
) -> str:
    """A folder with the template and a small byte-level tokenizer that splits words as Llama 3's and puts
    <|begin_of_text|> first. If it `trims`, transformers finds no mask of an answer that begins with a
    blank. special: more special tokens."""
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = tokenizers.Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world assistant user the answer is\n\nyes"] * 3, trainer)
    tokenizer.add_special_tokens([*MORE_SPECIAL, *special])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    steps = [processors.ByteLevel(trim_offsets=trims)]
    bos = "<|begin_of_text|>"
    special = [(bos, tokenizer.token_to_id(bos))]
    steps.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special))
    tokenizer.post_processor = processors.Sequence(steps)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": end, "bos_token": {"__type": "AddedToken", "content": bos}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def encode(folder: str, row: dict | list, **options) -> Encoded:
    """A row, or the messages of one, encoded with [data]'s `options` and the folder's tokenizer."""
    row = {"messages": row} if isinstance(row, list) else row
    row_format = "messages" if "messages" in row else "prompt_completion"
    data = Data(format=row_format, tokenizer=folder, **options)
    text = sample_text("chats.jsonl, row 7", row, row_format, "messages")
    return ChatEncoder(data, load_tokenizer(folder)).encode(text)


def marked(encoded: Encoded, tokenizer: Tokenizer | str) -> str:
    """The text of a document, with the learned parts between [[ and ]]."""
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    runs = []
    start = 0
    for stop in range(1, len(encoded.tokens) + 1):
        is_last = stop == len(encoded.tokens)
        if is_last or encoded.learned[stop] != encoded.learned[start]:
            text = tokenizer.spell(encoded.tokens[start:stop])
            runs.append(f"[[{text}]]" if encoded.learned[start] else text)
            start = stop
    return "".join(runs)


def learned_texts(encoded: Encoded, tokenizer: Tokenizer | str) -> list[str]:
    return re.findall(r"\[\[(.*?)\]\]", marked(encoded, tokenizer), re.DOTALL)
