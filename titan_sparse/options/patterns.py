"""The options of each pattern. Imports no torch.

The configuration has these classes as its sections. Attention's patterns (attention/patterns) are
subclasses of them.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_origin, get_type_hints

from titan_sparse.options.values import (
    MOST,
    Count,
    Positive,
    PositiveShare,
    PositiveTokens,
    Tokens,
    check_value,
    plain,
)


class PatternOptions:
    """The checks of the options of a pattern. Subclasses are dataclasses."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        """A pattern checks itself here. A section of the configuration is
        filled key by key first."""

    def check(self) -> None:
        """Raises ValueError, one line, for options that are out of range or exclude each other."""
        kinds = get_type_hints(type(self), include_extras=True)
        for item in fields(self):
            key, kind = f"{self.name}.{item.name}", kinds[item.name]
            if plain(kind) not in (int, float, bool, str) and get_origin(kind) is not Literal:
                raise ValueError(f"{key}: an option is an int, float, bool, str, or Literal")
            given = getattr(self, item.name)
            value = check_value(key, kind, given)
            if value is not given:
                # A number of NumPy, or an int for a float. Patterns are frozen.
                object.__setattr__(self, item.name, value)

    def check_block_size(self, block_size: int) -> None:
        """Raises ValueError for options that do not fit attention's block size."""

    def recall_like(self) -> float:
        """The recall of vertical_slash that computes about as much, by which
        "auto" picks a backend."""
        return 0.95

    def sparse_from(self, block_size: int, packed: bool) -> int:
        """Tokens of the shortest document in which the pattern can leave out pairs.

        packed: the mask separates the documents of a sequence.
        """
        raise NotImplementedError

    def sparse_with(self, tokens: int) -> tuple[str, int]:
        """An option and its largest value with which documents of so many tokens may be sparse."""
        raise NotImplementedError

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        values = ((item.name, getattr(self, item.name), item.default) for item in fields(self))
        return {name: value for name, value, default in values if value != default}


@dataclass
class DenseOptions(PatternOptions):
    """Pattern dense: everything the mask allows. No choices."""

    name: ClassVar[str] = "dense"

    def sparse_from(self, block_size: int, packed: bool) -> int:
        return MOST


@dataclass
class VerticalSlashOptions(PatternOptions):
    """Pattern vertical_slash: keys (verticals) and block diagonals (slashes) chosen online from a
    probe of queries. Counts are per query head."""

    recall: PositiveShare = 0.95
    """share of the attention mass that verticals and slashes must reach"""
    budget: Literal["joint", "independent"] = "joint"
    """joint: each head reaches recall over all rows, in the least time; independent: verticals and
    slashes each reach it alone, as published (docs/masks_and_patterns.md)"""
    probe: Tokens = 0
    """queries of a document that choose; tokens; 0: attention.block_size"""
    probe_rows: Literal["both", "spread", "last"] = "both"
    """spread: one query of each of `probe` equal parts of the document, drawn anew in each step;
    last: its last queries; both: a quarter last ones, the others spread"""
    sinks: Tokens = 4
    """first tokens of a document that are always verticals"""
    count_sinks: bool = False
    """the mass of the sinks counts in recall; budget = "independent" needs true"""
    local_slashes: Positive = 2
    """nearest slashes that are always on, the main diagonal included"""
    min_verticals: Count = 0
    """fewest verticals per head in addition to the sinks"""
    max_verticals: Count = 4096
    """most verticals per head in addition to the sinks; packed documents share it by length"""
    min_slashes: Count = 0
    """fewest slashes per head in addition to the local ones"""
    max_slashes: Count = 0
    """most slashes per head in addition to the local ones; 0: no cap"""
    dense_below: Tokens = 4096
    """documents of a packed sequence shorter than this are dense; tokens"""
    name: ClassVar[str] = "vertical_slash"

    def check(self) -> None:
        super().check()
        if self.budget == "independent" and not self.count_sinks:
            raise ValueError(
                f'{self.name}.count_sinks = false does not go with {self.name}.budget = "independent"; '
                'write count_sinks = true or budget = "joint"'
            )
        for what, most in (("verticals", self.max_verticals), ("slashes", self.max_slashes)):
            least = getattr(self, f"min_{what}")
            has_cap = what == "verticals" or most > 0
            if has_cap and least > most:
                raise ValueError(
                    f"{self.name}.min_{what} = {least} is above {self.name}.max_{what} = {most}; "
                    f"write min_{what} = {most}{' or less' * (most > 0)}, or max_{what} = {least} or more"
                )

    def check_block_size(self, block_size: int) -> None:
        """Also refuses a probe that is longer than a document, or a block that touches three."""
        queries = self.probe or block_size
        least = max(block_size, queries)
        if self.dense_below < least:
            raise ValueError(
                f"{self.name}.dense_below = {self.dense_below} must be at least block_size "
                f"({block_size}) and probe ({queries}); write dense_below = {least} or more"
            )

    def recall_like(self) -> float:
        return self.recall

    def sparse_from(self, block_size: int, packed: bool) -> int:
        # Local slashes are always on. They cover a document of as many blocks.
        least = (self.local_slashes + self.min_slashes) * block_size + 1
        return max(least, self.dense_below) if packed else least

    def sparse_with(self, tokens: int) -> tuple[str, int]:
        return "dense_below", tokens


@dataclass
class XAttentionOptions(PatternOptions):
    """Pattern xattention: the fewest key blocks whose antidiagonal scores reach a threshold."""

    stride: PositiveTokens = 16
    """tokens of a cell; divides attention.block_size"""
    threshold: PositiveShare = 0.9
    """share of a query block's scores that its key blocks must reach; the document's
    first block and the query's own are always on, and count"""
    dense_below: Tokens = 4096
    """documents of a packed sequence shorter than this are dense; tokens"""
    name: ClassVar[str] = "xattention"

    def check_block_size(self, block_size: int) -> None:
        if block_size % self.stride:
            raise ValueError(
                f"{self.name}.stride = {self.stride} does not divide block_size ({block_size}); "
                f"write stride = {math.gcd(self.stride, block_size)}"
            )
        if self.dense_below < block_size:
            raise ValueError(
                f"{self.name}.dense_below = {self.dense_below} is below block_size ({block_size}); "
                f"write dense_below = {block_size} or more"
            )

    def sparse_from(self, block_size: int, packed: bool) -> int:
        # A query block's own block and the first one are always on.
        least = 2 * block_size + 1
        return max(least, self.dense_below) if packed else least

    def sparse_with(self, tokens: int) -> tuple[str, int]:
        return "dense_below", tokens


@dataclass
class MoBAOptions(PatternOptions):
    """Pattern moba: queries choose chunks of keys by their mean key; short documents are dense."""

    chunk_size: PositiveTokens = 4096
    """tokens of a chunk; at least attention.block_size"""
    top_k: Positive = 12
    """chunks that a query sees, its own included"""
    name: ClassVar[str] = "moba"

    def check_block_size(self, block_size: int) -> None:
        """A tile must not touch three chunks."""
        if self.chunk_size < block_size:
            raise ValueError(
                f"{self.name}.chunk_size = {self.chunk_size} is below block_size ({block_size}); "
                f"write chunk_size = {block_size} or more"
            )

    def sparse_from(self, block_size: int, packed: bool) -> int:
        # A query sees top_k chunks of its document, and so all of a shorter one.
        return self.top_k * self.chunk_size + 1

    def sparse_with(self, tokens: int) -> tuple[str, int]:
        return "top_k", (tokens - 1) // self.chunk_size
