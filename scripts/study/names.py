"""The loss of names in code, by how far back the model saw them last.

A name that it saw long ago, such as one that another file defines, is what only a long context can
say. Names are those of several words, as fetch_gguf or RealModel: single words may also be guessed.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from titan_sparse.data.tokenizer import Tokenizer
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.loss import IGNORE_INDEX

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_SEVERAL_WORDS = re.compile(r"[A-Za-z0-9]_[A-Za-z]|[a-z][A-Z]")
NEW, NEAR, MIDDLE, FAR = range(4)
DISTANCES = ("new", "near", "middle", "far")


def name_losses(scorer: Scorer, windows: list[Sequence], length: int, far: int) -> dict[str, Any]:
    """For each of DISTANCES: tokens of such names, how many names they are, and their mean loss.

    new: not seen before in the window. far: last seen more than `far` tokens back. near: at most
    far / 16. Collective, as position_loss().
    """
    totals = torch.zeros(2, len(DISTANCES), dtype=torch.float64, device=scorer.device)
    names = np.zeros(len(DISTANCES), dtype=np.int64)
    for sequence in windows:
        distances = np.full(len(sequence.tokens) + 1, -1)
        for start, stop, distance in distances_of_names(sequence.tokens, scorer.tokenizer, far):
            distances[start:stop] = distance
            names[distance] += 1
        # The label at a position is the token after it.
        labels = np.where(distances[1:] >= 0, sequence.labels, IGNORE_INDEX)
        losses, positions = scorer.token_losses(Sequence(sequence.tokens, labels), length)
        kinds = torch.from_numpy(distances[1:]).to(scorer.device)[positions]
        totals[0].index_add_(0, kinds, losses.double())
        totals[1].index_add_(0, kinds, torch.ones_like(losses, dtype=torch.float64))
    scorer.release()
    found = {}
    for name, count, total, tokens in zip(DISTANCES, names.tolist(), *totals.tolist(), strict=True):
        loss = total / tokens if tokens else None
        found[name] = {"names": count, "tokens": int(tokens), "loss": loss}
    return {"far": far, "windows": len(windows), "distances": found}


def distances_of_names(
    tokens: NDArray[np.int64], tokenizer: Tokenizer, far: int
) -> Iterator[tuple[int, int, int]]:
    """The tokens [start, stop) of each name of several words, and NEW, NEAR, MIDDLE or FAR."""
    ids, places = np.unique(tokens, return_inverse=True)
    spelled = [tokenizer.spell([token]) for token in ids]
    pieces = [spelled[place] for place in places]
    # Where each token's letters end in the text.
    ends = np.cumsum([len(piece) for piece in pieces])
    last_seen: dict[str, int] = {}
    for match in _NAME.finditer("".join(pieces)):
        name = match.group()
        if not _OF_SEVERAL_WORDS.search(name):
            continue
        start = int(np.searchsorted(ends, match.start(), side="right"))
        stop = int(np.searchsorted(ends, match.end() - 1, side="right")) + 1
        distance = NEW
        if name in last_seen:
            back = start - last_seen[name]
            distance = FAR if back > far else NEAR if back <= far // 16 else MIDDLE
        last_seen[name] = start
        yield start, stop, distance
