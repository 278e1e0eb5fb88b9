"""Dense attention of packed documents on one rank, by a kernel that knows documents.

Tables of blocks would cost such a kernel 10 % and more, and would have to be made in every layer.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_sparse.attention.call import Run
from titan_sparse.attention.masks.memo import once_per_mask
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import pattern_by_key


class Packing(NamedTuple):
    """Documents in the tokens of all sequences, one sequence after the other; a run of padding counts as one.

    offsets: int32 [n + 1], where each begins, and the number of tokens. longest: tokens of one. window: keys that a query
    sees, its own included; None: all before it. padding: bool [B, S], None without any.
    """

    offsets: Tensor
    longest: int
    window: int | None
    padding: Tensor | None


def packing(run: Run, q: Tensor) -> Packing | None:
    """Of a call on one rank, dense and causal inside documents, with a window or without; None for another one, or if no
    kernel serves it. The host waits for the mask, once a batch."""
    static = (
        run.cp.size == 1 and run.rows.slices is None and not pattern_by_key(run.pattern).dynamic
    )
    whole = run.first == 0 and run.last is None
    if not static or not whole or run.plain or not run.backend.serves_causal(q):
        return None
    return once_per_mask(run.rows, ("packing", len(q)), lambda: find_packing(run.rows, len(q)))


def find_packing(rows: MaskRanges, batch: int) -> Packing | None:
    """None if the mask is anything but causal documents with one window for all."""
    position = torch.arange(rows.start.shape[1], device=rows.start.device)
    start, stop = (x.expand(batch, -1) for x in (rows.start, rows.stop))
    padding = start >= stop
    begin = (
        torch.zeros_like(start)
        if rows.document_start is None
        else rows.document_start.expand(batch, -1)
    )
    reach = torch.where(padding, 0, position + 1 - start).amax()
    expected = torch.maximum(begin, position + 1 - reach)
    fits = (padding | ((stop == position + 1) & (start == expected))).all()
    cut = (~padding & (start > begin)).any()
    piece = torch.where(padding, -1, begin)
    first = torch.ones_like(padding)
    first[:, 1:] = piece[:, 1:] != piece[:, :-1]
    fits, cut, padded, reach = torch.stack([fits, cut, padding.any(), reach]).tolist()
    if not fits:
        return None
    offsets = torch.nn.functional.pad(
        first.flatten().nonzero().flatten(), (0, 1), value=first.numel()
    ).int()
    return Packing(
        offsets, int(offsets.diff().max()), reach if cut else None, padding if padded else None
    )


def forward(run: Run, packing: Packing, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, D] and lse [B, Hq, S]; 0 and -inf for padding."""
    out, lse = run.backend.forward_packed(q, k, v, run.scale, *packing[:3])
    if packing.padding is None:
        return out, lse
    padding = packing.padding[:, None]
    return out.masked_fill(padding[..., None], 0), lse.masked_fill(padding, -torch.inf)


def backward(
    run: Run,
    packing: Packing,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype; 0 for padding."""
    if packing.padding is not None:  # so that its rows have no share in anything: exp(score - inf)
        lse = lse.masked_fill(packing.padding[:, None], torch.inf)
    return run.backend.backward_packed(d_out, q, k, v, out, lse, run.scale, *packing[:3])
