"""From position_ids and a 2D attention_mask to the ranges of keys that queries see."""

import torch
from torch import Tensor

from titan_sparse.attention.masks import MaskRanges
from titan_sparse.integrations.transformers.mask_rules import MaskRule
from titan_sparse.integrations.transformers.settings import AttentionSettings


def ranges_of_tokens(
    position_ids: Tensor | None,
    padding: Tensor | None,
    rule: MaskRule,
    q: Tensor,
    settings: AttentionSettings,
) -> MaskRanges:
    """The mask of the whole sequence of which q [B, Hq, S_local, D] is this rank's share.

    position_ids: int [1 or B, S_local]; a document begins where one does not follow on the one
    before. None: documents as in `rule`. padding: bool [B, S_local], False on padding, or None.
    The host waits for the device once. Collective under context parallelism.
    """
    if position_ids is not None:
        _check_positions(position_ids, q)
    if settings.ranks > 1:
        position_ids, padding = _whole_sequence(position_ids, padding, settings)
    seq_len = q.shape[2] * settings.ranks
    # [1 or B, S]
    begins = _beginnings(position_ids, rule.documents, seq_len, q.device)
    if padding is None:
        is_plain = not bool(begins[:, 1:].any())
        real = torch.ones_like(begins)
    else:
        begins, real = torch.broadcast_tensors(begins, padding.to(q.device))
        has_hole, is_packed = _holes_and_more(begins, real)
        if has_hole:
            raise ValueError(
                "attention_mask hides tokens in the middle of a sequence; write "
                "attention_mask=AttentionMask(mask) with a mask of titan_sparse.attention.masks"
            )
        is_plain = not is_packed
    if is_plain:
        # One row holds for all sequences.
        begins = begins[:1]
        real = torch.ones_like(begins)
    return _ranges(begins, real, rule, is_plain)


def _check_positions(position_ids: Tensor, q: Tensor) -> None:
    batch, _, seq_len, _ = q.shape
    if position_ids.ndim != 2 or position_ids.shape[1] != seq_len:
        raise ValueError(
            f"position_ids {list(position_ids.shape)} are not [batch, {seq_len}]; write positions "
            "of one dimension of text, or attention_mask=AttentionMask(mask)"
        )
    if position_ids.shape[0] not in (1, batch):
        raise ValueError(
            f"position_ids hold {position_ids.shape[0]} sequences, the batch {batch}; write as many"
        )


def _whole_sequence(
    position_ids: Tensor | None, padding: Tensor | None, settings: AttentionSettings
) -> tuple[Tensor, Tensor | None]:
    """Positions and padding of all ranks' tokens, in global order."""
    if position_ids is None:
        raise ValueError(
            "this model does not hand position_ids to attention, which context parallelism needs; "
            "write attention_mask=AttentionMask(mask)"
        )
    if settings.cp.depends_on_mask:
        raise ValueError(
            'layout "balanced" needs the mask before the tokens; write '
            "attention_mask=AttentionMask(cp.balance(mask.rows(seq_len)))"
        )
    position_ids = settings.cp.unshard(position_ids.contiguous(), dim=1)
    if padding is not None:
        # Collectives of bool are not everywhere.
        padding = settings.cp.unshard(padding.to(torch.uint8), dim=1).bool()
    return position_ids, padding


def _beginnings(
    position_ids: Tensor | None, documents: Tensor | None, seq_len: int, device: torch.device
) -> Tensor:
    """bool [1 or B, S]: whether a document begins at this token. The first token is one."""
    if position_ids is not None:
        follows = position_ids[:, 1:] == position_ids[:, :-1] + 1
        others = ~follows
    elif documents is not None:
        others = documents[:, 1:] != documents[:, :-1]
    else:
        others = torch.zeros(1, seq_len - 1, dtype=torch.bool, device=device)
    return torch.nn.functional.pad(others, (1, 0), value=True)


def _holes_and_more(begins: Tensor, real: Tensor) -> list[bool]:
    """Two facts, for one wait: whether a document has padding between its tokens; whether there are
    several documents or padding.

    begins, real: bool [B, S].
    """
    # Real tokens before each token, and before the beginning of its document.
    before = real.int().cumsum(1) - real.int()
    before_document = before.gather(1, _latest(begins))
    resumes = real.clone()
    resumes[:, 1:] &= ~real[:, :-1] & ~begins[:, 1:]
    holes = resumes & (before > before_document)
    is_packed = begins[:, 1:].any() | ~real.all()
    return torch.stack([holes.any(), is_packed]).tolist()


def _latest(marks: Tensor) -> Tensor:
    """int64 [B, S]: the latest marked token up to each token, 0 where there is none."""
    position = torch.arange(marks.shape[1], device=marks.device)
    return torch.where(marks, position, 0).cummax(1).values


def _ranges(begins: Tensor, real: Tensor, rule: MaskRule, is_plain: bool) -> MaskRanges:
    """The mask of tokens of which some begin documents and some are padding: bool [Bm, S]."""
    position = torch.arange(begins.shape[1], dtype=torch.int32, device=begins.device)
    # Behind padding on the left, the document begins with its first real token.
    first = begins.clone()
    first[:, 1:] |= ~real[:, :-1]
    document_start = _latest(first).int()
    start = document_start
    if rule.chunk is not None:
        start = position - (position - document_start) % rule.chunk
    if rule.window is not None:
        start = torch.maximum(start, position - rule.window + 1)
    # Padding at i sees nothing: i to i. So both vectors never decrease.
    start = torch.where(real, start, position)
    stop = position + real.int()
    sees_all = is_plain and rule.window is None and rule.chunk is None
    return MaskRanges(
        start=start,
        stop=stop,
        document_start=None if is_plain else torch.where(real, document_start, -1),
        plain=sees_all,
    )
