"""What follows from a mask alone is worked out once, not once a layer.

That saves dozens of small ops a layer, which a GPU would wait for.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from titan_sparse.attention.masks.base import MaskRanges

T = TypeVar("T")


class _Entry(NamedTuple):
    """Results for one mask, and what tells whether it is still the same mask."""

    versions: list[int]
    others: tuple[Tensor | None, ...]
    results: dict[Hashable, tuple[int, object]]


_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""From a mask's `start` to its _Entry. An entry goes when that tensor goes."""


def once_per_mask(
    ranges: MaskRanges, key: Hashable, compute: Callable[[], T], version: int = 0
) -> T:
    """compute(), remembered under `key` while this mask's `start` lives and the mask is unchanged.

    `key` and `version` have to name everything besides `ranges` that the result depends on. Only
    the last version is kept.
    """
    others = (ranges.stop, ranges.document_start, ranges.slices, ranges.table)
    versions = []
    for tensor in (ranges.start, *others):
        # Tensors made under inference_mode have no version, and nobody writes to them.
        if tensor is not None and not tensor.is_inference():
            versions.append(tensor._version)
    entry = _entries.get(ranges.start)
    if entry is None or entry.versions != versions or not _same_tensors(entry.others, others):
        entry = _Entry(versions, others, {})
        _entries[ranges.start] = entry
    known_version, result = entry.results.get(key, (None, None))
    if known_version != version:
        result = compute()
        entry.results[key] = (version, result)
    return result


def _same_tensors(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    for first, second in zip(a, b):
        if first is not second:
            return False
    return True
