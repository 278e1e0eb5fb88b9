"""Everything that one attention call needs, and its tiles: the key blocks its queries meet, and
what they see in them."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from titan_sparse.attention import tiles
from titan_sparse.attention.backends.base import Backend
from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.masks.ranges import MaskRanges, once_per_mask
from titan_sparse.attention.patterns.base import BlockIndex, Computation, Dense, Pattern
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.kernels.block_sparse import Piece, Tiles
from titan_sparse.kernels.block_tables import takes_blocks
from titan_sparse.kernels.dtypes import accumulation_dtype


@dataclass(frozen=True)
class AttentionCall:
    """One call of attend(). mask and index are global: the same on every rank.

    transport: makes the Transport of its schedule (context_parallel/loop.py).
    plain: the mask is causal and nothing else, and the pattern dense.
    first, last: on every rank the queries are the local blocks from `first` to before `last` (None
    for the end), and the keys are those before `last`. Between ranks that is a range of the
    sequence, its causal past and nothing else, in the layout "striped" only.
    vertical_kv: keys and values of the verticals [2, B, Hq, C, D], if they have been gathered.
    """

    mask: MaskRanges
    index: BlockIndex
    pattern: Pattern
    cp: ContextParallel
    backend: Backend
    transport: type[Any]
    scale: float
    plain: bool
    first: int = 0
    last: int | None = None
    vertical_kv: Tensor | None = None

    @property
    def seq_len(self) -> int:
        """Global tokens, padding included."""
        return self.mask.start.shape[1]

    @property
    def is_partial(self) -> bool:
        """True if the queries are only a range of the sequence."""
        return self.first > 0 or self.last is not None

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and keys [B, H, S_local, D] that this call is about, as views."""
        size = self.cp.block_size
        begin = self.first * size
        end = q.shape[2] if self.last is None else self.last * size
        return q[:, :, begin:end], k[:, :, :end], v[:, :, :end]

    def of_heads(self, heads: slice) -> "AttentionCall":
        """The call for some of the query heads."""
        return replace(self, index=self.index.of_heads(heads))

    def sum_dtype(self, q: Tensor) -> torch.dtype:
        """The dtype of sums over chunks: q's own if there is only one chunk."""
        if self.cp.size == 1:
            return q.dtype
        return accumulation_dtype(q.dtype)

    def key_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the keys of `rank` (default: this rank), on the device."""
        return self.cp.blocks(self.mask, rank)[: self.last]

    def query_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the queries of `rank` (default: this rank)."""
        return self.key_blocks(rank)[self.first :]

    def tiles_of_rank(
        self, source: int | None, transpose: bool, query_rank: int | None = None
    ) -> Tiles:
        """Tiles of the queries of `query_rank` (default: this rank) and the keys of rank `source`
        (None: of all ranks, one after the other).

        transpose: make Tiles.by_key too, which some backends read in the backward.
        """
        if source is None:
            k_blocks = self.cp.table(self.mask)[:, : self.last].flatten()
        else:
            k_blocks = self.key_blocks(source)
        # Those of a static pattern are made once, for the forward and for the backward.
        transpose = transpose or (not self.pattern.dynamic and self.backend.READS_BY_KEY)
        name = ("rank", source)
        return self.tiles_of_blocks(k_blocks, name, transpose, query_rank)

    def tiles_of_blocks(
        self, k_blocks: Tensor, name: Hashable, transpose: bool, query_rank: int | None = None
    ) -> Tiles:
        """Tiles of the queries of `query_rank` (default: this rank) and any
        global blocks int64 [n].

        name: what distinguishes these blocks from others of the same mask, layout and pattern; None
        for blocks that follow from the index, of which nothing is remembered.
        """

        def make() -> Tiles:
            if self._has_table_kernels():
                queries = self._slash_queries(query_rank)
                keys = self._slash_keys(k_blocks, name)
                return tiles.slash_block_tiles(queries, keys, self._slash_index, transpose)
            q_blocks = self.query_blocks(query_rank)
            return tiles.block_tiles(self.mask, self.index, q_blocks, k_blocks, transpose)

        if self.pattern.dynamic:
            return make()
        key = ("tiles", name, query_rank, transpose, self.pattern.key, self.cp.key)
        shape = (self.index.batch, self.index.heads, self.first, self.last)
        return once_per_mask(self.mask, (*key, *shape), make)

    def tiles_of_verticals(self, transpose: bool) -> Tiles:
        """Tiles of this rank's queries and the gathered verticals."""
        if self._has_table_kernels():
            # The host does not wait for the selection.
            queries = self._slash_queries()
            return tiles.slash_vertical_tiles(queries, self._slash_index, transpose)
        return tiles.vertical_tiles(self.mask, self.index, self.query_blocks(), transpose)

    def computation(self) -> Computation | None:
        """The pattern's own way to compute this call; None for tiles."""
        if self.cp.size > 1 or self.is_partial or not self.backend.GATHERS_QUERIES:
            return None

        def dense_tiles(mask: MaskRanges) -> Tiles:
            shape = (self.index.batch, self.index.heads, self.cp.block_size)
            index = Dense().index([], mask, *shape)
            blocks = self.key_blocks()
            return tiles.block_tiles(mask, index, blocks, blocks, transpose=True)

        return self.index.computation(self.mask, self.cp, self.scale, dense_tiles)

    def vertical_piece(
        self, vertical_kv: Tensor, transpose: bool, share: int = 0, shares: int = 1
    ) -> Piece:
        """Every shares-th block of the gathered verticals [2, B, Hq, C, D], from block `share` on.

        Whole blocks are dealt out, not single verticals: runs of neighbors stay as long, and the
        mask cuts no more tiles.
        """
        call = self
        k, v = vertical_kv
        if shares > 1:
            # [B, Hq, C] and twice [B, Hq, C, D]
            positions, k, v = (
                every_nth_block(x, self.index.block_size, share, shares).flatten(2, 3)
                for x in (self.index.verticals, k, v)
            )
            call = replace(self, index=replace(self.index, verticals=positions))
        return Piece(k, v, call.tiles_of_verticals(transpose))

    def _has_table_kernels(self) -> bool:
        """True if kernels make the tables, with no wait of the host."""
        has_kernels = self.index.has_table_kernels and takes_blocks(self.index.block_size)
        return has_kernels and self.mask.start.is_cuda

    @property
    def _slash_index(self) -> VerticalSlashIndex:
        """The index of a call that has table kernels."""
        return cast(VerticalSlashIndex, self.index)

    def _slash_queries(self, rank: int | None = None) -> tiles.SlashQueries:
        """The inputs of the kernels' tables for the queries of a rank, remembered with the mask."""
        key = ("slash queries", self.pattern.key, self.cp.key, self.index.batch, rank)
        return once_per_mask(
            self.mask,
            (*key, self.first, self.last),
            lambda: tiles.slash_queries(self.mask, self._slash_index, self.query_blocks(rank)),
        )

    def _slash_keys(self, k_blocks: Tensor, name: Hashable) -> tiles.SlashKeys:
        def make() -> tiles.SlashKeys:
            return tiles.slash_keys(k_blocks, self.index.block_size)

        if name is None:
            return make()
        return once_per_mask(self.mask, ("slash keys", name, self.cp.key, self.last), make)


def every_nth_block(x: Tensor, block_size: int, first: int, n: int) -> Tensor:
    """A view of every n-th block along dim 2, from block `first` on.

    The dim becomes two: blocks, and the tokens of a block.
    """
    return x.unflatten(2, (-1, block_size))[:, :, first::n]
