"""Batches cut into the tokens of ranks: on integers, with pretended ranks."""

import pytest
import torch

pytest.importorskip("accelerate")

from tests.integrations.transformers.families import positions, pretended_ranks, tokens
from titan_sparse.attention.context_parallel.layouts import restore_blocks
from titan_sparse.integrations.transformers.context_parallel import check_same_batch, shard_batch

LENGTHS = [30, 7, 13]
"""50 tokens: over two ranks they are padded to 64 in blocks of 16, to 64 in a zigzag too."""


def whole(name: str, batch: dict, layout: str) -> torch.Tensor:
    """The ranks' shards of one entry, in global order."""
    shards = [shard_batch(batch, pretended_ranks(layout, rank)) for rank in (0, 1)]
    joined = torch.cat([shard[name] for shard in shards], dim=1)
    table = shards[0]["attention_mask"].mask.table
    if table is None:
        table = pretended_ranks(layout).block_table(joined.shape[1])
    return restore_blocks(joined, 1, table, 16)


@pytest.mark.parametrize("layout", ["striped", "zigzag", "contiguous", "balanced"])
def test_shards_are_those_of_the_whole_batch(layout):
    ids = tokens(1, 50)
    labels = ids.clone()
    labels[0, ::3] = -100
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions(*LENGTHS)}
    assert torch.equal(whole("input_ids", batch, layout)[:, :50], ids)
    assert torch.equal(whole("position_ids", batch, layout)[:, :50], positions(*LENGTHS))
    shifted = whole("shift_labels", batch, layout)
    assert shifted.shape == (1, 64)
    assert torch.equal(shifted[:, :49], labels[:, 1:]) and (shifted[:, 49:] == -100).all()
    # transformers would shift these once more.
    assert (whole("labels", batch, layout) == -100).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"input_ids": None}, "write input_ids in place of inputs_embeds"),
        ({"labels": None}, "write a collator that adds labels"),
        ({"labels": torch.zeros(1, 7)}, r"labels \[1, 7\] does not go with input_ids \[1, 50\]"),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "cut pixel_values .*; drop it"),
        ({"completion_mask": torch.ones(1, 50)}, "cut completion_mask .*; drop it"),
    ],
)
def test_what_cannot_be_cut_is_refused(changes, message):
    batch = {"input_ids": tokens(1, 50), "labels": tokens(1, 50)} | changes
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, pretended_ranks())


def test_other_batches_of_one_sequence_are_refused():
    cp = pretended_ranks()
    ids = tokens(1, 50)
    cp.all_gather = lambda facts: torch.stack([facts, facts])
    check_same_batch(ids, ids, cp)
    cp.all_gather = lambda facts: torch.stack([facts, facts + torch.tensor([0, 0, 1, 0])])
    with pytest.raises(ValueError, match="different batches"):
        check_same_batch(ids, ids, cp)
    # The same tokens in another order are another batch.
    found = []
    cp.all_gather = lambda facts: found.append(facts) or facts[None]
    check_same_batch(ids, ids, cp)
    check_same_batch(ids.flip(1), ids, cp)
    assert not torch.equal(*found)
