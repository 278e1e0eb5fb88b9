"""attend() on one rank against dense masked attention in fp64, and invariants of every selection."""

import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.calls import op_arguments
from tests.reference import dense_attention, gradients, structured_qkv
from titan_sparse.attention import ContextParallel, attend, registry
from titan_sparse.attention.context_parallel.balanced import Costs
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.packed import prefix_lm
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, Mask, SlidingWindow
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

SPARSE = VerticalSlash(recall=0.7, sinks=2, local_slashes=1, dense_below=40)
CAPPED = VerticalSlash(
    recall=0.95, probe=7, sinks=0, max_verticals=21, max_slashes=2, dense_below=32
)
PATTERNS = {
    "dense": Dense(),
    "sparse": SPARSE,
    "capped": CAPPED,
    "xattention": XAttention(stride=4, threshold=0.6, dense_below=48),
    "moba": MoBA(19, 3),
}

# heads, KV heads, tokens, block size
SHAPES = [(16, 2, 128, 16), (5, 1, 157, 16), (3, 3, 157, 16), (5, 1, 128, 16)]

MASKS = {
    "full": Full(),
    "causal": Causal(),
    "valid": Causal(valid=(101, 0)),
    "window": Causal() & SlidingWindow(45),
    "documents": Documents([45, 3, 60, 17]),
    "documents by sequence": Documents([[128], [20, 41, 1, 55]]),
    "documents, window": Documents([[45, 3, 60, 17], [100]]) & SlidingWindow(30),
}
COMBINATIONS = [
    (mask, pattern)
    for mask in MASKS
    for pattern in PATTERNS
    if mask != "full" or pattern == "dense"
]


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    pattern: Pattern
    block: int

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def _problem(shape: tuple[int, int, int, int], mask: str, pattern: Pattern) -> Problem:
    heads, kv_heads, seq_len, block = shape
    q, k, v = structured_qkv(2, heads, kv_heads, seq_len, 8, seed=heads)
    return Problem(q * 0.5, k, v, MASKS[mask], pattern, block)


def _attend(p: Problem, *qkv: Tensor):
    return attend(*(qkv or p.qkv), p.mask, p.pattern, block_size=p.block, return_aux=True)


def _gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize(
    "shape, mask, pattern",
    [(SHAPES[number % 4], *combination) for number, combination in enumerate(COMBINATIONS)],
    ids=str,
)
def test_attend_is_dense_attention_over_what_was_selected(shape, mask, pattern):
    torch.set_num_threads(1)
    p = _problem(shape, mask, PATTERNS[pattern])
    d_out = torch.randn(p.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    aux = _attend(p)[1]
    seen = aux.index.dense(p.mask)
    want_lse = dense_attention(*p.qkv, seen)[1]
    want, want_grads = gradients(lambda *x: dense_attention(*x, seen)[0], d_out, *p.qkv)
    got, got_grads = gradients(
        lambda *x: attend(*x, p.mask, p.pattern, block_size=p.block), d_out, *p.qkv
    )
    assert torch.equal(aux.lse.isneginf(), ~seen.any(-1)) and torch.equal(
        want_lse.isneginf(), ~seen.any(-1)
    )
    assert _gap(aux.lse.nan_to_num(neginf=0), want_lse.nan_to_num(neginf=0)) < 1e-9
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), (got, *got_grads), (want, *want_grads), strict=True
    ):
        assert _gap(a, b) < 1e-9, name


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scale(pattern):
    p = _problem(SHAPES[2], "causal", PATTERNS[pattern])
    out, aux = attend(*p.qkv, p.mask, p.pattern, block_size=p.block, scale=0.2, return_aux=True)
    assert _gap(out, dense_attention(*p.qkv, aux.index.dense(p.mask), scale=0.2)[0]) < 1e-9


def test_the_default_block_size_is_128():
    p = _problem(SHAPES[2], "causal", Dense())
    out, aux = attend(*p.qkv, return_aux=True)
    assert aux.index.block_size == 128
    assert _gap(out, _attend(p)[0]) < 1e-12


def _with_index(p: Problem, tensors: list[Tensor], *qkv: Tensor) -> Tensor:
    """The forward op alone, with a given index."""
    ranges = p.mask.rows(p.q.shape[2])._replace(plain=False)
    arguments = op_arguments(tensors, ranges, p.pattern, one_rank(p.block))
    return torch.ops.titan_sparse.attend_forward(*qkv, *arguments)[0]


def _skipping_rows(p: Problem, seen: Tensor, verticals: Tensor, poisoned: int) -> Tensor:
    """bool [B, Hq, S]: rows whose block skips some KV block, in heads without verticals there."""
    size, seq_len = p.block, p.q.shape[2]
    here = slice(poisoned * size, (poisoned + 1) * size)
    padded = torch.nn.functional.pad(seen, (0, 0, 0, -seq_len % size))
    meets = padded[..., here].any(-1).unflatten(-1, (-1, size)).any(-1)
    has_vertical = ((verticals >= here.start) & (verticals < here.stop)).any(-1)
    return ~(meets | has_vertical[..., None]).repeat_interleave(size, -1)[..., :seq_len]


@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_not_selected_is_not_read(mask, pattern):
    """A NaN in a KV block would become 0 * NaN if the block were read and only masked."""
    p = _problem((4, 2, 157, 16), mask, PATTERNS[pattern])
    index = p.pattern.select(p.q, p.k, p.mask, block_size=p.block)
    seen = index.dense(p.mask)
    poisoned = 4
    skipping = _skipping_rows(p, seen, index.verticals, poisoned)

    def function(*qkv: Tensor) -> Tensor:
        return _with_index(p, index.tensors(), *qkv)

    clean, (clean_dq, _, _) = gradients(function, torch.ones_like(p.q), *p.qkv)
    here = slice(4 * 16, 5 * 16)
    k = p.k.clone()
    v = p.v.clone()
    k[:, :, here] = torch.nan
    v[:, :, here] = torch.nan
    out, (dq, _, _) = gradients(function, torch.ones_like(p.q), p.q, k, v)
    # In a dense causal problem only the rows before the block skip it. Otherwise some after it do
    # as well.
    assert (skipping & (torch.arange(157) >= 5 * 16)).any() != (
        pattern == "dense" and mask == "causal"
    )
    assert skipping.any(), "the case proves nothing"
    assert torch.equal(out[skipping], clean[skipping]) and torch.equal(
        dq[skipping], clean_dq[skipping]
    )
    assert out[seen[..., here].any(-1)].isnan().all()


@pytest.mark.parametrize("mask, pattern", COMBINATIONS)
def test_statistics_count_what_is_computed(mask, pattern):
    shape = SHAPES[1]
    p = _problem(shape, mask, PATTERNS[pattern])
    with recording(recall_rows=10**6) as record:
        _, aux = _attend(p)
    seen, visible = aux.index.dense(p.mask), p.mask.dense(shape[2])
    assert (record.visited[0] * 2 == seen.sum((0, 2, 3))).all()
    want = seen.sum((0, 2, 3)).double() / 2 / (visible.sum().double() / len(visible))
    assert torch.equal(record.density(), want[None])
    dense_lse = dense_attention(*p.qkv, visible[:, None].expand_as(seen))[1]
    kept = (aux.lse - dense_lse).exp()
    rows = visible.any(-1)[:, None].expand_as(kept)
    recall = torch.where(rows, kept, 0).sum((0, 2)) / rows.sum((0, 2))
    assert _gap(record.recall[0], recall) < 1e-9


def test_statistics_of_budgets_and_layers():
    p = _problem(SHAPES[0], "causal", CAPPED)
    with recording() as record:
        first, second = (_attend(p, p.q * factor, p.k, p.v)[1].index for factor in (1, 3))
    assert record.density().shape == (2, 16) and record.recall == []
    for got, index in zip(record.capped, (first, second), strict=True):
        assert torch.equal(got, index.capped.double().mean((0, 2)))
    assert 0 < torch.stack(record.capped).mean() <= 1
    _attend(p)
    assert len(record.visited) == 2, "recorded outside of recording()"


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "q, k, v, words",
    [
        (_x(2, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 8), "needs q"),
        (_x(1, 2, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 4), "needs q"),
        (_x(2, 2, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 8), "multiple of Hkv"),
        (_x(1, 2, 16, 8), _x(1, 2, 32, 8), _x(1, 2, 32, 8), "multiple of Hkv"),
        (_x(1, 2, 16, 8), _x(1, 2, 16, 4), _x(1, 2, 16, 4), "multiple of Hkv"),
        (_x(1, 1, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 8), "multiple of Hkv"),
        (_x(1, 1, 16, 8), _x(1, 1, 16, 8, dtype=torch.float64), _x(1, 1, 16, 8), "dtype"),
        (_x(1, 1, 16, 8), _x(1, 1, 16, 8), _x(1, 1, 16, 8, dtype=torch.bfloat16), "dtype"),
        (*[_x(1, 1, 16, 8, dtype=torch.int64)] * 3, "dtype"),
    ],
)
def test_tensors_that_do_not_fit(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        attend(q, k, v)


REFUSED = [
    ({"mask": Causal().rows(15)}, "15 tokens"),
    ({"mask": Causal(valid=(3, 4, 5))}, "3 sequences"),
    ({"mask": Documents([9, 8])}, "17 tokens"),
    ({"mask": "causal"}, "mask=str is not a mask; write a mask of titan_sparse.attention.masks"),
    ({"mask": Full(), "pattern": SPARSE, "block_size": 16}, "causal"),
    ({"pattern": "dense"}, "pattern=str is not a pattern; write one of"),
    ({"pattern": VerticalSlash(dense_below=15), "block_size": 16}, "dense_below = 16 or more"),
    (
        {"pattern": VerticalSlash(dense_below=16, probe=17), "block_size": 8},
        "dense_below = 17 or more",
    ),
    ({"backend": "nothing"}, "attention.backend"),
    ({"block_size": 0}, "block_size"),
    (
        {"cp": ContextParallel(None, "contiguous", "local", 8), "block_size": 16},
        "block_size=16",
    ),
    ({"recomputed": -0.1, "block_size": 4}, "0 to 1"),
    ({"recomputed": 0.5, "block_size": 4, "mask": Full()}, "write recomputed=0 or 1"),
    (
        {"recomputed": 0.5, "block_size": 4, "mask": prefix_lm([16], [9])},
        "causal mask; write recomputed=0 or 1",
    ),
    ({"sinks": _x(3)}, r"sinks has shape \[3\]; write one logit a query head, \[2\]"),
    (
        {"sinks": _x(2, dtype=torch.float64)},
        r"sinks is torch.float64; write sinks.float\(\), or the dtype of q \(torch.float32\)",
    ),
    ({"sinks": _x(2).to("meta")}, 'sinks is on meta, q on cpu; write sinks.to."cpu".'),
]


@pytest.mark.parametrize("options, words", REFUSED)
def test_options_that_do_not_fit(options, words):
    q = _x(2, 2, 16, 8)
    with pytest.raises(ValueError, match=words):
        attend(q, q, q, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layout": "diagonal"}, "layout"),
        ({"schedule": "spiral"}, "schedule"),
        ({"schedule": "group_cast", "overlap_stages": (2, 0)}, "overlap_stages"),
        ({"backward_circulates": "v"}, "backward_circulates"),
        ({"route_by": "index"}, "route_by"),
        ({"costs": Costs()}, 'costs would be ignored with layout "striped"'),
    ],
)
def test_context_parallel_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        ContextParallel(None, **options)


def test_a_context_parallel_lives_until_the_backward():
    """It must not live longer. Only the graph holds a reference."""
    cp = ContextParallel(None, "contiguous", "local", block_size=16)
    reference = weakref.ref(cp)
    q = _x(1, 2, 32, 8).requires_grad_()
    out = attend(q, q, q, cp=cp)
    del cp
    out.sum().backward()
    del out
    assert q.grad is not None and reference() is None


def test_a_key_without_its_object_is_refused():
    with pytest.raises(RuntimeError, match="is gone: keep the ContextParallel"):
        registry.lookup("attend nothing")
