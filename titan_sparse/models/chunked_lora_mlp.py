"""The MLP over chunks of tokens, as in chunked_mlp.py, with frozen weights and LoRA adapters.

The backward computes the gradients of the input and of the adapters alone. Forward and backward are
a custom op each.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_sparse.models.chunked_mlp import (
    ChunkedMLP,
    add_product,
    chunks,
    compiled,
    swiglu,
    swiglu_backward,
)


class ChunkedLoraMLP(ChunkedMLP):
    """Some of its linear layers are PEFT's, with one adapter each and no dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] -> [B, S, hidden_size]; weights, adapters and x of one dtype."""
        linears = [_parts(layer) for layer in (self.gate_proj, self.up_proj, self.down_proj)]
        return torch.ops.titan_sparse.chunked_lora_mlp(
            x,
            [linear.weight for linear in linears],
            [adapter for linear in linears for adapter in (linear.a, linear.b)],
            [linear.scale for linear in linears],
            self.chunk_tokens,
            self.compile_backend,
        )


class _Linear(NamedTuple):
    """rows -> rows W^T + scale (rows A^T) B^T. weight [out, in], a [rank, in], b [out, rank].

    Rank 0 is a layer without adapter.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float

    def forward(self, rows: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return F.linear(rows, self.weight).addmm_(
            F.linear(rows, self.a), self.b.T, alpha=self.scale
        )

    def add_input_gradient(self, d_rows: Tensor, d_out: Tensor) -> None:
        """d_rows [N, in] += the gradient of the input. d_out [N, out]."""
        d_rows.addmm_(d_out, self.weight).addmm_(d_out @ self.b, self.a, alpha=self.scale)

    def add_gradients(self, d_a: Tensor, d_b: Tensor, rows: Tensor, d_out: Tensor) -> None:
        """d_a and d_b, of the shapes of a and b, += their gradients."""
        # [N, rank] each
        d_inner = (d_out @ self.b) * self.scale
        inner = F.linear(rows, self.a) * self.scale
        add_product(d_a, d_inner.T, rows)
        add_product(d_b, d_out.T, inner)


def _parts(layer: nn.Module) -> _Linear:
    """Of a linear layer, or of PEFT's in its place."""
    weight = layer.weight
    if not hasattr(layer, "lora_A"):
        return _Linear(
            weight, weight.new_empty(0, weight.shape[1]), weight.new_empty(len(weight), 0), 0.0
        )
    (name,) = layer.lora_A.keys()
    return _Linear(
        weight, layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name])
    )


def _linears(weights: list[Tensor], adapters: list[Tensor], scales: list[float]) -> list[_Linear]:
    """Gate, up and down."""
    return [
        _Linear(weight, adapters[2 * number], adapters[2 * number + 1], scales[number])
        for number, weight in enumerate(weights)
    ]


@torch.library.custom_op("titan_sparse::chunked_lora_mlp", mutates_args=())
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
    # A custom op runs without gradients anyway, but what is compiled looks at the grad mode.
    with torch.no_grad():
        for chunk in chunks(len(rows), chunk_tokens):
            # [chunk_tokens, intermediate_size]. What goes in has no name, so that it is freed at
            # once.
            hidden = compiled(swiglu, compile_backend)(
                gate.forward(rows[chunk]), up.forward(rows[chunk])
            )
            out_rows[chunk] = down.forward(hidden)
    return out


@_forward.register_fake
def _(x, weights, adapters, scales, chunk_tokens, compile_backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("titan_sparse::chunked_lora_mlp_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    x: Tensor,
    weights: list[Tensor],
    adapters: list[Tensor],
    scales: list[float],
    chunk_tokens: int,
    compile_backend: str,
) -> list[Tensor]:
    """The gradients of x, then of the adapters."""
    gate, up, down = _linears(weights, adapters, scales)
    dx = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    # [B * S, hidden_size] each
    rows = x.reshape(-1, x.shape[-1])
    d_rows = dx.view(-1, x.shape[-1])
    d_out_rows = d_out.reshape(-1, x.shape[-1])
    # Sums over all chunks: in fp32, so that each chunk rounds nothing.
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = [torch.zeros_like(adapter, dtype=wide) for adapter in adapters]
    with torch.no_grad():
        for chunk in chunks(len(rows), chunk_tokens):
            # [chunk_tokens, intermediate_size] each
            d_hidden = d_out_rows.new_zeros(len(rows[chunk]), down.weight.shape[1])
            down.add_input_gradient(d_hidden, d_out_rows[chunk])
            hidden, d_gate, d_up = compiled(swiglu_backward, compile_backend)(
                gate.forward(rows[chunk]), up.forward(rows[chunk]), d_hidden
            )
            del d_hidden
            gate.add_gradients(*sums[0:2], rows[chunk], d_gate)
            up.add_gradients(*sums[2:4], rows[chunk], d_up)
            down.add_gradients(*sums[4:6], hidden, d_out_rows[chunk])
            gate.add_input_gradient(d_rows[chunk], d_gate)
            up.add_input_gradient(d_rows[chunk], d_up)
    return [dx, *(total.to(adapter.dtype) for total, adapter in zip(sums, adapters))]


@_backward.register_fake
def _(d_out, x, weights, adapters, scales, chunk_tokens, compile_backend):
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, *adapters)
    ]


def _save(ctx, inputs, output) -> None:
    x, weights, adapters, ctx.scales, ctx.chunk_tokens, ctx.compile_backend = inputs
    ctx.save_for_backward(x, *weights, *adapters)


def _differentiate(ctx, d_out: Tensor):
    x, *others = ctx.saved_tensors
    weights, adapters = others[:3], others[3:]
    dx, *gradients = torch.ops.titan_sparse.chunked_lora_mlp_backward(
        d_out, x, weights, adapters, ctx.scales, ctx.chunk_tokens, ctx.compile_backend
    )
    return dx, [None] * 3, gradients, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
