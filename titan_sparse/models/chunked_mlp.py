"""The MLP over chunks of tokens, forward and backward (ALST's tiled MLP, arXiv 2506.13996, section
3.3.1), with trained weights, or with frozen weights and LoRA adapters.

Only one chunk's intermediate results exist at a time, and the backward computes them again. The
forward and the backward are one custom op each. So a compiled block has one node for the MLP,
however many chunks there are, and recomputation skips the forward, because nothing needs its
result.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.loss import matmul
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import MLP


class ChunkedMLP(MLP):
    """The MLP with the same weights under the same names, `chunk_tokens` tokens at a time.

    Its linear layers may be PEFT's, with one adapter each and no dropout. Then the weights must be
    frozen.
    compile_backend: the backend of torch.compile for the computations between the matmuls; "" does
    not compile them.
    """

    def __init__(self, config: DecoderConfig, chunk_tokens: int, compile_backend: str = "") -> None:
        super().__init__(config)
        self.chunk_tokens = chunk_tokens
        self.compile_backend = compile_backend

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] -> [B, S, hidden_size]; weights, adapters and x of one dtype."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        adapters: list[Tensor] = []
        scales: list[float] = []
        for layer in layers:
            outputs, inputs = layer.weight.shape
            # A layer without adapter has A and B of rank 0.
            a, b, scale = layer.weight.new_empty(0, inputs), layer.weight.new_empty(outputs, 0), 0.0
            if hasattr(layer, "lora_A"):
                (name,) = layer.lora_A.keys()
                a, b, scale = (
                    layer.lora_A[name].weight,
                    layer.lora_B[name].weight,
                    layer.scaling[name],
                )
            adapters += [a, b]
            scales.append(float(scale))
        return torch.ops.titan_sparse.chunked_mlp(
            x,
            [layer.weight for layer in layers],
            adapters,
            scales,
            self.chunk_tokens,
            self.compile_backend,
        )


class _Linear(NamedTuple):
    """rows -> rows W^T + scale (rows A^T) B^T. weight [out, in], a [rank, in], b [out, rank]."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float

    def forward(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out]."""
        out = torch.mm(rows, self.weight.T, out=out)
        if self.scale:
            # The adapter's part.
            out.addmm_(F.linear(rows, self.a), self.b.T, alpha=self.scale)
        return out

    def add_input_gradient(self, d_rows: Tensor, d_out: Tensor, beta: float = 1.0) -> None:
        """d_rows [N, in] = beta * d_rows + the gradient of the input. d_out [N, out]."""
        d_rows.addmm_(d_out, self.weight, beta=beta)
        if self.scale:
            # The adapter's part.
            d_rows.addmm_(d_out @ self.b, self.a, alpha=self.scale)

    def add_gradients(self, totals: list[Tensor], rows: Tensor, d_out: Tensor) -> None:
        """totals, [d_weight] or [d_a, d_b], += the gradients, rounded only to fp32, so that the
        error does not grow with the number of chunks."""
        if len(totals) == 1:
            matmul(d_out.T, rows, totals[0], beta=1)
        elif self.scale:
            # [N, rank] each
            d_inner = (d_out @ self.b) * self.scale
            inner = F.linear(rows, self.a) * self.scale
            matmul(d_inner.T, rows, totals[0], beta=1)
            matmul(d_out.T, inner, totals[1], beta=1)


def _linears(weights: list[Tensor], adapters: list[Tensor], scales: list[float]) -> list[_Linear]:
    return [
        _Linear(*layer)
        for layer in zip(weights, adapters[::2], adapters[1::2], scales, strict=True)
    ]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32 (fp64 for fp64), returned in gate's dtype."""
    wide = accumulation_dtype(gate.dtype)
    hidden = F.silu(gate.to(wide)) * up.to(wide)
    return hidden.to(gate.dtype)


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute swiglu(gate, up) again, then the gradients of gate and up."""
    dtype = gate.dtype
    wide = accumulation_dtype(dtype)
    gate = gate.to(wide)
    up = up.to(wide)
    d_hidden = d_hidden.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return (silu * up).to(dtype), d_gate.to(dtype), (d_hidden * silu).to(dtype)


@functools.cache
def _compiled(function: Callable, backend: str) -> Callable:
    if not backend:
        return function
    # dynamic=False: there are at most two shapes, that of a full chunk and that of the last one.
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


@torch.library.custom_op("titan_sparse::chunked_mlp", mutates_args=())
def _forward(
    x: Tensor,
    weights: list[Tensor],
    adapters: list[Tensor],
    scales: list[float],
    chunk_tokens: int,
    compile_backend: str,
) -> Tensor:
    gate, up, down = _linears(weights, adapters, scales)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # [B * S, hidden_size] each
    rows = x.reshape(-1, x.shape[-1])
    out_rows = out.view(-1, x.shape[-1])
    # A custom op runs without gradients anyway, but compiled code checks the grad mode.
    with torch.no_grad():
        for start in range(0, len(rows), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            # [chunk_tokens, intermediate_size]. Unnamed inputs are freed at once.
            hidden = _compiled(swiglu, compile_backend)(
                gate.forward(rows[chunk]), up.forward(rows[chunk])
            )
            down.forward(hidden, out=out_rows[chunk])
    return out


@_forward.register_fake
def _(x, weights, adapters, scales, chunk_tokens, compile_backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("titan_sparse::chunked_mlp_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    adapters: list[Tensor],
    scales: list[float],
    chunk_tokens: int,
    compile_backend: str,
    trains_weights: bool,
) -> list[Tensor]:
    """The gradients of x and then of the weights or, if these are frozen, of the adapters."""
    gate, up, down = _linears(weights, adapters, scales)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # [B * S, hidden_size] each
    rows = x.reshape(-1, x.shape[-1])
    d_rows = dx.view(-1, x.shape[-1])
    d_out_rows = d_out.reshape(-1, x.shape[-1])
    trained = weights if trains_weights else adapters
    # Sums over all chunks are in fp32, so that adding a chunk does not round.
    wide = accumulation_dtype(x.dtype)
    totals = [torch.zeros_like(parameter, dtype=wide) for parameter in trained]
    of_layer = len(totals) // 3
    of_gate, of_up, of_down = (totals[i * of_layer : (i + 1) * of_layer] for i in range(3))
    with torch.no_grad():
        for start in range(0, len(rows), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            # [chunk_tokens, intermediate_size] each
            d_hidden = d_out_rows.new_empty(len(rows[chunk]), down.weight.shape[1])
            down.add_input_gradient(d_hidden, d_out_rows[chunk], beta=0)
            hidden, d_gate, d_up = _compiled(swiglu_backward, compile_backend)(
                gate.forward(rows[chunk]), up.forward(rows[chunk]), d_hidden
            )
            del d_hidden
            down.add_gradients(of_down, hidden, d_out_rows[chunk])
            gate.add_gradients(of_gate, rows[chunk], d_gate)
            up.add_gradients(of_up, rows[chunk], d_up)
            gate.add_input_gradient(d_rows[chunk], d_gate, beta=0)
            up.add_input_gradient(d_rows[chunk], d_up)
    return [dx, *(total.to(like.dtype) for total, like in zip(totals, trained))]


@_backward.register_fake
def _(d_out, x, weights, adapters, scales, chunk_tokens, compile_backend, trains_weights):
    trained = weights if trains_weights else adapters
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, *trained)
    ]


def _save(ctx, inputs, output) -> None:
    x, weights, adapters, *ctx.settings = inputs
    ctx.save_for_backward(x, *weights, *adapters)


def _differentiate(ctx, d_out: Tensor):
    x, *others = ctx.saved_tensors
    weights, adapters = others[:3], others[3:]
    trains_weights = any(ctx.needs_input_grad[1])
    dx, *gradients = torch.ops.titan_sparse.chunked_mlp_backward(
        d_out, x, weights, adapters, *ctx.settings, trains_weights
    )
    d_weights = gradients if trains_weights else [None] * len(weights)
    d_adapters = [None] * len(adapters) if trains_weights else gradients
    return dx, d_weights, d_adapters, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
