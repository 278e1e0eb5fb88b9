"""Generate text, greedily or by drawing tokens.

The prompt goes through the model's own attention, and new tokens through a cache (cache.py). The ranks
of a context-parallel group write the same tokens.
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

    Collective over the world: each data-parallel rank brings prompts of its own, and the ranks of a
    context-parallel group bring the same ones. Raises ValueError for an empty prompt, or none.
    """
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("a prompt is empty or missing; write a prompt of one token or more")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=scorer.device)
    asked = []
    for prompt in prompts:
        # One label, any but -100, where the next token is wanted.
        labels = np.full(len(prompt), IGNORED_LABEL)
        labels[-1] = prompt[-1]
        asked.append(Sequence(prompt, labels))
    batch = scorer.batch(asked, int(lengths.max()))
    places = Places(batch, lengths, new_tokens, scorer.cp)
    choose = TokenChoice(sampling or Sampling(), scorer.cp)
    texts: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    with cached(scorer, places):
        # [B, V]: each rank has the last logits of some prompts.
        own = scorer.run(batch, answer_logits)
        logits = own.new_zeros(len(prompts), own.shape[1])
        logits[(batch.labels != IGNORED_LABEL).nonzero()[:, 0]] = own
        logits = scorer.cp.all_reduce(logits)
        for number in range(new_tokens):
            tokens = choose(logits)
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


def _everywhere(is_done: bool, scorer: Scorer) -> bool:
    """Whether all data-parallel ranks are done. Until then all take part in the forwards."""
    if scorer.dp_size == 1:
        return is_done
    waiting = torch.tensor([not is_done], dtype=torch.int32, device=scorer.device)
    dist.all_reduce(waiting)
    return waiting.item() == 0


class TokenChoice:
    """Chooses the same tokens on all ranks of `cp`."""

    def __init__(self, sampling: Sampling, cp: ContextParallel) -> None:
        self.sampling = sampling
        self.cp = cp
        # On the CPU, so that numbers do not depend on the device.
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> int64 [B]."""
        if self.sampling.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = self._drawn(logits)
        # Ranks may round their sums differently. Their texts would then diverge without a notice.
        return self.cp.all_gather(tokens)[0]

    def _drawn(self, logits: Tensor) -> Tensor:
        shares = (logits.double() / self.sampling.temperature).softmax(-1)
        shares, tokens = shares.sort(dim=-1, descending=True)
        before = shares.cumsum(-1) - shares
        # The most likely token always stays.
        shares = shares.masked_fill(before >= self.sampling.top_p, 0)
        up_to = shares.cumsum(-1)
        drawn = torch.rand(len(logits), 1, dtype=torch.float64, generator=self.generator)
        # The first token whose cumulated share is beyond what was drawn: right=True.
        place = torch.searchsorted(up_to, drawn.to(up_to.device) * up_to[:, -1:], right=True)
        last = (shares > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(1, place.minimum(last))[:, 0]
