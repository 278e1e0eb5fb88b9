"""From the [attention] section to attention's objects."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.models.helpers import pretended_rank
from titan_sparse.attention import ContextParallel, backends
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention
from titan_sparse.config import Attention
from titan_sparse.from_config import (
    backend_case,
    block_table,
    build_attend,
    build_context_parallel,
    build_mask,
    build_pattern,
    gradient_dtype,
    has_slices,
)

LENGTHS = [[30, 20], [60]]


def _assert_same(mask, wanted) -> None:
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


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash", "xattention", "moba"])
def test_backend_case_knows_which_patterns_choose(pattern):
    attention = Attention(pattern=pattern)
    case = backend_case(attention, "cuda", torch.bfloat16, 64)
    assert case["dynamic"] == build_pattern(attention).dynamic


def test_patterns():
    attention = Attention(pattern="vertical_slash")
    attention.vertical_slash.recall = 0.7
    assert build_pattern(attention) == VerticalSlash(recall=0.7)
    attention.pattern = "xattention"
    attention.xattention.stride = 8
    assert build_pattern(attention) == XAttention(stride=8)


CHOICES = {
    "vertical_slash": {
        "recall": 0.6,
        "budget": "independent",
        "probe": 32,
        "probe_rows": "last",
        "sinks": 5,
        "count_sinks": True,
        "local_slashes": 3,
        "min_verticals": 7,
        "max_verticals": 11,
        "min_slashes": 2,
        "max_slashes": 13,
        "dense_below": 17,
    },
    "xattention": {"stride": 4, "threshold": 0.5, "dense_below": 19},
    "moba": {"chunk_size": 256, "top_k": 3},
}
"""A value of every key of a pattern, none of them its default."""


@pytest.mark.parametrize("name", CHOICES)
def test_a_pattern_has_each_choice_of_its_section(name):
    attention = Attention(pattern=name)
    section = getattr(attention, name)
    untouched = dataclasses.asdict(section)
    assert untouched.keys() == CHOICES[name].keys()
    for key, value in CHOICES[name].items():
        assert value != untouched[key]
        setattr(section, key, value)
    kind = {"vertical_slash": VerticalSlash, "xattention": XAttention, "moba": MoBA}[name]
    assert build_pattern(attention) == kind(**CHOICES[name])


@pytest.mark.parametrize("schedule", ["group_cast", "double_ring"])
def test_a_context_parallel_group_has_the_sections_choices(schedule):
    attention = Attention(
        layout="zigzag",
        schedule=schedule,
        block_size=32,
        backward_circulates="q",
        gradient_dtype="bfloat16",
        overlap_stages=3,
        overlap_stages_backward=5,
        route_by="mask",
    )
    with pretended_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_inter", "cp_intra"))
        cp = build_context_parallel(attention, mesh)
    assert (cp.inter, cp.intra, cp.ranks) == (2, 2, [0, 1, 2, 3])
    assert (cp.layout, cp.schedule, cp.block_size) == ("zigzag", schedule, 32)
    assert (cp.backward_circulates, cp.gradient_dtype) == ("q", torch.bfloat16)
    assert (cp.overlap_stages, cp.route_by) == ((3, 5), "mask")


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
