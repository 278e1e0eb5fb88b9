"""The texts that patterns are compared on: two of each kind, from what any machine has.

* code: files of the standard library.
* prose: topics of Python's language reference, as pydoc ships them, from both ends of the list.
* chat: chats.jsonl as one long session in the model's chat format, 22 chats of four questions each.
  Questions were written by hand, answers sampled from SmolLM2-135M-Instruct (Apache-2.0), cut at
  288 tokens and often wrong. The second text begins with the second half.
"""

import json
import pydoc_data.topics
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_sparse.data.tokenizer import Tokenizer

KINDS = ("code", "prose", "chat")
TEXTS_OF_KIND = 2
_CODE = ("argparse.py", "tarfile.py")
_CHATS = Path(__file__).with_name("chats.jsonl")
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message of the model's chat template."""


class Text(NamedTuple):
    kind: str
    source: str
    content: str

    def tokens(self, tokenizer: Tokenizer, count: int) -> Tensor:
        """Its first tokens, int64 [1, count]. ValueError if it has fewer."""
        # No more characters than tokens need: three or four make one.
        ids = tokenizer.encode(self.content[: 16 * count])
        if len(ids) < count:
            raise ValueError(
                f"{self.kind} ({self.source}) has {len(ids)} tokens; "
                f"write --lengths up to that, not {count}"
            )
        first = ids[:count].astype(np.int64)
        return torch.from_numpy(first)[None]


def text_of(kind: str, number: int) -> Text:
    """The text of this kind, number 0 or 1."""
    if kind == "code":
        return Text(kind, _CODE[number], standard_library_text(_CODE[number]))
    if kind == "prose":
        topics = pydoc_data.topics.topics
        names = sorted(topics, reverse=number == 1)
        return Text(kind, "pydoc_data.topics", "\n\n".join(topics[name] for name in names))
    return Text(kind, _CHATS.name, _chat(number))


def standard_library_text(name: str) -> str:
    """A file of this Python's standard library: text that any machine has."""
    return Path(sysconfig.get_path("stdlib"), name).read_text(encoding="utf-8")


def _chat(number: int) -> str:
    """All chats as one session; number 1 begins in the middle."""
    lines = _CHATS.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line) for line in lines]
    begin = number * len(chats) // TEXTS_OF_KIND
    messages = [{"role": "system", "content": _SYSTEM}]
    ordered = chats[begin:] + chats[:begin]
    for chat in ordered:
        messages += chat
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text
