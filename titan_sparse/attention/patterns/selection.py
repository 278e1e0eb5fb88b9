"""The op that selects. It lies below the patterns: they call it, and it knows them by a Protocol."""

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_sparse.attention import recorder, registry
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.inputs import (
    Ranks,
    mask_of_tensors,
    mask_of_whole_blocks,
    mask_tensors,
    whole_blocks,
)
from titan_sparse.attention.masks.ranges import MaskRanges


class Selects(Protocol):
    """What selection needs of a pattern (patterns/base.py)."""

    name: str
    key: str
    dynamic: bool
    takes_slices: bool

    def check_block_size(self, block_size: int) -> None: ...

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]: ...

    def empty_tensors(
        self, q: Tensor, seq_len: int, block_size: int, packed: bool
    ) -> list[Tensor]: ...

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> Any: ...


# Patterns are values of a few numbers. Equal ones share a key and an entry, which stays for good.
_PATTERNS: dict[str, Any] = {}


def register_pattern(pattern: Selects) -> None:
    """Let pattern_of(pattern.key) find it."""
    _PATTERNS[pattern.key] = pattern


def pattern_of(key: str) -> Any:
    """The pattern that a key names."""
    return _PATTERNS[key]


@dataclass(frozen=True)
class Selection:
    """The options of the select op. mask: names of the mask's tensors (inputs.mask_tensors)."""

    pattern: Selects
    cp: weakref.ref
    mask: str
    scale: float | None


@torch.compiler.assume_constant_result
def _selection_key(pattern: str, cp: str, mask: str, scale: float | None) -> str:
    owner = context_of(cp)

    def make() -> Selection:
        return Selection(pattern_of(pattern), weakref.ref(owner), mask, scale)

    return registry.register_owned(owner.calls, f"select {pattern} {cp} {mask} {scale}", make)


def check_pattern(pattern: Selects, ranges: MaskRanges, ranks: Ranks) -> None:
    """Raises ValueError for a pattern that does not fit the mask or the block size."""
    pattern.check_block_size(ranks.block_size)
    if ranges.slices is not None and not pattern.takes_slices:
        raise ValueError(
            f'pattern "{pattern.name}" needs a mask of one range of keys a query, not Slices; write '
            "pattern=Dense(), or a mask of Causal, SlidingWindow and Documents"
        )
    if pattern.dynamic and not ranges.causal:
        raise ValueError(
            f'pattern "{pattern.name}" needs a causal mask; '
            "write mask=Causal() & ... or pattern=Dense()"
        )


def select(
    q: Tensor,
    k: Tensor,
    ranges: MaskRanges,
    pattern: Selects,
    ranks: Ranks,
    scale: float | None,
) -> list[Tensor]:
    """The tensors of a dynamic pattern's index. No gradient. Collective over the ranks.

    Patterns rank keys by the softmax over keys. Learned sinks are not asked: a sink takes the same
    factor from every key of a row, so it changes no row's ranking. A head's budget weighs all rows
    alike, as recall does (observe/statistics.py). With the sinks, rows that leave little to the keys
    would weigh less.
    """
    names, tensors = mask_tensors(ranges)
    key = _selection_key(pattern.key, ranks.key, names, scale)
    return torch.ops.titan_sparse.select(q.detach(), k.detach(), tensors, key)


@torch.library.custom_op("titan_sparse::select", mutates_args=())
def _select(q: Tensor, k: Tensor, mask: list[Tensor], call: str) -> list[Tensor]:
    if q.numel() == 0:
        # No batch or no tokens: nothing is selected, as zeros say in every pattern's tensors.
        return [torch.zeros_like(tensor) for tensor in _fake_select(q, k, mask, call)]
    selection = registry.lookup(call)
    cp = selection.cp()
    ranges = mask_of_whole_blocks(mask_of_tensors(selection.mask, mask), cp.block_size)
    scale = q.shape[-1] ** -0.5 if selection.scale is None else selection.scale
    sent_before = cp.sent["collectives"]
    tensors = selection.pattern.select_tensors(
        whole_blocks(q, 2, cp.block_size), whole_blocks(k, 2, cp.block_size), ranges, cp, scale
    )
    if recorder.listening and (observer := recorder.observer()):
        observer.selection(cp.sent["collectives"] - sent_before)
    shares = recorder.capped_shares()
    if shares is not None:
        index = selection.pattern.index(tensors, ranges, *q.shape[:2], cp.block_size)
        if index.capped is not None:
            # [B, Hq, 3]
            both = index.capped.all(-1, keepdim=True)
            capped = torch.cat([index.capped, both], dim=-1)
            shares.append(capped.mean((0, 1), dtype=torch.float64))
    return tensors


@_select.register_fake
def _fake_select(q: Tensor, k: Tensor, mask: list[Tensor], call: str) -> list[Tensor]:
    selection = registry.lookup(call)
    block_size = selection.cp().block_size
    seq_len = mask[0].shape[1]
    seq_len += -seq_len % block_size
    packed = "document_start" in selection.mask
    return selection.pattern.empty_tensors(q, seq_len, block_size, packed)
