"""Selection problems for the patterns of explicit blocks, XAttention and MoBA, and how a selection
is checked.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import structured_qkv
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import MoBA, Pattern, VerticalSlash, XAttention

BLOCK = 16
MIXED = [[70, 9, 61, 17], [5, 48, 47, 49]]
XATTENTION = XAttention(stride=4, threshold=0.6, dense_below=48)
MOBA = MoBA(chunk_size=32, top_k=2)


def published(**parameters) -> VerticalSlash:
    """VerticalSlash as published, except for `parameters`."""
    paper = dict(
        budget="independent", probe_rows="last", sinks=30, count_sinks=True, local_slashes=2
    )
    return VerticalSlash(**paper | parameters)


class Case(NamedTuple):
    """A selection problem of two sequences.

    documents: their lengths if packed. valid: tokens of each sequence that are not padding, if it
        is not packed.
    """

    pattern: Pattern
    mask: Mask
    documents: list[list[int]] | None = None
    valid: tuple[int, int] | None = None
    seq_len: int = 157
    heads: tuple[int, int] = (4, 2)

    def spans(self, sequence: int) -> list[tuple[int, int]]:
        """(start, stop) of the documents; an unpacked sequence is one."""
        if self.documents is None:
            return [(0, self.valid[sequence] if self.valid else self.seq_len)]
        spans = []
        start = 0
        for length in self.documents[sequence % len(self.documents)]:
            spans.append((start, start + length))
            start += length
        return spans

    def inputs(self) -> list[Tensor]:
        """q, k, v in fp64."""
        heads, kv_heads = self.heads
        seed = len(repr(self.pattern))
        q, k, v = structured_qkv(2, heads, kv_heads, self.seq_len, 8, seed=seed)
        return [q * 0.5, k, v]


def cases_of_masks(pattern: Pattern) -> dict[str, Case]:
    """The pattern on every kind of mask that it takes."""
    return {
        "causal": Case(pattern, Causal()),
        "mha": Case(pattern, Causal(), heads=(3, 3), seq_len=144),
        "padding": Case(pattern, Causal(valid=(101, 0)), valid=(101, 0)),
        "window": Case(pattern, Causal() & SlidingWindow(45)),
        "packed": Case(pattern, Documents(MIXED), MIXED),
        "packed, window": Case(pattern, Documents(MIXED) & SlidingWindow(37), MIXED),
        "packed, two long in one block": Case(pattern, Documents([55, 50, 52]), [[55, 50, 52]]),
        "a tail in a block of its own": Case(pattern, Documents([66, 83]), [[66, 83]]),
        "shorter than a block": Case(pattern, Causal(), seq_len=9),
    }


def check_selection(
    case: Case, reference: Callable[[Case, Tensor, Tensor, int, Tensor], Tensor]
) -> None:
    """The selection matches the specification, head by head.

    reference: takes a case, q and k of a head [S, D], the number of the sequence and the visible
    pairs, bool [S, S]. Returns the pairs to compute, bool [S, S].
    """
    q, k, _ = case.inputs()
    heads, kv_heads = case.heads
    index = case.pattern.select(q, k, case.mask, block_size=BLOCK)
    dense = index.dense(case.mask)
    seen = case.mask.dense(case.seq_len).expand(2, -1, -1)
    for b in range(2):
        for h in range(heads):
            k_head = k[b, h // (heads // kv_heads)]
            want = reference(case, q[b, h], k_head, b, seen[b])
            assert torch.equal(dense[b, h], want), (b, h)
