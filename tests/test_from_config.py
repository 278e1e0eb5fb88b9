"""From the [attention] section to attention's objects."""

import torch

from titan_sparse.attention import ContextParallel, backends
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.patterns import VerticalSlash, XAttention
from titan_sparse.config import Attention
from titan_sparse.from_config import (
    backend_case,
    block_table,
    build_attend,
    build_mask,
    build_pattern,
    gradient_dtype,
    has_slices,
)

LENGTHS = [[30, 20], [60]]


def _assert_same(mask, wanted) -> None:
    """Both allow the same pairs of 64 tokens."""
    assert type(mask) is type(wanted)
    assert torch.equal(mask.dense(64), wanted.dense(64))


def test_masks():
    _assert_same(build_mask(Attention(mask="documents"), LENGTHS), Documents(LENGTHS))
    # Causal ignores where documents end, but what they leave of a sequence is padding.
    _assert_same(build_mask(Attention(mask="causal"), LENGTHS), Causal(valid=(50, 60)))
    windowed = build_mask(Attention(mask="documents", sliding_window=8), LENGTHS)
    _assert_same(windowed, Documents(LENGTHS) & SlidingWindow(8))


def test_masks_with_sinks_are_slices():
    plain = Attention(mask="causal", sliding_window=8)
    sinks = Attention(mask="causal", sliding_window=8, window_sinks=2)
    assert not has_slices(plain) and has_slices(sinks)
    assert not isinstance(build_mask(plain, LENGTHS), Slices)
    assert isinstance(build_mask(sinks, LENGTHS), Slices)
    assert backend_case(sinks, "cpu", torch.float32, 8)["slices"]


def test_backend_case_is_what_backends_take():
    case = backend_case(Attention(backend="eager"), "cpu", torch.float32, 64)
    assert backends.choose(**case) == "eager"
    assert backends.explain(**case).endswith("asked for")


def test_patterns():
    attention = Attention(pattern="vertical_slash")
    attention.vertical_slash.recall = 0.7
    assert build_pattern(attention) == VerticalSlash(recall=0.7)
    attention.xattention.stride = 8
    attention.vertical_slash.index = "xattention"
    assert build_pattern(attention) == XAttention(stride=8)
    assert attention.vertical_slash.index == "xattention"  # the section is left as it was


def test_gradients_travel_as_they_are_summed_unless_asked():
    assert gradient_dtype(Attention()) is None
    assert gradient_dtype(Attention(gradient_dtype="bfloat16")) == torch.bfloat16


def test_attend_has_the_sections_choices():
    cp = ContextParallel(None, "contiguous", "local", 16)
    attention = Attention(pattern="dense", backend="eager", block_size=16)
    attend = build_attend(attention, cp, recomputed=0.5)
    assert attend.keywords == {
        "pattern": build_pattern(attention),
        "cp": cp,
        "backend": "eager",
        "recomputed": 0.5,
    }
    q = torch.randn(2, 4, 64, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 64, 8, dtype=torch.float64)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attend(q, k, v, Causal().rows(64)), wanted)


def test_no_block_table_where_the_layout_does_not_depend_on_the_mask():
    cp = ContextParallel(None, "striped", "local", 16)
    assert block_table(Attention(mask="documents"), cp, LENGTHS, 64) is None
