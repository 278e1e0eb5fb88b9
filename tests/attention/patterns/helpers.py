"""Selection problems for the patterns of explicit blocks, XAttention and MoBA, and how a selection
is checked.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import Pattern, VerticalSlash
from titan_sparse.attention.patterns.base import BlockIndex
from titan_sparse.attention.patterns.spans import Spans, find_spans
from titan_sparse.attention.patterns.vertical_slash.probe import (
    ProbeGeometry,
    last_rows,
    probe_geometry,
    spread_rows,
)

BLOCK = 16
MIXED = [[70, 9, 61, 17], [5, 48, 47, 49]]


def published(**parameters) -> VerticalSlash:
    """VerticalSlash as published, except for `parameters`."""
    paper = dict(
        budget="independent", probe_rows="last", sinks=30, count_sinks=True, local_slashes=2
    )
    return VerticalSlash(**paper | parameters)


def probed(
    ranges: MaskRanges, kind: str, queries: int, block: int, dense_below: int, seed: int
) -> tuple[Spans, ProbeGeometry]:
    """The spans of two sequences, and their probes: of "spread" or of "last" rows."""
    seq_len = ranges.start.shape[1]
    spans = find_spans(ranges, 2, dense_below, block)
    if kind == "spread":
        rows = spread_rows(spans, queries, seq_len, block, seed)
    else:
        rows = last_rows(spans, queries, seq_len, block)
    return spans, probe_geometry(ranges, spans, rows, one_rank(block))


class Case(NamedTuple):
    """A selection problem of two sequences."""

    pattern: Pattern
    mask: Mask
    seq_len: int = 157
    heads: tuple[int, int] = (4, 2)

    @property
    def is_packed(self) -> bool:
        return self.mask.rows(self.seq_len).document_start is not None

    def spans(self, sequence: int) -> list[tuple[int, int]]:
        """(start, stop) of the documents; an unpacked sequence is one."""
        ranges = self.mask.rows(self.seq_len)
        row = sequence % len(ranges.start)
        tokens = int((ranges.start[row] < ranges.stop[row]).sum())
        if not self.is_packed:
            return [(0, tokens)]
        starts = ranges.document_start[row, :tokens].unique().tolist()
        return list(zip(starts, [*starts[1:], tokens]))

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
        "mha": Case(pattern, Causal(), 144, (3, 3)),
        "padding": Case(pattern, Causal(valid=(101, 0))),
        "window": Case(pattern, Causal() & SlidingWindow(45)),
        "packed": Case(pattern, Documents(MIXED)),
        "packed, window": Case(pattern, Documents(MIXED) & SlidingWindow(37)),
        "packed, two long in one block": Case(pattern, Documents([55, 50, 52])),
        "a tail in a block of its own": Case(pattern, Documents([66, 83])),
        "shorter than a block": Case(pattern, Causal(), 9),
    }


def check_selection(
    case: Case, reference: Callable[[Case, Tensor, Tensor, int, Tensor], Tensor]
) -> BlockIndex:
    """The selection, which matches the specification, head by head.

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
    return index
