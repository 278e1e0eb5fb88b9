"""The MLP over chunks of tokens: equal to the whole one, one op in a compiled block, no
forward run for nothing."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.models.helpers import causal, dense_attend
from tests.reference import LargestTensor
from tests.runs import TINY
from titan_sparse.models import chunked_mlp
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.models.config import Adapters
from titan_sparse.models.decoder import MLP, Block, inverse_frequencies, rope_tables
from titan_sparse.models.lora import add_adapters
from titan_sparse.training.model import checkpointed

CONFIG = replace(TINY, hidden_size=32, intermediate_size=48)
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _gradients(module: nn.Module, x: Tensor, *args) -> list[Tensor]:
    """Output, gradient of x, and of every trained parameter, for a random upstream gradient."""
    x = x.clone().requires_grad_()
    out = module(x, *args)
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, [x, *trained], d_out)]


def _pair(
    dtype: torch.dtype, chunk_tokens: int, compile_backend: str = "", targets: str = ""
) -> tuple[MLP, ChunkedMLP]:
    torch.manual_seed(0)
    whole = MLP(CONFIG)
    chunked = ChunkedMLP(CONFIG, chunk_tokens, compile_backend)
    for mlp in (whole, chunked):
        if targets == "none":
            mlp.requires_grad_(False)
        elif targets:
            add_adapters(mlp, Adapters(3, 6, 0.0, tuple(targets.split(",")), "default"))
        mlp.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=0.2)
    chunked.load_state_dict(whole.state_dict())
    return whole, chunked


@pytest.mark.parametrize("targets", ["", "gate_proj,up_proj,down_proj", "up_proj", "none"])
@pytest.mark.parametrize("compile_backend, chunk_tokens", [("", 7), ("", 1000), ("aot_eager", 16)])
def test_equals_the_whole_mlp(compile_backend, chunk_tokens, targets):
    """2 x 29 rows: ragged last chunks, and chunks across the boundary of two sequences."""
    whole, chunked = _pair(torch.float64, chunk_tokens, compile_backend, targets)
    x = torch.randn(2, 29, 32, dtype=torch.float64)
    for strided in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        for got, want in zip(_gradients(chunked, strided), _gradients(whole, strided), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("targets", ["", "gate_proj,up_proj"])
def test_error_of_gradients_does_not_grow_with_chunks(targets):
    x = torch.randn(1, 1024, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = _pair(torch.bfloat16, 1024, targets=targets)[0].double()
    wanted = _gradients(exact, x.double())
    errors = {}
    for chunk_tokens in (1024, 8):
        got = _gradients(_pair(torch.bfloat16, chunk_tokens, targets=targets)[1], x)
        errors[chunk_tokens] = [
            ((g.double() - w).norm() / w.norm()).item()
            for g, w in zip(got[2:], wanted[2:], strict=True)
        ]
    assert all(many < 1.1 * one for many, one in zip(errors[8], errors[1024], strict=True)), errors


def test_the_activation_is_rounded_once():
    """In bfloat16 the result is as if computed in float64. A rounding is at
    most 2^-8 of the value."""
    torch.manual_seed(0)
    gate, up, d_hidden = torch.randn(3, 64, 48).bfloat16()
    exact = [gate.double().requires_grad_(), up.double().requires_grad_()]
    hidden = nn.functional.silu(exact[0]) * exact[1]
    wanted = [hidden, hidden, *torch.autograd.grad(hidden, exact, d_hidden.double())]
    found = [chunked_mlp.swiglu(gate, up), *chunked_mlp.swiglu_backward(gate, up, d_hidden)]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


class _Largest(LargestTensor):
    """Also inside of the two ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inside = {
            torch.ops.titan_sparse.chunked_mlp.default: chunked_mlp._forward._init_fn,
            torch.ops.titan_sparse.chunked_mlp_backward.default: chunked_mlp._backward._init_fn,
        }
        if func not in inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return inside[func](*args)


@pytest.mark.parametrize("targets", ["", "gate_proj,down_proj"])
def test_no_intermediate_of_all_tokens(targets):
    _, chunked = _pair(torch.float32, 16, targets=targets)
    x = torch.randn(1, 640, 32, requires_grad=True)
    with _Largest() as seen:
        chunked(x).sum().backward()
    assert seen.elements == x.numel()  # the intermediate size is larger: 640 x 48 would be seen


def _block(chunk_tokens: int) -> tuple[Block, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    mlp = (lambda config: ChunkedMLP(config, chunk_tokens)) if chunk_tokens else MLP
    block = Block(CONFIG, dense_attend, mlp).double()
    positions = torch.arange(96)[None]
    frequencies = inverse_frequencies(CONFIG.rope, CONFIG.head_dim)
    cos, sin = rope_tables(*frequencies, positions, torch.float64)
    return block, (cos, sin, causal(96))


@pytest.mark.parametrize(
    "backend, forwards",
    [("aot_eager", 1), (None, 2), pytest.param("inductor", 1, marks=pytest.mark.slow)],
)
def test_in_a_checkpointed_block(monkeypatch, backend, forwards):
    """Compiled, a step runs each op once: 48 chunks forward, 48 backward, and the block is one
    graph. Not compiled, the recomputation runs the forward again."""
    forward = Mock(side_effect=chunked_mlp.swiglu)
    backward = Mock(side_effect=chunked_mlp.swiglu_backward)
    monkeypatch.setattr(chunked_mlp, "swiglu", forward)
    monkeypatch.setattr(chunked_mlp, "swiglu_backward", backward)
    x = torch.randn(1, 96, 32, dtype=torch.float64)
    block, args = _block(0)
    want = _gradients(block, x, *args)
    block, args = _block(2)
    block = checkpointed(block, "full")
    if backend:
        block.compile(backend=backend, fullgraph=True)
    for got, wanted in zip(_gradients(block, x, *args), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert (forward.call_count, backward.call_count) == (48 * forwards, 48)
