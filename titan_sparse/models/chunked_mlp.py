"""The MLP over chunks of tokens, forward and backward (ALST's tiled MLP, arXiv 2506.13996, section
3.3.1).

The intermediate results of one chunk exist at a time, and the backward computes them again.
Forward and backward are a custom op each. So a compiled block holds one node, however many chunks
there are, and recomputation skips the forward, because nothing needs its result.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import MLP


class ChunkedMLP(MLP):
    """The MLP with the same weights under the same names, `chunk_tokens` tokens at a time.

    compile_backend: the backend of torch.compile for the computations between the matmuls; "" does
    not compile them.
    """

    def __init__(self, config: DecoderConfig, chunk_tokens: int, compile_backend: str = "") -> None:
        super().__init__(config)
        self.chunk_tokens = chunk_tokens
        self.compile_backend = compile_backend

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] -> [B, S, hidden_size]; weights and x of one dtype."""
        return torch.ops.titan_sparse.chunked_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            self.chunk_tokens,
            self.compile_backend,
        )


def chunks(rows: int, chunk_tokens: int) -> list[slice]:
    """The parts of so many rows, each of chunk_tokens, the last one of what is left."""
    return [slice(start, start + chunk_tokens) for start in range(0, rows, chunk_tokens)]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32 (fp64 for fp64), returned in gate's dtype."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    hidden = F.silu(gate.to(wide)) * up.to(wide)
    return hidden.to(gate.dtype)


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """swiglu(gate, up) once more, then the gradients of gate and up."""
    dtype = gate.dtype
    wide = torch.promote_types(dtype, torch.float32)
    gate = gate.to(wide)
    up = up.to(wide)
    d_hidden = d_hidden.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return (silu * up).to(dtype), d_gate.to(dtype), (d_hidden * silu).to(dtype)


@functools.cache
def compiled(function: Callable, backend: str) -> Callable:
    """The function under torch.compile; as it is with the backend ""."""
    if not backend:
        return function
    # dynamic=False: there are two shapes at most, that of a whole chunk and that of the last one.
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, rounded only to total's dtype, so that the error does not grow with the
    number of chunks."""
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
    # [B * S, hidden_size] each
    rows = x.reshape(-1, x.shape[-1])
    out_rows = out.view(-1, x.shape[-1])
    # A custom op runs without gradients anyway, but what is compiled looks at the grad mode.
    with torch.no_grad():
        for chunk in chunks(len(rows), chunk_tokens):
            # [chunk_tokens, intermediate_size]. What goes in has no name, so that it is freed at
            # once.
            hidden = compiled(swiglu, compile_backend)(
                F.linear(rows[chunk], gate),
                F.linear(rows[chunk], up),
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
    # [B * S, hidden_size] each
    rows = x.reshape(-1, x.shape[-1])
    d_rows = dx.reshape(-1, x.shape[-1])
    d_out_rows = d_out.reshape(-1, x.shape[-1])
    # The weights' gradients are sums over all chunks: in fp32, so that each chunk rounds nothing.
    wide = torch.promote_types(x.dtype, torch.float32)
    d_gate = torch.zeros(gate.shape, dtype=wide, device=gate.device)
    d_up = torch.zeros(up.shape, dtype=wide, device=up.device)
    d_down = torch.zeros(down.shape, dtype=wide, device=down.device)
    with torch.no_grad():
        for chunk in chunks(len(rows), chunk_tokens):
            # [chunk_tokens, intermediate_size] each. What goes in has no name, so that it is freed
            # at once.
            hidden, d_gate_rows, d_up_rows = compiled(swiglu_backward, compile_backend)(
                F.linear(rows[chunk], gate),
                F.linear(rows[chunk], up),
                d_out_rows[chunk] @ down,
            )
            add_product(d_down, d_out_rows[chunk].T, hidden)
            add_product(d_gate, d_gate_rows.T, rows[chunk])
            add_product(d_up, d_up_rows.T, rows[chunk])
            torch.mm(d_gate_rows, gate, out=d_rows[chunk]).addmm_(d_up_rows, up)
    return dx, d_gate.to(gate.dtype), d_up.to(up.dtype), d_down.to(down.dtype)


@_backward.register_fake
def _(d_out, x, gate, up, down, chunk_tokens, compile_backend):
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (x, gate, up, down)
    )


def _save(ctx, inputs, output) -> None:
    x, gate, up, down, ctx.chunk_tokens, ctx.compile_backend = inputs
    ctx.save_for_backward(x, gate, up, down)


def _differentiate(ctx, d_out: Tensor):
    x, gate, up, down = ctx.saved_tensors
    dx, d_gate, d_up, d_down = torch.ops.titan_sparse.chunked_mlp_backward(
        d_out, x, gate, up, down, ctx.chunk_tokens, ctx.compile_backend
    )
    return dx, d_gate, d_up, d_down, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
