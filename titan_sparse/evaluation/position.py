"""Loss and perplexity by position: does the model use context that is far away?

A window slides over each document (Press et al., ALiBi, arXiv 2108.12409, appendix B). Each token
is scored once, in the first window that reaches it. Its position in that window is the length of
its context (Xiong et al., arXiv 2309.16039, figure 1).
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_sparse.data.documents import Documents
from titan_sparse.data.tokenizer import Encoded, check_ids
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.loss import IGNORE_INDEX


def long_documents(documents: Documents, min_length: int) -> Iterator[Encoded]:
    """Each document in the source's order, closed by the end-of-document token.

    Documents with fewer than `min_length` tokens (that token not counted), and empty ones, are
    skipped. Raises ValueError if a token is beyond the vocabulary.
    """
    for index in range(len(documents)):
        if documents.length(index) > max(min_length, 1):
            tokens, learned = documents[index]
            check_ids(tokens, documents.tokenizer)
            yield Encoded(tokens.astype(np.int64), learned)


def windows(documents: Iterable[Encoded], length: int, stride: int) -> Iterator[Sequence]:
    """Windows of up to `length` tokens, `stride` apart, over each document.

    Labels that an earlier window has scored are -100, and so are those of chats that are not
    learned. Raises ValueError for a stride outside [1, length].
    """
    if not 1 <= stride <= length:
        raise ValueError(
            f"a stride of {stride} leaves out or repeats tokens of windows of {length}; write 1 to {length}"
        )
    for document, learned in documents:
        targets = document if learned is None else np.where(learned, document, IGNORE_INDEX)
        scored = 0
        for start in itertools.count(0, stride):
            if scored >= len(document) - 1:
                break
            tokens = document[start : start + length]
            following = targets[start + 1 : start + length + 1]
            labels = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
            labels[scored - start : len(following)] = following[scored - start :]
            scored = start + len(following)
            # A window of a long question has nothing to score.
            if (labels != IGNORE_INDEX).any():
                yield Sequence(tokens, labels)


def first_windows(
    documents: Documents, min_length: int, length: int, stride: int, count: int
) -> list[Sequence]:
    """Up to `count` windows() over documents of at least `min_length` tokens.

    Raises ValueError if no document is that long.
    """
    endless = windows(long_documents(documents, min_length), length, stride)
    first = list(itertools.islice(endless, count))
    if not first:
        raise ValueError(
            f"no document has {min_length} tokens (data.min_document_length), or any at all; write a "
            "smaller length or another source"
        )
    return first


def position_loss(
    scorer: Scorer, sequences: list[Sequence], length: int, buckets: int
) -> dict[str, Any]:
    """Mean cross-entropy (natural log) and perplexity over all labels, and in `buckets` equal
    ranges of positions; None where a range has no label.

    Collective: all ranks bring the same `sequences` of at most `length` tokens. Raises ValueError
    if there are more buckets than tokens.
    """
    if not 1 <= buckets <= length:
        raise ValueError(
            f"{length} positions cannot be cut into {buckets} buckets; write 1 to {length}"
        )
    # [2, buckets]: sums of losses, and how many they are
    totals = torch.zeros(2, buckets, dtype=torch.float64, device=scorer.device)
    for _, sequence in scorer.own(sequences):
        losses, positions = scorer.token_losses(sequence, length)
        bucket = positions * buckets // length
        totals[0].index_add_(0, bucket, losses.double())
        totals[1].index_add_(0, bucket, torch.ones_like(losses, dtype=torch.float64))
    scorer.release()
    # Ranks of a context-parallel group hold different tokens: nothing is counted twice.
    dist.all_reduce(totals)
    sums, counts = totals.tolist()
    # Bucket b holds the positions p with p * buckets // length == b.
    edges = [-(-number * length // buckets) for number in range(buckets + 1)]
    ranges = []
    for start, stop, total, count in zip(edges, edges[1:], sums, counts):
        ranges.append({"start": start, "stop": stop, **_mean(total, count)})
    return {"length": length, **_mean(math.fsum(sums), math.fsum(counts)), "buckets": ranges}


def _mean(total: float, count: float) -> dict[str, float | int | None]:
    if not count:
        return {"tokens": 0, "loss": None, "perplexity": None}
    loss = total / count
    # exp(710) is beyond what a float holds.
    perplexity = math.inf if loss > 700 else math.exp(loss)
    return {"tokens": int(count), "loss": loss, "perplexity": perplexity}
