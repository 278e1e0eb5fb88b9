"""What one attention call computes with, and the tiles of its shares of work."""

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titan_sparse.attention import registry
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.backends.base import Backend, Piece
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
from titan_sparse.attention.tiles.tables import Tiles


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
        """First and last + 1 local query block, of so many local tokens; the last None for the end."""
        if self.share == "whole":
            return 0, None
        boundary, blocks = recomputed_blocks(self.recomputed, seq_len, self.cp().block_size)
        return (0, boundary) if self.share == "first" else (boundary, blocks)


def recomputed_blocks(recomputed: float, seq_len: int, block_size: int) -> tuple[int, int]:
    """How many of a rank's query blocks a share makes, and how many there are.

    seq_len: tokens of the rank. Both numbers are the same on every rank.
    """
    blocks = -(-seq_len // block_size)
    return int(recomputed * blocks + 0.5), blocks


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
            pattern_of(pattern),
            weakref.ref(owner),
            backend,
            mask,
            plain,
            scale,
            share,
            recomputed,
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
        last = q.shape[2] if self.last is None else self.last * size
        return q[:, :, self.first * size : last], k[:, :, :last], v[:, :, :last]

    def of_heads(self, heads: slice) -> "AttentionCall":
        """The call for some of the query heads."""
        index = self.index.of_heads(heads)
        return replace(self, make_index=lambda: index)

    def sum_dtype(self, q: Tensor) -> torch.dtype:
        """In which dtype sums over chunks are kept: q's own where there is one chunk only."""
        return q.dtype if self.cp.size == 1 else accumulation_dtype(q.dtype)

    def key_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the keys of `rank` (default: this rank), on the device."""
        return self.cp.blocks(self.mask, rank)[: self.last]

    def query_blocks(self, rank: int | None = None) -> Tensor:
        """int64 [n]: global blocks of the queries of `rank` (default: this rank)."""
        return self.key_blocks(rank)[self.first :]

    def count_plain_ring(self, k: Tensor, backward: bool = False) -> None:
        """Add to cp.plain_ring_bytes what a ring sends in which each chunk visits every rank.

        A backward sends the gradients too, in the dtype that they have between ranks.
        """
        element_bytes = k.element_size()
        if backward:
            element_bytes += (self.cp.gradient_dtype or self.sum_dtype(k)).itemsize
        self.cp.plain_ring_bytes += 2 * k.numel() * element_bytes * (self.cp.size - 1)

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
            return self.cp.table(self.mask)[:, : self.last].flatten()

        return self._block_tiles(batch, transpose, k_blocks, None, None)

    def tiles_of_blocks(
        self, batch: int, transpose: bool, k_blocks: Tensor, name: Hashable, capacity: int
    ) -> Tiles:
        """Tiles of this rank's queries and any global blocks int64 [n].

        name: what distinguishes these blocks from others of the same mask, layout and pattern.
        capacity: KV blocks that there are in memory, if more; queries see none of the rest.
        """
        size = self.index.block_size
        if self._has_table_kernels():
            keys = slash_tables.key_side(k_blocks, size)
            tiles = slash_tables.block_tiles(self._query_side(batch), self.index, keys, transpose)
            return block_tables.with_room(tiles, capacity)

        def make() -> Tiles:
            return block_tables.with_room(
                self._tables().block_tiles(
                    self.mask, self.index, self.query_blocks(), k_blocks, batch, transpose
                ),
                capacity,
            )

        return self._once_if_static(("tiles of blocks", name, batch, transpose, capacity), make)

    def tiles_of_verticals(self, batch: int, transpose: bool) -> Tiles:
        """Tiles of this rank's queries and the gathered verticals."""
        if self._has_table_kernels():
            return slash_tables.vertical_tiles(self._query_side(batch), self.index, transpose)
        return block_tables.vertical_tiles(self.mask, self.index, self.query_blocks(), transpose)

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
            verticals = every_nth_block(self.index.verticals, 2, size, share, shares)
            index = self.index.with_verticals(verticals.flatten(2, 3))
            call = replace(self, make_index=lambda: index)
            k = every_nth_block(k, 2, size, share, shares).flatten(2, 3)
            v = every_nth_block(v, 2, size, share, shares).flatten(2, 3)
        return Piece(k, v, call.tiles_of_verticals(batch, transpose))

    def _block_tiles(
        self,
        batch: int,
        transpose: bool,
        k_blocks: Callable[[], Tensor],
        source: int | None,
        query_rank: int | None,
    ) -> Tiles:
        """Tiles with the keys of a rank (None: of all), which are the same for all layers."""
        if self._has_table_kernels():
            keys = once_per_mask(
                self.mask,
                ("key side", self.cp.key, source, self.last),
                lambda: slash_tables.key_side(k_blocks(), self.index.block_size),
            )
            query_side = self._query_side(batch, query_rank)
            return slash_tables.block_tiles(query_side, self.index, keys, transpose)
        if not self.pattern.dynamic:
            # Made once, for the forward and for the backward.
            transpose = transpose or self.backend.READS_BY_KEY

        def make() -> Tiles:
            return self._tables().block_tiles(
                self.mask, self.index, self.query_blocks(query_rank), k_blocks(), batch, transpose
            )

        return self._once_if_static(("tiles", source, query_rank, batch, transpose), make)

    def _once_if_static(self, name: tuple, make: Callable[[], Tiles]) -> Tiles:
        """make(), remembered with the mask if the pattern is static."""
        if self.pattern.dynamic:
            return make()
        heads = self.index.heads
        key = (*name, self.pattern.key, self.cp.key, heads, self.first, self.last)
        return once_per_mask(self.mask, key, make)

    def _tables(self):
        """The module that makes tables of blocks for this mask, in plain torch."""
        return block_tables if self.mask.slices is None else slice_tables

    def _has_table_kernels(self) -> bool:
        """Whether kernels make the tables, with no wait of the host."""
        is_vertical_slash = isinstance(self.index, VerticalSlashIndex)
        return self.mask.start.is_cuda and self.mask.slices is None and is_vertical_slash

    def _query_side(self, batch: int, rank: int | None = None) -> slash_tables.QuerySide:
        key = (
            "query side",
            self.pattern.key,
            self.cp.key,
            batch,
            rank,
            self.first,
            self.last,
        )
        return once_per_mask(
            self.mask,
            key,
            lambda: slash_tables.query_side(self.mask, self.index, self.query_blocks(rank), batch),
        )


def bind(key: str, q: Tensor, index: list[Tensor], mask: list[Tensor]) -> AttentionCall:
    """The call of an op that got this key, queries [B, Hq, S_local, D], and the index's and the
    mask's tensors. For the first of two shares the verticals' keys and values end `index`.
    """
    options: CallOptions = registry.OBJECTS.get(key) or registry.lookup(key)
    cp = options.cp()
    vertical_kv = None
    if options.share == "first":
        *index, vertical_kv = index
    first, last = options.block_range(q.shape[2])
    ranges = mask_of_whole_blocks(mask_of_tensors(options.mask, mask, options.plain), cp.block_size)

    def make_index() -> BlockIndex:
        return options.pattern.index(index, ranges, q.shape[0], q.shape[1], cp.block_size)

    return AttentionCall(
        mask=ranges,
        make_index=make_index,
        pattern=options.pattern,
        cp=cp,
        backend=BACKENDS[options.backend],
        scale=q.shape[-1] ** -0.5 if options.scale is None else options.scale,
        plain=ranges.plain and not options.pattern.dynamic,
        first=first,
        last=last,
        vertical_kv=vertical_kv,
    )


def every_nth_block(x: Tensor, dim: int, block_size: int, first: int, n: int) -> Tensor:
    """A view of every n-th block along `dim`, which becomes two dims: blocks and their tokens."""
    blocks = x.unflatten(dim, (-1, block_size))
    return blocks[(slice(None),) * dim + (slice(first, None, n),)]
