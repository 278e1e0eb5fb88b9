"""Patterns, their indices, and the op that selects."""

import dataclasses
import math
import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titan_sparse.attention import recorder, registry
from titan_sparse.attention.context_parallel.group import ContextParallel, context_of
from titan_sparse.attention.inputs import (
    Ranks,
    check_tensors,
    constant,
    mask_of_tensors,
    mask_of_whole_blocks,
    mask_tensors,
    ranks_of,
    resolve_mask,
    whole_blocks,
)
from titan_sparse.attention.masks.ranges import Mask, MaskRanges
from titan_sparse.kernels import compact as compact_kernels
from titan_sparse.kernels.chunks import ChosenChunks, chosen_bits
from titan_sparse.options.patterns import DenseOptions, PatternOptions


@dataclass(eq=False)
class BlockIndex:
    """What one selection chose, for all heads and the whole (global) sequence.

    It is the same on every rank and has two parts: a set of block pairs, which selects() returns,
    and `verticals`, single keys that every query of their document sees in addition. A pair of
    tokens in a selected block pair is not counted again through its vertical.

    verticals: int32 [B, Hq, C], ascending global positions, filled up with the sequence length. C is
        0 for patterns of blocks.
    """

    by_head: ClassVar[tuple[str, ...]] = ("verticals",)
    """Attributes that have the query heads as dim 1."""
    capped = None
    """bool [B, Hq, 2]: whether the cap on verticals, and the cap on slashes, kept a budget below the
    recall; None for patterns without budgets."""
    seq_len: int
    block_size: int
    verticals: Tensor

    @property
    def heads(self) -> int:
        return self.verticals.shape[1]

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        """bool [B or 1, Hq or 1, nq, nk]: which pairs of global blocks (int [nq], int [nk]) are
        computed whole."""
        raise NotImplementedError

    def heads_selecting(self, q_blocks: Tensor, k_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """How many heads compute each pair of global blocks (int [nq], int [nk]) for some queries,
        and how many do for all: int32 [B or 1, nq, nk] each."""
        some = self.selects(q_blocks, k_blocks)
        every = some & self.selects_for_all(q_blocks, k_blocks)
        # A pattern that treats all heads alike answers for one of them.
        alike = self.heads // some.shape[1]
        return some.sum(1, dtype=torch.int32) * alike, every.sum(1, dtype=torch.int32) * alike

    def covers(self, q_blocks: Tensor, verticals: Tensor) -> Tensor:
        """bool [B, Hq, nq, C]: the vertical [B, Hq, C] lies in a block that the query block computes
        whole. Only patterns with verticals have it."""
        raise NotImplementedError

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
        """What single queries (global positions, int [Sq]) chose inside the selected pairs of
        blocks; None for everything."""
        return None

    def tensors(self) -> list[Tensor]:
        """What custom ops pass on and activation checkpointing keeps; Pattern.index() reads it."""
        return []

    def dense(self, mask: Mask) -> Tensor:
        """bool [B, Hq, S, S] in global order: exactly the pairs that attend() computes.

        For tests and pictures.
        """
        device = self.verticals.device
        blocks = torch.arange(math.ceil(self.seq_len / self.block_size), device=device)
        in_blocks = self.selects(blocks, blocks)
        in_blocks = in_blocks.repeat_interleave(self.block_size, 2)
        in_blocks = in_blocks.repeat_interleave(self.block_size, 3)
        in_blocks = in_blocks[..., : self.seq_len, : self.seq_len]
        batch, heads = self.verticals.shape[:2]
        # One place more takes the filling of `verticals`.
        is_vertical = torch.zeros(batch, heads, self.seq_len + 1, dtype=torch.bool, device=device)
        is_vertical.scatter_(2, self.verticals.long().clamp(max=self.seq_len), True)
        visible = mask.dense(self.seq_len, device)[:, None]
        return (in_blocks | is_vertical[:, :, None, : self.seq_len]) & visible


@dataclass(eq=False)
class BlockSets(BlockIndex):
    """For every head and query block any set of key blocks, as bits.

    That is 32 MiB for 16 heads at 524,288 tokens in blocks of 128.

    words: int32 [B, Hq, blocks, ceil(blocks / 32)]; bit c (kernels/compact.py) of query block a: a
        meets key block c.
    """

    by_head = ("verticals", "words")
    words: Tensor

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [B, Hq, nq, words]
        words = self.words[:, :, q_blocks.long()]
        # [1, 1, nq, nk]
        numbers = k_blocks.expand(1, 1, len(q_blocks), -1)
        return chosen_bits(words, numbers)

    def tensors(self) -> list[Tensor]:
        return [self.words]


def no_verticals(like: Tensor) -> Tensor:
    """BlockIndex.verticals of a pattern that has none: int32 [B, Hq, 0].

    like: [B, Hq, ...].
    """
    batch, heads = like.shape[:2]
    # [B, Hq, 0]
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
    """Positions int32 [N, capacity] of the True elements of bool [N, L], ascending; and how many there
    are, int32 [N].

    What is left of the capacity is filled up with `fill`.
    """
    if selected.is_cuda:
        return compact_kernels.compact(selected, capacity, fill)
    return compact_kernels.compact_naive(selected, capacity, fill)


class Pattern(PatternOptions):
    """What is worth seeing. Subclasses are dataclasses of their options, which cannot be changed.

    `key` names a pattern inside custom ops, which take strings but no objects.
    """

    dynamic: ClassVar[bool] = True
    """False if nothing has to be looked at to select."""
    takes_slices: ClassVar[bool] = False
    """Whether it also works with masks of Slices, which have no single range of keys a query."""

    def __post_init__(self) -> None:
        self.check()
        # The dataclass is frozen.
        object.__setattr__(self, "key", f"{self.name}:{dataclasses.asdict(self)}")
        _PATTERNS[self.key] = self

    def __setattr__(self, name: str, value: object) -> None:
        if "key" in self.__dict__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        return hash(self.key)

    def __setstate__(self, state: dict) -> None:
        """Patterns that come from another process are known here too."""
        self.__dict__.update(state)
        _PATTERNS[self.key] = self

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
        if scale is not None:
            scale = constant(scale)
        # The index of a static pattern needs only the mask.
        tensors = []
        if self.dynamic:
            tensors = select(q, k, ranges, self, ranks, scale)
        return self.index(tensors, ranges, q.shape[0], q.shape[1], ranks.block_size)

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


class DenseIndex(BlockIndex):
    """Selects every pair of blocks; no verticals."""

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        # [1, 1, nq, nk]
        shape = (1, 1, len(q_blocks), len(k_blocks))
        return torch.ones(shape, dtype=torch.bool, device=q_blocks.device)


class Dense(Pattern, DenseOptions):
    """All pairs that the mask allows: the baseline of every comparison."""

    dynamic: ClassVar[bool] = False
    takes_slices: ClassVar[bool] = True

    def index(
        self, tensors: list[Tensor], ranges: MaskRanges, batch: int, heads: int, block_size: int
    ) -> DenseIndex:
        seq_len = ranges.start.shape[1]
        device = ranges.start.device
        # [B, Hq, 0]
        verticals = torch.empty(batch, heads, 0, dtype=torch.int32, device=device)
        return DenseIndex(seq_len, block_size, verticals)


# Patterns are values of a few numbers. Equal ones share a key and an entry, which stays for good.
_PATTERNS: dict[str, Pattern] = {}


@dataclass(frozen=True)
class CallOptions:
    """Options of the ops. They look them up by a key (registry.py).

    cp: a weak reference, as the ContextParallel owns this object.
    mask: names of the mask's tensors (inputs.mask_tensors).
    scale: of the scores; None for D ** -0.5.
    The select op does not read the rest:
    plain: the mask is causal and nothing else. window: of the mask (MaskRanges).
    begin, end: the call is about the query blocks of this range alone, as shares of the sequence.
    A range that ends before the sequence does is given the verticals' keys and values.
    """

    pattern: Pattern
    cp: weakref.ref
    mask: str
    scale: float | None
    backend: str = ""
    plain: bool = False
    window: int = 0
    begin: float = 0.0
    end: float = 1.0

    @property
    def is_partial(self) -> bool:
        """Whether the call is about a part of the queries."""
        return self.begin > 0 or self.end < 1

    def block_range(self, seq_len: int) -> tuple[int, int | None]:
        """The range of local query blocks that the call is about: first, and last + 1.

        seq_len: local tokens. The last + 1 is None for the end of the sequence.
        """
        block_size = self.cp().block_size
        first = blocks_before(self.begin, seq_len, block_size)[0] if self.begin > 0 else 0
        last = blocks_before(self.end, seq_len, block_size)[0] if self.end < 1 else None
        return first, last


def blocks_before(share: float, seq_len: int, block_size: int) -> tuple[int, int]:
    """How many blocks of a rank are before this share of the sequence, and how many there are.

    seq_len: tokens of the rank. Both numbers are the same on every rank.
    """
    blocks = -(-seq_len // block_size)
    return int(share * blocks + 0.5), blocks


@torch.compiler.assume_constant_result
def options_key(
    pattern: str,
    cp: str,
    mask: str,
    scale: float | None,
    backend: str = "",
    plain: bool = False,
    window: int = 0,
    begin: float = 0.0,
    end: float = 1.0,
) -> str:
    """The key of CallOptions, for a pattern and a ContextParallel named by their keys."""
    options = (mask, scale, backend, plain, window, begin, end)
    key = " ".join(map(str, ("attend", pattern, cp, *options)))
    if key not in registry.OBJECTS:
        owner = context_of(cp)
        owner.calls[key] = CallOptions(_PATTERNS[pattern], weakref.ref(owner), *options)
        registry.OBJECTS[key] = owner.calls[key]
    return key


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


def select(
    q: Tensor,
    k: Tensor,
    ranges: MaskRanges,
    pattern: Pattern,
    ranks: Ranks,
    scale: float | None,
) -> list[Tensor]:
    """The tensors of a dynamic pattern's index. No gradient. Collective over the ranks.

    Patterns rank keys by the softmax over keys. Learned sinks are not asked: a sink takes the same
    factor from every key of a row, so it changes no row's ranking. A head's budget weighs all rows
    alike, as recall does (observe.py). With the sinks, rows that leave little to the keys
    would weigh less.
    """
    names, tensors = mask_tensors(ranges)
    key = options_key(pattern.key, ranks.key, names, scale)
    return torch.ops.titan_sparse.select(q.detach(), k.detach(), tensors, key)


@torch.library.custom_op("titan_sparse::select", mutates_args=())
def _select(q: Tensor, k: Tensor, mask: list[Tensor], call: str) -> list[Tensor]:
    if q.numel() == 0:
        # No batch or no tokens: nothing is selected, as zeros say in every pattern's tensors.
        return [torch.zeros_like(tensor) for tensor in _fake_select(q, k, mask, call)]
    options = registry.lookup(call)
    cp = options.cp()
    ranges = mask_of_whole_blocks(mask_of_tensors(options.mask, mask), cp.block_size)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    sent_before = cp.sent["collectives"]
    tensors = options.pattern.select_tensors(
        whole_blocks(q, 2, cp.block_size), whole_blocks(k, 2, cp.block_size), ranges, cp, scale
    )
    if recorder.listening and (observer := recorder.observer()):
        observer.selection(cp.sent["collectives"] - sent_before)
    # What activation checkpointing repeats is not counted again.
    if recorder.capped is not None and not recorder.recomputing():
        index = options.pattern.index(tensors, ranges, *q.shape[:2], cp.block_size)
        if index.capped is not None:
            # [B, Hq, 3]
            both = index.capped.all(-1, keepdim=True)
            capped = torch.cat([index.capped, both], dim=-1)
            recorder.capped.append(capped.mean((0, 1), dtype=torch.float64))
    return tensors


@_select.register_fake
def _fake_select(q: Tensor, k: Tensor, mask: list[Tensor], call: str) -> list[Tensor]:
    options = registry.lookup(call)
    block_size = options.cp().block_size
    seq_len = mask[0].shape[1]
    # Up to whole blocks.
    seq_len += -seq_len % block_size
    packed = "document_start" in options.mask
    return options.pattern.empty_tensors(q, seq_len, block_size, packed)
