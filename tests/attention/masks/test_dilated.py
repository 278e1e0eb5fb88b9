"""Dilated against its definition pair by pair, alone and with documents, padding and a window."""

import pytest
import torch
from torch import Tensor

from tests.reference import structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks import (
    Causal,
    Dilated,
    Documents,
    Full,
    Slices,
    SlidingWindow,
)

SEQ_LEN = 61


def _definition(window: int, rate: int) -> Tensor:
    """bool [S, S]"""
    query = torch.arange(SEQ_LEN)[:, None]
    key = torch.arange(SEQ_LEN)
    distance = query - key
    return (distance >= 0) & (distance < window) & (distance % rate == 0)


@pytest.mark.parametrize("window", [1, 7, 61, 1000])
@pytest.mark.parametrize("rate", [1, 3, 61])
def test_sees_the_definition(window, rate):
    mask = Dilated(window, rate)
    assert torch.equal(mask.dense(SEQ_LEN)[0], _definition(window, rate))
    assert mask.rows(SEQ_LEN).causal
    if rate == 1:
        assert torch.equal(mask.dense(SEQ_LEN), SlidingWindow(window).dense(SEQ_LEN))


@pytest.mark.parametrize(
    "other",
    [
        Full(),
        Causal(),
        Causal(valid=(50, 0)),
        Documents([1] * 40),
        Documents([]),
        Documents([[20, 30], [61]]) & SlidingWindow(13),
        Slices.of([(0, 61, 5, 40, "full")]),
        Dilated(30, 4),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_intersections(other):
    want = other.dense(SEQ_LEN) & _definition(20, 3)
    for both in (Dilated(20, 3) & other, other & Dilated(20, 3)):
        assert torch.equal(both.dense(SEQ_LEN), want)
        assert both.rows(SEQ_LEN).causal


def test_masks_are_made_inside_of_compiled_functions():
    q = structured_qkv(1, 2, 2, SEQ_LEN, 8)[0]

    def attention(q: Tensor) -> Tensor:
        return attend(q, q, q, Dilated(9, 2), block_size=16) + attend(
            q, q, q, SlidingWindow(7), block_size=16
        )

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attention(q))
    torch._dynamo.reset()
