"""What is cached for a mask is dropped when the mask is freed or changes."""

import gc

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention import attend, tiles
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks.ranges import (
    Causal,
    Documents,
    MaskRanges,
    _entries,
    once_per_mask,
)
from titan_sparse.attention.patterns import Dense, VerticalSlash

eager = BACKENDS["eager"]


def test_once_per_mask():
    ranges = Causal().rows(8)
    calls = []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    assert [once_per_mask(ranges, key, compute) for key in "aabab"] == [1, 1, 2, 1, 2]
    assert once_per_mask(Causal().rows(8), "a", compute) == 3
    assert once_per_mask(MaskRanges(ranges.start, ranges.stop.clone(), None), "a", compute) == 4
    assert once_per_mask(ranges, "a", compute) == 5, "the other stop took the place"
    ranges.stop.sub_(1)
    assert once_per_mask(ranges, "a", compute) == 6
    seeded = ranges._replace(probe_seed=torch.tensor(1))
    assert [once_per_mask(seeded, "a", compute) for _ in range(2)] == [7, 7]
    seeded.probe_seed.fill_(2)
    assert once_per_mask(seeded, "a", compute) == 8


def test_nothing_outlives_its_mask():
    gc.collect()
    before = len(_entries)
    ranges = Causal().rows(8)
    once_per_mask(ranges, "a", lambda: torch.zeros(1))
    assert len(_entries) == before + 1
    del ranges
    gc.collect()
    assert len(_entries) == before


def test_inference_mode():
    """Tensors made in inference mode have no version counter. Attention still caches data for their mask."""
    with torch.inference_mode():
        q = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        pattern = VerticalSlash(recall=0.6, sinks=1, dense_below=16)
        inside = attend(q, q, q, Causal(), pattern, block_size=16)
    assert torch.equal(
        inside, attend(q.clone(), q.clone(), q.clone(), Causal(), pattern, block_size=16)
    )


@pytest.mark.parametrize("by_key", [False, True], ids=["by query", "by query and key"])
def test_tables_of_a_static_mask_are_made_once(by_key, monkeypatch):
    """For all layers, forward and backward."""
    made = []
    block_tiles = tiles.block_tiles

    def noted(*args):
        made.append(args[-1])
        return block_tiles(*args)

    monkeypatch.setattr(eager, "READS_BY_KEY", by_key)
    monkeypatch.setattr(tiles, "block_tiles", noted)
    q, k, v = [x.requires_grad_() for x in structured_qkv(1, 4, 2, 96, 8)]
    ranges = Documents([[50, 46]]).rows(96)
    for _ in range(2):
        attend(q, k, v, ranges, Dense(), backend="eager", block_size=16).sum().backward()
    assert made == [by_key]
