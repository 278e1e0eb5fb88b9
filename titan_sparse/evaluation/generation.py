"""Text from a model: greedy, or drawn. The prompt by the model's own attention, then with a cache.

The ranks of a context-parallel group write the same tokens; cache.py says who keeps which keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from titan_sparse.attention import ContextParallel
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.evaluation.cache import Places, cached
from titan_sparse.evaluation.scorer import Batch, Scorer, Sequence
from titan_sparse.loss import answer_logits

Stop = Callable[[NDArray[np.int64]], bool]
"""Whether a text ends with the last of these tokens, int64 [n]."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: of the softmax; 0 takes the most likely token. top_p: only the most likely tokens
    that together reach this probability. seed: the same on all ranks of a group.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature = {self.temperature} is negative; write 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p = {self.top_p} is not in (0, 1]. Write 1 to draw from all tokens"
            )


def generate(
    scorer: Scorer,
    prompts: list[NDArray[np.int64]],
    new_tokens: int,
    stop: Stop | None = None,
    sampling: Sampling | None = None,
) -> list[NDArray[np.int64]]:
    """What the model writes after each prompt: up to `new_tokens` tokens, int64 [n] each.

    prompts: int64 [n] each, of any lengths above 0; they go through the model together. stop: ends
    a text, with its last token. Greedy without `sampling`.

    Collective over the world: each data-parallel rank brings prompts of its own, the ranks of a
    context-parallel group the same ones. Raises ValueError for an empty prompt, or none.
    """
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("there is nothing to go on from; write a prompt of one token or more")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=scorer.device)
    batch = scorer.batch([_asked(prompt) for prompt in prompts], int(lengths.max()))
    places = Places(batch, lengths, new_tokens, scorer.cp)
    choice = _Choice(sampling or Sampling(), scorer.cp)
    texts: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    with cached(scorer, places):
        logits = _whole(scorer.run(batch, answer_logits), batch, scorer.cp)
        for number in range(new_tokens):
            tokens = choice.next(logits)
            for row, token in enumerate(tokens.tolist()):
                if not is_done[row]:
                    texts[row].append(token)
                    is_done[row] = stop is not None and stop(np.array(texts[row]))
            if number + 1 == new_tokens or _everywhere(all(is_done), scorer):
                break
            column = tokens[:, None]
            # All labels count.
            following = Batch(column, labels=column, positions=places.next(), masks=None)
            logits = scorer.run(following, answer_logits)
    return [np.array(text, dtype=np.int64) for text in texts]


def _asked(prompt: NDArray[np.int64]) -> Sequence:
    """A prompt with one label, any but -100, where the next token is wanted."""
    labels = np.full(len(prompt), IGNORED_LABEL)
    labels[-1] = prompt[-1]
    return Sequence(prompt, labels)


def _whole(logits: Tensor, batch: Batch, cp: ContextParallel) -> Tensor:
    """The prompts' last logits [B, V] on every rank, from those that this rank has."""
    rows = (batch.labels != IGNORED_LABEL).nonzero()[:, 0]
    whole = logits.new_zeros(len(batch.labels), logits.shape[1])
    whole[rows] = logits
    return cp.all_reduce(whole)


def _everywhere(is_done: bool, scorer: Scorer) -> bool:
    """Whether all data-parallel ranks are done: until then all take part in the forwards."""
    if scorer.dp_size == 1:
        return is_done
    waiting = torch.tensor([not is_done], dtype=torch.int32, device=scorer.device)
    dist.all_reduce(waiting)
    return waiting.item() == 0


class _Choice:
    """Draws the same tokens on all ranks of `cp`."""

    def __init__(self, sampling: Sampling, cp: ContextParallel) -> None:
        self.sampling = sampling
        self.cp = cp
        # On the CPU, so that numbers do not depend on the device.
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def next(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> int64 [B]."""
        if self.sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = self._drawn(logits)
        # A rank whose sums were rounded otherwise would go its own way, unseen.
        return self.cp.all_gather(tokens)[0]

    def _drawn(self, logits: Tensor) -> Tensor:
        shares = (logits.double() / self.sampling.temperature).softmax(-1)
        shares, tokens = shares.sort(dim=-1, descending=True)
        before = shares.cumsum(-1) - shares
        # The most likely token stays in any case.
        shares = shares.masked_fill(before >= self.sampling.top_p, 0)
        up_to = shares.cumsum(-1)
        drawn = torch.rand(len(logits), 1, dtype=torch.float64, generator=self.generator)
        # The first token whose cumulated share is beyond what was drawn: right=True.
        place = torch.searchsorted(up_to, drawn.to(up_to.device) * up_to[:, -1:], right=True)
        last = (shares > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(1, place.minimum(last))[:, 0]
