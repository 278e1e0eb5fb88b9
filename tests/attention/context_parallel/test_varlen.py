"""Dense attention of packed documents on one rank by FlashAttention-4: here by a
twin of its interface."""

import sys

import pytest
import torch
from torch import Tensor

from tests.attention import dense_twin
from tests.attention.problems import assert_equal, problem
from tests.reference import gradients, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.backends import BACKENDS, flex
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.context_parallel import dense as packed
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, SlidingWindow
from titan_sparse.attention.masks.slices import prefix_lm
from titan_sparse.attention.patterns import Dense

eager = BACKENDS["eager"]

S = 96


def masks(scale: int = 1) -> dict:
    def documents(*lengths):
        return Documents([[scale * n for n in row] for row in lengths])

    return {
        "causal, in two parts": Causal(),
        "documents, in two parts": documents([50, 1, 45]),
        "documents": documents([50, 1, 45]),
        "padded": documents([30, 7, 20], [96]),
        "window": Causal() & SlidingWindow(11 * scale),
        "documents in a window": documents([50, 1, 40], [10, 70]) & SlidingWindow(9 * scale),
        "padded, in a window": Causal(valid=(96 * scale, 61 * scale)) & SlidingWindow(20 * scale),
        "a window that cuts nothing": documents([40, 56]) & SlidingWindow(60 * scale),
    }


MASKS = masks()


class Interface:
    """flash_attn.cute.interface by the dense twin. Tensors come by token, documents in a row."""

    def __init__(self):
        self.windows = []

    def _flash_attn_fwd(self, q, k, v, softmax_scale, return_lse, out, **options):
        shape = self._shape(q, options)
        found = dense_twin.dense_forward(*(_by_head(x) for x in (q, k, v)), shape, softmax_scale)
        _by_head(out).copy_(found.out)
        return out, found.lse.view(-1, len(q)) if q.dim() == 3 else found.lse

    def _flash_attn_bwd(self, q, k, v, out, d_out, lse, softmax_scale, dq, dk, dv, **options):
        assert lse.is_contiguous()
        shape = self._shape(q, options)
        q, k, v, out, d_out = (_by_head(x) for x in (q, k, v, out, d_out))
        queries = Queries(q, d_out, out, lse.view(q.shape[:-1]))
        found = dense_twin.dense_backward(queries, k, v, shape, softmax_scale)
        for gradient, x in zip((dq, dk, dv), found):
            _by_head(gradient).copy_(x)

    def _shape(self, q: Tensor, options: dict) -> DenseShape:
        if q.dim() == 4:
            self.windows.append(None)
            return DenseShape(**options)
        offsets = options["cu_seqlens_q"]
        longest = options["max_seqlen_q"]
        assert options["cu_seqlens_k"] is offsets
        assert options["max_seqlen_k"] == longest >= offsets.diff().max()
        window = None
        if "window_size_left" in options:
            assert options["window_size_right"] == 0 and "causal" not in options
            window = options["window_size_left"] + 1
        else:
            assert options["causal"]
        self.windows.append(window)
        return DenseShape(True, offsets, longest, window)


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1)[None]


@pytest.mark.parametrize("name", MASKS)
def test_equals_attention_over_tiles(name, monkeypatch):
    mask = MASKS[name]
    p = problem((6, 2), mask, seq_len=S)
    # The second part of the queries sees more keys than there are queries.
    options = {"backend": "eager", "recomputed": 0.5 if "in two parts" in name else 0.0}
    want = p.results(**options)
    interface = Interface()
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    # The backward computes one of two KV heads at a time.
    monkeypatch.setattr(flex, "ENOUGH_BLOCKS", 1)
    monkeypatch.setattr(eager, "SERVES_DENSE", True)
    monkeypatch.setattr(eager, "serves_dense", lambda shape: True)
    monkeypatch.setattr(eager, "dense_forward", flex.Flex().dense_forward)
    monkeypatch.setattr(eager, "dense_backward", flex.Flex().dense_backward)
    assert_equal(p.results(**options), want, tolerance=1e-11)
    windows = {"window": 11, "documents in a window": 9, "padded, in a window": 20}
    # A forward, of as many parts, and a backward. Parts of documents go by tiles.
    passes = {"causal, in two parts": 4, "documents, in two parts": 2}
    assert interface.windows == [windows.get(name)] * passes.get(name, 3)


def test_what_documents_and_a_window_cannot_say():
    assert packed.find_packing(Full().rows(S), 1) is None
    ranges = (Documents([[50, 46]]) & SlidingWindow(9)).rows(S)
    ranges.start[0, 70] += 1  # one query sees less
    assert packed.find_packing(ranges, 1) is None
    assert prefix_lm([S], [10]).rows(S).slices is not None  # which packing() leaves to tables


def test_offsets():
    found = packed.find_packing(Documents([[50, 1, 40], [96]]).rows(S), 2)
    assert found.shape.offsets.tolist() == [0, 50, 51, 91, 96, 192]
    assert found.shape.longest == 96 and found.shape.window is None
    assert found.padding.sum() == 5 and found.padding[0, -5:].all()
    # What is known without a wait: the same documents, and empty ones.
    known = packed.known_packing(Documents([[50, 1, 40], [96]]).rows(S))
    assert known.shape.offsets.tolist() == [0, 50, 51, 91, 96] + [192] * 60
    assert known.shape.longest == S and known.padding.equal(found.padding)
    one = packed.find_packing(Documents([[50, 46]]).rows(S), 3)  # a mask for all sequences
    assert one.shape.offsets.tolist() == [0, 50, 96, 146, 192, 242, 288] and one.padding is None


@pytest.mark.gpu
@pytest.mark.skipif(flex.missing() is not None, reason=str(flex.missing()))
@pytest.mark.parametrize("name", MASKS)
def test_on_a_gpu(name, monkeypatch):
    """FlashAttention-4's documents against its block lists, in bf16, both against fp64."""
    mask = masks(16)[name]
    q, k, v = (x.cuda().bfloat16() for x in structured_qkv(2, 8, 2, S * 16, 128, seed=3))
    d_out = torch.randn_like(q)

    def run(backend, *x):
        return gradients(lambda *y: attend(*y, mask, Dense(), backend=backend), *x)

    out, grads = run("flex", d_out, q, k, v)
    want, wanted = run("eager", d_out.double(), *(x.double() for x in (q, k, v)))
    monkeypatch.setattr(packed, "packing_of", lambda *call: None)
    listed, by_lists = run("flex", d_out, q, k, v)
    for a, b, c in zip((out, *grads), (want, *wanted), (listed, *by_lists)):
        error, bound = ((x.double() - b).norm() / b.norm() for x in (a, c))
        assert error < 1.5 * bound, (name, error, bound)
