"""The MLP over chunks of tokens: equal to the whole one, one op in a compiled block, no forward run for nothing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.helpers import causal, dense_attend
from tests.runs import TINY
from titan_sparse.models import chunked_mlp
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.models.decoder import MLP, Block
from titan_sparse.models.rope import inverse_frequencies, rope_tables
from titan_sparse.training.build_model import checkpointed

CONFIG = replace(TINY, hidden_size=32, intermediate_size=48)
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _gradients(module: nn.Module, x: Tensor, *args) -> list[Tensor]:
    """Output, gradient of x and of every parameter, for an upstream gradient that differs from row to row."""
    x = x.clone().requires_grad_()
    out = module(x, *args)
    d_out = torch.randn(
        out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], d_out)]


def _pair(
    dtype: torch.dtype, chunk_tokens: int, compile_backend: str = ""
) -> tuple[MLP, ChunkedMLP]:
    torch.manual_seed(0)
    whole, chunked = (
        MLP(CONFIG).to(dtype),
        ChunkedMLP(CONFIG, chunk_tokens, compile_backend).to(dtype),
    )
    chunked.load_state_dict(whole.state_dict())
    return whole, chunked


@pytest.mark.parametrize(
    "compile_backend, chunk_tokens", [("", 1), ("", 7), ("", 58), ("", 1000), ("aot_eager", 16)]
)
def test_equals_the_whole_mlp(compile_backend, chunk_tokens):
    """2 x 29 rows: ragged last chunks, and chunks over the seam of two sequences."""
    whole, chunked = _pair(torch.float64, chunk_tokens, compile_backend)
    x = torch.randn(2, 29, 32, dtype=torch.float64)
    for strided in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        for got, want in zip(_gradients(chunked, strided), _gradients(whole, strided), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_error_of_weight_gradients_does_not_grow_with_chunks():
    x = torch.randn(1, 4096, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = _pair(torch.bfloat16, 4096)[1].double()
    wanted, errors = _gradients(exact, x.double()), {}
    for chunk_tokens in (4096, 8):
        got = _gradients(_pair(torch.bfloat16, chunk_tokens)[1], x)
        errors[chunk_tokens] = [
            ((g.double() - w).norm() / w.norm()).item()
            for g, w in zip(got[2:], wanted[2:], strict=True)
        ]
    assert all(many < 1.1 * one for many, one in zip(errors[8], errors[4096], strict=True)), errors


def test_the_activation_is_rounded_once():
    """In bfloat16, as if it was computed in float64. A rounding is at most 2^-8 of the value."""
    torch.manual_seed(0)
    gate, up, d_hidden = torch.randn(3, 64, 48).bfloat16()
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    hidden = nn.functional.silu(exact[0]) * exact[1]
    wanted = [hidden, hidden, *torch.autograd.grad(hidden, exact, d_hidden.double())]
    found = [
        chunked_mlp.swiglu(gate, up),
        *chunked_mlp.swiglu_backward(gate, up, d_hidden),
    ]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_intermediate_of_all_tokens():
    _, chunked = _pair(torch.float32, 16)
    x, weights = torch.randn(1, 640, 32), [p.detach() for p in chunked.parameters()]
    with LargestTensor() as seen:
        chunked_mlp._forward._init_fn(x, *weights, 16, "")
        chunked_mlp._backward._init_fn(x, x, *weights, 16, "")
    assert seen.largest == x.numel()  # the intermediate size is larger: 640 x 48 would be seen


@pytest.fixture
def calls(monkeypatch) -> dict[str, int]:
    """How often a chunk was computed forward and backward."""
    count = {"forward": 0, "backward": 0}
    forward, backward = chunked_mlp.swiglu, chunked_mlp.swiglu_backward

    def counted_forward(*args):
        count["forward"] += 1
        return forward(*args)

    def counted_backward(*args):
        count["backward"] += 1
        return backward(*args)

    monkeypatch.setattr(chunked_mlp, "swiglu", counted_forward)
    monkeypatch.setattr(chunked_mlp, "swiglu_backward", counted_backward)
    return count


def _block(chunk_tokens: int) -> tuple[Block, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    mlp = (lambda config: ChunkedMLP(config, chunk_tokens)) if chunk_tokens else MLP
    block = Block(CONFIG, dense_attend, mlp).double()
    positions = torch.arange(96)[None]
    cos, sin = rope_tables(
        *inverse_frequencies(CONFIG.rope, CONFIG.head_dim), positions, torch.float64
    )
    return block, (cos, sin, causal(96))


@pytest.mark.parametrize(
    "backend, forwards",
    [("aot_eager", 1), (None, 2), pytest.param("inductor", 1, marks=pytest.mark.slow)],
)
def test_in_a_checkpointed_block(calls, backend, forwards):
    """Compiled, a step runs each op once: 48 chunks forward, 48 backward, and the block is one graph.

    Not compiled, the recomputation runs the forward again, as it does all of a block.
    """
    x = torch.randn(1, 96, 32, dtype=torch.float64)
    block, args = _block(0)
    want = _gradients(block, x, *args)
    block, args = _block(2)
    block = checkpointed(block, "full")
    if backend:
        block.compile(backend=backend, fullgraph=True)
    for got, wanted in zip(_gradients(block, x, *args), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert calls == {"forward": 48 * forwards, "backward": 48}
