"""Learned sinks on one rank, against a softmax with one more logit per row: out, lse and every gradient."""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.attention.calls import op_arguments, select_arguments
from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.test_recomputed import CHECKPOINTS
from tests.reference import attention_with_sinks, dense_attention, gradients, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.packed import prefix_lm, sliding_window
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, Mask, SlidingWindow
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import Dense, MoBA, Pattern, VerticalSlash, XAttention

eager = BACKENDS["eager"]

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
MASKS = {
    "full": Full(),
    "causal": Causal(),
    "valid": Causal(valid=(101, 0)),
    "window": Causal() & SlidingWindow(45),
    "documents": Documents([[40, 3, 57, 9], [20, 41, 1, 55]]),
    "documents, window": Documents([[40, 3, 57, 9], [100]]) & SlidingWindow(30),
    "slices": prefix_lm([60, 50], [9, 20]),
    "slices, window": sliding_window([60, 50], 20, sinks=5),
}
PATTERNS = {
    "dense": Dense(),
    "vertical_slash": VerticalSlash(recall=0.7, sinks=2, local_slashes=1, dense_below=40),
    "xattention": XAttention(4, 0.6, 48),
    "moba": MoBA(32, 2),
}
SPARSE_MASKS = ("causal", "valid", "documents, window")
COMBINATIONS = [
    *((mask, "dense") for mask in MASKS),
    *itertools.product(SPARSE_MASKS, [name for name in PATTERNS if name != "dense"]),
]
SHAPES = [(8, 2, 128, 16), (5, 1, 157, 32), (3, 3, 117, 16)]
"""Query heads, KV heads, tokens, block size."""


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    mask: Mask
    pattern: Pattern
    block: int

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.sinks

    @property
    def d_out(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.q.shape, dtype=torch.float64, generator=generator)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options):
        return attend(
            q, k, v, self.mask, self.pattern, block_size=self.block, sinks=sinks, **options
        )

    def seen(self) -> Tensor:
        """bool [B, Hq, S, S]: what the mask allows and the pattern selects."""
        _, aux = self.attend(self.q, self.k, self.v, None, return_aux=True)
        return aux.index.dense(self.mask)


def sink_logits(heads: int) -> Tensor:
    """They range from sinks with almost no weight to sinks with almost all of it."""
    return torch.linspace(-6, 12, heads, dtype=torch.float64)


def _problem(
    mask: str = "documents", pattern: str = "dense", shape: tuple[int, ...] = SHAPES[2]
) -> Problem:
    heads, kv_heads, seq_len, block = shape
    q, k, v = structured_qkv(2, heads, kv_heads, seq_len, 8, seed=heads)
    return Problem(q * 0.5, k, v, sink_logits(heads), MASKS[mask], PATTERNS[pattern], block)


def _results(p: Problem, **options) -> list[Tensor]:
    """out, lse and gradients of q, k, v and the sinks by attend()."""
    _, aux = p.attend(*p.inputs, return_aux=True, **options)
    out, grads = gradients(lambda *x: p.attend(*x, **options), p.d_out, *p.inputs)
    return [out, aux.lse, *grads]


def _wanted(p: Problem) -> list[Tensor]:
    seen = p.seen()
    out, grads = gradients(lambda *x: attention_with_sinks(*x, seen)[0], p.d_out, *p.inputs)
    return [out, attention_with_sinks(*p.inputs, seen)[1], *grads]


def _assert_equal(got: list[Tensor], want: list[Tensor], note: object = None) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.shape == b.shape and a.isfinite().all(), (name, note)
        assert (a - b).abs().max() < 1e-9, (name, note)


@pytest.mark.parametrize(
    "shape, mask, pattern",
    [(SHAPES[i % len(SHAPES)], *combination) for i, combination in enumerate(COMBINATIONS)],
    ids=str,
)
def test_is_a_softmax_with_one_more_column(mask, pattern, shape):
    p = _problem(mask, pattern, shape)
    _assert_equal(_results(p), _wanted(p))


def test_packed_kernels(monkeypatch):
    """Dense packed documents by kernels that know documents, padding included."""
    for mask in ("valid", "documents, window"):
        p = _problem(mask)
        want = _wanted(p)
        with monkeypatch.context() as patch:
            let_eager_serve_dense(patch)
            patch.setattr(eager, "forward", None)
            _assert_equal(_results(p), want, mask)


@pytest.mark.parametrize("mask", ["causal", "valid"])
def test_a_sink_of_minus_infinity_is_none(mask):
    """Also where a row sees no key either."""
    p = _problem(mask)
    p = p._replace(sinks=torch.full((3,), -torch.inf, dtype=torch.float64))
    got = _results(p)
    _, aux = p.attend(p.q, p.k, p.v, None, return_aux=True)
    out, grads = gradients(lambda *x: p.attend(*x, None), p.d_out, p.q, p.k, p.v)
    for name, a, b in zip(NAMES, got, [out, aux.lse, *grads, torch.zeros(3).double()]):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("window", [None, 20])
def test_equals_the_attention_of_gpt_oss(window):
    """The eager attention of transformers, which adds a mask to the scores."""
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    p = _problem("causal", shape=SHAPES[0])
    if window is not None:
        p = p._replace(mask=Causal() & SlidingWindow(window))
    seen = p.mask.dense(128)[:, None]
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)

    def theirs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        module = nn.Module()
        module.sinks, module.num_key_value_groups = sinks, 4
        out, _ = eager_attention_forward(module.eval(), q, k, v, added, scaling=0.4)
        return out.transpose(1, 2)

    got, grads = gradients(lambda *x: p.attend(*x, scale=0.4), p.d_out, *p.inputs)
    want, wanted = gradients(theirs, p.d_out, *p.inputs)
    for a, b in zip((got, *grads), (want, *wanted), strict=True):
        assert (a - b).abs().max() < 1e-9


# Activation checkpointing and torch.compile


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "how, compiled, pattern",
    [
        ("selective", False, "dense"),
        ("plain", False, "vertical_slash"),
        ("selective", True, "vertical_slash"),
    ],
)
def test_recomputed_in_part_or_whole(pattern, how, compiled):
    p = _problem("documents", pattern)
    want = _wanted(p)
    ranges = p.mask.rows(117)
    for share in (0.4, 1.0):

        def block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, share: float = share) -> Tensor:
            """Functions before and after the attention are also recomputed."""
            out = attend(
                q * 1.0,
                k,
                v,
                ranges,
                p.pattern,
                block_size=p.block,
                recomputed=share,
                sinks=sinks * 1.0,
            )
            return out * 1.0

        torch._dynamo.reset()
        function = functools.partial(CHECKPOINTS[how], block)
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        leaves = [x.clone().requires_grad_() for x in p.inputs]
        out = function(*leaves)
        out.backward(p.d_out)
        _, aux = p.attend(*p.inputs, recomputed=share, return_aux=True)
        got = [out.detach(), aux.lse, *(x.grad for x in leaves)]
        _assert_equal(got, want, share)


def test_opcheck():
    """All ops; a part of attention has no gradient of its own."""
    p = _problem("documents", "vertical_slash", (4, 2, 125, 16))
    q, k, v = p.q, p.k, p.v
    ranges = p.mask.rows(125)
    ops = torch.ops.titan_sparse
    arguments = select_arguments(ranges, p.pattern, 16, 0.3)
    torch.library.opcheck(ops.select.default, (q, k, *arguments))
    index = p.pattern.select(q, k, p.mask, block_size=16).tensors()
    cp = one_rank(16)
    _, *whole = op_arguments(index, ranges, p.pattern, cp, 0.3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sinks = p.sinks.clone().requires_grad_()
    for op in (ops.attend_forward, ops.attend_recomputed):
        torch.library.opcheck(op.default, (*leaves, sinks, *whole))
    out, lse, verticals = ops.attend_forward(q, k, v, None, *whole)
    saved = [out, lse, verticals]
    arguments = (torch.ones_like(q), q, k, v, saved, *whole)
    torch.library.opcheck(ops.attend_backward.default, arguments)
    arguments = (torch.ones_like(out), out, lse, sinks.detach())
    torch.library.opcheck(ops.attend_sinks_backward.default, arguments)

    second = op_arguments(index, ranges, p.pattern, cp, 0.3, 0.4, 1.0)
    torch.library.opcheck(ops.attend_forward.default, (q, k, v, *second))
    second_out, second_lse, vertical_kv = ops.attend_forward(q, k, v, *second)
    assert second_out.shape[2] == 125 - 3 * 16
    first = op_arguments([*index, vertical_kv], ranges, p.pattern, cp, 0.3, 0.0, 0.4)
    torch.library.opcheck(ops.attend_recomputed.default, (q, k, v, *first))
    first_out, first_lse, nothing = ops.attend_recomputed(q, k, v, *first)
    assert nothing.numel() == 0
    shares = [first_out, second_out, first_lse, second_lse, vertical_kv]
    result = torch.library.opcheck(ops.attend_join.default, (*leaves, sinks, *whole, shares))
    assert set(result.values()) == {"SUCCESS"}
    with pytest.raises(ValueError, match="join"):
        ops.attend_forward(*leaves, *second)


# Dtypes and statistics


@pytest.mark.parametrize(
    "dtype, sink_dtype, bound",
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float16, torch.float16, 2e-3),
    ],
    ids=str,
)
def test_lower_precision(dtype, sink_dtype, bound):
    p = _problem("documents", "vertical_slash")
    q, k, v = (x.to(dtype) for x in (p.q, p.k, p.v))
    low = p._replace(q=q, k=k, v=v, sinks=p.sinks.to(sink_dtype))
    seen = low.seen()
    exact = [x.double() for x in low.inputs]
    d_out = p.d_out.to(dtype)
    got, grads = gradients(low.attend, d_out, *low.inputs)
    want, wanted = gradients(lambda *x: attention_with_sinks(*x, seen)[0], d_out.double(), *exact)
    for name, a, b, x in zip(
        ("out", "dq", "dk", "dv", "dsinks"),
        (got, *grads),
        (want, *wanted),
        (q, *low.inputs),
        strict=True,
    ):
        assert a.dtype == x.dtype, name
        assert ((a.double() - b).norm() / b.norm()).item() < bound, name


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_selection_and_statistics_are_of_the_keys_alone(pattern, share):
    """This holds even with sinks that leave almost no mass to the keys."""
    p = _problem("causal", pattern, (4, 2, 128, 16))
    with recording(recall_rows=128) as want:
        _, plain = p.attend(p.q, p.k, p.v, None, recomputed=share, return_aux=True)
    with recording(recall_rows=128) as got:
        _, aux = p.attend(*p.inputs[:3], p.sinks + 40, recomputed=share, return_aux=True)
    assert torch.equal(aux.index.dense(p.mask), plain.index.dense(p.mask))
    assert torch.equal(got.density(), want.density())
    assert torch.equal(got.recall[0], want.recall[0])
    visible = p.mask.dense(128)[:, None].expand(2, 4, -1, -1)
    kept = (plain.lse - dense_attention(p.q, p.k, p.v, visible)[1]).exp()
    assert (got.recall[0] - kept.mean((0, 2))).abs().max() < 1e-9
    assert (got.recall[0] - 1).abs().max() < 1e-9 or pattern != "dense"
