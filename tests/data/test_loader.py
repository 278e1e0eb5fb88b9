"""titan_sparse.data.loader: the global stream, resuming on any number of ranks, epochs, sharding."""

import json
import logging
import string

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
from titan_sparse.data.loader import build_loader
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer

RAGGED = random_documents([5, 40, 1, 15, 16, 17, 3, 90])


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


@pytest.mark.parametrize("depends", [True, False], ids=["batch", "fixed"])
def test_a_layout_shards_each_batch_alike(depends):
    """With a block table, which is made from the lengths of a batch and returned with it."""
    seen = []

    def block_table(lengths: list[list[int]], seq_len: int) -> torch.Tensor:
        seen.append((lengths, seq_len))
        return torch.arange(2).add(len(seen)).remainder(2)[:, None]

    def shard(x: torch.Tensor, dim: int, table: torch.Tensor | None) -> torch.Tensor:
        return x.unflatten(dim, (2, -1))[:, table[0, 0] if depends else 1]

    options = {"batch_size": 3, "padding_multiple": 8, "seq_len": 13}
    full, local = make_loader(RAGGED, **options), make_loader(RAGGED, **options)
    local.use_layout(shard, block_table if depends else None)
    for number in range(3):
        whole, part = next(full), next(local)
        assert whole.table is None and part.lengths == whole.lengths
        assert all(sum(lengths) == 13 for lengths in part.lengths)
        half = slice(8, 16)
        if depends:
            assert part.table.tolist() == [[(number + 1) % 2], [number % 2]]
            assert seen[number] == (whole.lengths, 16)
            half = slice(8 * ((number + 1) % 2), 8 * ((number + 1) % 2) + 8)
        for field in ("tokens", "labels", "positions"):
            assert getattr(part, field).dtype == torch.int64
            assert torch.equal(getattr(part, field), getattr(whole, field)[:, half])
    assert part.tokens.shape == (3, 8)


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
    far = make_loader(list(string.ascii_letters[:20]), skipping, seq_len=2, dp_size=10)
    global_stream([far], 2)
    assert skipping.calls == 20
    global_stream([far], 2)
    assert skipping.calls == 22


def test_build_loader_takes_a_tokenizer_and_pads(tmp_path):
    given = CountingTokenizer()
    data = Data(source=str(write_texts(tmp_path / "data", ".jsonl")), shuffle=False)
    loader = build_loader(data, 24, 2, 0, 0, 1, padding_multiple=16, tokenizer=given)
    assert loader.tokenizer is given
    batch = next(loader)
    assert batch.tokens.shape == (2, 32) and given.calls > 0
    assert batch.tokens[0, : len(TEXTS[0]) + 1].tolist() == [*TEXTS[0].encode(), END]


@pytest.mark.parametrize("sequences", ["packed", "fixed"])
def test_the_loader_is_twenty_times_as_fast_as_a_node_trains(tmp_path, sequences):
    folder = prepared(tmp_path, lengths=[600_000, 1_300_000, 530_000])
    config = Config(data=Data(source=folder, sequences=sequences))
    config.training.seq_len = 524_288
    # Processor time would be fairer on a busy machine, but waiting for pages counts too; the margin is tenfold.
    assert tokens_per_second(config, 0.5) > 20 * NODE_TOKENS_PER_SECOND
