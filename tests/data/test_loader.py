"""titan_sparse.data.loader: the global stream, resuming on any number of ranks, epochs, sharding."""

import json
import logging

import numpy as np
import pytest
import torch

from scripts.benchmarks.loader import NODE_TOKENS_PER_SECOND, tokens_per_second
from tests.data.helpers import (
    END,
    TEXTS,
    global_stream,
    make_loader,
    prepared,
    random_documents,
    train_tokenizer,
    write_texts,
)
from titan_sparse.config import Config, Data, Refusal
from titan_sparse.data.loader import Batch, PackedLoader, build_loader
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer

RAGGED = random_documents([5, 40, 1, 15, 16, 17, 3, 90])


@pytest.mark.parametrize(("dp_size", "batch_size"), [(2, 1), (3, 2)])
def test_the_global_stream_is_the_same_on_any_number_of_ranks(dp_size, batch_size):
    ranks = [
        make_loader(RAGGED, dp_rank=r, dp_size=dp_size, batch_size=batch_size)
        for r in range(dp_size)
    ]
    alone = make_loader(RAGGED)
    batches = 12
    assert global_stream(ranks, batches) == global_stream([alone], batches * dp_size * batch_size)
    assert all(rank.epoch == alone.epoch >= 1 for rank in ranks)
    assert all(rank.documents_seen == alone.documents_seen for rank in ranks)
    assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)


@pytest.mark.parametrize("consumed", [1, 13])
@pytest.mark.parametrize(("dp_size", "batch_size"), [(1, 1), (3, 2)])
def test_resume_equals_uninterrupted_also_on_other_ranks(consumed, dp_size, batch_size):
    saved = [make_loader(RAGGED, dp_rank=r, dp_size=2) for r in range(2)]
    start = global_stream(saved, consumed)
    state = json.loads(json.dumps(saved[0].state_dict()))
    ranks = [
        make_loader(RAGGED, dp_rank=r, dp_size=dp_size, batch_size=batch_size)
        for r in range(dp_size)
    ]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = global_stream(ranks, 6)
    assert start + resumed == global_stream([make_loader(RAGGED)], len(start) + len(resumed))
    assert state["sequence"] == 2 * consumed


def test_resume_on_other_ranks_is_logged(caplog):
    saved = make_loader(RAGGED, dp_size=2)
    global_stream([saved], 6)
    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        make_loader(RAGGED, dp_size=2).load_state_dict(saved.state_dict())
        assert not caplog.messages
        make_loader(RAGGED, dp_size=4).load_state_dict(saved.state_dict())
    message = "loader: saved with 2 data-parallel ranks x 1 sequences, goes on with 4 x 1 from global sequence 12"
    assert caplog.messages == [message]


@pytest.mark.parametrize(
    ("source", "option", "message"),
    [
        (RAGGED, {"seq_len": 32}, "training.seq_len was 16 and is 32"),
        (RAGGED, {"seed": 4}, "training.seed was 3 and is 4"),
        (RAGGED[1:], {}, "documents of data.source was 8 and is 7"),
        (RAGGED, {"shuffle": False}, "data.shuffle was 1 and is 0"),
        (RAGGED, {"min_document_length": 2}, "data.min_document_length was 0 and is 2"),
    ],
)
def test_resume_on_another_stream_is_refused(source, option, message):
    state = make_loader(RAGGED).state_dict()
    with pytest.raises(ValueError, match=message):
        make_loader(source, **option).load_state_dict(state)


def one_byte_documents(count: int, **options) -> PackedLoader:
    """Documents of one byte and its end: one document a sequence."""
    return make_loader([chr(65 + i) for i in range(count)], seq_len=2, **options)


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_hold_each_document_once_and_reshuffle(shuffle):
    orders = {}
    for seed in (3, 4):
        loader = one_byte_documents(20, shuffle=shuffle, seed=seed)
        taken = [int(next(loader).tokens[0, 0]) - 65 for _ in range(60)]
        orders[seed] = [taken[0:20], taken[20:40], taken[40:60]]
        assert all(sorted(order) == list(range(20)) for order in orders[seed])
        assert loader.epoch == 3 and loader.documents_seen == 60
    distinct = {tuple(order) for seed in orders for order in orders[seed]}
    assert len(distinct) == (6 if shuffle else 1)


def test_shard_is_applied_alike_and_lengths_stay_global():
    calls = []

    def shard(x: torch.Tensor, dim: int, table: torch.Tensor | None) -> torch.Tensor:
        calls.append((tuple(x.shape), dim, table))
        return x.unflatten(dim, (-1, 4))[:, 1::2].flatten(1)

    options = {"batch_size": 3, "padding_multiple": 8, "seq_len": 13}
    full = make_loader(RAGGED, **options)
    local = make_loader(RAGGED, **options)
    local.use_layout(shard)
    for _ in range(5):
        whole, part = next(full), next(local)
        for field in ("tokens", "labels", "positions"):
            expected = getattr(whole, field)[:, [4, 5, 6, 7, 12, 13, 14, 15]]
            assert getattr(part, field).dtype == torch.int64 and torch.equal(
                getattr(part, field), expected
            )
        assert part.lengths == whole.lengths and all(sum(lengths) == 13 for lengths in part.lengths)
    assert calls == [((3, 16), 1, None)] * 15


def test_a_layout_may_depend_on_the_batch():
    """The block table made from a batch's lengths shards this batch and is returned with it."""
    seen = []

    def block_table(lengths: list[list[int]], seq_len: int) -> torch.Tensor:
        seen.append((lengths, seq_len))
        return torch.arange(2).add(len(seen)).remainder(2)[:, None]

    def shard(x: torch.Tensor, dim: int, table: torch.Tensor) -> torch.Tensor:
        return x.unflatten(dim, (2, -1))[:, table[0, 0]]

    options = {"batch_size": 2, "padding_multiple": 8, "seq_len": 13}
    full = make_loader(RAGGED, **options)
    local = make_loader(RAGGED, **options)
    local.use_layout(shard, block_table)
    for number in range(3):
        whole, part = next(full), next(local)
        assert whole.table is None and part.table.tolist() == [[(number + 1) % 2], [number % 2]]
        assert seen[number] == (whole.lengths, 16)
        half = slice(0, 8) if number % 2 else slice(8, 16)
        for field in ("tokens", "labels", "positions"):
            assert torch.equal(getattr(part, field), getattr(whole, field)[:, half])


def test_positions_that_do_not_restart_count_through_the_sequence():
    """As a causal mask over whole sequences needs them, sharded like the tokens."""
    options = {"batch_size": 2, "padding_multiple": 8, "seq_len": 13}
    pieces = make_loader(RAGGED, **options)
    through = make_loader(RAGGED, **options, restart_positions=False)
    local = make_loader(RAGGED, **options, restart_positions=False)
    local.use_layout(lambda x, dim, table: x[:, 8:])
    for _ in range(3):
        expected, batch, part = next(pieces), next(through), next(local)
        assert batch.positions.dtype == torch.int64
        assert batch.positions.tolist() == [list(range(16))] * 2
        assert part.positions.tolist() == [list(range(8, 16))] * 2
        assert torch.equal(batch.tokens, expected.tokens)
        assert torch.equal(batch.labels, expected.labels)


def test_split_special_tokens_belong_to_the_stream_and_are_off_in_older_states(tmp_path):
    train_tokenizer(tmp_path, ["</s>"])
    ids, letters = (load_tokenizer(str(tmp_path), split) for split in (False, True))
    state = make_loader(RAGGED, tokenizer=ids).state_dict()
    fingerprint = json.loads(state["fingerprint"])
    del fingerprint[0]["split_special_tokens"]
    older = {**state, "fingerprint": json.dumps(fingerprint)}
    make_loader(RAGGED, tokenizer=ids).load_state_dict(older)
    for saved in (state, older):
        with pytest.raises(ValueError, match="data.split_special_tokens was 0 and is 1"):
            make_loader(RAGGED, tokenizer=letters).load_state_dict(saved)


@pytest.mark.parametrize("where", ["cursors", "fingerprint"])
def test_a_state_of_a_later_version_is_refused(where):
    state = make_loader(RAGGED).state_dict()
    (part,) = json.loads(state[where])
    later = state | {where: json.dumps([part | {"phase": 1}])}
    with pytest.raises(Refusal, match="phase.*, which this version does not know"):
        make_loader(RAGGED).load_state_dict(later)


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> np.ndarray:
        self.calls += 1
        return super().encode(text)


def test_each_document_is_tokenised_once_an_epoch_and_passed_over_without_later():
    alone, skipping = CountingTokenizer(), CountingTokenizer()
    loader = make_loader(RAGGED, tokenizer=alone)
    global_stream([loader], 11)
    assert loader.epoch == 0 and alone.calls == loader.documents_seen
    far = one_byte_documents(20, tokenizer=skipping, dp_rank=0, dp_size=10)
    global_stream([far], 2)
    assert skipping.calls == 20
    global_stream([far], 2)
    assert skipping.calls == 22


@pytest.mark.usefixtures("datasets_cache")
def test_build_loader_opens_source_and_tokenizer(tmp_path):
    folder = write_texts(tmp_path / "data", ".jsonl")
    data = Data(source=str(folder), shuffle=False, min_document_length=1)
    batch = next(build_loader(data, 24, 2, 0, 0, 1, padding_multiple=16))
    assert isinstance(batch, Batch) and batch.tokens.shape == (2, 32)
    assert batch.tokens[0, : len(TEXTS[0]) + 1].tolist() == [*TEXTS[0].encode(), END]
    given = CountingTokenizer()
    loader = build_loader(data, 25, 1, 0, 0, 1, tokenizer=given)
    assert loader.tokenizer is given
    batch = next(loader)
    assert batch.lengths[0][0] == len(TEXTS[0]) + 1 and given.calls > 0
    assert batch.tokens.shape == (1, 25)


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("sequences", ["packed", "fixed"])
def test_the_loader_is_twenty_times_as_fast_as_a_node_trains(tmp_path, sequences):
    folder = prepared(tmp_path, lengths=[600_000, 1_300_000, 530_000])
    config = Config(data=Data(source=folder, sequences=sequences))
    config.training.seq_len = 524_288
    # Processor time would be fairer on a busy machine, but waiting for pages counts too; the margin is tenfold.
    assert tokens_per_second(config, 0.5) > 20 * NODE_TOKENS_PER_SECOND
