"""Texts, chats, templates, tokenizers, shards, and loaders that several tests use."""

import dataclasses
import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from titan_sparse.config import Data
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.loader import Batch, PackedLoader, build_loader
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.rows import sample_text
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.stream import WalkedStream
from titan_sparse.data.tokenizer import ByteTokenizer, Encoded, Tokenizer, load_tokenizer

TEXTS = ["first\nline", "", "zweites: \u00e4\u00f6\u20ac \U0001f600", "x" * 50, "last\n"]

END = ByteTokenizer.end_of_document
PADDING = ByteTokenizer.padding

LENGTHS = [5, 40, 0, 1, 15, 16, 17, 33, 3, 90]


def write_texts(folder: Path, ending: str, texts: list[str] = TEXTS) -> str:
    """A folder of two files, or of one file a document for .txt."""
    folder.mkdir()
    size = 1 if ending == ".txt" else 2
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        table = [{"text": text, "number": i} for i, text in enumerate(part)]
        write_rows(folder / f"{start:02}{ending}", table)
    return str(folder)


def zstd(raw: bytes) -> bytes:
    return pyarrow.compress(raw, "zstd", asbytes=True)


def write_rows(path: Path, table: list[dict], ending: str = "") -> None:
    """Parquet, lines of JSON, or the text of one row, as the path's ending or another one says."""
    ending = ending or path.suffix
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return
    raw = "".join(json.dumps(row) + "\n" for row in table).encode()
    if ending == ".txt":
        [row] = table
        raw = row["text"].encode()
    pack = {".zst": zstd, ".gz": gzip.compress}.get(ending, bytes)
    path.write_bytes(pack(raw))


def train_tokenizer(folder: Path, special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    pad_id = tokenizer.token_to_id(special[-1])
    tokenizer.enable_padding(length=9, pad_token=special[-1], pad_id=pad_id)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def random_documents(lengths: list[int]) -> list[str]:
    """Documents of the given byte lengths, no two alike."""
    generator = np.random.default_rng(len(lengths))
    texts = []
    for length in lengths:
        characters = generator.integers(32, 127, length)
        texts.append("".join(map(chr, characters)))
    return texts


def lettered_texts(letter: str, lengths: list[int] = LENGTHS) -> list[str]:
    """Documents that can be identified by their first letter and their length."""
    return [letter * length for length in lengths]


def prepared(folder: Path, letter: str = "a", lengths: list[int] = LENGTHS, **options) -> str:
    """A folder of shards of lettered_texts(), three rows to a shard."""
    source = folder / f"{letter}.jsonl"
    write_rows(source, [{"text": text} for text in lettered_texts(letter, lengths)])
    recipe = Recipe(str(source), **{"shard_rows": 3, **options})
    prepare(recipe, str(folder / letter))
    return str(folder / letter)


def read_shards(folder: str, tokenizer=None) -> list[list[int]]:
    """The tokens of every document in a folder of shards."""
    shards = TokenShards(folder, tokenizer or ByteTokenizer())
    assert shards.lengths().tolist() == [shards.length(i) for i in range(len(shards))]
    return [shards[i].tokens.tolist() for i in range(len(shards))]


def make_loader(
    source: list[str], tokenizer=None, seq_len=16, seed=3, batch_size=1, **options
) -> PackedLoader:
    """A loader of texts; `options` are those of [data] and of PackedLoader."""
    tokenizer = tokenizer or ByteTokenizer()
    of_data = {item.name for item in dataclasses.fields(Data)} & options.keys()
    data = Data(**{name: options.pop(name) for name in of_data})
    stream = WalkedStream(TokenizedTexts(source, tokenizer), tokenizer, data, seq_len, seed)
    return PackedLoader([stream], [1.0], batch_size, 0, 1, **options)


def open_loader(
    data: Data, seq_len: int = 16, dp_rank: int = 0, dp_size: int = 1, batch_size: int = 1
) -> PackedLoader:
    """build_loader() with a seed and small sizes."""
    return build_loader(data, seq_len, batch_size, 3, dp_rank, dp_size)


def loaders(
    data: Data, ranks: int = 1, batch_size: int = 1, seq_len: int = 16
) -> list[PackedLoader]:
    return [open_loader(data, seq_len, rank, ranks, batch_size) for rank in range(ranks)]


def rows(batch: Batch) -> Iterator[tuple]:
    """Each sequence of a batch as a value that can be compared with ==."""
    fields = (batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist(), batch.lengths)
    return zip(*fields, strict=True)


def global_stream(ranks: list[PackedLoader], batches: int) -> list[tuple]:
    """The global stream that the ranks together hand out."""
    sequences = []
    for _ in range(batches):
        for rank in ranks:
            sequences.extend(rows(next(rank)))
    return sequences


def check_resume(data: Data, consumed: int, seq_len: int = 16) -> None:
    """After `consumed` batches on two ranks, other ranks and batch sizes continue the stream."""
    saved = loaders(data, 2, 1, seq_len)
    start = global_stream(saved, consumed)
    state = json.loads(json.dumps(saved[0].state_dict()))
    assert state == saved[1].state_dict() and state["sequence"] == 2 * consumed
    for dp_size, batch_size in ((1, 1), (3, 2)):
        ranks = loaders(data, dp_size, batch_size, seq_len)
        for rank in ranks:
            rank.load_state_dict(state)
        resumed = global_stream(ranks, 5)
        (alone,) = loaders(data, seq_len=seq_len)
        assert start + resumed == global_stream([alone], len(start) + len(resumed))
        assert {counters(rank) for rank in ranks} == {counters(alone)}
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)


def counters(loader: PackedLoader) -> tuple[int, int]:
    cursor = loader.streams[0].cursor
    return cursor.epoch, cursor.documents_seen


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
    """A folder with the template and a small tokenizer, which splits words as Llama 3's and puts
    <|begin_of_text|> first. If it `trims`, transformers finds no mask of an answer that begins with
    a blank. special: more special tokens."""
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
