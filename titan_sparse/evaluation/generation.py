"""Generate text greedily, with keys and values kept on the ranks of a sequence.

The prompt goes through the model's own attention, dense or sparse, in the run's layout and schedule.
Each rank keeps the keys that it has computed, and the ranks take turns to keep those of new tokens. A
new query attends densely to the keys of all ranks (attention.decode).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """What the model writes after each prompt, int64 [n]: up to `new_tokens` tokens, int64 [n] each.

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
    places = _Places(
        prompt=batch.positions.masked_fill(batch.positions >= lengths[:, None], _NOWHERE),
        lengths=lengths,
        cp=scorer.cp,
    )

    def replace(layer: int, attend: Callable[..., Tensor]) -> _CachedAttend:
        windows = getattr(scorer.model_config, "windows", None)
        section = scorer.attention
        # 0: the layer has none.
        window = windows[layer] if windows else 0
        return _CachedAttend(attend, places, window, section.sliding_window, section.window_sinks)

    texts: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    with attention_replaced(scorer.model, replace):
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
            # All data-parallel ranks take part in the forwards until the last one is done.
            waiting = torch.tensor([not all(is_done)], dtype=torch.int32, device=scorer.device)
            dist.all_reduce(waiting)
            if number + 1 == new_tokens or not waiting.item():
                break
            places.number = number
            column = tokens[:, None]
            # All labels count.
            following = ScoredBatch(column, column, places.query()[:, None], masks=None)
            logits = scorer.run(following, answer_logits)
    return [np.array(text, dtype=np.int64) for text in texts]


@dataclass
class _Places:
    """Where tokens are, for all layers.

    prompt: int64 [B, S_local], positions of the prompt's tokens on this rank. lengths: int64 [B], tokens
    of the prompts. number: how many new tokens come before the one that goes through.
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
        numbers = torch.arange(self.cp.rank, self.number + 1, self.cp.size)
        return self.lengths[:, None] + numbers.to(self.lengths.device)


@dataclass(eq=False)
class _CachedAttend:
    """One layer's attention: of the prompt by `attend`, and then of one token a sequence, which sees
    the last `window` tokens, and of these the last `run` and the first `sinks`; 0: all."""

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
