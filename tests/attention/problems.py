"""Calls of attend(), and what dense attention gives over the pairs that they select."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import (
    attention_with_sinks,
    dense_attention,
    gradients,
    structured_qkv,
    tiles_of,
)
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.inputs import mask_tensors
from titan_sparse.attention.masks import (
    Causal,
    Dilated,
    Documents,
    Full,
    Mask,
    Slices,
    SlidingWindow,
)
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.ops import options_key
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention
from titan_sparse.attention.patterns.base import BlockIndex

SEQ_LEN = 192
RANGES: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "padded": Causal(valid=(SEQ_LEN - 5, 31)),
    "nothing at all": Causal(valid=(0,)),
    "window": SlidingWindow(30),
    "padded window": Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 70)) & SlidingWindow(65),
    "window of one": SlidingWindow(1),
    "documents": Documents([[100, 7, 1, 60], [40, 40, 100]]),
    "single tokens": Documents([1] * 150),
    "short documents": Documents([24] * 8),
    "long and short": Documents([[SEQ_LEN], [3, 110, 40, 15, 20]]),
    "windowed documents": Documents([[SEQ_LEN], [3, 100, 60, 17]]) & SlidingWindow(50),
}
"""Masks of up to two sequences of SEQ_LEN tokens, all but those made of slices."""
PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "vertical_slash": VerticalSlash(
        recall=0.7, sinks=3, local_slashes=1, max_verticals=40, dense_below=32
    ),
    "xattention": XAttention(stride=4, threshold=0.6, dense_below=48),
    # Chunks end inside of blocks.
    "moba": MoBA(chunk_size=28, top_k=3),
}
"""For blocks of 8 to 24."""


def combinations(masks: dict[str, Mask], patterns: dict[str, Pattern] = PATTERNS) -> list:
    """(mask, pattern) by name. Only dense takes a mask that is not causal ranges."""
    found = []
    for mask, pattern in itertools.product(masks, patterns):
        for_dense = isinstance(masks[mask], (Full, Dilated, Slices))
        if not (for_dense and patterns[pattern].dynamic):
            found.append((mask, pattern))
    return found


NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


class Problem(NamedTuple):
    """inputs: q, k, v, and sinks where there are some."""

    inputs: list[Tensor]
    mask: Mask = Causal()
    pattern: Pattern = Dense()
    block: int = 16

    @property
    def d_out(self) -> Tensor:
        q = self.inputs[0]
        generator = torch.Generator().manual_seed(1)
        return torch.randn(q.shape, dtype=torch.float64, generator=generator).to(q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options):
        options = {"block_size": self.block, "sinks": sinks} | options
        return attend(q, k, v, self.mask, self.pattern, **options)

    def aux(self, **options):
        return self.attend(*self.inputs, return_aux=True, **options)[1]

    def seen(self) -> Tensor:
        """bool [B, Hq, S, S]: what the mask allows and the pattern selects."""
        q, k = self.inputs[:2]
        index = self.pattern.select(q, k, self.mask, block_size=self.block)
        return index.dense(self.mask).expand(*q.shape[:3], -1)

    def results(self, d_out: Tensor | None = None, **options) -> dict[str, Tensor]:
        """NAMES, and the tensors of the index."""
        leaves = [x.detach().clone().requires_grad_() for x in self.inputs]
        out, aux = self.attend(*leaves, return_aux=True, **options)
        d_inputs = torch.autograd.grad(out, leaves, self.d_out if d_out is None else d_out)
        found = dict(zip(NAMES, (out.detach(), aux.lse.detach(), *d_inputs)))
        return found | {f"index {number}": x for number, x in enumerate(aux.index.tensors())}

    def wanted(self, seen: Tensor) -> dict[str, Tensor]:
        """NAMES, by dense attention in fp64 over bool [B, Hq, S, S]."""
        reference = attention_with_sinks if self.inputs[3:] else dense_attention
        exact = [x.double() for x in self.inputs]
        out, grads = gradients(lambda *x: reference(*x, seen)[0], self.d_out.double(), *exact)
        return dict(zip(NAMES, (out, reference(*exact, seen)[1], *grads)))


def problem(
    heads: tuple[int, int],
    mask: Mask | None = None,
    pattern: Pattern | None = None,
    block: int = 16,
    *,
    seq_len: int = SEQ_LEN,
    sinks: bool = False,
    seed: int = 3,
) -> Problem:
    """Two sequences in fp64; by default causal and dense."""
    inputs = structured_qkv(2, *heads, seq_len, 8, seed)
    more = [sink_logits(heads[0])] if sinks else []
    return Problem([*inputs, *more], mask or Causal(), pattern or Dense(), block)


def computed_blocks(index: BlockIndex, mask: Mask) -> Tensor:
    """bool [blocks, blocks]: pairs of which some head of some sequence computes a pair of tokens,
    verticals left out."""
    blocks = index.all_blocks()
    is_seen = tiles_of(mask.dense(index.seq_len), index.block_size).any(-1).any(-1)
    return (index.selects(blocks, blocks) & is_seen[:, None]).any(1).any(0)


def op_arguments(
    index: list[Tensor],
    ranges: MaskRanges,
    pattern: Pattern,
    cp: ContextParallel,
    scale: float,
    begin: float = 0.0,
    end: float = 1.0,
) -> tuple[None, list[Tensor], list[Tensor], str]:
    """(sinks, index, mask, call), which follow q, k and v in an op of attention; no sinks. The last
    two follow q and k in the op select. begin, end: as options_key() takes them."""
    facts, tensors = mask_tensors(ranges)
    key = options_key(pattern.key, cp.key, facts, scale, "eager", begin, end)
    return None, index, tensors, key


def sink_logits(heads: int) -> Tensor:
    """They range from sinks with almost no weight to sinks with almost all of it."""
    return torch.linspace(-6, 12, heads, dtype=torch.float64)


def assert_equal(
    found: dict[str, Tensor], wanted: dict[str, Tensor], case: object = "", tolerance: float = 1e-9
) -> None:
    """All that is wanted was found. case: what to say of a difference."""
    for name, want in wanted.items():
        words = f"{name}, {case}: "
        # The density of a mask that allows nothing is not a number.
        torch.testing.assert_close(
            *(found[name], want),
            rtol=0,
            atol=tolerance,
            equal_nan=name == "density",
            msg=lambda text, words=words: words + text,
        )
