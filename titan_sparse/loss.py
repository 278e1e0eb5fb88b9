"""LM head fused with the cross-entropy: the full logits never exist, forward or backward (docs/loss.md)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_sparse.kernels.cross_entropy import IGNORE_INDEX, cross_entropy, cross_entropy_naive

_ROW_ALIGNMENT = 16
"""Logits between the starts of two rows are a multiple of this: aligned rows for any vocabulary."""


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that count in the loss (those other than -100); any shape in, int64 scalar out."""
    return (labels != IGNORE_INDEX).sum()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> Tensor:
    """Sum over labels != -100 of cross-entropy + z_loss * lse^2, natural log, of the logits hidden @ weight.T; scalar.

    hidden [B, S, D] and weight [V, D] of one dtype (bf16, fp32, fp64), labels int64 [B, S]. Logits are fp32 (fp64 for
    fp64), and so is the loss. `chunk_tokens` rows of logits live at a time. Gradients are computed in the same pass
    as the loss (as in Liger Kernel, arXiv 2410.10989), d_weight summed in fp32; backward only scales them.
    z-loss: PaLM, arXiv 2204.02311, section 5. Raises ValueError for shapes and dtypes that do not fit or
    chunk_tokens < 1, RuntimeError (on CUDA: a device assertion) for a label out of range.
    """
    _check(hidden, weight, labels, chunk_tokens)
    if not torch.is_grad_enabled():
        # needs_input_grad does not look at the grad mode, so that without this the gradients would be computed.
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, z_loss)


def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> Tensor:
    """The terms of linear_cross_entropy(), [B, S], 0 where the label is -100: for weighted losses and evaluation.

    What they will be weighted with is known in backward only, so that it computes the logits again: four matmuls of
    the head's size in all where linear_cross_entropy() takes three.
    """
    _check(hidden, weight, labels, chunk_tokens)
    return _TokenCrossEntropy.apply(hidden, weight, labels, chunk_tokens, z_loss)


@torch.no_grad()
def answer_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """For each of the N labels != -100, in order: cross-entropy [N], as token_cross_entropy() has it, and the token with
    the largest logit, int64 [N]. For evaluation, where few labels count: logits of the others are not computed."""
    _check(hidden, weight, labels, chunk_tokens)
    rows, targets = hidden[labels != IGNORE_INDEX], labels[labels != IGNORE_INDEX]
    losses = token_cross_entropy(rows, weight, targets, chunk_tokens, z_loss)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    largest = [
        _matmul(part, weight.T, part.new_empty(len(part), len(weight), dtype=dtype)).argmax(-1)
        for part in rows.split(chunk_tokens)
    ]
    return losses, torch.cat(largest)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} less D."
        )
    if chunk_tokens < 1:
        raise ValueError(
            f"training.loss_chunk_tokens = {chunk_tokens} is not positive; write for example 4096."
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ):
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}; both must be bfloat16, float32 or float64."
        )
    in_range = ((labels >= 0) & (labels < len(weight))) | (labels == IGNORE_INDEX)
    torch._assert_async(in_range.all(), f"labels must be {IGNORE_INDEX} or in [0, {len(weight)})")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float
    ) -> Tensor:
        wants = ctx.needs_input_grad[:2]
        losses, d_hidden, d_weight = _by_chunks(
            hidden, weight, labels, None, chunk_tokens, z_loss, wants
        )
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(d_hidden, d_weight)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = None if d_hidden is None else _scaled(d_hidden, d_loss, d_hidden.dtype)
        d_weight = None if d_weight is None else _scaled(d_weight, d_loss, ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk_tokens, ctx.z_loss = chunk_tokens, z_loss
        return _by_chunks(hidden, weight, labels, None, chunk_tokens, z_loss, (False, False))[
            0
        ].view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        scales, wants = d_losses.contiguous().flatten(), ctx.needs_input_grad[:2]
        _, d_hidden, d_weight = _by_chunks(
            hidden, weight, labels, scales, ctx.chunk_tokens, ctx.z_loss, wants
        )
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scales: Tensor | None,
    chunk_tokens: int,
    z_loss: float,
    wants: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [B * S], and where wanted d_hidden, and d_weight in the logits' dtype, of their sum weighted by scales."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows, targets, vocab = hidden.flatten(0, -2), labels.flatten(), len(weight)
    losses = torch.empty(len(rows), dtype=dtype, device=hidden.device)
    d_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if wants[0] else None
    d_weight = torch.zeros_like(weight, dtype=dtype) if wants[1] else None
    width = -(-vocab // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    # One buffer for all chunks, empty as long as nothing is written: this is the largest tensor of the step.
    buffer = torch.empty(min(chunk_tokens, len(rows)), width, dtype=dtype, device=hidden.device)
    for start in range(0, len(rows), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits = _matmul(rows[chunk], weight.T, buffer[: len(rows[chunk]), :vocab])
        losses[chunk], d_logits = _cross_entropy(
            logits,
            targets[chunk],
            None if scales is None else scales[chunk],
            z_loss,
            hidden.dtype if any(wants) else None,
        )
        if d_rows is not None:
            d_rows[chunk] = _matmul(d_logits, weight, torch.empty_like(rows[chunk], dtype=dtype))
        if d_weight is not None:
            _matmul(d_logits.T, rows[chunk], d_weight, beta=1)
    return losses, None if d_rows is None else d_rows.view(hidden.shape), d_weight


def _cross_entropy(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
    has_kernel = logits.is_cuda and logits.dtype == torch.float32
    return cross_entropy(logits, *args) if has_kernel else cross_entropy_naive(logits, *args)


def _matmul(a: Tensor, b: Tensor, out: Tensor, beta: int = 0) -> Tensor:
    """out = beta * out + a @ b, summed and stored in out's dtype; a and b may be narrower."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b, beta=beta)
    if a.is_cuda:
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    return out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)


def _scaled(gradient: Tensor, d_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * d_loss rounded once to dtype. With a dim, d_loss is not rounded to bf16 before the product."""
    return torch.mul(gradient, d_loss.view(1), out=torch.empty_like(gradient, dtype=dtype))
