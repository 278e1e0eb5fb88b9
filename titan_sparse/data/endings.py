"""Find the tokens at which a text of a run ends.

Whoever writes text with the model stops at them: `evaluate`, lm-eval, and by the exported
config.json and generation_config.json everyone else. A base model names its end-of-document token
alone. If it then learns chats that end in <|im_end|>, that token must stop it too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_sparse.config.sections import Config, Data
from titan_sparse.config.sources import parts_of
from titan_sparse.data.chats import ChatEncoder
from titan_sparse.data.rows import sample_text
from titan_sparse.data.shards import is_prepared, read_meta
from titan_sparse.data.tokenizer import Encoded, Tokenizer
from titan_sparse.models.huggingface_config import read_object

_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _FUNCTION}
_ASKED = {"role": "user", "content": "a"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
_ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [_ASKED, {"role": "assistant", "content": "b"}]},
    {"messages": [_ASKED, {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
    {"messages": [_ASKED, {"role": "assistant", "content": "b"}] * 2},
    {"messages": [_ASKED, _CALL], "tools": [_TOOL]},
    {"messages": [_ASKED, _CALL, {"role": "tool", "name": "f", "content": "c"}], "tools": [_TOOL]},
)
"""Chats whose answers end in all ways in which a template ends them."""


def text_ends(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Tokens that end a text: those of model.initial_hf, that of the tokenizer, and those that end
    an answer in the chats of data.source.

    Raises ValueError, naming the key, if there are chats but no chat template.
    """
    ends = []
    # Ids of another tokenizer mean something else.
    if tokenizer.folder is not None:
        if not config.data.other_tokenizer:
            ends += declared_ends(config.model.initial_hf)
        ends += declared_ends(str(tokenizer.folder))
    ends.append(tokenizer.end_of_document)
    for data in _chats(config.data):
        ends += _learned_ends(data, tokenizer, config.model.initial_hf)
    return list(dict.fromkeys(ends))


def declared_ends(folder: str) -> list[int]:
    """The tokens that a Hugging Face folder names as ends, as transformers reads it: of
    generation_config.json, and without that file of config.json."""
    for name in ("generation_config.json", "config.json") if folder else ():
        path = Path(folder).expanduser() / name
        if path.is_file():
            ids = read_object(path, folder).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            return [token for token in ids if isinstance(token, int)]
    return []


def _chats(data: Data) -> Iterator[Data]:
    """The recipes of the parts of data.source that hold chats."""
    for part in parts_of(data):
        if is_prepared(part.source):
            meta = read_meta(part.source)
            part.format = meta.get("row_format", "text")
            part.chat_template_kwargs = meta.get("chat_template_kwargs", "")
            part.chat_template = part.source
        if part.format != "text":
            part.loss_on = "assistant"
            yield part


def _learned_ends(data: Data, tokenizer: Tokenizer, model_folder: str) -> set[int]:
    """The special tokens that end what is learned of an answer. A token that also stands within an
    answer, as between its reasoning and its content, does not end it."""
    encoder = ChatEncoder(data, tokenizer, model_folder)
    ends: set[int] = set()
    within: set[int] = set()
    for row in _ROWS:
        try:
            encoded = encoder.encode(sample_text("", row, "messages", "messages"))
        except ValueError:
            # Not every template has tools, or learns two answers.
            continue
        for *earlier, last in _answers(encoded, tokenizer):
            ends.add(last)
            within.update(earlier)
    return (ends - within) & tokenizer.special_ids


def _answers(encoded: Encoded, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each run of learned ones, without the blanks after it."""
    edges = np.flatnonzero(np.diff(encoded.learned, prepend=False, append=False))
    for start, stop in edges.reshape(-1, 2).tolist():
        run = encoded.tokens[start:stop].tolist()
        while run[-1] not in tokenizer.special_ids and not tokenizer.decode(run[-1:]).strip():
            run.pop()
        yield run
