"""Define a backend: the kernels that compute attention over pieces of keys.

The schedules call it once a step, with one piece (the blocks of a chunk of keys) or two (those, and
a share of the gathered verticals).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from titan_sparse.kernels import merge as merge_kernel
from titan_sparse.kernels.block_sparse import Piece

Gradients = tuple[Tensor, list[tuple[Tensor, Tensor]]]
"""dq, and (dk, dv) of each piece."""


class Partial(NamedTuple):
    """Attention over the keys met so far."""

    out: Tensor  # [B, Hq, Sq, D]
    lse: Tensor  # natural log, [B, Hq, Sq], fp32 (fp64 for fp64)


class Queries(NamedTuple):
    """The query side of a backward. out and lse are of the whole attention, over all keys:
    with them the gradients of the pieces add up exactly.

    q, d_out, out: [B, Hq, Sq, D]. lse: natural log, [B, Hq, Sq].
    """

    q: Tensor
    d_out: Tensor
    out: Tensor
    lse: Tensor


class DenseShape(NamedTuple):
    """Dense attention that needs no tiles.

    The last four are of packed documents.
    """

    causal: bool
    """The queries are the last ones of the keys' positions, and each sees its own key and earlier
    ones. Otherwise all queries see all keys."""
    offsets: Tensor | None = None
    """int32 [n + 1], where each document begins in the tokens of all sequences, one after the
    other, and their number."""
    longest: int = 0  # tokens of the longest document, or more
    window: int | None = None  # keys that a query sees, its own included; None for all
    has_documents: bool = False  # False if a sequence is one document, with or without padding


class Case(NamedTuple):
    """The inputs that a backend has to serve."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    block_size: int
    slices: bool = False  # the mask has Slices
    dynamic: bool = False  # the pattern chooses by the inputs, as all but Dense do
    is_short: bool = False  # fewer tokens than short_below()


def not_served(
    backend: str,
    case: Case,
    devices: Sequence[str],
    dtypes: Sequence[torch.dtype],
    block_sizes: Sequence[int],
    head_dims: Sequence[int],
) -> str | None:
    """The reason why a backend that computes these inputs does not compute the
    case; None if it does."""
    for what, value, served, instead in (
        ("device", case.device_type, devices, "eager"),
        ("dtype", case.dtype, dtypes, "eager"),
        ("attention.block_size", case.block_size, block_sizes, "auto"),
        ("head_dim", case.head_dim, head_dims, "auto"),
    ):
        if value not in served:
            return (
                f'attention.backend = "{backend}" needs {what} {" or ".join(map(str, served))}, '
                f'not {value}; write "{instead}"'
            )
    return None


Before = TypeVar("Before", Partial, Tensor)


class Sum(NamedTuple, Generic[Before]):
    """A sum over pieces of keys, to which one more is added.

    dtype: of the new sum.
    before: the sum over the keys so far: a Partial, or the dq of a backward. It may be overwritten
    with the new sum. None for no keys: then a result that the kernel rounds to q's dtype is not
    widened.
    """

    dtype: torch.dtype
    before: Before | None = None


def merge(
    total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, dtype: torch.dtype
) -> Partial:
    """Attention over the keys of `total` and of one more piece, whose attention is out and lse.

    total: out [B, H, S, D] and natural-log lse [B, H, S] over other keys, or None for no keys.
    Returns out in `dtype` and lse in its own dtype. Without a total the piece is returned alone and
    is not widened: the next merge reads any dtype.
    """
    if total is None:
        return Partial(_first(out, dtype), lse)
    if out.is_cuda and lse.dtype == torch.float32:
        return Partial(*merge_kernel.merge(*total, out, lse, dtype))
    merged, merged_lse = merge_kernel.merge_naive(*total, out, lse)
    return Partial(merged.to(dtype), merged_lse)


def add(total: Tensor | None, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """total + piece, in `dtype`.

    A total that has `dtype` already may be overwritten with the sum. Without a total the piece is
    returned alone and is not widened.
    """
    if total is None:
        return _first(piece, dtype)
    add_piece = merge_kernel.add if piece.is_cuda else merge_kernel.add_naive
    return add_piece(total, piece, dtype)


def _first(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum of one piece: rounded to `dtype`, or as it is if that is wider."""
    if dtype.itemsize > piece.dtype.itemsize:
        return piece
    return piece.to(dtype)


class Backend(ABC):
    """The kernels of a backend. By default they use only tiles."""

    READS_BY_KEY = True
    """True if backward() reads Tiles.by_key."""
    SERVES_SLICES = False
    """True if it takes tiles of a mask of slices."""
    DENSE_BY_CHUNK = False
    """True if dense_forward() on each rank's keys beats tiles over those of all ranks at once."""
    SERVES_DENSE = False
    """True if there are inputs of which serves_dense() says yes."""
    GATHERS_QUERIES = False
    """True if kernels.gathered computes chunks that single queries chose, on one rank."""

    @abstractmethod
    def refusal(self, case: Case) -> str | None:
        """The reason why no machine serves such inputs by this backend, one
        sentence; None if some do."""

    def missing(self, case: Case) -> str | None:
        """The reason why the kernels cannot run here on a GPU, a part of a
        sentence; None if they can."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """The name of the kernels, for the banner."""

    @abstractmethod
    def forward(self, q: Tensor, pieces: list[Piece], scale: float, total: Sum[Partial]) -> Partial:
        """Attention of q [B, Hq, Sq, D] over one piece or two, and over the keys of `total`.

        Rows that see nothing: out 0, lse -inf.
        """

    @abstractmethod
    def backward(
        self, queries: Queries, pieces: list[Piece], scale: float, total: Sum[Tensor]
    ) -> Gradients:
        """dq with that of `total`, and (dk, dv) of each piece.

        The first piece's dk and dv are in the sum's dtype too, or in q's if kernels round to it.
        The dk and dv of a second piece, the verticals, are fp32 (fp64 for fp64).
        """

    def serves_dense(self, shape: DenseShape) -> bool:
        """True if dense_forward() and dense_backward() are the faster way for these inputs."""
        return False

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> Partial:
        """Dense attention without tiles; out in q's dtype, lse fp32 (fp64 for fp64)."""
        raise NotImplementedError(f"{type(self).__name__} computes dense attention over tiles")

    def dense_backward(
        self, queries: Queries, k: Tensor, v: Tensor, shape: DenseShape, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv through these keys, in q's dtype.

        out and lse may be those of more keys: then the gradients are the share of these keys.
        """
        raise NotImplementedError(f"{type(self).__name__} computes dense attention over tiles")
