"""Cross-entropy of rows of logits, and its gradient in the logits' own memory.

Two passes over a row, in tiles of the vocabulary: first the maximum and the sum of exponentials
(online softmax, Milakov and Gimelshein, arXiv 1805.02867), then the gradient. Nothing of the size
of the logits is allocated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_sparse.kernels.dtypes import accumulation_dtype

IGNORE_INDEX = -100

_TILE = 4096
"""Columns (tokens of the vocabulary) that a program holds at a time."""


def cross_entropy_naive(
    logits: Tensor,
    labels: Tensor,
    scales: Tensor | None,
    z_loss: float,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """The plain-torch twin of cross_entropy(), on any device, for fp64 logits too.

    It leaves the logits as they are.
    """
    # [C, V]
    wide = logits.to(accumulation_dtype(logits.dtype))
    # [C] each
    rows = torch.arange(len(labels), device=labels.device)
    ignored = labels == IGNORE_INDEX
    targets = labels.masked_fill(ignored, 0)

    log_probabilities = wide.log_softmax(-1)
    lse = wide.logsumexp(-1)
    losses = z_loss * lse.square() - log_probabilities[rows, targets]
    losses.masked_fill_(ignored, 0.0)
    if gradient_dtype is None:
        return losses, None

    # d(lse) is the softmax; the z-loss adds 2 * z_loss * lse of it.
    d_logits = log_probabilities.exp_().mul_((1.0 + 2.0 * z_loss * lse)[:, None])
    d_logits[rows, targets] -= 1.0
    if scales is not None:
        d_logits *= scales[:, None]
    d_logits.masked_fill_(ignored[:, None], 0.0)
    return losses, d_logits.to(gradient_dtype)


@triton.jit
def _cross_entropy_kernel(
    logits, labels, scales, losses, d_logits, logits_stride, d_logits_stride, vocab, z_loss,
    IGNORED: tl.constexpr, HAS_SCALES: tl.constexpr, WANTS_GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    ignored = label == IGNORED
    target = tl.where(ignored, 0, label).to(tl.int32)
    limit = tl.where(ignored, 0, vocab)  # an ignored row is not read
    logits += row * logits_stride
    tile = tl.arange(0, TILE)

    # First pass: maximum and sum of exponentials. The maximum starts finite, since -inf - -inf is
    # nan.
    top = -3.0e38
    total = 0.0
    for start in range(0, limit, TILE):
        column = start + tile
        x = tl.load(logits + column, mask=column < limit, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    log_total = tl.log(tl.where(ignored, 1.0, total))
    lse = tl.where(ignored, 0.0, top + log_total)
    # Differences with the maximum come first, so that large logits lose no digits.
    loss = top - tl.load(logits + target).to(tl.float32) + log_total + z_loss * lse * lse
    tl.store(losses + row, tl.where(ignored, 0.0, loss))

    if WANTS_GRADIENT:
        d_logits += row * d_logits_stride
        scale = 1.0
        if HAS_SCALES:
            scale = tl.load(scales + row)
        softmax_scale = scale * (1.0 + 2.0 * z_loss * lse)
        for start in range(0, vocab, TILE):
            column = start + tile
            x = tl.load(logits + column, mask=column < limit, other=float("-inf")).to(tl.float32)
            softmax = tl.exp(x - top - log_total)
            d = softmax * softmax_scale - tl.where(column == target, scale, 0.0)
            d = tl.where(ignored, 0.0, d).to(d_logits.dtype.element_ty)
            # A narrower gradient lies at the front of its row. Other threads may still have to read
            # what is overwritten here, as part of this tile or of the one before.
            tl.debug_barrier()
            tl.store(d_logits + column, d, mask=column < vocab)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    scales: Tensor | None,
    z_loss: float,
    gradient_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Losses [C] = lse - logits[label] + z_loss * lse^2, and the gradient of their sum weighted by
    `scales`.

    logits: [C, V], fp32 (or bf16, fp16), contiguous rows with any stride between them.
    labels: int64 [C], in [0, V) or -100, which gives loss 0 and gradient 0.
    scales: fp32 [C], or None for ones. They do not scale the losses.
    Losses are fp32. The gradient [C, V] overwrites the logits: in gradient_dtype, which is no wider
    than theirs, it takes the front of each row's memory. With gradient_dtype None there is no
    gradient, and the logits stay.
    """
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    d_logits = None if gradient_dtype is None else logits.view(gradient_dtype)[:, :vocab]
    if rows == 0:
        return losses, d_logits
    # Stand-ins for scales and a gradient that are not there are not touched.
    gradient = logits if d_logits is None else d_logits
    _cross_entropy_kernel[(rows,)](
        logits, labels, losses if scales is None else scales, losses, gradient,
        logits.stride(0), gradient.stride(0), vocab, z_loss,
        IGNORED=IGNORE_INDEX, HAS_SCALES=scales is not None, WANTS_GRADIENT=d_logits is not None,
        TILE=_TILE, num_warps=8,
    )  # fmt: skip
    return losses, d_logits
