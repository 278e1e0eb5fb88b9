"""Masks of both kinds, ranges and slices, for tests that compare with the dense mask."""

from tests.slice_cases import NAMES, SEQ_LEN, mask_and_truth
from titan_sparse.attention.masks import Causal, Dilated, Documents, Full, Mask, SlidingWindow

RANGES: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "padded": Causal(valid=(SEQ_LEN - 5, 31)),
    "nothing at all": Causal(valid=(0,)),
    "window": SlidingWindow(30),
    "window of one": SlidingWindow(1),
    "documents": Documents([[100, 7, 1, 60], [40, 40, 100]]),
    "single tokens": Documents([1] * 150),
    "windowed documents": Documents([[SEQ_LEN], [3, 100, 60, 17]]) & SlidingWindow(50),
}
SLICES: dict[str, Mask] = {name: mask_and_truth(name)[0] for name in NAMES[::3]} | {
    "dilated": Dilated(40, 7),
    "dilated documents": Documents([[100, 7, 1, 60], [40, 40, 100]]) & Dilated(50, 20),
}
MASKS = RANGES | SLICES
