"""Greedy decoding with a KV cache: the prompt by the model's own attention, dense or sparse, each new token densely."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.loss import answer_scores
from titan_sparse.models.decoder import Attend, Attention, Decoder

if TYPE_CHECKING:
    from titan_sparse.config import Attention as AttentionSection


class _CachedAttend:
    """One layer's attention: keeps the prompt's keys and values, and answers a single query by all that are kept."""

    def __init__(
        self, attend: Attend, prompt: int, capacity: int, sliding_window: int, sinks: int
    ) -> None:
        self.attend, self.length, self.capacity, self.window, self.sinks = (
            attend,
            0,
            capacity,
            sliding_window,
            sinks,
        )
        self.prompt, self.kv = prompt, None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.capacity, k.shape[-1])
            self._append(k[:, :, : self.prompt], v[:, :, : self.prompt])  # what follows is padding
            return self.attend(q, k, v, mask)
        self._append(k, v)
        keys, values = self._seen()
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def _seen(self) -> Tensor:
        """Keys and values that the last token sees, as attention.sliding_window and window_sinks have it."""
        first = max(0, self.length - self.window) if self.window else 0
        seen = self.kv[:, :, :, first : self.length]
        sinks = min(self.sinks, first)
        return torch.cat([self.kv[:, :, :, :sinks], seen], dim=3) if sinks else seen

    def _append(self, k: Tensor, v: Tensor) -> None:
        stop = self.length + k.shape[2]
        self.kv[0, :, :, self.length : stop], self.kv[1, :, :, self.length : stop] = k, v
        self.length = stop


@contextlib.contextmanager
def _cached(
    model: Decoder, prompt: int, capacity: int, attention: "AttentionSection"
) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    plain = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = _CachedAttend(
            layer.attend, prompt, capacity, attention.sliding_window, attention.window_sinks
        )
    try:
        yield
    finally:
        for layer, attend in zip(layers, plain, strict=True):
            layer.attend = attend


@torch.no_grad()
def greedy(scorer: Scorer, prompt: NDArray[np.int64], new_tokens: int) -> NDArray[np.int64]:
    """The `new_tokens` most likely tokens after `prompt` int64 [n], int64 [new_tokens]: always that many, so that all ranks
    do the same number of forwards. Collective over the world; each data-parallel rank brings its own prompt.

    Raises ValueError for several context-parallel ranks.
    """
    if scorer.cp.size > 1:
        raise ValueError(
            f"generation needs parallelism.cp = 1, not {scorer.cp.size}; write --answers forced"
        )
    count = len(prompt)
    with _cached(scorer.model, count, count + new_tokens, scorer.attention):
        labels = np.full(count, IGNORED_LABEL)
        labels[-1] = prompt[-1]  # any token: says where the next one is wanted
        token = scorer.answer(Sequence(prompt, labels), count)[1]
        found = [token]
        for position in range(count, count + new_tokens - 1):
            place = torch.tensor([[position]], device=scorer.device)
            token = scorer.model(
                token[None], place, None, token[None], scorer.chunk_tokens, 0.0, answer_scores
            )[1]
            found.append(token)
    return torch.cat(found).cpu().numpy()
