"""Keys and values that are kept while a model generates, spread over the ranks of a sequence.

The prompt goes through the model's own attention, dense or sparse, in the run's layout and schedule.
Each rank keeps the keys that it has computed. The ranks take turns to keep the keys of new tokens. A
new query attends densely to the keys of all ranks (attention.decode).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.attention.decode import Cached, attend_cached
from titan_sparse.evaluation.scorer import Batch, Scorer, attention_replaced

_NOWHERE = 2**62
"""The position of what no query sees: padding."""


class Window(NamedTuple):
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


class Places:
    """Where tokens are, for all layers. `number` counts the new tokens that went through.

    batch: the prompts. lengths: int64 [B], tokens of the prompts. new_tokens: most that follow.
    """

    def __init__(self, batch: Batch, lengths: Tensor, new_tokens: int, cp: ContextParallel) -> None:
        is_padding = batch.positions >= lengths[:, None]
        # int64 [B, S_local], positions of the prompt's tokens on this rank.
        self.prompt = batch.positions.masked_fill(is_padding, _NOWHERE)
        self.lengths = lengths
        self.number = -1
        self.cp = cp
        self.slots = -(-new_tokens // cp.size)

    def next(self) -> Tensor:
        """Positions of the next tokens, int64 [B, 1]."""
        self.number += 1
        return self.query()[:, None]

    def query(self) -> Tensor:
        """Positions of the tokens that go through now, int64 [B]."""
        return self.lengths + self.number

    def own_slot(self) -> int | None:
        """Where this rank keeps what goes through now; None where another rank does."""
        slot, rank = divmod(self.number, self.cp.size)
        return slot if rank == self.cp.rank else None

    def kept(self) -> Tensor:
        """Positions of the new tokens that this rank keeps, int64 [B, n]."""
        count = (self.number - self.cp.rank) // self.cp.size + 1
        slots = torch.arange(count, device=self.lengths.device)
        numbers = slots * self.cp.size + self.cp.rank
        return self.lengths[:, None] + numbers


class _CachedAttend:
    """One layer's attention: of the prompt by `attend`, and then of one token a sequence."""

    def __init__(self, attend: Callable[..., Tensor], places: Places, window: Window) -> None:
        self.attend = attend
        self.places = places
        self.window = window
        # Positions [B, n], keys and values [B, Hkv, n, D] of the prompt.
        self.prompt: tuple[Tensor, Tensor, Tensor] | None = None
        # Keys and values of new tokens, [2, B, Hkv, slots, D].
        self.new: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        # q [B, Hq, S_local, D]; k and v [B, Hkv, S_local, D]. Then S_local is 1.
        if self.prompt is None:
            self.prompt = self._needed(k, v)
            self.new = k.new_empty(2, *k.shape[:2], self.places.slots, k.shape[-1])
            return self.attend(q, k, v, mask, **options)
        slot = self.places.own_slot()
        if slot is not None:
            self.new[0, :, :, slot] = k[:, :, 0]
            self.new[1, :, :, slot] = v[:, :, 0]
        query = self.places.query()
        positions, keys, values = self.prompt
        cached = [Cached(keys, values, self.window.seen(positions, query))]
        kept = self.places.kept()
        if kept.shape[1]:
            new_keys, new_values = self.new[:, :, :, : kept.shape[1]]
            cached.append(Cached(new_keys, new_values, self.window.seen(kept, query)))
        return attend_cached(q, cached, self.places.cp, **options)

    def _needed(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What new tokens see of the prompt: positions, keys and values. Windows only move on."""
        positions = self.places.prompt
        seen = self.window.seen(positions, self.places.lengths)
        needed = seen.any(0).nonzero()[:, 0]
        return positions[:, needed], k[:, :, needed], v[:, :, needed]


def cached(scorer: Scorer, places: Places) -> AbstractContextManager[None]:
    """Inside, the first batch through scorer's model is a prompt, and then each is one token."""
    windows = getattr(scorer.model_config, "windows", None)
    section = scorer.attention

    def replace(layer: int, attend: Callable[..., Tensor]) -> _CachedAttend:
        own = windows[layer] if windows else 0
        window = Window(own, section.sliding_window, section.window_sinks)
        return _CachedAttend(attend, places, window)

    return attention_replaced(scorer.model, replace)
