"""What one attention call computes with, and the tiles of its shares of work."""

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_sparse.attention import registry
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import Backend
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.inputs import mask_of_tensors, mask_of_whole_blocks
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.merge import accumulation_dtype
from titan_sparse.attention.patterns.base import BlockIndex, Pattern
from titan_sparse.attention.patterns.selection import pattern_of
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.attention.tiles import blocks as block_tables
from titan_sparse.attention.tiles import slash as slash_tables
from titan_sparse.attention.tiles import slices as slice_tables
from titan_sparse.kernels.block_sparse import Piece, Tiles


@dataclass(frozen=True)
class CallOptions:
    """What an attention op is told besides tensors. It reaches the op by a key (registry.py).

    cp: a weak reference, as the ContextParallel owns this object.
    mask: names of the mask's tensors (inputs.mask_tensors).
    plain: the mask is causal and nothing else.
    scale: of the scores; None for D ** -0.5.
    share: of the queries: "whole", or "first" or "second" of the two shares between which
    `recomputed` draws the line.
    """

    pattern: Pattern
    cp: weakref.ref
    backend: str
    mask: str
    plain: bool
    scale: float | None
    share: str = "whole"
    recomputed: float = 0.0

    def block_range(self, seq_len: int) -> tuple[int, int | None]:
        """The range of local query blocks that the call is about: first, and last + 1.

        seq_len: local tokens. The end is None for the whole.
        """
        if self.share == "whole":
            return 0, None
        block_size = self.cp().block_size
        boundary, blocks = recomputed_blocks(self.recomputed, seq_len, block_size)
        if self.share == "first":
            return 0, boundary
        return boundary, blocks


def recomputed_blocks(recomputed: float, seq_len: int, block_size: int) -> tuple[int, int]:
    """How many of a rank's query blocks the first share has, and how many there are in all.

    seq_len: tokens of the rank. Both numbers are the same on every rank.
    """
    blocks = -(-seq_len // block_size)
    boundary = int(recomputed * blocks + 0.5)
    return boundary, blocks


@torch.compiler.assume_constant_result
def options_key(
    pattern: str,
    cp: str,
    backend: str,
    mask: str,
    plain: bool,
    scale: float | None,
    share: str = "whole",
    recomputed: float = 0.0,
) -> str:
    """The key of CallOptions, for a pattern and a ContextParallel named by their keys."""
    key = f"attend {pattern} {cp} {backend} {mask} {plain} {scale} {share} {recomputed}"
    if key in registry.OBJECTS:
        return key
    owner = context_of(cp)

    def make() -> CallOptions:
        return CallOptions(
            pattern=pattern_of(pattern),
            cp=weakref.ref(owner),
            backend=backend,
            mask=mask,
            plain=plain,
            scale=scale,
            share=share,
            recomputed=recomputed,
        )

    return registry.register_owned(owner.calls, key, make)


@dataclass(frozen=True)
class AttentionCall:
    """One call of attend(). mask and index are global: the same on every rank.

    make_index: makes the index when somebody asks for it; dense kernels never do.
    plain: the mask is causal and nothing else, and the pattern dense.
    first, last: on every rank the queries are the local blocks from `first` to before `last` (None
    for the end), and the keys are those before `last`. Between ranks that is a range of the
    sequence, its causal past and nothing else, in the layout "striped" only.
    vertical_kv: keys and values of the verticals [2, B, Hq, C, D], if they have been gathered.
    """

    mask: MaskRanges
    make_index: Callable[[], BlockIndex]
    pattern: Pattern
    cp: ContextParallel
    backend: Backend
    scale: float
    plain: bool
    first: int = 0
    last: int | None = None
    vertical_kv: Tensor | None = None

    @functools.cached_property
    def index(self) -> BlockIndex:
        """What the pattern selected."""
        return self.make_index()

    @property
    def seq_len(self) -> int:
        """Global tokens, padding included."""
        return self.mask.start.shape[1]

    @property
    def is_partial(self) -> bool:
        """Whether the queries are only a range of the sequence."""
        return self.first > 0 or self.last is not None

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries and keys [B, H, S_local, D] that this call is about, as views."""
        size = self.cp.block_size
        begin = self.first * size
        end = q.shape[2]
        if self.last is not None:
            end = self.last * size
        q_share = q[:, :, begin:end]
        k_share = k[:, :, :end]
        v_share = v[:, :, :end]
        return q_share, k_share, v_share

    def of_heads(self, heads: slice) -> "AttentionCall":
        """The call for some of the query heads."""
        index = self.index.of_heads(heads)
        return replace(self, make_index=lambda: index)

    def sum_dtype(self, q: Tensor) -> torch.dtype:
        """The dtype that sums over chunks are kept in: q's own where there is one chunk only."""
        if self.cp.size == 1:
            return q.dtype
        return accumulation_dtype(q.dtype)

    def key_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the keys of `rank` (default: this rank), on the device."""
        blocks = self.cp.blocks(self.mask, rank)
        return blocks[: self.last]

    def query_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the queries of `rank` (default: this rank)."""
        blocks = self.key_blocks(rank)
        return blocks[self.first :]

    def count_plain_ring(self, k: Tensor, backward: bool = False) -> None:
        """Add to cp.plain_ring_bytes what a ring sends in which each chunk visits every rank.

        k: [B, Hkv, S_local, D]. A backward sends the gradients too, in the dtype that they have
        between ranks.
        """
        element_bytes = k.element_size()
        if backward:
            gradient_dtype = self.cp.gradient_dtype or self.sum_dtype(k)
            element_bytes += gradient_dtype.itemsize
        # Keys and values, hence 2.
        chunk_bytes = 2 * k.numel() * element_bytes
        hops = self.cp.size - 1
        self.cp.plain_ring_bytes += chunk_bytes * hops

    # Tiles

    def tiles_of_rank(
        self, batch: int, source: int, transpose: bool, query_rank: int | None = None
    ) -> Tiles:
        """Tiles of the queries of `query_rank` (default: this rank) and the keys of rank `source`.

        transpose: make Tiles.by_key too, which some backends read in the backward.
        """

        def k_blocks() -> Tensor:
            return self.key_blocks(source)

        return self._block_tiles(batch, transpose, k_blocks, source, query_rank)

    def tiles_of_all_ranks(self, batch: int, transpose: bool) -> Tiles:
        """Tiles of this rank's queries and the keys of all ranks, one rank after the other."""

        def k_blocks() -> Tensor:
            # [ranks, n]
            table = self.cp.table(self.mask)
            return table[:, : self.last].flatten()

        return self._block_tiles(batch, transpose, k_blocks, source=None, query_rank=None)

    def tiles_of_blocks(
        self, batch: int, transpose: bool, k_blocks: Tensor, name: Hashable, capacity: int
    ) -> Tiles:
        """Tiles of this rank's queries and any global blocks int64 [n].

        name: what distinguishes these blocks from others of the same mask, layout and pattern.
        capacity: KV blocks that there are in memory, if more; queries see none of the rest.
        """
        if self._has_table_kernels():
            query_side = self._query_side(batch)
            key_side = slash_tables.key_side(k_blocks, self.index.block_size)
            tiles = slash_tables.block_tiles(query_side, self.index, key_side, transpose)
            return block_tables.with_room(tiles, capacity)

        def make() -> Tiles:
            tables = self._tables()
            tiles = tables.block_tiles(
                self.mask,
                self.index,
                self.query_blocks(),
                k_blocks,
                batch,
                transpose,
            )
            return block_tables.with_room(tiles, capacity)

        full_name = ("tiles of blocks", name, batch, transpose, capacity)
        return self._once_if_static(full_name, make)

    def tiles_of_verticals(self, batch: int, transpose: bool) -> Tiles:
        """Tiles of this rank's queries and the gathered verticals."""
        if self._has_table_kernels():
            query_side = self._query_side(batch)
            return slash_tables.vertical_tiles(query_side, self.index, transpose)
        return block_tables.vertical_tiles(
            self.mask,
            self.index,
            self.query_blocks(),
            transpose,
        )

    def vertical_piece(
        self, vertical_kv: Tensor, batch: int, transpose: bool, share: int = 0, shares: int = 1
    ) -> Piece:
        """Every shares-th block of the gathered verticals [2, B, Hq, C, D], from block `share` on.

        Whole blocks are dealt out, not single verticals: runs of neighbors stay as long, and the
        mask cuts no more tiles.
        """
        call = self
        k, v = vertical_kv
        if shares > 1:
            size = self.index.block_size
            # [B, Hq, C]
            positions = self.index.verticals
            positions = every_nth_block(positions, 2, size, share, shares).flatten(2, 3)
            index = self.index.with_verticals(positions)
            call = replace(self, make_index=lambda: index)
            # [B, Hq, C, D]
            k = every_nth_block(k, 2, size, share, shares).flatten(2, 3)
            v = every_nth_block(v, 2, size, share, shares).flatten(2, 3)
        tiles = call.tiles_of_verticals(batch, transpose)
        return Piece(k, v, tiles)

    def _block_tiles(
        self,
        batch: int,
        transpose: bool,
        k_blocks: Callable[[], Tensor],
        source: int | None,
        query_rank: int | None,
    ) -> Tiles:
        """Tiles with the keys of the rank `source` (None: of all ranks).

        k_blocks(): the global blocks of those keys, which are the same for all layers.
        """
        if self._has_table_kernels():

            def make_key_side() -> slash_tables.KeySide:
                return slash_tables.key_side(k_blocks(), self.index.block_size)

            key = ("key side", self.cp.key, source, self.last)
            key_side = once_per_mask(self.mask, key, make_key_side)
            query_side = self._query_side(batch, query_rank)
            return slash_tables.block_tiles(query_side, self.index, key_side, transpose)
        if not self.pattern.dynamic:
            # Made once, for the forward and for the backward.
            transpose = transpose or self.backend.READS_BY_KEY

        def make() -> Tiles:
            tables = self._tables()
            return tables.block_tiles(
                self.mask,
                self.index,
                self.query_blocks(query_rank),
                k_blocks(),
                batch,
                transpose,
            )

        name = ("tiles", source, query_rank, batch, transpose)
        return self._once_if_static(name, make)

    def _once_if_static(self, name: tuple, make: Callable[[], Tiles]) -> Tiles:
        """make(), remembered with the mask if the pattern is static."""
        if self.pattern.dynamic:
            return make()
        key = (
            *name,
            self.pattern.key,
            self.cp.key,
            self.index.heads,
            self.first,
            self.last,
        )
        return once_per_mask(self.mask, key, make)

    def _tables(self):
        """The module that makes tables of blocks for this mask, in plain torch."""
        if self.mask.slices is None:
            return block_tables
        return slice_tables

    def _has_table_kernels(self) -> bool:
        """Whether kernels make the tables, with no wait of the host."""
        is_vertical_slash = isinstance(self.index, VerticalSlashIndex)
        on_gpu = self.mask.start.is_cuda
        has_no_slices = self.mask.slices is None
        return is_vertical_slash and on_gpu and has_no_slices

    def _query_side(self, batch: int, rank: int | None = None) -> slash_tables.QuerySide:
        """What the kernels' tables need of the queries of a rank, remembered with the mask."""

        def make() -> slash_tables.QuerySide:
            q_blocks = self.query_blocks(rank)
            return slash_tables.query_side(self.mask, self.index, q_blocks, batch)

        key = (
            "query side",
            self.pattern.key,
            self.cp.key,
            batch,
            rank,
            self.first,
            self.last,
        )
        return once_per_mask(self.mask, key, make)


def bind(key: str, q: Tensor, index: list[Tensor], mask: list[Tensor]) -> AttentionCall:
    """The call that an op was given by its key and its tensors.

    q: [B, Hq, S_local, D]. index, mask: the tensors of the index and of the mask. For the first of
    two shares the keys and values of the verticals are the last tensor of `index`.
    """
    options: CallOptions = registry.OBJECTS.get(key) or registry.lookup(key)
    cp = options.cp()
    vertical_kv = None
    if options.share == "first":
        *index, vertical_kv = index
    batch, heads, seq_len, head_dim = q.shape
    first, last = options.block_range(seq_len)
    ranges = mask_of_tensors(options.mask, mask, options.plain)
    ranges = mask_of_whole_blocks(ranges, cp.block_size)
    scale = options.scale
    if scale is None:
        scale = head_dim**-0.5

    def make_index() -> BlockIndex:
        return options.pattern.index(
            index,
            ranges,
            batch,
            heads,
            cp.block_size,
        )

    return AttentionCall(
        mask=ranges,
        make_index=make_index,
        pattern=options.pattern,
        cp=cp,
        backend=BACKENDS[options.backend],
        scale=scale,
        plain=ranges.plain and not options.pattern.dynamic,
        first=first,
        last=last,
        vertical_kv=vertical_kv,
    )


def every_nth_block(x: Tensor, dim: int, block_size: int, first: int, n: int) -> Tensor:
    """A view of every n-th block along `dim`, from block `first` on.

    The dim becomes two: blocks, and the tokens of a block.
    """
    blocks = x.unflatten(dim, (-1, block_size))
    all_before = (slice(None),) * dim
    every_nth = slice(first, None, n)
    return blocks[(*all_before, every_nth)]
