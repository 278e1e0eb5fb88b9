"""The texts that are looked at: two of each kind, from what any machine has.

* code: files of the standard library.
* prose: topics of Python's language reference, as pydoc ships them, from both ends of the list.
* chat: data/chats.jsonl as one long session in the model's chat format. Questions were written by
  hand, answers by the model itself (write_chats.py). The second text begins with the second half.
"""

import hashlib
import json
import pydoc_data.topics
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scripts.study.real_model import standard_library_text
from titan_sparse.data.tokenizer import Tokenizer

CODE = ("argparse.py", "tarfile.py")
CHATS = Path(__file__).parent / "data" / "chats.jsonl"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message of the model's chat template."""
Chat = list[dict[str, str]]
"""Messages, as chat templates take them: role and content."""
KINDS = ("code", "prose", "chat")
TEXTS_OF_KIND = 2


class Text(NamedTuple):
    """A text and where it is from. number: among those of its kind."""

    kind: str
    number: int
    source: str
    content: str

    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    def tokens(self, tokenizer: Tokenizer, count: int) -> Tensor:
        """Its first tokens, int64 [1, count]. ValueError if it has fewer."""
        # No more characters than tokens need: three or four make one.
        ids = tokenizer.encode(self.content[: 16 * count])
        if len(ids) < count:
            raise ValueError(
                f"{self.kind} {self.number} ({self.source}) has {len(ids)} tokens; "
                f"write --lengths up to that, not {count}"
            )
        return torch.from_numpy(ids[:count].astype(np.int64))[None]


def text_of(kind: str, number: int) -> Text:
    """The text of this kind, number 0 or 1."""
    if kind == "code":
        return Text(kind, number, CODE[number], standard_library_text(CODE[number]))
    if kind == "prose":
        return Text(kind, number, "pydoc_data.topics", _prose(number))
    return Text(kind, number, CHATS.name, _chat(number))


def _prose(number: int) -> str:
    """All topics, in the order of their names, or in the reverse order."""
    topics = pydoc_data.topics.topics
    names = sorted(topics, reverse=number == 1)
    return "\n\n".join(topics[name] for name in names)


def _chat(number: int) -> str:
    """All chats as one session; number 1 begins in the middle."""
    chats = read_chats()
    begin = number * len(chats) // TEXTS_OF_KIND
    messages = [{"role": "system", "content": SYSTEM}]
    for chat in chats[begin:] + chats[:begin]:
        messages += chat
    return "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )


def read_chats() -> list[Chat]:
    """What the file holds, a chat a line."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
