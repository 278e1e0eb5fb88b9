"""Generate text, with keys and values kept on the ranks of a sequence.

The prompt goes through the model's own attention, dense or sparse, in the run's layout and
schedule. Each rank keeps the keys that it has computed, and the ranks take turns to keep those of
new tokens. A new query attends densely to the keys of all ranks (attention.decode).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.decode import Cached, attend_cached
from titan_sparse.data.chat_template import ChatTemplate
from titan_sparse.data.tokenizer import Tokenizer, begun
from titan_sparse.evaluation.scorer import ScoredBatch, Scorer, Sequence, attention_replaced
from titan_sparse.loss import IGNORE_INDEX, answer_logits
from titan_sparse.models.config import DecoderConfig
from titan_sparse.options.values import check_value

Stop = Callable[[NDArray[np.int64]], bool]
"""True if a text ends with the last of these tokens, int64 [n]."""

_NOWHERE = 2**62
"""The position of what no query sees: padding."""


def generate(
    scorer: Scorer,
    prompts: list[NDArray[np.int64]],
    new_tokens: int,
    stop: Stop | None = None,
) -> list[NDArray[np.int64]]:
    """The most likely text after each prompt, int64 [n]: up to `new_tokens` tokens, int64 [n] each.

    Collective and with the errors of stream().
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for column in stream(scorer, prompts, new_tokens, stop):
        for text, token in zip(texts, column):
            if token is not None:
                text.append(token)
    return [np.array(text, dtype=np.int64) for text in texts]


def stream(
    scorer: Scorer,
    prompts: list[NDArray[np.int64]],
    new_tokens: int,
    stop: Stop | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """The next token of each prompt, int64 [n], up to `new_tokens` times; None for a text that has
    ended.

    temperature: 0 takes the most likely token. Otherwise logits are divided by it, and a token is
    drawn with `seed`. Collective over the world: each data-parallel rank brings prompts of its own,
    and the ranks of a context-parallel group bring the same ones. Raises ValueError for an empty
    prompt, or none.
    """
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("a prompt is empty or missing; write a prompt of one token or more")
    refuse_linear_layers(scorer.model_config)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=scorer.device)
    asked = []
    for prompt in prompts:
        # One label, any but -100, where the next token is wanted.
        labels = np.full(len(prompt), IGNORE_INDEX)
        labels[-1] = prompt[-1]
        asked.append(Sequence(prompt, labels))
    batch = scorer.batch(asked, int(lengths.max()))
    places = _Places(
        prompt=batch.positions.masked_fill(batch.positions >= lengths[:, None], _NOWHERE),
        lengths=lengths,
        cp=scorer.cp,
    )
    generator = torch.Generator(scorer.device).manual_seed(seed)
    texts: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    with attention_replaced(scorer.model, _cached_attention(scorer, places)):
        # [B, V]: each rank has the last logits of some prompts.
        own = scorer.run(batch, answer_logits)
        logits = own.new_zeros(len(prompts), own.shape[1])
        logits[(batch.labels != IGNORE_INDEX).nonzero()[:, 0]] = own
        logits = scorer.cp.all_reduce(logits)
        for number in range(new_tokens):
            # Ranks may round their sums differently. Their texts would then
            # diverge without a notice.
            tokens = scorer.cp.all_gather(_choose(logits, temperature, generator))[0]
            column = [None if done else token for token, done in zip(tokens.tolist(), is_done)]
            yield column
            for row, token in enumerate(column):
                if token is not None:
                    texts[row].append(token)
                    is_done[row] = stop is not None and stop(np.array(texts[row]))
            # All data-parallel ranks take part in the forwards until the last one is done.
            waiting = torch.tensor([not all(is_done)], dtype=torch.int32, device=scorer.device)
            dist.all_reduce(waiting)
            if number + 1 == new_tokens or not waiting.item():
                break
            places.number = number
            following = tokens[:, None]
            # All labels count.
            of_tokens = ScoredBatch(following, following, places.query()[:, None], masks=None)
            logits = scorer.run(of_tokens, answer_logits)


def refuse_linear_layers(model: DecoderConfig) -> None:
    """Raises ValueError for a model whose states are not kept between tokens."""
    if model.linear_layers:
        raise ValueError(
            "text cannot be generated here with linear attention, whose states are not kept; export "
            "the model, and write it with transformers"
        )


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """The next tokens, int64 [B], from logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    shares = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0]


def _cached_attention(
    scorer: Scorer, places: "_Places"
) -> Callable[[int, Callable[..., Tensor]], "_CachedAttend"]:
    """The function that attention_replaced() puts in place of each layer's attention."""
    windows = scorer.model_config.windows
    section = scorer.attention

    def replace(layer: int, attend: Callable[..., Tensor]) -> _CachedAttend:
        # 0: the layer has none.
        window = windows[layer] if windows else 0
        return _CachedAttend(attend, places, window, section.sliding_window, section.window_sinks)

    return replace


def encode_prompt(
    text: str, tokenizer: Tokenizer, template: ChatTemplate | None, add_bos: bool
) -> NDArray[np.int64]:
    """The tokens of a text to continue, or with a template those of a user's message to answer.

    add_bos: data.add_bos. A template writes such tokens itself. Raises ValueError for a text
    without tokens or not of UTF-8, and a message that the template refuses.
    """
    check_value("PROMPT", str, text)
    if template is not None:
        message = {"role": "user", "content": text}
        text, _ = template.render([message], [], add_generation_prompt=True)
    tokens = tokenizer.encode(text).astype(np.int64)
    if len(tokens) == 0:
        raise ValueError("the prompt has no tokens; write some text")
    if template is None and add_bos:
        tokens = begun(tokens, tokenizer.begin)
    return tokens


def decoded(
    columns: Iterator[list[int | None]], tokenizer: Tokenizer, endings: Collection[int]
) -> Iterator[str]:
    """The text of the first prompt of stream(), as it arrives and without what ends it.

    A letter may have several tokens. It arrives when it is whole.
    """
    tokens: list[int] = []
    shown = ""
    for token, *_ in columns:
        if token is None or token in endings:
            continue
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if text.endswith("\ufffd"):
            continue
        yield text[len(shown) :]
        shown = text
    yield tokenizer.decode(tokens)[len(shown) :]


@dataclass
class _Places:
    """The positions of tokens, for all layers.

    prompt: int64 [B, S_local], positions of the prompt's tokens on this rank. lengths: int64 [B],
    tokens of the prompts. number: how many new tokens come before the one that goes through.
    """

    prompt: Tensor
    lengths: Tensor
    cp: ContextParallel
    number: int = 0

    def query(self) -> Tensor:
        """Positions of the tokens that go through now, int64 [B]."""
        return self.lengths + self.number

    def kept(self) -> Tensor:
        """Positions of the new tokens that this rank keeps, int64 [B, n]."""
        device = self.lengths.device
        numbers = torch.arange(self.cp.rank, self.number + 1, self.cp.size, device=device)
        return self.lengths[:, None] + numbers


@dataclass(eq=False)
class _CachedAttend:
    """One layer's attention: of the prompt by `attend`, and then of one token a sequence, which
    sees the last `window` tokens, and of these the last `run` and the first `sinks`; 0: all."""

    attend: Callable[..., Tensor]
    places: _Places
    window: int
    run: int
    sinks: int
    prompt: tuple[Tensor, Tensor, Tensor] | None = None
    """positions [B, n], keys and values [B, Hkv, n, D] of the prompt"""
    new: Tensor | None = None
    """keys and values of the new tokens that this rank keeps, [2, B, Hkv, n, D]"""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        # q [B, Hq, S_local, D]; k and v [B, Hkv, S_local, D]. Then S_local is 1.
        places = self.places
        if self.prompt is None:
            # Only what new tokens see is kept: windows only move on.
            needed = self._seen(places.prompt).any(0).nonzero()[:, 0]
            self.prompt = (places.prompt[:, needed], k[:, :, needed], v[:, :, needed])
            self.new = k.new_empty(2, *k.shape[:2], 0, k.shape[-1])
            return self.attend(q, k, v, mask, **options)
        if places.number % places.cp.size == places.cp.rank:
            self.new = torch.cat([self.new, torch.stack([k, v])], dim=3)
        positions, keys, values = self.prompt
        cached = [Cached(keys, values, self._seen(positions))]
        if self.new.shape[3]:
            cached.append(Cached(*self.new, self._seen(places.kept())))
        return attend_cached(q, cached, places.cp, **options)

    def _seen(self, positions: Tensor) -> Tensor:
        """bool [B, n], for keys at `positions` [B, n]."""
        query = self.places.query()[:, None]
        seen = positions <= query
        if self.run:
            seen &= (positions > query - self.run) | (positions < self.sinks)
        if self.window:
            seen &= positions > query - self.window
        return seen
