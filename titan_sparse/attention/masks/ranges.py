"""Masks: rules for which query sees which key. They resolve to ranges or to slices (slices.py).

In a mask of ranges, query i sees one contiguous range of keys, start[i] <= j < stop[i]. Two vectors
of length S are the whole mask. No S x S tensor exists anywhere. Both vectors are nondecreasing in
i, which the counting of visible pairs and the block classification rely on. Positions are global: a
layout permutes tokens, never what they see.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from titan_sparse.attention.masks.slice_geometry import (
    intersected,
    padded_table,
    slices_of_ranges,
    tightened,
)


class MaskRanges(NamedTuple):
    """A mask resolved for one sequence length. All int32, global positions. Bm is 1 or the batch
    size. On a CPU, attend() refuses ranges that break the rules of `start`, `stop`, `causal`,
    and `plain`.

    start, stop: [Bm, S], both nondecreasing. Query i sees keys start[i] <= j < stop[i], none where
    they are equal.
    document_start: [Bm, S], where the query's document begins, -1 on padding. None for an unpacked
    sequence.
    causal: no query sees a later key. Patterns that select block diagonals need this.
    plain: every query is known to see all keys up to its own. Some kernels compute that faster.
    Packed documents are never marked plain: torch.compile would compile anew for a sequence that
    happens to hold a single document.
    slices: int32 [Bm, N, 6], what is seen, as in slice_geometry.py, for masks that one range a
    query cannot express. None elsewhere. With slices, start and stop are only bounds: 0 and S for a
    query that sees anything, S and S for others.
    table: int64 [ranks, n], the blocks of every rank in the layout "balanced".
    ContextParallel.balance() adds it. q, k and v are sharded by it, so all masks of a batch carry
    the table of one of them.
    offsets: int32 [n + 1], for masks that are causal inside of documents and nothing else, but for
    padding and a window. Where each document begins in the tokens of all Bm sequences, one after
    the other; padding counts as a document. Empty ones at the end make the size the same for most
    batches. Kernels that know documents take it.
    window: of a mask with offsets, the most keys that a query sees, its own included; 0 for all.
    probe_seed: int64 scalar from which patterns draw the query rows that they probe, the same on
    all ranks. A trainer gives each step another one. None: the rows of seed 0. It is a tensor, so
    that a CUDA graph draws new rows in each replay.
    """

    start: Tensor
    stop: Tensor
    document_start: Tensor | None = None
    causal: bool = True
    plain: bool = False
    slices: Tensor | None = None
    table: Tensor | None = None
    offsets: Tensor | None = None
    window: int = 0
    probe_seed: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that this mask has, by name; `start` comes first."""
        fields = zip(self._fields, self)
        return {name: x for name, x in fields if isinstance(x, Tensor)}

    def dense(self) -> Tensor:
        """bool [Bm, S, S] in global order, for tests and pictures of small sequences."""
        seq_len, device = self.start.shape[1], self.start.device
        token = torch.arange(seq_len, device=device)
        if self.slices is None:
            # [Bm, S, 1] against [S]
            return (token >= self.start[..., None]) & (token < self.stop[..., None])
        distance = token - token[:, None]
        seen = torch.zeros(len(self.slices), seq_len, seq_len, dtype=torch.bool, device=device)
        for seen_in_sequence, slices in zip(seen, self.slices.tolist()):
            for q_start, q_stop, k_start, k_stop, low, high in slices:
                here = (slice(q_start, q_stop), slice(k_start, k_stop))
                held = (distance[here] >= low) & (distance[here] <= high)
                seen_in_sequence[here] |= held
        return seen


class Mask:
    """Base of all masks. Subclasses implement rows(). `a & b` sees what both see."""

    is_constant: ClassVar[bool] = False
    """True if rows() always gives the same for equal masks, so that it may be remembered. A
    subclass has to say so itself: it may have more that decides over rows() than the class that it
    extends compares."""

    def __init_subclass__(cls) -> None:
        if "is_constant" not in vars(cls):
            cls.is_constant = False

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        """The mask for `seq_len` global tokens, resolved to tensors on `device`."""
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return Intersection(self, other)

    def dense(self, seq_len: int, device: torch.device | str = "cpu") -> Tensor:
        """bool [Bm, S, S] in global order, for tests and pictures of small sequences."""
        return self.rows(seq_len, device).dense()


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    is_constant = True

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # [1, S]
        start = torch.zeros(1, seq_len, dtype=torch.int32, device=device)
        stop = torch.full_like(start, seq_len)
        return MaskRanges(start, stop, causal=False)


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees keys 0..i.

    valid: one number per sequence. Tokens from there on are padding, which no query sees and which
    sees nothing. Raises ValueError unless all are whole numbers and, in rows(), for one that does
    not fit the sequence.
    """

    valid: tuple[int, ...] | None = None
    is_constant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.valid is None:
            return
        try:
            valid = tuple(map(operator.index, self.valid))
        except TypeError:
            valid = ()
        if not valid:
            raise ValueError(
                f"Causal(valid={self.valid!r}): write a whole number of tokens for each sequence"
            )
        # Equal masks have to have the same hash. The dataclass is frozen.
        object.__setattr__(self, "valid", valid)

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # [1, S]
        position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        if self.valid is None:
            start = torch.zeros_like(position)
            return MaskRanges(start, position + 1, plain=True)
        if max(self.valid) > seq_len or min(self.valid) < 0:
            raise ValueError(
                f"Causal(valid={self.valid}) does not fit a sequence of {seq_len} tokens"
            )
        # [Bm, 1] against [1, S]
        valid = torch.tensor(self.valid, dtype=torch.int32, device=device)[:, None]
        real = position < valid
        start = torch.where(real, 0, seq_len).int()
        stop = torch.where(real, position + 1, seq_len).int()
        has_no_padding = min(self.valid) == seq_len
        offsets = _offsets([[count] for count in self.valid], seq_len).to(device)
        return MaskRanges(start, stop, plain=has_no_padding, offsets=offsets)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees keys i - window + 1 .. i, itself included.

    Raises ValueError unless window is a whole number of 1 or more.
    """

    window: int
    is_constant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refusal = (
            f"SlidingWindow(window={self.window!r}): "
            "a window is a whole number of tokens, 1 or more"
        )
        # Positions are int32. A larger window, such as sys.maxsize, means the same.
        window = min(at_least_one(self.window, refusal), torch.iinfo(torch.int32).max)
        object.__setattr__(self, "window", window)

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        # [1, S]
        position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        # The first queries have fewer keys before them than the window holds.
        start = (position - self.window + 1).clamp(min=0)
        stop = position + 1
        offsets = _offsets([[seq_len]], seq_len).to(device)
        return MaskRanges(start, stop, offsets=offsets, window=self.window)


class Documents(Mask):
    """Packed documents: causal inside each, nothing across.

    lengths: tokens of each document in order, one list for all sequences of the batch or one list
    per sequence. What is left of the sequence after the last document is padding: it sees nothing
    and no query sees it.
    Raises ValueError for a length that is not a whole number of 1 or more and, in rows(), for
    documents that together are longer than the sequence.
    """

    is_constant = True

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor):
        given: Any = as_lists(lengths)
        if not isinstance(given, Sequence):
            raise ValueError(f"Documents({given!r}) is not a list; write Documents([300, 500])")
        given = [as_lists(row) for row in given]
        are_sequences = [isinstance(row, Sequence) for row in given]
        if any(are_sequences) and not all(are_sequences):
            raise ValueError(
                f"Documents({given!r}) mixes numbers and lists; write one list, or one list for each sequence"
            )
        sequences: Sequence[Any] = given if any(are_sequences) else [given]
        refusal = "Documents(lengths): a length is a whole number of tokens, 1 or more, not {!r}"
        self.lengths = tuple(
            tuple(at_least_one(length, refusal.format(length)) for length in row)
            for row in sequences
        )

    def __repr__(self) -> str:
        return f"Documents(lengths={self.lengths})"

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        starts = [_document_starts(lengths, seq_len) for lengths in self.lengths]
        # [Bm, S]
        document_start = torch.stack(starts).to(device)
        real = document_start >= 0
        # [S]: each token sees the tokens up to itself
        stop = torch.arange(1, seq_len + 1, dtype=torch.int32, device=device)
        return MaskRanges(
            start=document_start.where(real, seq_len),
            stop=stop.expand_as(document_start).where(real, seq_len),
            document_start=document_start,
            offsets=_offsets(self.lengths, seq_len).to(device),
        )


def _offsets(lengths: Sequence[Sequence[int]], seq_len: int) -> Tensor:
    """MaskRanges.offsets on the CPU. lengths: of the documents of each sequence;
    the rest is padding."""
    begins = []
    for number, documents in enumerate(lengths):
        of_sequence = itertools.accumulate(documents, initial=number * seq_len)
        # Without padding the last one is where the next sequence begins.
        begins += [begin for begin in of_sequence if begin < (number + 1) * seq_len]
    total = len(lengths) * seq_len
    count = max(64, total // 512, len(begins))
    size = 1 << (count - 1).bit_length()
    return torch.tensor(
        begins + [total] * (size + 1 - len(begins)), dtype=torch.int32, device="cpu"
    )


def _document_starts(lengths: Sequence[int], seq_len: int) -> Tensor:
    """int32 [S]: where each token's document begins, -1 on padding."""
    total = sum(lengths)
    if total > seq_len:
        raise ValueError(f"Documents(lengths) hold {total} tokens, the sequence {seq_len}")
    # [documents]
    sizes = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    begins = sizes.cumsum(0, dtype=torch.int32) - sizes
    # [total] -> [S]. Its length is given, because torch.compile cannot trace one
    # that follows from data.
    starts = torch.repeat_interleave(begins, sizes, output_size=total)
    return torch.nn.functional.pad(starts, (0, seq_len - total), value=-1)


@dataclass(frozen=True)
class Intersection(Mask):
    """The pairs that both masks see."""

    first: Mask
    second: Mask

    @property
    def is_constant(self) -> bool:  # type: ignore[override]
        return self.first.is_constant and self.second.is_constant

    def rows(self, seq_len: int, device: torch.device | str = "cpu") -> MaskRanges:
        """Raises ValueError for two packings of documents, and for batches of different sizes."""
        return intersect(self.first.rows(seq_len, device), self.second.rows(seq_len, device))


def intersect(a: MaskRanges, b: MaskRanges) -> MaskRanges:
    """The pairs that two resolved masks of one sequence length both see.

    Raises ValueError as Intersection.rows().
    """
    if a.document_start is not None and b.document_start is not None:
        raise ValueError("Documents & Documents: give the finer of the two document lists alone")
    if len(a.start) != len(b.start) and 1 not in (len(a.start), len(b.start)):
        raise ValueError(
            f"masks for {len(a.start)} and for {len(b.start)} sequences do not go together"
        )
    if a.slices is not None or b.slices is not None:
        return _intersected_slices(a, b)
    # [Bm, S]
    start = torch.maximum(a.start, b.start)
    stop = torch.minimum(a.stop, b.stop)
    documents = a.document_start if b.document_start is None else b.document_start
    if documents is not None:
        # A query that sees nothing is padding, even if only the other mask says so.
        documents = torch.where(start < stop, documents, -1)
    # Two ranges that do not meet leave an empty one, which must not end before it begins.
    stop = torch.maximum(start, stop)
    offsets, window = _offsets_of_both(a, b)
    return MaskRanges(
        start, stop, documents, causal=a.causal or b.causal, offsets=offsets, window=window
    )


def _offsets_of_both(a: MaskRanges, b: MaskRanges) -> tuple[Tensor | None, int]:
    """MaskRanges.offsets and .window of a & b: of a window and documents, or where one is plain."""
    if a.plain or (a.window and a.document_start is None):
        a, b = b, a
    # Now b is the one that may be plain, or a window.
    if b.plain:
        return a.offsets, a.window
    if b.window and b.document_start is None and len(b.start) == 1 and a.offsets is not None:
        windows = filter(None, (a.window, b.window))
        return a.offsets, min(windows)
    return None, 0


UNTRACED = (
    "torch.compile cannot trace sizes that depend on slices; write rows = mask.rows(seq_len, device) "
    "outside of the compiled function, and give it rows"
)


@torch.compiler.disable(reason=UNTRACED)
def _intersected_slices(a: MaskRanges, b: MaskRanges) -> MaskRanges:
    batch = max(len(a.start), len(b.start))
    pairs = zip(_slices_of_sequences(a, batch), _slices_of_sequences(b, batch))
    # No pair is twice in either, so no pair is twice in both.
    sequences = [tightened(intersected(*of_sequence)) for of_sequence in pairs]
    return ranges_of_slices(
        padded_table(sequences),
        seq_len=a.start.shape[1],
        device=a.start.device,
        causal=never_sees_later(sequences),
    )


def _slices_of_sequences(ranges: MaskRanges, batch: int) -> list[Tensor]:
    """int64 [N, 6] on the CPU for each of `batch` sequences."""
    if ranges.slices is not None:
        sequences = [tightened(padded) for padded in ranges.slices.long().cpu()]
    else:
        sequences = [slices_of_ranges(*ends) for ends in zip(ranges.start, ranges.stop)]
    # One mask may be for all sequences of the batch.
    return sequences * batch if len(sequences) == 1 else sequences


def never_sees_later(sequences: list[Tensor]) -> bool:
    """True if no slice of any sequence, int64 [N, 6] each and tightened, holds a later key."""
    return not any((slices[:, 5] > 0).any() for slices in sequences)


def ranges_of_slices(
    table: Tensor, seq_len: int, device: torch.device | str, causal: bool
) -> MaskRanges:
    """The mask that sees what the slices hold. table: int32 [Bm, N, 6], tightened, on the CPU."""
    slices = table.to(device)
    # The number of slices differs from batch to batch. Without the mark, torch.compile would
    # compile anew for each number.
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(slices, 1)
    # [Bm, N]
    q_start, q_stop = table[..., 0], table[..., 1]
    # A slice adds 1 at its first query and takes it away behind its last one.
    changes = torch.zeros(len(table), seq_len + 1, dtype=torch.int32, device="cpu")
    changes.scatter_add_(1, q_start.long(), torch.full_like(q_start, 1))
    changes.scatter_add_(1, q_stop.long(), torch.full_like(q_stop, -1))
    # [Bm, S]
    sees_any = changes[:, :seq_len].cumsum(1, dtype=torch.int32) > 0
    start = torch.where(sees_any, 0, seq_len).int().to(device)
    stop = torch.full_like(start, seq_len)
    return MaskRanges(start, stop, causal=causal, slices=slices)


def as_lists(value: Any) -> Any:
    """A tensor or an array as lists of numbers, as one of a single number would pass for a number;
    other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def at_least_one(value: Any, refusal: str) -> int:
    """`value` as an int of 1 or more, for Python's, NumPy's and torch's integers.

    Raises ValueError(refusal) for everything else.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(refusal)
    return number


def token_positions(blocks: Tensor, block_size: int) -> Tensor:
    """Global token positions int64 [n * block_size] of the global blocks int [n], in local order.

    Example with block_size 2: blocks [3, 0, 5] are tokens [6, 7, 0, 1, 10, 11].
    """
    offsets = torch.arange(block_size, device=blocks.device)
    # [n, block_size]
    positions = blocks.long()[:, None] * block_size + offsets
    return positions.flatten()


def rows_once(mask: Mask, seq_len: int, like: Tensor) -> MaskRanges:
    """mask.rows(seq_len) on the device of `like`, remembered for the last few masks.

    Without it every layer would resolve its mask anew, and nothing would be remembered for it by
    once_per_mask(). Nothing is remembered of what is only traced: by torch.compile, on fake
    tensors, or by a CUDA graph.
    """
    is_traced = torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter)
    if is_traced or not mask.is_constant:
        return mask.rows(seq_len, like.device)
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return mask.rows(seq_len, like.device)
    # An autograd graph cannot keep tensors that were made in inference mode.
    return _rows_once(mask, seq_len, like.device, torch.is_inference_mode_enabled())


@functools.lru_cache(maxsize=4)
def _rows_once(mask: Mask, seq_len: int, device: torch.device, inference: bool) -> MaskRanges:
    return mask.rows(seq_len, device)


T = TypeVar("T")


class _Entry(NamedTuple):
    """Cached results for one mask, and what shows whether the mask has changed."""

    versions: list[int]
    others: list[Tensor]
    results: dict[Hashable, object]


_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""From a mask's `start` to its _Entry. An entry goes when that tensor goes."""


def once_per_mask(ranges: MaskRanges, key: Hashable, compute: Callable[[], T]) -> T:
    """compute(), remembered under `key` while this mask's `start` lives and the mask is unchanged.

    `key` must name everything except `ranges` that the result depends on. Nothing is remembered of
    what torch.compile traces.
    """
    if torch.compiler.is_compiling():
        return compute()
    start, *others = ranges.tensors().values()
    # Tensors made under inference_mode have no version, and no code writes to them.
    versions = [x._version for x in (start, *others) if not x.is_inference()]
    entry = _entries.get(start)
    is_same = entry is not None and len(entry.others) == len(others)
    is_same = is_same and all(map(operator.is_, entry.others, others))
    if not is_same or entry.versions != versions:
        entry = _Entry(versions, others, {})
        _entries[start] = entry
    if key not in entry.results:
        entry.results[key] = compute()
    return entry.results[key]
