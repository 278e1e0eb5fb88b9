"""LM head fused with the cross-entropy: the full logits never exist, forward or backward.

docs/training.md explains it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_sparse.kernels.cross_entropy import IGNORE_INDEX, cross_entropy, cross_entropy_naive
from titan_sparse.kernels.dtypes import accumulation_dtype

_ROW_ALIGNMENT = 16
"""Logits between the starts of two rows are a multiple of this: aligned rows for any vocabulary."""


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that count in the loss (those other than -100); any shape in, int64 scalar
    out."""
    return (labels != IGNORE_INDEX).sum()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> Tensor:
    """Cross-entropy + z_loss * lse^2 of the logits hidden @ weight.T, natural log, summed over
    labels != -100; a scalar.

    hidden [B, S, D] and weight [V, D] have one dtype (bf16, fp32, fp64), labels are int64 [B, S].
    Logits are fp32 (fp64 for fp64), and so is the loss. `chunk_tokens` rows of logits live at a
    time. Gradients are computed in the same pass as the loss (as in Liger Kernel,
    arXiv 2410.10989), with d_weight summed in fp32; the backward only scales them. The z-loss is
    PaLM's, arXiv 2204.02311, section 5.

    Raises ValueError for shapes and dtypes that do not fit or chunk_tokens < 1, and RuntimeError
    (on CUDA: a device assertion) for a label out of range.
    """
    _check(hidden, weight, labels, chunk_tokens)
    if not torch.is_grad_enabled():
        # needs_input_grad ignores the grad mode: without this, the gradients would be computed.
        hidden = hidden.detach()
        weight = weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, z_loss)


def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> Tensor:
    """The terms of linear_cross_entropy(), [B, S], 0 where the label is -100: for weighted losses
    and evaluation.

    Their weights are known only in the backward, which therefore computes the logits again. That
    makes four matmuls of the head's size in all, where linear_cross_entropy() takes three.
    """
    _check(hidden, weight, labels, chunk_tokens)
    return _TokenCrossEntropy.apply(hidden, weight, labels, chunk_tokens, z_loss)


@torch.no_grad()
def answer_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """For each of the N labels != -100, in order: its cross-entropy, and the most likely token.

    The cross-entropy [N] is that of token_cross_entropy(); the token with the largest logit is
    int64 [N]. For evaluation, where few labels count: logits of the others are not computed.
    """
    _check(hidden, weight, labels, chunk_tokens)
    valid = labels != IGNORE_INDEX
    # [N, D] and [N]
    rows = hidden[valid]
    targets = labels[valid]
    losses = token_cross_entropy(rows, weight, targets, chunk_tokens, z_loss)
    # [chunk_tokens, V] at a time, without a name, so that it is freed at once.
    predictions = [_logits(chunk, weight).argmax(-1) for chunk in rows.split(chunk_tokens)]
    return losses, torch.cat(predictions)


@torch.no_grad()
def answer_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float = 0.0
) -> Tensor:
    """The logits of the N labels != -100, in order: [N, V], fp32 (fp64 for fp64).

    For generation, where few labels count. Called as linear_cross_entropy() is.
    """
    _check(hidden, weight, labels, chunk_tokens)
    return _logits(hidden[labels != IGNORE_INDEX], weight)


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    """Logits [N, V] of rows [N, D], in fp32 (fp64 for fp64)."""
    dtype = accumulation_dtype(rows.dtype)
    return matmul(rows, weight.T, rows.new_empty(len(rows), len(weight), dtype=dtype))


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} "
            "less D."
        )
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; write hidden "
            "[B, S, D] and weight [V, D]"
        )
    if not hidden.device == weight.device == labels.device:
        raise ValueError(
            f"hidden, weight, and labels are on {hidden.device}, {weight.device}, and {labels.device}; "
            f'write .to("{hidden.device}")'
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels are {labels.dtype}; write labels.long()")
    if chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens (training.loss_chunk_tokens) = {chunk_tokens} is not positive; write for "
            "example 4096."
        )
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    if hidden.dtype != weight.dtype or hidden.dtype not in dtypes:
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}; both must be bfloat16, float32 or "
            "float64."
        )
    # Asynchronous, so that no GPU is waited for.
    in_range = ((labels >= 0) & (labels < len(weight))) | (labels == IGNORE_INDEX)
    torch._assert_async(in_range.all(), f"labels must be {IGNORE_INDEX} or in [0, {len(weight)})")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float
    ) -> Tensor:
        losses, d_hidden, d_weight = _loss_by_chunks(
            hidden, weight, labels, None, chunk_tokens, z_loss, ctx.needs_input_grad[:2]
        )
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(d_hidden, d_weight)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = _scaled(d_hidden, d_loss, d_hidden.dtype)
        if d_weight is not None:
            d_weight = _scaled(d_weight, d_loss, ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, z_loss: float
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk_tokens = chunk_tokens
        ctx.z_loss = z_loss
        losses, _, _ = _loss_by_chunks(
            hidden, weight, labels, None, chunk_tokens, z_loss, (False, False)
        )
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        scales = d_losses.contiguous().flatten()
        _, d_hidden, d_weight = _loss_by_chunks(
            hidden, weight, labels, scales, ctx.chunk_tokens, ctx.z_loss, ctx.needs_input_grad[:2]
        )
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None


def _loss_by_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scales: Tensor | None,
    chunk_tokens: int,
    z_loss: float,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [B * S], and the gradients of their sum weighted by `scales` [B * S] (None: ones).

    wanted: whether of hidden, and of weight. d_hidden has hidden's shape and dtype, d_weight the
    logits' dtype; None where not wanted.
    """
    logits_dtype = accumulation_dtype(hidden.dtype)
    # [B * S, D] and [B * S]
    rows = hidden.flatten(0, -2)
    targets = labels.flatten()
    vocab_size = len(weight)

    losses = torch.empty(len(rows), dtype=logits_dtype, device=hidden.device)
    d_rows = None
    d_weight = None
    if wanted[0]:
        d_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if wanted[1]:
        d_weight = torch.zeros_like(weight, dtype=logits_dtype)
    gradient_dtype = hidden.dtype if any(wanted) else None

    # The kernel where it runs, else its plain-torch twin.
    has_kernel = hidden.is_cuda and logits_dtype == torch.float32
    cross_entropy_of = cross_entropy if has_kernel else cross_entropy_naive
    # All chunks use one buffer for logits in turn. It is the largest tensor of the step.
    padded_vocab = -(-vocab_size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    buffer = torch.empty(
        min(chunk_tokens, len(rows)), padded_vocab, dtype=logits_dtype, device=hidden.device
    )
    for start in range(0, len(rows), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        # [chunk_tokens, D] @ [D, V] -> [chunk_tokens, V]
        logits = matmul(rows[chunk], weight.T, buffer[: len(rows[chunk]), :vocab_size])
        losses[chunk], d_logits = cross_entropy_of(
            logits,
            targets[chunk],
            None if scales is None else scales[chunk],
            z_loss,
            gradient_dtype,
        )
        if d_logits is None:
            continue
        if d_rows is not None:
            # Summed in the logits' dtype, rounded to hidden's once. The scratch has no name, so
            # that it is freed at once.
            d_rows[chunk] = matmul(
                d_logits, weight, torch.empty_like(rows[chunk], dtype=logits_dtype)
            )
        if d_weight is not None:
            matmul(d_logits.T, rows[chunk], d_weight, beta=1)
    d_hidden = None if d_rows is None else d_rows.view(hidden.shape)
    return losses, d_hidden, d_weight


def matmul(a: Tensor, b: Tensor, out: Tensor, beta: int = 0) -> Tensor:
    """out = beta * out + a @ b, summed and stored in out's dtype; a and b may be narrower."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b, beta=beta)
    if a.is_cuda:
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    return out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)


def _scaled(gradient: Tensor, d_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * d_loss, rounded once to dtype."""
    # As a vector of one element. A scalar d_loss would be rounded to bf16 before the product.
    factor = d_loss.view(1)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
