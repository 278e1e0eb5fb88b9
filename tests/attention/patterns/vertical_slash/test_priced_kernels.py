"""The selection by prices as a GPU makes it: by kernels, from the probe to the lists.

Here Triton's interpreter runs them.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import priced, probe
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.patterns.vertical_slash.probe import set_probe_seed
from titan_sparse.kernels import compact

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQ_LEN = 128
MASKS = {
    "window": Causal() & SlidingWindow(100),
    "documents": Documents([[71, 7, 1, 49], [60, 60]]),
}
PATTERNS = {
    "joint": VerticalSlash(recall=0.9, sinks=3, dense_below=48),
    "capped": VerticalSlash(
        recall=0.8, sinks=0, max_verticals=20, max_slashes=4, min_slashes=2, dense_below=64
    ),
}


@pytest.fixture(autouse=True)
def the_same_rows() -> Iterator[None]:
    set_probe_seed(0)
    yield
    set_probe_seed(0)


@pytest.mark.parametrize("pattern, mask", [("joint", "documents"), ("capped", "window")])
def test_selection_by_kernels_is_that_of_the_twins(pattern: str, mask: str, monkeypatch):
    """They match except for elements that rounding moves over a limit. A GPU's arithmetic moves more."""
    allowed = 0.01 if DEVICE == "cuda" else 0.001
    of_twins = _select(PATTERNS[pattern], MASKS[mask])
    for module in (probe, priced):
        monkeypatch.setattr(module, "by_kernels", lambda keys: True)
    monkeypatch.setattr(priced, "compact", compact.compact)
    of_kernels = _select(PATTERNS[pattern], MASKS[mask])

    assert torch.equal(of_kernels.capped, of_twins.capped)
    slashes, want_slashes = of_kernels.slashes, of_twins.slashes
    assert (slashes != want_slashes).double().mean() < allowed
    assert want_slashes.any()
    # [B, Hq, S]: verticals as flags.
    flags = []
    for index in (of_kernels, of_twins):
        flag = torch.zeros(2, 4, SEQ_LEN + 1, dtype=torch.bool, device=DEVICE)
        flags.append(flag.scatter_(2, index.verticals.long(), True)[..., :SEQ_LEN])
        # Ascending, and filled up behind the last one.
        assert bool((index.verticals.diff(dim=-1) >= 0).all())
    assert (flags[0] != flags[1]).double().mean() < allowed
    assert flags[1].any()


def _select(pattern: VerticalSlash, mask: Mask) -> VerticalSlashIndex:
    q, k, _ = structured_qkv(2, 4, 2, SEQ_LEN, 16, seed=5, dtype=torch.float32)
    q = q.to(DEVICE)
    k = k.to(DEVICE)
    return pattern.select(q, k, mask, block_size=16)
