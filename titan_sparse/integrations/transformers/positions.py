"""From position_ids and a 2D attention_mask to the ranges of keys that queries see."""

import torch
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from titan_sparse.attention.masks import MaskRanges, Slices
from titan_sparse.attention.masks.base import intersect
from titan_sparse.integrations.transformers.mask_rules import MaskRule
from titan_sparse.integrations.transformers.settings import ON_ONE_RANK, AttentionSettings


def ranges_of_tokens(
    position_ids: Tensor | None,
    padding: Tensor | None,
    rule: MaskRule,
    q: Tensor,
    settings: AttentionSettings,
) -> MaskRanges:
    """The mask of the whole sequence of which q [B, Hq, S_local, D] is this rank's share.

    position_ids: int [1 or B, S_local]. padding: bool [B, S_local], False on padding, or None.
    A document begins where positions return to 0 (padding aside), and where transformers found one.
    Under context parallelism transformers sees the positions of one rank only, so we search the
    whole sequence as it does: without a padding mask, a document begins at every jump.
    The host waits for the device once; collective and once more under context parallelism.
    """
    documents = rule.documents
    if position_ids is not None:
        _check_positions(position_ids, q)
    if settings.ranks > 1:
        position_ids, padding = _whole_sequence(position_ids, padding, settings)
        documents = None if padding is not None else find_packed_sequence_indices(position_ids)
    if padding is None:
        real = torch.ones(1, q.shape[2] * settings.ranks, dtype=torch.bool, device=q.device)
    else:
        real = padding.to(q.device)
    # [1 or B, S]
    begins = _beginnings(position_ids, documents, real)
    real = real.expand_as(begins)
    is_plain, has_hole = _facts(begins, real)
    if is_plain:
        # One row holds for all sequences.
        begins = begins[:1]
        real = real[:1]
    ranges = _ranges(begins, real, rule, is_plain)
    if not has_hole:
        return ranges
    if not (rule.is_local or settings.pattern.takes_slices):
        raise ValueError(
            f"attention_mask has padding between tokens, which {settings.pattern.name} does not "
            "compute; move the padding to one side, or write register(AttentionSettings())"
        )
    return intersect(ranges, _real_keys(real))


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
    """Positions and padding of all ranks' tokens, in global order.

    Raises ValueError, on all ranks, if each seems to hold a sequence of its own.
    """
    if position_ids is None:
        raise ValueError(
            "this model does not hand position_ids to attention, which context parallelism needs; "
            f"write attention_mask=AttentionMask(mask) in training. {ON_ONE_RANK}"
        )
    of_ranks = settings.cp.all_gather(position_ids.contiguous())
    if bool((of_ranks == of_ranks[0]).all()):
        raise ValueError(
            "all ranks have the same position_ids, as if each held a whole sequence; write those "
            f"of this rank's tokens (shard_batch() cuts a batch). {ON_ONE_RANK}"
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


def _beginnings(position_ids: Tensor | None, documents: Tensor | None, real: Tensor) -> Tensor:
    """bool [1 or B, S]: the first token of each document. Padding never is.

    documents: int [B, S], as in MaskRule. real: bool [1 or B, S].
    """
    begins = real.cumsum(1) == 1
    if documents is not None:
        others = documents[:, 1:] != documents[:, :-1]
        begins = begins | torch.nn.functional.pad(others, (1, 0))
    elif position_ids is not None:
        # Positions that are 0 throughout do not separate anything.
        counts = (position_ids * real).amax(1, keepdim=True) > 0
        begins = begins | ((position_ids == 0) & counts)
    return begins & real


def _facts(begins: Tensor, real: Tensor) -> list[bool]:
    """Two facts, for one wait: whether each sequence is one document without padding; whether a
    document has padding between its tokens.

    begins, real: bool [B, S].
    """
    is_plain = real.all() & ~begins[:, 1:].any()
    resumes = real[:, 1:] & ~real[:, :-1] & ~begins[:, 1:]
    return torch.stack([is_plain, resumes.any()]).tolist()


def _real_keys(real: Tensor) -> MaskRanges:
    """The mask whose queries all see every key that is not padding. real: bool [B, S]."""
    seq_len = real.shape[1]
    masks = []
    for row in real.cpu().int():
        # [S + 1]: 1 where a run of real tokens begins, -1 behind its last token
        edges = torch.nn.functional.pad(row, (1, 1)).diff()
        runs = torch.stack([(edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]], dim=1)
        masks.append(Slices([(0, seq_len)] * len(runs), runs, ["full"] * len(runs)))
    return Slices.batch(masks).rows(seq_len, real.device)


def _latest(marks: Tensor) -> Tensor:
    """int64 [B, S]: the latest marked token up to each token, 0 where there is none."""
    position = torch.arange(marks.shape[1], device=marks.device)
    return torch.where(marks, position, 0).cummax(1).values


def _ranges(begins: Tensor, real: Tensor, rule: MaskRule, is_plain: bool) -> MaskRanges:
    """The mask of tokens of which some begin documents and some are padding: bool [Bm, S].

    Keys of padding between the tokens of a document are not hidden.
    """
    position = torch.arange(begins.shape[1], dtype=torch.int32, device=begins.device)
    document_start = _latest(begins).int()
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
