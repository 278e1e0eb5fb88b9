"""Greedy decoding with a KV cache.

The prompt is read with the model's own attention, dense or sparse; each new token densely.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.config import Attention as AttentionSection
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.loss import answer_scores
from titan_sparse.models.decoder import Attend, Attention, Decoder
from titan_sparse.models.transformers_config import TransformersConfig


class _CachedAttend:
    """One layer's attention. Keeps keys and values, and answers a single query by all that are kept.

    prompt, capacity: tokens of the prompt, and of prompt and generated text together.
    """

    def __init__(
        self, attend: Attend, prompt: int, capacity: int, section: AttentionSection
    ) -> None:
        self.attend = attend
        self.prompt = prompt
        self.capacity = capacity
        self.window = section.sliding_window
        self.sinks = section.window_sinks
        self.length = 0
        # [2, B, Hkv, capacity, D], keys and values
        self.kv: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        # q [B, Hq, S, D]; k and v [B, Hkv, S, D]: the prompt, padded, and later one token.
        if self.kv is None:
            self.kv = k.new_empty(2, *k.shape[:2], self.capacity, k.shape[-1])
            self._append(k[:, :, : self.prompt], v[:, :, : self.prompt])  # what follows is padding
            return self.attend(q, k, v, mask)
        self._append(k, v)
        keys, values = self._seen()
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def _seen(self) -> Tensor:
        """Keys and values that the last token sees, [2, B, Hkv, n, D].

        Which, attention.sliding_window and window_sinks say.
        """
        first = max(0, self.length - self.window) if self.window else 0
        seen = self.kv[:, :, :, first : self.length]
        sinks = min(self.sinks, first)
        if not sinks:
            return seen
        return torch.cat([self.kv[:, :, :, :sinks], seen], dim=3)

    def _append(self, k: Tensor, v: Tensor) -> None:
        stop = self.length + k.shape[2]
        self.kv[0, :, :, self.length : stop] = k
        self.kv[1, :, :, self.length : stop] = v
        self.length = stop


@contextlib.contextmanager
def _cached(
    model: Decoder, prompt: int, capacity: int, section: AttentionSection
) -> Iterator[None]:
    """Inside, the model's attention goes through a _CachedAttend in each layer."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    plain = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = _CachedAttend(layer.attend, prompt, capacity, section)
    try:
        yield
    finally:
        for layer, attend in zip(layers, plain, strict=True):
            layer.attend = attend


@torch.no_grad()
def greedy(scorer: Scorer, prompt: NDArray[np.int64], new_tokens: int) -> NDArray[np.int64]:
    """The most likely tokens after `prompt`, one at a time: int64 [new_tokens].

    Always that many, so that all ranks do the same number of forwards. prompt: int64 [n]. Collective
    over the world; each data-parallel rank brings its own prompt.

    Raises ValueError for several context-parallel ranks, and for models of transformers.
    """
    if isinstance(scorer.model_config, TransformersConfig):
        raise ValueError(
            f"generation is not there for a {scorer.model_config.model_type}, which runs through "
            "transformers' own code; write --answers forced"
        )
    if scorer.cp.size > 1:
        raise ValueError(
            f"generation needs parallelism.cp = 1, not {scorer.cp.size}; write --answers forced"
        )
    count = len(prompt)
    with _cached(scorer.model, count, count + new_tokens, scorer.attention):
        labels = np.full(count, IGNORED_LABEL)
        labels[-1] = prompt[-1]  # any token: says where the next one is wanted
        _, token = scorer.answer(Sequence(prompt, labels), count)
        generated = [token]
        for position in range(count, count + new_tokens - 1):
            # [1, 1]
            positions = torch.tensor([[position]], device=scorer.device)
            _, token = scorer.model(
                token[None], positions, None, token[None], scorer.chunk_tokens, 0.0, answer_scores
            )
            generated.append(token)
    return torch.cat(generated).cpu().numpy()
