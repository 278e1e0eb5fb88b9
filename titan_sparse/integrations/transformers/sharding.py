"""A batch of a Hugging Face collator, cut into the tokens of this rank.

Labels are shifted and the mask is made in the whole sequence. Only then does a
rank keep its blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import find_packed_sequence_indices

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.attention.context_parallel.layouts import block_multiple
from titan_sparse.attention.masks import MaskRanges
from titan_sparse.attention.patterns import Dense
from titan_sparse.integrations.transformers.masks import AttentionMask, MaskRule, ranges_of_tokens
from titan_sparse.loss import IGNORE_INDEX

PER_TOKEN = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
"""Entries of a batch with a row for each sequence and a column for each token."""

FOR_OTHER_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""How packing collators describe documents in addition to position_ids. We do not need it."""


class ShardMask(AttentionMask):
    """The mask of whole sequences, of whose tokens this rank has some."""

    def __init__(self, ranges: MaskRanges, real_tokens: Tensor):
        """real_tokens: how many of this rank's tokens are no padding, int64 scalar."""
        super().__init__(ranges)
        self.real_tokens = real_tokens

    def sum(self) -> Tensor:
        """The tokens of this rank that are no padding. TRL counts them so, and sums over ranks."""
        return self.real_tokens


def shifted_labels(batch: Mapping[str, Any]) -> Tensor:
    """The label that each token of a whole batch is to predict, int64 [B, S]: that of its
    successor.

    Raises ValueError for a batch without labels.
    """
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]
    if batch.get("labels") is None:
        raise ValueError(
            "context parallelism computes losses only, and the batch has no labels; "
            "write a collator that adds labels"
        )
    return pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)


def shard_batch(batch: Mapping[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """This rank's tokens of a batch, for a model whose attention is ours.

    batch: the whole one, the same on all ranks of `cp`, with input_ids and labels (or shift_labels)
    [B, S]. attention_mask [B, S] is 0 on padding. Documents begin where position_ids return to 0,
    and without attention_mask also where they jump. S is padded to what the layout needs.

    attention_mask of the result holds the mask of the whole sequences. `labels` are all -100, so
    that a model that does not know shift_labels has no loss rather than a wrong one. Not
    collective. Raises ValueError for what cannot be cut.
    """
    _check(batch)
    input_ids = batch["input_ids"]
    length = input_ids.shape[1]
    multiple = block_multiple(cp.layout, cp.size) * cp.block_size
    padding = -length % multiple
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=input_ids.device)[None]
    positions = positions.expand_as(input_ids)
    is_real = batch.get("attention_mask")
    documents = None
    if is_real is None:
        # Without a mask, transformers begins a document at every jump of positions.
        documents = find_packed_sequence_indices(pad(positions, (0, padding)))
        is_real = torch.ones_like(input_ids)
    is_real = pad(is_real != 0, (0, padding))
    positions_padded = pad(positions, (0, padding))
    # Only the shape and the device of queries are looked at.
    queries = positions_padded[:, None, :, None]
    rule = MaskRule(documents=documents)
    ranges = cp.balance(ranges_of_tokens(positions_padded, is_real, rule, queries, Dense()))

    def own(whole: Tensor, filler: int) -> Tensor:
        return cp.shard(pad(whole, (0, padding), value=filler), 1, ranges.table)

    shift_labels = own(shifted_labels(batch), IGNORE_INDEX)
    known = (*PER_TOKEN, *FOR_OTHER_KERNELS)
    others = {key: value for key, value in batch.items() if key not in known}
    return others | {
        "input_ids": own(input_ids, 0),
        "position_ids": own(positions, 0),
        "attention_mask": ShardMask(ranges, cp.shard(is_real, 1, ranges.table).sum()),
        "shift_labels": shift_labels,
        "labels": torch.full_like(shift_labels, IGNORE_INDEX),
    }


def _check(batch: Mapping[str, Any]) -> None:
    """Raises ValueError for entries that are not one number a token."""
    if batch.get("input_ids") is None:
        raise ValueError(
            "context parallelism cuts input_ids, and the batch has none; "
            "write input_ids in place of inputs_embeds"
        )
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor | None):
        raise ValueError(
            f"context parallelism cuts an attention_mask [B, S] of 0 and 1, not {type(mask).__name__}; "
            "leave it out, and write position_ids that are 0 where a document begins"
        )
    shape = batch["input_ids"].shape
    for key, value in batch.items():
        if key in FOR_OTHER_KERNELS or not isinstance(value, Tensor) or value.ndim == 0:
            continue
        is_of_one_row = key == "position_ids" and value.shape == (1, shape[1])
        if key not in PER_TOKEN or (value.shape != shape and not is_of_one_row):
            raise ValueError(
                f"context parallelism does not know how to cut {key} {list(value.shape)} beside "
                f"input_ids {list(shape)}; drop it in the collator"
            )
