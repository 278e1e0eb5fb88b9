"""XAttention: the selection against plain loops over documents, heads and tokens."""

import math

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import BLOCK, MIXED, Case, cases_of_masks, check_selection
from tests.attention.problems import PATTERNS
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import XAttention, xattention
from titan_sparse.kernels.antidiagonals import fewest

SHORT = [17, 16, 33, 15, 19]
CASES = cases_of_masks(PATTERNS["xattention"]) | {
    "all of the score": Case(XAttention(4, 1.0, 48), Causal()),
    "little of the score": Case(XAttention(4, 0.05, 48), Documents(MIXED)),
    "cells of one": Case(XAttention(1, 0.7, 48), Documents(MIXED)),
    "cells of a block": Case(XAttention(16, 0.7, 16), Documents(SHORT)),
}
KERNEL_CASES = ["padding", "packed, window"]


def _cell_scores(
    q: Tensor, k: Tensor, start: Tensor, span: tuple[int, int], stride: int
) -> dict[int, dict[int, float]]:
    """Softmax over key cells of the antidiagonal sums, for the query cells of a document."""
    mine = range(*span)
    shares = {}
    for i in range(len(q) // stride + 1):
        if i * stride not in mine:
            continue
        scores = {}
        for j in range(i + 1):
            # A key cell is that of its last token's document.
            if j * stride + stride - 1 not in mine or (j + 1) * stride <= start[i * stride]:
                continue
            total = 0
            for t in range(stride):
                a = i * stride + stride - 1 - t
                b = j * stride + t
                if a in mine and b in mine:
                    total += float(q[a] @ k[b])
            scores[j] = total * q.shape[1] ** -0.5 / stride
        weights = sum(math.exp(score) for score in scores.values())
        shares[i] = {j: math.exp(score) / weights for j, score in scores.items()}
    return shares


def _chosen_blocks(
    q: Tensor, k: Tensor, start: Tensor, case: Case, span: tuple[int, int]
) -> set[tuple[int, int]]:
    """Pairs of blocks of one document and head."""
    pattern = case.pattern
    first, stop = span
    blocks = range(first // BLOCK, (stop - 1) // BLOCK + 1)
    if case.is_packed and stop - first < pattern.dense_below:
        return {(a, c) for a in blocks for c in blocks if c <= a}
    # A sequence ends with a whole block: what is missing belongs to no document.
    shares = _cell_scores(q, k, start, span, pattern.stride)
    per_block = BLOCK // pattern.stride
    chosen = set()
    for a in blocks:
        mass = dict.fromkeys(blocks, 0.0)
        for i in range(a * per_block, (a + 1) * per_block):
            for j, share in shares.get(i, {}).items():
                mass[j // per_block] += share
        picked = {blocks[0], a}
        target = pattern.threshold * sum(mass.values()) - 1e-12
        for c in sorted(set(blocks) - picked, key=lambda c: -mass[c]):
            if sum(mass[block] for block in picked) < target:
                picked.add(c)
        chosen |= {(a, c) for c in picked if c <= a}
    return chosen


def _specification(case: Case, q: Tensor, k: Tensor, sequence: int, seen: Tensor) -> Tensor:
    """bool [S, S]: the pairs of tokens to be computed, of q and k [S, D]."""
    padding = -case.seq_len % BLOCK
    q = torch.nn.functional.pad(q, (0, 0, 0, padding))
    k = torch.nn.functional.pad(k, (0, 0, 0, padding))
    start = case.mask.rows(case.seq_len).start
    start = torch.nn.functional.pad(start, (0, padding), value=case.seq_len)
    start = start[sequence % len(start)]
    chosen = torch.zeros_like(seen)
    for span in case.spans(sequence):
        if span[0] < span[1]:
            for a, c in _chosen_blocks(q, k, start, case, span):
                chosen[a * BLOCK : (a + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK] = True
    return chosen & seen


@pytest.mark.parametrize("name", CASES)
def test_the_selection_is_the_specification(name):
    check_selection(CASES[name], _specification)


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_kernels_choose_what_the_specification_does(name, monkeypatch):
    """In Triton's interpreter and fp32. Tests on a GPU cover other numbers."""
    case = CASES[name]._replace(seq_len=117 if name == "padding" else 157)
    q, k, _ = case.inputs()
    want = case.pattern.select(q, k, case.mask, block_size=BLOCK)
    monkeypatch.setattr(xattention, "_by_kernels", lambda q, cp, stride: True)
    for elements in (xattention._CHUNK_ELEMENTS, 1):
        monkeypatch.setattr(xattention, "_CHUNK_ELEMENTS", elements)
        got = case.pattern.select(q.float(), k.float(), case.mask, block_size=BLOCK)
        assert torch.equal(got.words, want.words)


def test_equal_scores_are_taken_in_order_of_position():
    mass = torch.tensor([[1.0, 3, 1, 1, 1, 1]])
    forced = torch.tensor([[False, False, False, False, False, True]])
    assert fewest(mass, forced, 0.7).tolist() == [[True, True, True, False, False, True]]
