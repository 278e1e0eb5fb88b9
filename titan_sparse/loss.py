"""LM head fused with the cross-entropy: the full logits never exist, forward or backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that count in the loss (those other than -100); any shape in, int64 scalar out."""
    return (labels != IGNORE_INDEX).sum()


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Sum of cross-entropies (natural log) of softmax(hidden @ weight.T); scalar fp32, or fp64 for fp64 hidden.

    hidden [B, S, D] and weight [V, D] of one dtype, labels int64 [B, S], -100 ignored. `chunk_tokens` rows of logits
    live at a time. Gradients are computed in the same pass as the loss, d_weight accumulated over chunks in the
    loss's dtype; backward only scales them. Raises ValueError for shapes that do not fit or chunk_tokens < 1.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} less D.")
    if chunk_tokens < 1:
        raise ValueError(f"training.loss_chunk_tokens = {chunk_tokens} is not positive; write for example 2048.")
    if not torch.is_grad_enabled():
        # needs_input_grad does not look at the grad mode, so that without this the gradients would be computed.
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtype = _accumulation_dtype(hidden)
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        d_rows = torch.empty_like(rows) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        for start in range(0, len(rows), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            chunk_loss, d_logits = _loss_and_d_logits(rows[chunk], weight, targets[chunk], wants_hidden or wants_weight)
            loss += chunk_loss
            if d_rows is not None:
                d_rows[chunk] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ rows[chunk]
        ctx.hidden_shape, ctx.weight_dtype = hidden.shape, weight.dtype
        ctx.save_for_backward(d_rows, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_rows, d_weight = ctx.saved_tensors
        d_hidden = None
        if d_rows is not None:
            d_hidden = _scale(d_rows, d_loss).to(d_rows.dtype).view(ctx.hidden_shape)
        if d_weight is not None:
            d_weight = _scale(d_weight, d_loss).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None


def _accumulation_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _loss_and_d_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """hidden [C, D], labels [C] -> (loss sum, d_logits [C, V] in hidden's dtype, None when not wanted)."""
    log_probabilities = F.log_softmax(F.linear(hidden, weight), dim=-1, dtype=_accumulation_dtype(hidden))
    ignored = labels == IGNORE_INDEX
    targets = labels.masked_fill(ignored, 0)
    rows = torch.arange(len(labels), device=labels.device)
    loss = -log_probabilities[rows, targets].masked_fill(ignored, 0.0).sum()
    if not wants_gradient:
        return loss, None
    d_logits = log_probabilities.exp_()  # in place: this is the largest tensor of the step
    d_logits[rows, targets] -= 1.0
    return loss, d_logits.masked_fill_(ignored[:, None], 0.0).to(hidden.dtype)


def _scale(gradient: Tensor, d_loss: Tensor) -> Tensor:
    """gradient * d_loss in d_loss's precision: a product in bf16 would round the scalar, and so every gradient."""
    return gradient.to(d_loss.dtype) * d_loss
