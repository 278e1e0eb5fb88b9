"""From the [attention] section to attention's objects."""

import dataclasses
from typing import get_args

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices, sliding_window
from titan_sparse.attention.patterns import PATTERNS
from titan_sparse.config import Attention, Config, check, load
from titan_sparse.models.flavours import resolve
from titan_sparse.training.attention import (
    backend_case,
    block_table,
    build_attend,
    build_context_parallel,
    build_mask,
    build_pattern,
    sparse_from,
    why_dense,
)

LENGTHS = [[30, 20], [60]]
MASKS = [
    ({"mask": "documents"}, Documents(LENGTHS)),
    # Causal ignores where documents end, but what they leave of a sequence is padding.
    ({"mask": "causal"}, Causal(valid=(50, 60))),
    ({"mask": "documents", "sliding_window": 8}, Documents(LENGTHS) & SlidingWindow(8)),
    (
        {"mask": "documents", "sliding_window": 8, "window_sinks": 2},
        Slices.batch([sliding_window(lengths, 8, 2) for lengths in LENGTHS]),
    ),
    (
        {"mask": "causal", "sliding_window": 8, "window_sinks": 2},
        Slices.batch([sliding_window([50], 8, 2), sliding_window([60], 8, 2)]),
    ),
]


@pytest.mark.parametrize("options, wanted", MASKS)
def test_masks(options, wanted):
    attention = Attention(**options)
    mask = build_mask(attention, LENGTHS)
    assert type(mask) is type(wanted)
    assert torch.equal(mask.dense(64), wanted.dense(64))
    case = backend_case(attention, "cpu", torch.float32, 8, 1024)
    assert case["slices"] == isinstance(mask, Slices)


def test_a_context_parallel_group_has_the_sections_choices():
    attention = Attention(
        layout="zigzag",
        schedule="double_ring",
        block_size=32,
        backward_circulates="q",
        gradient_dtype="bfloat16",
        route_by="mask",
    )
    in_stages = Attention(schedule="group_cast", overlap_stages=3, overlap_stages_backward=5)
    with fake_world(4, rank=1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_inter", "cp_intra"))
        cp = build_context_parallel(attention, mesh)
        assert build_context_parallel(in_stages, mesh).overlap_stages == (3, 5)
        # Gradients travel as they are summed unless asked otherwise.
        assert build_context_parallel(Attention(schedule="ring"), mesh).gradient_dtype is None
    assert (cp.inter, cp.intra, cp.ranks) == (2, 2, [0, 1, 2, 3])
    assert (cp.layout, cp.schedule, cp.block_size) == ("zigzag", "double_ring", 32)
    assert (cp.backward_circulates, cp.gradient_dtype) == ("q", torch.bfloat16)
    assert cp.route_by == "mask"


def test_attend_has_the_sections_choices():
    cp = ContextParallel(None, "striped", "local", 16)
    attention = Attention(pattern="dense", backend="eager", block_size=16)
    attend = build_attend(attention, cp, recomputed=0.5)
    pattern = build_pattern(attention)
    wanted = {"pattern": pattern, "cp": cp, "backend": "eager", "recomputed": 0.5}
    assert attend.keywords == wanted
    # The layout does not depend on the mask.
    assert block_table(attention, cp, LENGTHS, 64) is None


SPARSE = {
    "vertical_slash": {"recall": 0.01, "max_verticals": 0, "sinks": 0, "dense_below": 64},
    "xattention": {"threshold": 0.01, "stride": 4, "dense_below": 64},
    "moba": {"chunk_size": 20, "top_k": 3},
}
"""Options that leave out as much as they can."""


@pytest.mark.parametrize("mask", ["documents", "causal"])
@pytest.mark.parametrize("pattern", SPARSE)
def test_the_shortest_document_that_loses_pairs(pattern, mask):
    """By selection itself, on random keys: one token less, and everything is selected."""
    attention = Attention(mask=mask, pattern=pattern, block_size=16)
    for name, value in SPARSE[pattern].items():
        setattr(getattr(attention, pattern), name, value)
    least = sparse_from(attention)
    cp = ContextParallel(None, "striped", "local", 16)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 96, 8, dtype=torch.float64)
    is_whole = []
    for tokens in (least - 1, least):
        built = build_mask(attention, [[tokens]])
        index = build_pattern(attention).select(q, k, built.rows(96), cp)
        seen = built.dense(96)
        is_whole.append(torch.equal(index.dense(built) & seen, seen.expand(1, 2, -1, -1)))
    assert is_whole == [True, False]


@pytest.mark.parametrize(
    "words, longest, reason",
    [
        ("--training.seq_len 2048", None, "training.seq_len = 2048, but vertical_slash"),
        ("--training.seq_len 4096", 3000, "no document of data.source has more than 3000 tokens"),
        ("--training.seq_len 32k --attention.pattern moba", None, "documents of 49153 tokens"),
        ("--training.seq_len 2048 --attention.pattern xattention", None, "4096 tokens or more"),
        (
            "--training.seq_len 200 --attention.mask causal --data.sequences fixed",
            None,
            "257 tokens",
        ),
        ("--attention.dense_layers 0,1,2,3", None, "no layer of this model has the pattern"),
        ("--training.seq_len 4096", 4096, ""),
        ("--training.seq_len 2048 --attention.pattern dense", None, ""),
    ],
)
def test_a_pattern_that_cannot_select_is_reported(words, longest, reason):
    """What is advised is accepted, and helps."""

    def report(*more: str) -> str:
        config: Config = load(["--training.device=cpu", *words.split(), *more])[0]
        check(config, 1, 1)
        return why_dense(config, resolve(**vars(config.model)), longest)

    said = report()
    assert reason in said and bool(said) == bool(reason) and "\n" not in said
    for advice in said.partition("; write ")[2].split(", or "):
        if " = " in advice:
            key, value = advice.removesuffix(" or less").removesuffix(" or more").split(" = ")
            assert report(f"--{key}={value.strip(chr(34))}") == ""


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_a_section_with_each_of_its_choices(name):
    [choice] = [item for item in dataclasses.fields(Attention) if item.name == "pattern"]
    assert set(get_args(choice.type)) == set(PATTERNS)
    kind, attention = PATTERNS[name], Attention(pattern=name)
    section = getattr(attention, name)
    assert kind.name == section.name == name and issubclass(kind, type(section))
    assert dataclasses.asdict(build_pattern(attention)) == dataclasses.asdict(section)
    case = backend_case(attention, "cpu", torch.float32, 64, 1024)
    assert case["dynamic"] == kind().dynamic

    other_words = {"joint": "independent", "both": "last"}
    for key, value in dataclasses.asdict(section).items():
        # Another valid value than the default.
        other = {str: lambda x: other_words[x], bool: lambda x: not x, float: lambda x: x / 2}
        changed = other.get(type(value), lambda x: 2 * x + 4)(value)
        setattr(section, key, changed)
    assert build_pattern(attention) == kind(**dataclasses.asdict(section))
