"""The quality of the real model with a pattern in all of its layers: its loss, and needles it
finds.

Recall on dense queries and keys says little about that: what a layer loses changes the queries and
keys of those above it, and a key of little mass may be the one that was asked for.

Texts are two of each kind, from what any machine has:

* code: files of the standard library.
* prose: topics of Python's language reference, as pydoc ships them, from both ends of the list.
* chat: chats.jsonl as one long session in the model's chat format, 22 chats of four questions each.
  Questions were written by hand, answers sampled from SmolLM2-135M-Instruct (Apache-2.0), cut at
  288 tokens and often wrong. The second text begins with the second half.
"""

import dataclasses
import functools
import json
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.study.real_model import (
    dense_attention,
    load_decoder,
    positions_of,
    standard_library_text,
)
from titan_sparse.attention.attend import Auxiliary, attend
from titan_sparse.attention.masks.ranges import Causal, MaskRanges
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, Pattern
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.evaluation.needle import needle_samples
from titan_sparse.loss import IGNORE_INDEX, answer_scores, linear_cross_entropy
from titan_sparse.models.decoder import Attend, inverse_frequencies
from titan_sparse.models.huggingface_config import read_config

BLOCK = 128
"""Tokens of a block."""
KINDS = ("code", "prose", "chat")
TEXTS_OF_KIND = 2
_CODE = ("argparse.py", "tarfile.py")
_CHATS = Path(__file__).with_name("chats.jsonl")
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message of the model's chat template."""
_SEED = 0
"""Of the needles' keys and numbers, and of where their text begins."""


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


class RealModel:
    """The model in a folder of scripts.study.real_model, in fp32, with any attention.

    dtype: of the queries and keys that attention is given.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.config = read_config(str(folder))
        self.device = device
        self.dtype = dtype
        self.attend: Attend = dense_attention
        self.decoder = load_decoder(folder, self._attend).to(device)

    @torch.no_grad()
    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        attend: Attend,
        loss: Callable[..., Any] = linear_cross_entropy,
    ) -> Any:
        """The result of `loss` of titan_sparse.loss, with `attend` in every layer.

        tokens, labels: int64 [B, S], labels already shifted. YaRN by as much as S is longer than
        what the model was trained at.
        """
        rope = self.config.rope
        trained = self.config.max_positions
        if tokens.shape[1] > trained:
            factor = tokens.shape[1] / trained
            rope = dataclasses.replace(rope, scaling="yarn", factor=factor, original_length=trained)
        frequencies = inverse_frequencies(rope, self.config.head_dim)
        self.decoder.inv_freq, self.decoder.attention_factor = frequencies
        self.attend = attend
        return self.decoder(
            tokens.to(self.device),
            positions_of(tokens).expand_as(tokens).to(self.device),
            None,
            labels=labels.to(self.device),
            loss=loss,
        )

    def queries_and_keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and keys of dense attention in each layer, after RoPE. tokens: int64 [1, S].

        q [layers, Hq, S, D], k [layers, Hkv, S, D].
        """
        seen: list[tuple[Tensor, Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
            seen.append((q.to(self.dtype), k.to(self.dtype)))
            return dense_attention(q, k, v, mask)

        self.run(tokens, next_tokens(tokens), attend)
        q, k = zip(*seen, strict=True)
        return torch.cat(q), torch.cat(k)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return self.attend(q, k, v, mask)


def next_tokens(tokens: Tensor) -> Tensor:
    """Labels of tokens [B, S]; the last token has none."""
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)


class Needles(NamedTuple):
    """Prompts with their answers. tokens: int64 [N, S]. labels: int64 [N, S], of answers alone."""

    tokens: Tensor
    labels: Tensor


def hide_needles(text: Text, tokenizer: Tokenizer, length: int, count: int) -> Needles | None:
    """`count` prompts of `length` tokens out of this text, each needle at its own depth.

    None for count = 0. Raises ValueError if a needle and its question do not fit.
    """
    if count == 0:
        return None
    # No more characters than tokens need: three or four make one.
    document = TokenizedTexts([text.content[: 16 * length]], tokenizer)
    # In the middle of as many equal parts of the text.
    depths = [(number + 0.5) / count for number in range(count)]
    samples = needle_samples(document, [length], depths, 1, _SEED)
    pairs = zip(*(sample.sequence() for sample in samples), strict=True)
    tokens, labels = (torch.from_numpy(np.stack(rows)) for rows in pairs)
    return Needles(tokens, labels)


def quality(
    model: RealModel, tokens: Tensor, needles: Needles | None, pattern: Pattern
) -> dict[str, float]:
    """The quality of the model with this pattern in all of its layers. tokens: int64 [1, S].

    loss: mean cross entropy over the text, nats a token. density, recall: of that forward, means of
    all heads and layers, recall of all rows. needles: share of the answers' tokens that are the
    most likely, each after the right ones before it; needle_loss: their mean cross entropy. The
    last two are left out where `needles` is None.
    """
    kept: list[list[float]] = []

    def attend_and_weigh(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        _, dense = attend_by(Dense(), q, k, v, model.dtype)
        out, *recall_and_density = attend_and_compare(pattern, dense.lse, q, k, v, model.dtype)
        kept.append(recall_and_density)
        return out

    def attend_alone(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return attend_by(pattern, q, k, v, model.dtype)[0]

    loss = model.run(tokens, next_tokens(tokens), attend_and_weigh)
    recall, density = np.mean(kept, axis=0).tolist()
    measured = {"loss": loss.item() / (tokens.shape[1] - 1), "density": density, "recall": recall}
    if needles is not None:
        losses, predicted = model.run(*needles, attend_alone, answer_scores)
        answers = needles.labels[needles.labels != IGNORE_INDEX]
        is_right = predicted.cpu() == answers
        measured["needles"] = is_right.double().mean().item()
        measured["needle_loss"] = losses.mean().item()
    return {name: round(value, 5) for name, value in measured.items()}


def attend_and_compare(
    pattern: Pattern, dense_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
) -> tuple[Tensor, float, float]:
    """out, and means over heads of recall, of all rows, and of density."""
    with recording() as seen:
        out, found = attend_by(pattern, q, k, v, dtype)
    # Both normalizers sum exp(scores), one of them over what was selected.
    recall = (found.lse - dense_lse).double().exp().mean()
    return out, recall.item(), seen.density().mean().item()


@functools.lru_cache(maxsize=1)
def causal_mask(seq_len: int, device: torch.device) -> MaskRanges:
    """One for all calls, so that what selection derives from it is derived once."""
    return Causal().rows(seq_len, device)


def attend_by(
    pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Auxiliary]:
    """attend() in `dtype`, causal; out has the dtype of q."""
    result: Any = attend(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        causal_mask(q.shape[2], q.device),
        pattern,
        # Flex, which may be faster, would compile for every length.
        backend="triton" if q.is_cuda else "eager",
        block_size=BLOCK,
        return_aux=True,
    )
    out, found = result
    return out.to(q.dtype), found
