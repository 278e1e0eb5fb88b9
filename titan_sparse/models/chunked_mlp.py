"""The MLP over chunks of tokens, forward and backward (ALST's tiled MLP, arXiv 2506.13996, section 3.3.1).

One chunk's intermediate results exist at a time; the backward computes them again. Two custom ops, so that a compiled
block holds one node however many chunks there are, and recomputation leaves the forward away: nothing needs its result.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.models.decoder import MLP
from titan_sparse.models.flavours import DecoderConfig


class ChunkedMLP(MLP):
    """MLP with the same weights under the same names, `chunk_tokens` tokens at a time.

    compile_backend: of torch.compile for what lies between the matmuls; "" runs it as it is.
    """

    def __init__(self, config: DecoderConfig, chunk_tokens: int, compile_backend: str = "") -> None:
        super().__init__(config)
        self.chunk_tokens, self.compile_backend = chunk_tokens, compile_backend

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] -> [B, S, hidden_size]; weights and x of one dtype."""
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return torch.ops.titan_sparse.chunked_mlp(
            x, *weights, self.chunk_tokens, self.compile_backend
        )


def _chunks(rows: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, start + chunk_tokens) for start in range(0, rows, chunk_tokens))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in fp32 (fp64 for fp64), returned in gate's dtype."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """_swiglu(gate, up) once more, then the gradients of gate and up."""
    dtype, wide = gate.dtype, torch.promote_types(gate.dtype, torch.float32)
    gate, up, d_hidden = gate.to(wide), up.to(wide), d_hidden.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return (silu * up).to(dtype), d_gate.to(dtype), (d_hidden * silu).to(dtype)


@functools.cache
def _compiled(function: Callable, backend: str) -> Callable:
    # dynamic=False: there are two shapes at most, a whole chunk and the last one.
    return (
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        if backend
        else function
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, rounded to total's dtype alone, so that the error does not grow with the number of chunks."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@torch.library.custom_op("titan_sparse::chunked_mlp", mutates_args=())
def _forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, chunk_tokens: int, compile_backend: str
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    with torch.no_grad():  # said once more, since what is compiled looks at it
        for chunk in _chunks(len(rows), chunk_tokens):
            hidden = _compiled(_swiglu, compile_backend)(
                F.linear(rows[chunk], gate), F.linear(rows[chunk], up)
            )
            torch.mm(hidden, down.T, out=out_rows[chunk])
    return out


@_forward.register_fake
def _(x, gate, up, down, chunk_tokens, compile_backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("titan_sparse::chunked_mlp_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    chunk_tokens: int,
    compile_backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, d_rows, d_out_rows = (t.reshape(-1, x.shape[-1]) for t in (x, dx, d_out))
    wide = torch.promote_types(x.dtype, torch.float32)
    d_gate, d_up, d_down = (
        torch.zeros(w.shape, dtype=wide, device=w.device) for w in (gate, up, down)
    )
    with torch.no_grad():
        for chunk in _chunks(len(rows), chunk_tokens):
            inputs, d_outputs = rows[chunk], d_out_rows[chunk]
            hidden, d_g, d_u = _compiled(_swiglu_backward, compile_backend)(
                F.linear(inputs, gate), F.linear(inputs, up), d_outputs @ down
            )
            _add_product(d_down, d_outputs.T, hidden)
            _add_product(d_gate, d_g.T, inputs)
            _add_product(d_up, d_u.T, inputs)
            torch.mm(d_g, gate, out=d_rows[chunk]).addmm_(d_u, up)
    return dx, d_gate.to(gate.dtype), d_up.to(up.dtype), d_down.to(down.dtype)


@_backward.register_fake
def _(d_out, x, gate, up, down, chunk_tokens, compile_backend):
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gate, up, down)
    )


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.chunk_tokens, ctx.compile_backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, d_out: Tensor):
    gradients = torch.ops.titan_sparse.chunked_mlp_backward(
        d_out, *ctx.saved_tensors, ctx.chunk_tokens, ctx.compile_backend
    )
    return (*gradients, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)
