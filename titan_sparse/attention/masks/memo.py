"""What follows from a mask alone is worked out once, not once a layer: dozens of small ops that a GPU would wait for."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch.utils.weak import WeakTensorKeyDictionary

from titan_sparse.attention.masks.ranges import MaskRanges

T = TypeVar("T")
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once_per_mask(rows: MaskRanges, key: Hashable, compute: Callable[[], T]) -> T:
    """compute(), remembered under `key` for as long as this mask's `start` lives and nothing of the mask is changed.

    `key` has to name everything besides `rows` that the result depends on.
    """
    parts = (rows.stop, rows.document_start, rows.slices, rows.table)
    # Tensors made under inference_mode have no version: they are not written to either.
    versions = [x._version for x in (rows.start, *parts) if x is not None and not x.is_inference()]
    entry = _known.get(rows.start)
    if entry is None or entry[0] != versions or any(a is not b for a, b in zip(entry[1], parts)):
        entry = _known[rows.start] = (versions, parts, {})
    results = entry[2]
    if key not in results:
        results[key] = compute()
    return results[key]
