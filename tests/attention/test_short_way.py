"""One rank takes a short way: plain causal attention runs through few files and makes no tables."""

import sys

import pytest
import torch

from titan_sparse.attention import attend
from titan_sparse.attention.patterns import VerticalSlash

PACKAGE = "/titan_sparse/"


def _files_entered(function) -> set[str]:
    """Files of the package of which function() calls any function."""
    entered = set()

    def enter(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and PACKAGE in path:
            entered.add(path.rpartition(PACKAGE)[2])

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    return [torch.randn(1, heads, 256, 16) for heads in (4, 2, 2)]


def test_plain_causal_attention_enters_eight_files(qkv):
    attend(*qkv)  # what is made once a process is made now
    assert _files_entered(lambda: attend(*qkv)) == {
        "attention/attend.py",
        "attention/inputs.py",
        "attention/masks/ranges.py",
        "attention/backends/__init__.py",
        "attention/call.py",
        "attention/ops.py",
        "attention/schedules/single.py",
        "attention/backends/eager.py",
    }


def test_its_backward_needs_no_more(qkv):
    leaves = [x.requires_grad_() for x in qkv]
    out = attend(*leaves)
    entered = _files_entered(lambda: out.sum().backward())
    assert entered <= {
        "attention/inputs.py",
        "attention/call.py",
        "attention/ops.py",
        "attention/registry.py",
        "attention/schedules/single.py",
        "attention/backends/eager.py",
    }


def test_one_rank_does_nothing_for_rings(qkv):
    pattern = VerticalSlash(recall=0.8, max_verticals=32, dense_below=128)
    entered = _files_entered(lambda: attend(*qkv, pattern=pattern, block_size=32))
    rings = {"ring", "transport", "needs", "rectangles", "all_gather", "group_cast"}
    assert not {path for path in entered if path.rpartition("/")[2].removesuffix(".py") in rings}
    assert not {path for path in entered if "routing" in path or "group_cast_plan" in path}
