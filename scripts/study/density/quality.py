"""What the model itself says with a pattern in all of its layers: its loss, and needles it finds.

Recall on dense queries and keys tells little of that: what a layer loses changes the queries and
keys of those above it, and a key of little mass may be the one that was asked for.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scripts.study.density.inputs import RealModel, next_tokens
from scripts.study.density.mass import BLOCK, causal_mask, density
from scripts.study.density.patterns import Spec
from scripts.study.density.texts import Text
from titan_sparse.attention.attend import Auxiliary, attend
from titan_sparse.attention.patterns import Dense, Pattern
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.needle import needle_samples
from titan_sparse.loss import answer_scores

_SEED = 0
"""Of the needles' keys and numbers, and of where their text begins."""


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
    samples = needle_samples(Haystack(document, tokenizer), [length], depths, 1, _SEED)
    tokens = np.stack([np.concatenate([sample.prompt, sample.answer]) for sample in samples])
    labels = np.full_like(tokens, IGNORED_LABEL)
    for row, sample in zip(labels, samples):
        # The last token of the prompt says the first one of the answer.
        row[len(sample.prompt) - 1 : -1] = sample.answer
    return Needles(torch.from_numpy(tokens), torch.from_numpy(labels))


def measure_quality(
    model: RealModel, tokens: Tensor, needles: Needles | None, specs: Iterable[Spec]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """quality() of dense attention, and of each pattern at each value, as measure() orders rows.

    tokens: int64 [1, S]. Those of patterns also have "above_dense", their loss less that of dense
    attention.
    """
    dense = quality(model, tokens, needles, Dense())
    of_settings = []
    for spec in specs:
        for value in spec.values:
            found = quality(model, tokens, needles, spec.pattern(value))
            found["above_dense"] = round(found["loss"] - dense["loss"], 5)
            of_settings.append(found)
    return dense, of_settings


def quality(
    model: RealModel, tokens: Tensor, needles: Needles | None, pattern: Pattern
) -> dict[str, float]:
    """What the model says with this pattern in all of its layers. tokens: int64 [1, S].

    loss: mean cross entropy over the text, nats a token. density, recall: of that forward, means of
    all heads and layers, recall of all rows. needles: share of the answers' tokens that are the
    most likely, each after the right ones before it; needle_loss: their mean cross entropy. The
    last two are left out where `needles` is None.
    """
    kept: list[Tensor] = []

    def attend_and_weigh(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        out, found = attend_by(pattern, q, k, v, model.dtype)
        _, dense = attend_by(Dense(), q, k, v, model.dtype)
        # Both normalizers sum exp(scores), one of them over what was selected.
        recall = (found.lse - dense.lse).double().exp().mean()
        kept.append(torch.stack([density(found.index).mean(), recall]))
        return out

    def attend_alone(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return attend_by(pattern, q, k, v, model.dtype)[0]

    loss = model.run(tokens, next_tokens(tokens), attend_and_weigh)
    # Of [layers, 2]
    mean_density, mean_recall = torch.stack(kept).mean(0).tolist()
    measured = {
        "loss": loss.item() / (tokens.shape[1] - 1),
        "density": mean_density,
        "recall": mean_recall,
    }
    if needles is not None:
        losses, predicted = model.run(*needles, attend_alone, answer_scores)
        answers = needles.labels[needles.labels != IGNORED_LABEL]
        right = predicted.cpu() == answers
        measured["needles"] = right.double().mean().item()
        measured["needle_loss"] = losses.mean().item()
    return {name: round(value, 5) for name, value in measured.items()}


def attend_by(
    pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Auxiliary]:
    """attend() in `dtype`, causal; out has the dtype of q.

    q: [B, Hq, S, D]. k, v: [B, Hkv, S, D].
    """
    # Flex, which may be faster, would compile for every length.
    backend = "triton" if q.is_cuda else "eager"
    result: Any = attend(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        causal_mask(q.shape[2], q.device),
        pattern,
        backend=backend,
        block_size=BLOCK,
        return_aux=True,
    )
    out, found = result
    return out.to(q.dtype), found
