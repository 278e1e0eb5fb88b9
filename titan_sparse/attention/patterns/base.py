"""Patterns and their indices."""

import ast
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan_sparse.attention import recorder
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.inputs import (
    Ranks,
    check_scale,
    check_tensors,
    constant,
    mask_of_whole_blocks,
    ranks_of,
    resolve_mask,
    whole_blocks,
)
from titan_sparse.attention.masks.ranges import Mask, MaskRanges
from titan_sparse.attention.patterns.flex_mask import flex_block_mask
from titan_sparse.kernels import compact as compact_kernels
from titan_sparse.kernels.block_sparse import ChosenChunks, Tiles, chosen_keys
from titan_sparse.options.patterns import DenseOptions, PatternOptions


class Computation(Protocol):
    """A pattern's own way to compute a call of attend()."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [B, Hq, S, D] and lse [B, Hq, S] of q [B, Hq, S, D] and k, v [B, Hkv, S, D]."""

    def backward(
        self, queries: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in their dtype.

        queries: q, d_out, out and lse (Queries in attention/backends/base.py).
        """


@dataclass(eq=False)
class BlockIndex:
    """The result of one selection, for all heads and the whole (global) sequence.

    It is the same on every rank and has two parts: a set of block pairs, which selects() returns,
    and `verticals`, single keys that every query of their document sees in addition. A pair of
    tokens in a selected block pair is not counted again through its vertical.

    verticals: int32 [B, Hq, C], ascending global positions, filled up with the sequence length. C is
        0 for patterns of blocks.
    """

    by_head: ClassVar[tuple[str, ...]] = ("verticals",)
    """Attributes that have the query heads as dim 1."""
    capped = None
    """bool [B, Hq, 2]: whether the cap on verticals, and the cap on slashes, kept a budget below
    the recall; None for patterns without budgets."""
    selects_all: ClassVar[bool] = False
    """True if it selects every pair of blocks, so that the mask alone says what is computed."""
    has_table_kernels: ClassVar[bool] = False
    """True if kernels make its tables of tiles on a GPU, with no wait of the
    host (tiles.slash_*)."""
    shortens_rings: ClassVar[bool] = False
    """True if it may leave out all of a rank's keys, so that a ring looks before it sends them."""
    seq_len: int
    block_size: int
    verticals: Tensor

    @property
    def has_verticals(self) -> bool:
        return self.verticals.shape[-1] > 0

    @property
    def batch(self) -> int:
        return self.verticals.shape[0]

    @property
    def heads(self) -> int:
        return self.verticals.shape[1]

    def all_blocks(self) -> Tensor:
        """int64 [blocks]: all blocks of the sequence, of which the last one may be cut short."""
        blocks = -(-self.seq_len // self.block_size)
        return torch.arange(blocks, device=self.verticals.device)

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        """bool [B or 1, Hq or 1, nq, nk]: which pairs of global blocks (int [nq], int [nk]) are
        computed whole."""
        raise NotImplementedError

    def heads_selecting(self, q_blocks: Tensor, k_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The number of heads that compute each pair of global blocks (int [nq], int [nk]) for some
        queries, and for all of them: int32 [B or 1, nq, nk] each."""
        some = self.selects(q_blocks, k_blocks)
        every = some & self.selects_for_all(q_blocks, k_blocks)
        # A pattern that treats all heads alike answers for one of them.
        alike = self.heads // some.shape[1]
        return some.sum(1, dtype=torch.int32) * alike, every.sum(1, dtype=torch.int32) * alike

    def heads_selecting_whole(self, q_blocks: Tensor, k_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """heads_selecting() of blocks in a row, where the mask lets all of the queries see all of
        the keys. On the CPU."""
        return self.heads_selecting(q_blocks, k_blocks)

    def covers(self, q_blocks: Tensor, verticals: Tensor) -> Tensor:
        """bool [B, Hq, nq, C]: the vertical [B, Hq, C] lies in a block that the query block
        computes whole. Only patterns with verticals have it."""
        raise NotImplementedError

    def vertical_pairs_by_block(self, ranges: MaskRanges) -> Tensor:
        """Pairs of the queries of each block with verticals outside the tiles that it computes, of
        all sequences and heads together: int64 [blocks]. On the CPU."""
        return torch.zeros_like(self.all_blocks())

    def of_heads(self, heads: slice) -> "BlockIndex":
        fields = {name: getattr(self, name)[:, heads].contiguous() for name in self.by_head}
        return dataclasses.replace(self, **fields)

    def selects_for_all(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        """bool, broadcastable to selects(): pairs of blocks that all queries of the block chose.

        The mask may still hide keys. Only patterns with chosen_chunks() distinguish
        the queries of a block.
        """
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q_blocks.device)

    def chosen_chunks(self, q_positions: Tensor) -> ChosenChunks | None:
        """The choices of single queries (global positions, int [Sq]) inside the selected pairs of
        blocks; None for everything."""
        return None

    def pairs(self, ranges: MaskRanges, q_blocks: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
        """Pairs of tokens computed for these queries, by part of the keys: float64 [B, Hq, parts].

        parts: global blocks int64 [n] each. None where all queries of a block compute the same, so
        that the mask and the selected blocks say it.
        """
        return None

    def computation(
        self,
        ranges: MaskRanges,
        cp: ContextParallel,
        scale: float,
        dense_tiles: Callable[[MaskRanges], Tiles],
    ) -> Computation | None:
        """The pattern's own way to compute a call on one rank; None for tiles, which all patterns
        support. Asked for only where the backend gathers queries.

        dense_tiles: makes the tiles of all pairs of a mask.
        """
        return None

    def counts(self) -> dict[str, list[int]]:
        """The number of single elements that each head of the first sequence
        chose, by kind of element."""
        return {}

    def tensors(self) -> list[Tensor]:
        """The tensors that custom ops pass on and activation checkpointing keeps;
        Pattern.index() reads them."""
        return []

    def selected_keys(self, q_positions: Tensor) -> Tensor:
        """bool [B, Hq, n, S]: the keys of queries (global positions, int [n]), where
        the mask allows them."""
        chosen = self.chosen_chunks(q_positions)
        if chosen is not None:
            position = torch.arange(self.seq_len, device=q_positions.device)
            return chosen_keys(chosen, position.view(1, 1, -1))
        in_blocks = self.selects(q_positions // self.block_size, self.all_blocks())
        in_blocks = in_blocks.repeat_interleave(self.block_size, dim=-1)[..., : self.seq_len]
        # One place more takes the filling of `verticals`.
        is_vertical = in_blocks.new_zeros(*self.verticals.shape[:2], self.seq_len + 1)
        is_vertical.scatter_(2, self.verticals.long().clamp(max=self.seq_len), True)
        return in_blocks | is_vertical[:, :, None, :-1]

    def dense(self, mask: Mask | MaskRanges) -> Tensor:
        """bool [B, Hq, S, S] in global order: exactly the pairs that attend()
        computes with this mask.

        For tests and pictures. Raises ValueError for a mask of another length.
        """
        ranges = self._ranges(mask)
        position = torch.arange(self.seq_len, device=ranges.start.device)
        return self.selected_keys(position) & ranges.dense()[:, None]

    def _ranges(self, mask: Mask | MaskRanges) -> MaskRanges:
        """The mask for the tokens of this index. Raises ValueError for one of another length."""
        ranges = mask.rows(self.seq_len, self.verticals.device) if isinstance(mask, Mask) else mask
        if ranges.start.shape[1] != self.seq_len:
            raise ValueError(
                f"the mask is for {ranges.start.shape[1]} tokens, the index for {self.seq_len}; write "
                f"mask.rows({self.seq_len})"
            )
        return ranges

    def block_mask(self, mask: Mask | MaskRanges) -> BlockMask:
        """[B, Hq, S, S] for flex_attention(q, k, v, block_mask=..., enable_gqa=True), in global
        order: exactly the pairs that attend() computes with this mask.

        Raises ValueError for a mask of another length.
        """
        ranges = self._ranges(mask)
        blocks = self.all_blocks()
        return flex_block_mask(
            ranges,
            self.block_size,
            self.selects(blocks, blocks),
            self.selects_for_all(blocks, blocks),
            self.verticals,
            self.chosen_chunks(torch.arange(self.seq_len, device=ranges.start.device)),
        )


def no_verticals(like: Tensor) -> Tensor:
    """BlockIndex.verticals int32 [B, Hq, 0] of a pattern that has none. like: [B, Hq, ...]."""
    batch, heads = like.shape[:2]
    return like.new_empty(batch, heads, 0, dtype=torch.int32)


def gather_blocks(x: Tensor, cp: ContextParallel, ranges: MaskRanges) -> Tensor:
    """All ranks' blocks [B, H, n_local, ...] in global order [B, H, blocks, ...], on every rank."""
    if cp.size == 1:
        return x
    # [ranks, B, H, n_local, ...] -> [B, H, ranks * n_local, ...], ordered by rank.
    by_rank = cp.all_gather(x).movedim(0, 2).flatten(2, 3)
    global_order = torch.argsort(cp.table(ranges).flatten())
    return by_rank[:, :, global_order]


def compact(selected: Tensor, capacity: int, fill: int) -> tuple[Tensor, Tensor]:
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending; and how many
    there are, int32 [N].

    What is left of the capacity is filled up with `fill`.
    """
    if selected.is_cuda:
        return compact_kernels.compact(selected, capacity, fill)
    return compact_kernels.compact_naive(selected, capacity, fill)


class Pattern(PatternOptions):
    """The method that selects the pairs worth computing.

    Subclasses are dataclasses of their options, which cannot be changed.

    `key` names a pattern inside custom ops, which take strings but no objects.
    """

    key: str
    dynamic: ClassVar[bool] = True
    """False if nothing has to be looked at to select."""
    takes_slices: ClassVar[bool] = False
    """True if it also works with masks of Slices, which have no single range of keys a query."""
    gathers_queries: ClassVar[bool] = False
    """True if its index has a computation() of its own, on one rank, which gathers queries."""

    def __init_subclass__(cls) -> None:
        # A dataclass that compares its fields would lose the hash.
        cls.__hash__ = Pattern.__hash__  # type: ignore[method-assign]
        name = getattr(cls, "name", None)
        _CLASSES[cls] = sum(getattr(other, "name", None) == name for other in _CLASSES)

    def __post_init__(self) -> None:
        if not hasattr(self, "name"):
            kind = type(self).__name__
            raise TypeError(f'{kind} has no name; write name: ClassVar[str] = "..." in the class')
        self.check()
        self._register()

    def _register(self) -> None:
        """Give it its key: its class, and its options as a dictionary."""
        # asdict() would copy them, which torch.compile cannot trace before torch 2.13.
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        options = {field.name: getattr(self, field.name) for field in fields}
        others = sorted(vars(self).keys() - options.keys() - {"key"})
        if others:
            # They are not in the key, so that another object's values would be read in their place.
            kind = type(self).__name__
            raise TypeError(
                f"{kind}.{others[0]} is not an option; write it as a field of the dataclass, an int, float, "
                f"bool, or str, or compute it from the fields in a property"
            )
        if torch.compiler.is_compiling():
            # A number that changes from call to call would be a symbol.
            numbers = {name: x for name, x in options.items() if type(x) in (int, float)}
            options |= {name: type(x)(constant(x)) for name, x in numbers.items()}
        key = f"{_class_key(type(self))}:{options}"
        # The dataclass is frozen.
        object.__setattr__(self, "key", key)
        _PATTERNS[key] = self

    def __setattr__(self, name: str, value: object) -> None:
        if "key" in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __setstate__(self, state: dict) -> None:
        """Patterns that come from another process are known here too."""
        self.__dict__.update(state)
        self._register()

    def select(
        self,
        q: Tensor,
        k: Tensor,
        mask: Mask | MaskRanges,
        cp: ContextParallel | None = None,
        scale: float | None = None,
        block_size: int | None = None,
    ) -> BlockIndex:
        """Choose what attend() computes for these q [B, Hq, S_local, D] and k [B, Hkv, S_local, D].

        No gradient. Collective over `cp`. `scale` defaults to D ** -0.5, `block_size` to that of
        `cp`, or 128. Raises ValueError for inputs that do not fit together.
        """
        ranks = ranks_of(cp, block_size)
        check_tensors(q, k, k)
        ranges = resolve_mask(mask, q, ranks)
        check_pattern(self, ranges, ranks)
        # The index of a static pattern needs only the mask.
        tensors = []
        if self.dynamic:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            check_scale(scale)
            tensors = self.choose(q.detach(), k.detach(), ranges, context_of(ranks.key), scale)
        return self.index(tensors, ranges, q.shape[0], q.shape[1], ranks.block_size)

    def choose(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        """The tensors of the index, for inputs of any length. Reports to a recording.

        Patterns rank keys by the softmax over keys. Learned sinks are not asked: a sink takes the
        same factor from every key of a row, so it changes no row's ranking. A head's budget weighs
        all rows alike, as recall does (observe.py). With the sinks, rows that leave little to the
        keys would weigh less.
        """
        size = cp.block_size
        ranges = mask_of_whole_blocks(ranges, size)
        if q.numel() == 0 or q.is_meta:
            # No batch or no tokens: nothing is selected, as zeros say in every pattern's tensors.
            packed = ranges.document_start is not None
            empty = self.empty_tensors(q, ranges.start.shape[1], size, packed)
            return [torch.zeros_like(tensor) for tensor in empty]
        sent_before = cp.sent["collectives"]
        whole_q, whole_k = (whole_blocks(x, 2, size) for x in (q, k))
        # Autocast would select by products of 16 bits.
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            tensors = self.select_tensors(whole_q, whole_k, ranges, cp, scale)
        if recorder.listeners.recording and (observer := recorder.observer()):
            observer.selection(cp.sent["collectives"] - sent_before)
        # What activation checkpointing repeats is not counted again.
        if recorder.listeners.capped is not None and not recorder.recomputing():
            index = self.index(tensors, ranges, q.shape[0], q.shape[1], size)
            if index.capped is not None:
                # [B, Hq, 3]
                both = index.capped.all(-1, keepdim=True)
                capped = torch.cat([index.capped, both], dim=-1)
                recorder.listeners.capped.append(capped.mean((0, 1), dtype=torch.float64))
        return tensors

    def select_tensors(
        self, q: Tensor, k: Tensor, ranges: MaskRanges, cp: ContextParallel, scale: float
    ) -> list[Tensor]:
        """The selection itself, on this rank's shards of whole blocks.

        index() makes a BlockIndex of the result.
        """
        raise NotImplementedError

    def empty_tensors(self, q: Tensor, seq_len: int, block_size: int, packed: bool) -> list[Tensor]:
        """Tensors of the shapes and dtypes that select_tensors() returns, for torch.compile."""
        raise NotImplementedError

    def vertical_count(self, tensors: list[Tensor]) -> int:
        """C of the index that these tensors stand for."""
        return 0

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> BlockIndex:
        """The BlockIndex that select_tensors()'s result stands for."""
        raise NotImplementedError


_CLASSES: dict[type[Pattern], int] = {}
"""Every class of patterns, and how many of the same name came before it."""
_PATTERNS: dict[str, Pattern] = {}
"""Patterns are values of a few numbers. Equal ones share a key and an entry,
which stays for good."""


def _class_key(kind: type[Pattern]) -> str:
    """The name of a class of patterns. A number tells apart those of one name, such as one that a
    notebook defines again."""
    number = _CLASSES[kind]
    return f"{kind.name}#{number + 1}" if number else kind.name


def pattern_of(key: str) -> Pattern:
    """The pattern of this key. One that is made inside of a compiled function is made again here,
    as torch.compile has only traced it so far."""
    if key not in _PATTERNS:
        of_class, _, options = key.partition(":")
        named = [kind for kind in _CLASSES if hasattr(kind, "name")]
        [kind] = [kind for kind in named if _class_key(kind) == of_class]
        kind(**ast.literal_eval(options))
    return _PATTERNS[key]


class DenseIndex(BlockIndex):
    """Selects every pair of blocks; no verticals."""

    selects_all: ClassVar[bool] = True

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        shape = (1, 1, len(q_blocks), len(k_blocks))
        return torch.ones(shape, dtype=torch.bool, device=q_blocks.device)


class Dense(Pattern, DenseOptions):
    """All pairs that the mask allows: the baseline of every comparison."""

    dynamic: ClassVar[bool] = False
    takes_slices: ClassVar[bool] = True

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> DenseIndex:
        # [B, Hq, 0]
        verticals = ranges.start.new_empty(batch, heads, 0)
        return DenseIndex(ranges.start.shape[1], block_size, verticals)


def check_pattern(pattern: Pattern, ranges: MaskRanges, ranks: Ranks) -> None:
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
