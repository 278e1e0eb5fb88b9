"""What is cached for a mask is dropped when the mask is freed or changes."""

import gc

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention import attend, tiles
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks import Dilated
from titan_sparse.attention.masks.ranges import (
    Causal,
    Documents,
    Full,
    Mask,
    MaskRanges,
    SlidingWindow,
    _entries,
    once_per_mask,
)
from titan_sparse.attention.masks.slices import sliding_window
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
    """Tensors made in inference mode have no version counter. Attention still caches
    data for their mask."""
    with torch.inference_mode():
        q = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        pattern = VerticalSlash(recall=0.6, sinks=1, dense_below=16)
        inside = attend(q, q, q, Causal(), pattern, block_size=16)
    assert torch.equal(
        inside, attend(q.clone(), q.clone(), q.clone(), Causal(), pattern, block_size=16)
    )


@pytest.fixture
def made(monkeypatch) -> list[bool]:
    """Whether tables were made by key, each time that some were made."""
    calls = []
    block_tiles = tiles.block_tiles

    def noted(*args):
        calls.append(args[-1])
        return block_tiles(*args)

    monkeypatch.setattr(tiles, "block_tiles", noted)
    return calls


@pytest.mark.parametrize("by_key", [False, True], ids=["by query", "by query and key"])
def test_tables_of_a_static_mask_are_made_once(by_key, made, monkeypatch):
    """For all layers, forward and backward."""
    monkeypatch.setattr(eager, "READS_BY_KEY", by_key)
    q, k, v = [x.requires_grad_() for x in structured_qkv(1, 4, 2, 96, 8)]
    ranges = Documents([[50, 46]]).rows(96)
    for _ in range(2):
        attend(q, k, v, ranges, Dense(), backend="eager", block_size=16).sum().backward()
    assert made == [by_key]


MASKS = {
    "causal": Causal,
    "causal with padding": lambda: Causal(valid=[50, 64]),
    "full": Full,
    "window": lambda: SlidingWindow(20),
    "dilated": lambda: Dilated(40, 2),
    # Each of these is equal to itself only.
    "documents in a window": lambda: Documents([40, 24]) & SlidingWindow(20),
    "slices": lambda: sliding_window([40, 24], 20, sinks=3),
}


@pytest.mark.parametrize("name", MASKS)
def test_layers_share_what_is_remembered_for_a_mask(name, made):
    """A mask in every layer costs as little as one that the user resolved once."""
    q, k, v = structured_qkv(2, 4, 2, 64, 8)
    mask = MASKS[name]()
    kept = {"backend": "eager", "block_size": 16}
    outs = [attend(q, k, v, mask, **kept) for _ in range(3)]
    assert len(made) == 1
    expected = attend(q, k, v, MASKS[name]().rows(64), **kept)
    assert all(torch.equal(out, expected) for out in outs)


class _Lengthening(Mask):
    """A mask that a user wrote, which changes: keys before `self.stop`."""

    stop = 0

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        self.stop += 16
        start = torch.zeros(1, seq_len, dtype=torch.int32, device=device)
        return MaskRanges(start, torch.full_like(start, self.stop), None, causal=False)


def test_equal_masks_of_other_lengths_are_others():
    q, k, v = structured_qkv(1, 4, 2, 64, 8)
    for length in (64, 48, 64):
        part = [x[:, :, :length] for x in (q, k, v)]
        out = attend(*part, SlidingWindow(20), block_size=16)
        assert torch.equal(out, attend(*part, SlidingWindow(20).rows(length), block_size=16))


def test_a_mask_that_a_user_wrote_is_asked_every_time():
    q, k, v = structured_qkv(1, 4, 2, 64, 8)
    for mask in (_Lengthening(), _Lengthening() & SlidingWindow(200)):
        first, second = (attend(q, k, v, mask, block_size=16) for _ in range(2))
        assert not torch.equal(first, second)


class _WithoutSome(Causal):
    """Causal, without some keys at the beginning. What it inherits compares `valid` alone."""

    def __init__(self, hidden: int):
        super().__init__()
        object.__setattr__(self, "hidden", hidden)

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        ranges = super().rows(seq_len, device)
        start = ranges.stop.clamp(max=self.hidden)
        return ranges._replace(start=start, plain=False)


def test_a_class_that_extends_a_mask_of_ours_is_asked_every_time():
    q, k, v = structured_qkv(1, 4, 2, 64, 8)
    for more in (Causal(), SlidingWindow(200)):
        for hidden in (3, 9):
            mask = _WithoutSome(hidden) & more
            out = attend(q, k, v, mask, block_size=16)
            assert torch.equal(out, attend(q, k, v, mask.rows(64), block_size=16))
            own = attend(q, k, v, _WithoutSome(hidden), block_size=16)
            assert torch.equal(own, attend(q, k, v, mask.rows(64), block_size=16))


def test_what_inference_mode_remembers_is_not_trained_with():
    q, k, v = structured_qkv(1, 4, 2, 112, 8)
    with torch.inference_mode():
        attend(q, k, v, SlidingWindow(33), block_size=16)
    q.requires_grad_()
    attend(q, k, v, SlidingWindow(33), block_size=16).sum().backward()
    assert q.grad.any()
