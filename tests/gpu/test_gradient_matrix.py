"""On a GPU: every backend's out and gradients, in bf16 and in fp32, against fp64.

Every head size, block size, grouping, mask and pattern occurs, and learned sinks. The bound in bf16
is 5e-3, and at most twice the error of torch's dense flash attention on the same tensors. A public
bug of one kernel library gave exact forwards and gradients off by 150 times, at one head size and
one length only.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import published
from tests.gpu.errors import (
    LIMIT,
    check,
    check_lse,
    errors,
    exact,
    flash_errors,
    problem,
    skip_without,
    with_gradients,
)
from tests.reference import attention_with_sinks, by_token, relative_error
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import sliding_window
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention

SEQ_LEN = 2001  # no whole blocks
LENGTHS = [700, 3, 901, 130, 200]
MASKS = {
    "causal": Causal(),
    "documents": Documents(LENGTHS),
    "padding": Causal(valid=(1500,)),
    "window": Causal() & SlidingWindow(777),
    "documents in a window": Documents(LENGTHS) & SlidingWindow(512),
    # A mask of slices.
    "window with sinks": sliding_window(LENGTHS, 512, sinks=4),
}
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": VerticalSlash(
        recall=0.8, sinks=4, max_verticals=200, max_slashes=5, dense_below=256
    ),
    "joint": VerticalSlash(recall=0.9, dense_below=256),
    "published": published(recall=0.9, dense_below=256),
    "xattention": XAttention(16, 0.7, 256),
    "moba": MoBA(300, 3),
}


class Cell(NamedTuple):
    """sinks: the dtype of learned ones; None for none."""

    backend: str
    dim: int
    heads: tuple[int, int] = (4, 1)
    mask: str = "documents"
    pattern: str = "vertical_slash"
    size: int = 128
    sinks: torch.dtype | None = None
    dtype: torch.dtype = torch.bfloat16
    tokens: int = SEQ_LEN

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        inputs, d_out = problem(self.heads, self.dim, self.tokens, dtype=self.dtype)
        # In memory by token, as models have them. Padding, where there is any,
        # lays them out by head.
        inputs = [by_token(x) for x in inputs]
        if self.sinks is not None:
            # From one that hardly counts to one that takes most.
            inputs.append(torch.linspace(-3, 9, self.heads[0], device="cuda", dtype=self.sinks))
        return inputs, d_out

    def function(self) -> Callable[..., Tensor]:
        def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options):
            return attend(
                q, k, v, MASKS[self.mask], PATTERNS[self.pattern],
                backend=self.backend, block_size=self.size, sinks=sinks, **options,
            )  # fmt: skip

        return function


def _dense(backend: str, dim: int, *more, **options) -> Cell:
    return Cell(backend, dim, *more, pattern="dense", **options)


GROUPS = [(4, 4), (6, 2), (8, 1)]
FP32 = torch.float32
TILES = [(dim, size) for dim in (64, 96, 128, 256) for size in (64, 128)]
CELLS = [
    *(
        Cell("triton", dim, heads, mask, size=size)
        for (dim, size), heads, mask in zip(
            TILES, itertools.cycle(GROUPS), itertools.cycle(["causal", "documents", "window"])
        )
    ),
    *(
        Cell("triton", dim, pattern=name, size=size)
        for (dim, size), name in itertools.product([(128, 128), (256, 64)], PATTERNS)
    ),
    *(_dense("triton", 256, mask=mask) for mask in MASKS),
    *(
        Cell("triton", dim, (8, 2), mask, pattern, sinks=FP32)
        for (dim, mask), pattern in itertools.product(
            [(64, "padding"), (128, "window"), (256, "causal")], ["dense", "vertical_slash"]
        )
    ),
    Cell("flex", 64, (4, 4), "window"),
    Cell("flex", 96, (6, 2), "documents"),
    Cell("flex", 128, (8, 1), "causal"),
    # Chunks that end inside of blocks: the Triton kernels compute what single queries chose.
    Cell("flex", 64, (4, 2), "causal", "moba"),
    *(_dense("flex", dim, mask="causal") for dim in (64, 96, 128)),
    # FlashAttention-4 had errors in its head_dim 64 gradients that grew with the length.
    *(Cell("flex", dim, (2, 1), "causal", "joint", tokens=16384) for dim in (64, 96, 128)),
    Cell("flex", 64, (4, 2), dtype=torch.float16),
    _dense("flex", 128, (8, 2), "padding", sinks=FP32),
    *(_dense(name, 64, sinks=torch.bfloat16) for name in ("triton", "flex")),
    *(_dense("cudnn", dim, heads, "causal") for dim, heads in zip((64, 96, 256), GROUPS)),
    *(_dense("cudnn", 128, (7, 1), mask) for mask in ("causal", "padding")),
    *(_dense("cudnn", dim, mask="causal", tokens=1024) for dim in (48, 112)),
    *(
        _dense("cudnn", dim, mask="causal", tokens=1024, dtype=torch.float16)
        for dim in (16, 80, 128)
    ),
    *(_dense("cudnn", dim, mask="causal", tokens=n) for dim, n in ((64, 77), (256, 128))),
    _dense("cudnn", 64, (8, 2), "causal", sinks=FP32),
]
EXACT = [
    *(Cell("triton", 64, pattern=pattern, dtype=FP32) for pattern in PATTERNS),
    *(
        Cell("triton", 64, pattern=pattern, sinks=FP32, dtype=FP32)
        for pattern in ("dense", "vertical_slash")
    ),
    # Small tiles, which spill nothing: large ones took minutes to compile. The probe's kernels have
    # no smaller ones and leave the selection to their twins.
    Cell("triton", 256, dtype=FP32),
]


def _results(cell: Cell) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """out and all gradients, the same in fp64 over the pairs that were
    selected, and these pairs."""
    inputs, d_out = cell.inputs()
    function = cell.function()
    _, aux = function(*inputs, return_aux=True)
    seen = aux.index.dense(MASKS[cell.mask])
    want, want_lse = exact(inputs, d_out, seen)
    check_lse(aux.lse, want_lse)
    return with_gradients(function, inputs, d_out), want, seen


@functools.cache
def _flash_errors(heads: tuple[int, int], dim: int, tokens: int, dtype: torch.dtype) -> list[float]:
    return flash_errors(*problem(heads, dim, tokens, dtype=dtype))


def _rounding_of_sinks(cell: Cell, seen: Tensor) -> float:
    """What rounding an exact output to bf16 does to the sinks' gradient.

    That is a sum over all rows of a head in which much cancels.
    """
    inputs, d_out = cell.inputs()
    *_, sinks = wide = [x.double() for x in inputs]
    out, lse = attention_with_sinks(*wide, seen)
    share = (sinks[:, None] - lse).exp()
    of_exact, of_rounded = (
        (share * (d_out.double() * x).sum(-1)).sum((0, 2)) for x in (out, out.bfloat16().double())
    )
    return relative_error(of_rounded, of_exact)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_16_bits(cell: Cell):
    skip_without(cell.backend)
    got, want, seen = _results(cell)
    bounds = _flash_errors(cell.heads, cell.dim, cell.tokens, cell.dtype)
    check(got[:4], want[:4], bounds)
    if cell.sinks is not None:
        # Kernels round once, and the sinks again.
        allowed = max(LIMIT, 3 * _rounding_of_sinks(cell, seen))
        assert relative_error(got[4], want[4]) <= allowed


@pytest.mark.parametrize("cell", EXACT, ids=lambda cell: "-".join(map(str, cell)))
def test_fp32(cell: Cell):
    """No step rounds to 16 bits, and no product uses TF32."""
    got, want, _ = _results(cell)
    assert max(errors(got, want)) < 1e-4
