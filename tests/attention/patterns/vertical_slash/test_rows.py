"""Which rows the probe looks at: the last ones of a span, or one of each of its equal parts."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.reference import structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, MaskRanges
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.spans import Spans, find_spans
from titan_sparse.attention.patterns.vertical_slash.probe import ProbedRows, last_rows, spread_rows

BLOCK = 4


def _spans(mask: Mask, seq_len: int, dense_below: int = 8, batch: int = 1) -> Spans:
    return find_spans(mask.rows(seq_len), batch, dense_below, BLOCK)


def _positions(rows: ProbedRows, span: int) -> list[int]:
    """Those of the first sequence."""
    # [P]
    position = rows.position[0, span]
    exists = rows.exists[0, span]
    return position[exists].tolist()


def test_last_rows_of_documents_by_hand():
    """Only 9 to 18 is a span: the documents of 3 and 6 tokens are short. One slot is unused."""
    rows = last_rows(_spans(Documents([[3, 6, 9]]), 20), 5, 20, BLOCK)
    (last_document, unused) = rows.position[0].tolist()
    assert last_document == [13, 14, 15, 16, 17]
    # Where no row exists, positions only have to be legal.
    assert unused == [15, 16, 17, 18, 19]
    assert rows.exists[0, 0].all()
    assert not rows.exists[0, 1].any()
    assert rows.group[0, 0].tolist() == [1, 1, 1, 0, 0]
    assert rows.group_block[0, 0].tolist() == [4, 3]
    assert rows.group_rows[0].tolist() == [[2, 3], [0, 0]]


def test_spread_rows_by_hand():
    """One row per four tokens from 4 on, as the hash of seeds 0 and 1 draws them.

    A resumed run has to draw the same rows.
    """
    spans = _spans(Documents([[4, 16]]), 24)
    rows = spread_rows(spans, 4, 24, BLOCK, seed=0)
    again = spread_rows(spans, 4, 24, BLOCK, seed=1)
    assert _positions(rows, 0) == [4, 8, 14, 19]
    assert _positions(again, 0) == [7, 10, 14, 18]
    assert rows.group.tolist()[0][0] == [0, 1, 2, 3]
    assert rows.group_block[0, 0].tolist() == [1, 2, 3, 4]
    assert rows.group_rows[0, 0].tolist() == [1, 1, 1, 1]
    # The other slots hold no span.
    assert not rows.exists[0, 1:].any()
    assert not rows.group_rows[0, 1:].any()


def test_last_rows_and_one_of_each_part_before_them_by_hand():
    """With one last row out of 4: three parts of 4 tokens from 4 on, drawn as
    without it, and row 16."""
    spans = _spans(Documents([[4, 13]]), 24)
    rows = spread_rows(spans, 4, 24, BLOCK, seed=0, last=1)
    [first, second, third, last] = _positions(rows, 0)
    assert (first in range(4, 8)) and (second in range(8, 12)) and (third in range(12, 16))
    assert last == 16
    assert rows.group.tolist()[0][0] == [0, 1, 2, 3]
    assert rows.group_block[0, 0].tolist()[-1] == 4
    # As many tokens as rows, or fewer: each of them once.
    for length in (1, 3, 4):
        short = spread_rows(_spans(Causal(valid=(length,)), 24), 4, 24, BLOCK, seed=0, last=1)
        assert _positions(short, 0) == list(range(length))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    queries=st.integers(1, 20),
    seed=st.integers(0, 2**40),
)
def test_one_row_of_each_equal_part(lengths, queries, seed):
    """Every document gets the same number. A part that begins between two tokens rounds down."""
    seq_len = sum(lengths) + 5
    spans = _spans(Documents([lengths]), seq_len)
    rows = spread_rows(spans, queries, seq_len, BLOCK, seed)
    known = zip(spans.start[0].tolist(), spans.stop[0].tolist())
    for number, (start, stop) in enumerate(known):
        length = stop - start
        positions = _positions(rows, number)
        if length <= queries:
            assert positions == list(range(start, stop))
            continue
        assert len(positions) == queries
        for part, position in enumerate(positions):
            first = math.floor(part * length / queries)
            behind = math.ceil((part + 1) * length / queries)
            assert first <= position - start < behind
    assert (rows.group_rows.sum(-1) == rows.exists.sum(-1)).all()
    assert torch.equal(rows.group_block, rows.position // BLOCK)
    assert rows.position.max() < seq_len


def test_offsets_are_even_over_seeds_and_parts():
    """Each of 64 tokens of a part is drawn about equally often, for any part, span and seed."""
    spans = _spans(Documents([[1024] * 2]), 2048)
    drawn = [spread_rows(spans, 16, 2048, BLOCK, seed).position[0] for seed in range(400)]
    # [seeds, spans, parts]
    offset = torch.stack([position[:2] for position in drawn]) % 64
    counts = offset.flatten().bincount(minlength=64)
    mean = offset.numel() / 64
    deviation = math.sqrt(mean)
    assert ((counts - mean).abs() < 5 * deviation).all()
    # Neither seeds nor spans nor parts that follow each other are drawn alike.
    for dim in range(3):
        count = offset.shape[dim] - 1
        is_equal = offset.narrow(dim, 1, count) == offset.narrow(dim, 0, count)
        share = is_equal.double().mean()
        assert 0.5 / 64 < share < 2 / 64


def test_a_selection_follows_the_seed():
    """What is cached for a mask holds for one seed, also where that is changed in place. The last
    rows do not depend on it."""
    q, k, _ = structured_qkv(1, 4, 2, 320, 8, seed=2)
    ranges = Causal().rows(320)._replace(probe_seed=torch.tensor(0))

    def choose(seed: int, **parameters) -> list[list[int]]:
        ranges.probe_seed.fill_(seed)
        pattern = VerticalSlash(recall=0.8, dense_below=16, count_sinks=True, **parameters)
        index = pattern.select(q, k, ranges, block_size=16)
        return [tensor.tolist() for tensor in index.tensors()]

    for budget in ("joint", "independent"):
        spread = dict(budget=budget, probe_rows="spread")
        first = choose(3, **spread)
        both = dict(budget=budget, probe_rows="both")
        assert choose(3, **both) != choose(4, **both)
        assert choose(4, **spread) != first
        # On the same ranges, and as on ranges that nothing was remembered for.
        assert choose(3, **spread) == first
        ranges = Causal().rows(320)._replace(probe_seed=torch.tensor(0))
        assert choose(3, **spread) == first

        last = dict(budget=budget, probe_rows="last")
        assert choose(3, **last) == choose(4, **last)
        assert choose(3, **last) != first


def test_compiled_attention_follows_the_seed():
    """The graph reads the seed when it runs and not when it is traced. Without one it is 0."""
    q, k, v = structured_qkv(1, 4, 2, 320, 8, seed=2)
    pattern = VerticalSlash(recall=0.6, dense_below=16, probe_rows="spread")

    def function(q: Tensor, k: Tensor, v: Tensor, mask: MaskRanges) -> Tensor:
        return attend(q, k, v, mask, pattern, block_size=16)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    outputs = []
    for seed in (0, 1):
        mask = Causal().rows(320)._replace(probe_seed=torch.tensor(seed))
        outputs.append(compiled(q, k, v, mask))
        assert torch.equal(outputs[-1], function(q, k, v, mask))
    assert not torch.equal(*outputs)
    assert torch.equal(outputs[0], function(q, k, v, Causal()))
