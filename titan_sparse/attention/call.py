"""What one attention call computes with: the pieces of work that schedules put in order."""

from collections.abc import Hashable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.backends.eager import accumulation_dtype
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import BlockIndex, pattern_by_key
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles import (
    blocks as tiles,
)
from titan_sparse.attention.tiles import (
    slash as slash_tiles,
)
from titan_sparse.attention.tiles import (
    slices as slice_tiles,
)
from titan_sparse.attention.tiles.blocks import Tiles


class Run(NamedTuple):
    """One call of attend(): rows and index are global, the same on every rank.

    pattern: its key. plain: the mask is causal and nothing else, the pattern dense. first, last: on every rank queries are
    the local blocks from `first` to before `last` (None: the end), keys those before `last`. Between ranks that is a part of
    the sequence, its causal past and nothing else, for layout "striped" only. vertical_kv: keys and values of the verticals
    [2, B, Hq, C, D] where they have been gathered already.
    """

    rows: MaskRanges
    pattern: str
    index: BlockIndex
    cp: ContextParallel
    backend: ModuleType
    scale: float
    plain: bool
    first: int = 0
    last: int | None = None
    vertical_kv: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Global tokens, padding included."""
        return self.rows.start.shape[1]

    def part(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and keys [B, H, S_local, D] that this run is about, as views."""
        size = self.cp.block_size
        last = q.shape[2] if self.last is None else self.last * size
        return q[:, :, self.first * size : last], k[:, :, :last], v[:, :, :last]

    def sum_dtype(self, q: Tensor) -> torch.dtype:
        """In which sums over chunks are kept: q's own where there is but one chunk."""
        return q.dtype if self.cp.size == 1 else accumulation_dtype(q.dtype)

    def is_plain(self, q: Tensor) -> bool:
        """Whether one rank computes dense causal attention, and by a kernel made for just that."""
        return self.plain and self.cp.size == 1 and self.backend.serves_causal(q)

    def count_plain_ring(self, k: Tensor, backward: bool = False) -> None:
        """Add to cp.plain_ring_bytes what a ring sends in which each chunk of K and V visits every rank, and in the backward
        their gradients too, in the dtype that they have on the wire: what cp.bytes_sent is measured against."""
        gradient = (self.cp.gradient_dtype or self.sum_dtype(k)).itemsize if backward else 0
        self.cp.plain_ring_bytes += (
            2 * k.numel() * (k.element_size() + gradient) * (self.cp.size - 1)
        )

    def blocks(self, rank: int | None = None) -> Tensor:
        """Global blocks of the keys of `rank` (default: this rank) on the data's device."""
        return self.cp.blocks(self.rows, rank)[: self.last]

    def query_blocks(self, rank: int | None = None) -> Tensor:
        """Global blocks of the queries of `rank` (default: this rank)."""
        return self.blocks(rank)[self.first :]

    def tiles(
        self,
        batch: int,
        transpose: bool,
        source: Hashable = None,
        queries: int | None = None,
        k_blocks: Tensor | None = None,
        room: int = 0,
    ) -> Tiles:
        """Tiles of the queries of rank `queries` (default: this rank) and the KV of rank `source` (default: of all ranks,
        one after the other), or of any global blocks int64 [n], which `source` then names; by_key too if `transpose`.
        room: KV blocks that there are in memory, if more."""
        blocks = lambda: self._key_blocks(source) if k_blocks is None else k_blocks
        if self._has_table_kernels():
            make = lambda: slash_tiles.key_side(blocks(), self.index.block_size)
            # Any blocks are the selection's, of this layer alone; those of ranks are the same for all layers.
            keys = (
                make()
                if k_blocks is not None
                else once_per_mask(self.rows, ("key side", self.cp.key, source, self.last), make)
            )
            return tiles.with_room(
                slash_tiles.block_tiles(
                    self._query_side(batch, queries), self.index, keys, transpose
                ),
                room,
            )
        static = not pattern_by_key(self.pattern).dynamic
        if static and k_blocks is None:
            transpose = (
                transpose or self.backend.READS_BY_KEY
            )  # made once, for the forward and for the backward
        of = tiles if self.rows.slices is None else slice_tiles
        make = lambda: tiles.with_room(
            of.block_tiles(
                self.rows, self.index, self.query_blocks(queries), blocks(), batch, transpose
            ),
            room,
        )
        if not static:
            return make()
        key = (
            "tiles",
            self.pattern,
            self.cp.key,
            batch,
            self.index.heads,
            transpose,
            source,
            queries,
            room,
            self.first,
            self.last,
        )
        return once_per_mask(self.rows, key, make)

    def _key_blocks(self, source: int | None) -> Tensor:
        return (
            self.cp.table(self.rows)[:, : self.last].flatten()
            if source is None
            else self.blocks(source)
        )

    def vertical_tiles(self, batch: int, transpose: bool = False) -> Tiles:
        """Tiles of this rank's queries and the gathered verticals."""
        if self._has_table_kernels():
            return slash_tiles.vertical_tiles(self._query_side(batch), self.index, transpose)
        return tiles.vertical_tiles(self.rows, self.index, self.query_blocks(), transpose)

    def _has_table_kernels(self) -> bool:
        return (
            self.rows.start.is_cuda
            and self.rows.slices is None
            and isinstance(self.index, VerticalSlashIndex)
        )

    def _query_side(self, batch: int, rank: int | None = None) -> slash_tiles.QuerySide:
        key = ("query side", self.pattern, self.cp.key, batch, rank, self.first, self.last)
        return once_per_mask(
            self.rows,
            key,
            lambda: slash_tiles.query_side(self.rows, self.index, self.query_blocks(rank), batch),
        )
