"""Generate text greedily, with keys and values kept on the ranks of a sequence.

The prompt goes through the model's own attention, dense or sparse, in the run's layout and schedule.
Each rank keeps the keys that it has computed. The ranks take turns to keep the keys of new tokens. A
new query attends densely to the keys of all ranks (attention.decode). The ranks of a context-parallel
group write the same tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.decode import Cached, attend_cached
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.evaluation.scorer import ScoredBatch, Scorer, Sequence, attention_replaced
from titan_sparse.from_config import has_linear_layers
from titan_sparse.loss import answer_logits

Stop = Callable[[NDArray[np.int64]], bool]
"""Whether a text ends with the last of these tokens, int64 [n]."""

_NOWHERE = 2**62
"""The position of what no query sees: padding."""


def generate(
    scorer: Scorer,
    prompts: list[NDArray[np.int64]],
    new_tokens: int,
    stop: Stop | None = None,
) -> list[NDArray[np.int64]]:
    """What the model writes after each prompt: up to `new_tokens` tokens, int64 [n] each.

    prompts: int64 [n] each, of any lengths above 0; they go through the model together. stop: ends
    a text, with its last token.

    Collective over the world: each data-parallel rank brings prompts of its own, and the ranks of a
    context-parallel group bring the same ones. Raises ValueError for an empty prompt, or none.
    """
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("a prompt is empty or missing; write a prompt of one token or more")
    if has_linear_layers(scorer.model_config):
        raise ValueError(
            "text cannot be generated here with linear attention, whose states are not kept; export "
            "the model, and write it with transformers"
        )
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=scorer.device)
    asked = []
    for prompt in prompts:
        # One label, any but -100, where the next token is wanted.
        labels = np.full(len(prompt), IGNORED_LABEL)
        labels[-1] = prompt[-1]
        asked.append(Sequence(prompt, labels))
    batch = scorer.batch(asked, int(lengths.max()))
    places = _Places(batch, lengths, scorer.cp)
    texts: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    with _cached(scorer, places):
        # [B, V]: each rank has the last logits of some prompts.
        own = scorer.run(batch, answer_logits)
        logits = own.new_zeros(len(prompts), own.shape[1])
        logits[(batch.labels != IGNORED_LABEL).nonzero()[:, 0]] = own
        logits = scorer.cp.all_reduce(logits)
        for number in range(new_tokens):
            # Ranks may round their sums differently. Their texts would then diverge without a notice.
            tokens = scorer.cp.all_gather(logits.argmax(-1))[0]
            for row, token in enumerate(tokens.tolist()):
                if not is_done[row]:
                    texts[row].append(token)
                    is_done[row] = stop is not None and stop(np.array(texts[row]))
            if number + 1 == new_tokens or _everywhere(all(is_done), scorer):
                break
            places.number = number
            column = tokens[:, None]
            # All labels count.
            following = ScoredBatch(column, column, places.query()[:, None], masks=None)
            logits = scorer.run(following, answer_logits)
    return [np.array(text, dtype=np.int64) for text in texts]


def _everywhere(is_done: bool, scorer: Scorer) -> bool:
    """Whether all data-parallel ranks are done. Until then all take part in the forwards."""
    if scorer.dp_size == 1:
        return is_done
    waiting = torch.tensor([not is_done], dtype=torch.int32, device=scorer.device)
    dist.all_reduce(waiting)
    return waiting.item() == 0


class _Places:
    """Where tokens are, for all layers. `number` counts the new tokens before the one that goes
    through.

    batch: the prompts. lengths: int64 [B], tokens of the prompts.
    """

    def __init__(self, batch: ScoredBatch, lengths: Tensor, cp: ContextParallel) -> None:
        is_padding = batch.positions >= lengths[:, None]
        # int64 [B, S_local], positions of the prompt's tokens on this rank.
        self.prompt = batch.positions.masked_fill(is_padding, _NOWHERE)
        self.lengths = lengths
        self.number = 0
        self.cp = cp

    def query(self) -> Tensor:
        """Positions of the tokens that go through now, int64 [B]."""
        return self.lengths + self.number

    def kept(self) -> Tensor:
        """Positions of the new tokens that this rank keeps, int64 [B, n]."""
        numbers = torch.arange(self.cp.rank, self.number + 1, self.cp.size)
        return self.lengths[:, None] + numbers.to(self.lengths.device)


class _Window(NamedTuple):
    """What a query sees: `layer` tokens, and of these the last `run` and the first `sinks`; 0: all."""

    layer: int
    run: int
    sinks: int

    def seen(self, positions: Tensor, query: Tensor) -> Tensor:
        """bool [B, n], for keys at `positions` [B, n] and one query a sequence, at `query` [B]."""
        query = query[:, None]
        seen = positions <= query
        if self.run:
            seen &= (positions > query - self.run) | (positions < self.sinks)
        if self.layer:
            seen &= positions > query - self.layer
        return seen


class _CachedAttend:
    """One layer's attention: of the prompt by `attend`, and then of one token a sequence."""

    def __init__(self, attend: Callable[..., Tensor], places: _Places, window: _Window) -> None:
        self.attend = attend
        self.places = places
        self.window = window
        # Positions [B, n], keys and values [B, Hkv, n, D] of the prompt.
        self.prompt: tuple[Tensor, Tensor, Tensor] | None = None
        # Keys and values of the new tokens that this rank keeps, [2, B, Hkv, n, D].
        self.new: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        # q [B, Hq, S_local, D]; k and v [B, Hkv, S_local, D]. Then S_local is 1.
        places = self.places
        if self.prompt is None:
            # Only what new tokens see is kept: windows only move on.
            needed = self.window.seen(places.prompt, places.lengths).any(0).nonzero()[:, 0]
            self.prompt = (places.prompt[:, needed], k[:, :, needed], v[:, :, needed])
            self.new = k.new_empty(2, *k.shape[:2], 0, k.shape[-1])
            return self.attend(q, k, v, mask, **options)
        if places.number % places.cp.size == places.cp.rank:
            self.new = torch.cat([self.new, torch.stack([k, v])], dim=3)
        query = places.query()
        positions, keys, values = self.prompt
        cached = [Cached(keys, values, self.window.seen(positions, query))]
        if self.new.shape[3]:
            cached.append(Cached(*self.new, self.window.seen(places.kept(), query)))
        return attend_cached(q, cached, places.cp, **options)


def _cached(scorer: Scorer, places: _Places) -> AbstractContextManager[None]:
    """Inside, the first batch through scorer's model is a prompt, and then each is one token."""
    windows = getattr(scorer.model_config, "windows", None)
    section = scorer.attention

    def replace(layer: int, attend: Callable[..., Tensor]) -> _CachedAttend:
        own = windows[layer] if windows else 0
        window = _Window(own, section.sliding_window, section.window_sinks)
        return _CachedAttend(attend, places, window)

    return attention_replaced(scorer.model, replace)
