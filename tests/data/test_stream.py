"""The global stream of sequences, compared with a loop over documents."""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import (
    END,
    PADDING,
    check_resume,
    counters,
    global_stream,
    lettered_texts,
    loaders,
    make_loader,
    open_loader,
    prepared,
    random_documents,
    train_tokenizer,
    write_texts,
)
from titan_sparse.config import Data, Refusal
from titan_sparse.data.documents import TokenizedTexts, open_documents
from titan_sparse.data.loader import PackedLoader
from titan_sparse.data.stream import pack
from titan_sparse.data.tokenizer import ByteTokenizer, Encoded, load_tokenizer

SEQ_LEN = 16


def test_pack_by_hand():
    first, second = np.array([10, 11, 12, END]), np.array([20, 21, 22, 23, END])
    learned = np.array([False, True, False, True, True])
    packed = pack([(Encoded(first), 2, 4), (Encoded(second, learned), 0, 3)], 7, PADDING)
    assert packed.tokens.tolist() == [12, END, 20, 21, 22, PADDING, PADDING]
    assert packed.labels.tolist() == [END, -100, 21, -100, 23, -100, -100]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert packed.lengths == [2, 3]
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == np.int64


def pieces(lengths: list[int], data: Data, are_tokens: bool) -> Iterator[tuple[int, int, int, int]]:
    """(epoch, document, start, stop) of all pieces, forever. Lengths count the end token."""
    least = {"packed": 1, "fixed": SEQ_LEN, "fixed_and_rest": 2}[data.sequences]
    shortest = max(data.min_document_length, least - 1, 1)
    room = SEQ_LEN
    for epoch in itertools.count():
        units = [[document] for document in range(len(lengths))]
        if data.sequences != "packed":
            for document, length in enumerate(lengths):
                starts = range(0, length if length > shortest else 0, SEQ_LEN)
                units[document] = [(document, start) for start in starts if length - start >= least]
        if are_tokens and data.sequences != "packed":
            # All samples are shuffled, and not only the documents.
            units = [[sample] for samples in units for sample in samples]
        order = range(len(units))
        if data.shuffle:
            order = np.random.default_rng([3, epoch]).permutation(len(units))
        for unit in itertools.chain.from_iterable(units[place] for place in order):
            if data.sequences != "packed":
                document, start = unit
                yield epoch, document, start, min(start + SEQ_LEN, lengths[document])
                continue
            place = 0
            while lengths[unit] > shortest and place < lengths[unit]:
                stop = min(place + room, lengths[unit])
                yield epoch, unit, place, stop
                room = room - (stop - place) or SEQ_LEN
                place = stop


def sequences(texts: list[str], data: Data, are_tokens: bool) -> Iterator[tuple]:
    """The rows of global_stream()."""
    documents = [[*text.encode(), END] for text in texts]
    stream = pieces([len(document) for document in documents], data, are_tokens)
    while True:
        tokens, labels, positions, lengths = [], [], [], []
        while len(tokens) < SEQ_LEN:
            _, number, start, stop = next(stream)
            document = documents[number]
            tokens += document[start:stop]
            labels += [*document[start + 1 : stop + 1], -100][: stop - start]
            positions += range(stop - start)
            lengths.append(stop - start)
            if data.sequences != "packed":
                break
        rest = SEQ_LEN - len(tokens)
        yield tokens + [PADDING] * rest, labels + [-100] * rest, positions + [0] * rest, lengths


def texts(folder: Path, ending: str = ".jsonl", letter: str = "a") -> str:
    """A source of raw texts, the same as prepared() makes tokens of."""
    return write_texts(folder / f"texts {letter}", ending, lettered_texts(letter))


@pytest.mark.parametrize("ending", [".txt", ".jsonl.zst", ".parquet", "tokens"])
@pytest.mark.parametrize("kind", ["packed", "fixed", "fixed_and_rest"])
@pytest.mark.parametrize(("shuffle", "shortest"), [(True, 0), (False, 0), (True, 5), (False, 16)])
def test_the_stream_is_that_of_a_loop_over_the_documents(tmp_path, ending, kind, shuffle, shortest):
    are_tokens = ending == "tokens"
    source = prepared(tmp_path) if are_tokens else texts(tmp_path, ending)
    data = Data(source=source, sequences=kind, shuffle=shuffle, min_document_length=shortest)
    documents = [text for text in lettered_texts("a") if text or not are_tokens]
    expected = list(itertools.islice(sequences(documents, data, are_tokens), 48))
    assert global_stream(loaders(data), 48) == expected
    assert global_stream(loaders(data, 3, 2), 8) == expected


@pytest.mark.parametrize("is_prepared", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("kind", ["packed", "fixed", "fixed_and_rest"])
@pytest.mark.parametrize("consumed", [1, 9])
def test_resume_equals_uninterrupted_on_any_ranks(tmp_path, is_prepared, kind, consumed):
    source = prepared(tmp_path) if is_prepared else texts(tmp_path)
    data = Data(source=source, sequences=kind)
    check_resume(data, consumed)


@pytest.mark.parametrize(
    ("kind", "seq_len", "expected"),
    [
        # Sequences of two tokens: aa, a|, cc, |a, aa, |c. The document b is too short.
        ("packed", 2, [(0, 1), (0, 1), (0, 2), (1, 3), (1, 3), (1, 4)]),
        # aa, a|, cc; the | of cc is left over.
        ("fixed", 2, [(0, 1), (0, 1), (1, 2), (1, 3), (1, 3), (2, 4)]),
        # aaa, cc|; the | of aaa is left over.
        ("fixed_and_rest", 3, [(0, 1), (1, 2), (1, 3), (2, 4)]),
    ],
)
def test_counters_by_hand(kind, seq_len, expected):
    loader = make_loader(
        ["aaa", "b", "cc"], seq_len=seq_len, shuffle=False, min_document_length=2, sequences=kind
    )
    assert [(next(loader), counters(loader))[1] for _ in expected] == expected


def test_documents_that_give_no_sample_are_counted(tmp_path, caplog):
    source = prepared(tmp_path)
    with caplog.at_level(logging.INFO, logger="titan_sparse"):
        open_loader(Data(source=source, sequences="fixed"))
    said = "data: 3 of 9 documents are left out: they have fewer than 15 tokens"
    assert caplog.messages == [said]


def test_as_many_tokens_as_allowed_are_kept_in_memory(monkeypatch):
    """Of documents of 4, 41, 4 and 21 tokens; the last one stays, however long."""
    monkeypatch.setattr("titan_sparse.data.documents.MOST_KEPT", 25)
    documents = TokenizedTexts(["x" * length for length in (3, 40, 3, 20)], ByteTokenizer())
    held = []
    for index in (0, 1, 2, 3, 0):
        assert len(documents[index].tokens) == documents.length(index)
        held.append(list(documents._encoded))
    assert held == [[0], [1], [2], [2, 3], [3, 0]]


def mixed(*parts: tuple[str, float]) -> PackedLoader:
    """A mixture of (letters, share): every letter is a document, and with its end a sequence."""
    streams = []
    for letters, _ in parts:
        streams += make_loader(list(letters), seq_len=2, shuffle=False).streams
    return PackedLoader(streams, [share for _, share in parts], 1, 0, 1)


def test_the_part_furthest_behind_its_share_is_next():
    """By hand, with ties to the first part. Other versions continue a checkpoint in this order."""
    loader = mixed(("a", 0.5), ("b", 0.3), ("c", 0.2))
    taken = "".join(chr(next(loader).tokens[0, 0]) for _ in range(10))
    assert taken == "abcaabacba"
    # 0.1 / (0.1 + 0.2) differs from 1 / 3 in the last digit.
    shares = [part["share"] for part in mixed(("a", 1 / 3), ("b", 2 / 3)).fingerprint()]
    assert shares == [0.333333333, 0.666666667]


def test_each_part_of_a_mixture_has_epochs_of_its_own():
    loader = mixed(("a", 0.5), ("bbb", 0.5))
    for _ in range(8):
        next(loader)
    assert [stream.cursor.epoch for stream in loader.streams] == [4, 1]
    assert [stream.cursor.documents_seen for stream in loader.streams] == [4, 4]


@pytest.mark.parametrize("kind", ["packed", "fixed"])
def test_a_mixture_of_texts_and_tokens_keeps_its_shares_and_resumes(tmp_path, kind):
    parts = {"a": prepared(tmp_path, "a"), "b": texts(tmp_path, letter="b")}
    parts["c"] = prepared(tmp_path, "c")
    shares = dict(zip("abc", (0.5, 0.3, 0.2), strict=True))
    source = ", ".join(f"{parts[letter]}:{10 * share}" for letter, share in shares.items())
    data = Data(source=source, sequences=kind)
    check_resume(data, 7)
    rows = {letter: [] for letter in "abc"}
    for count, row in enumerate(global_stream(loaders(data), 50), 1):
        rows[chr(min(row[0]))].append(row)
        for letter, share in shares.items():
            assert abs(len(rows[letter]) - share * count) <= 1.0
    for letter, own in rows.items():
        alone = global_stream(loaders(Data(source=parts[letter], sequences=kind)), 50)
        assert own == alone[: len(own)]


def test_another_mixture_is_another_stream(tmp_path):
    parts = [prepared(tmp_path, letter) for letter in "ab"]
    data = Data(source=f"{parts[0]}:0.5, {parts[1]}:0.5")
    state = open_loader(data).state_dict()
    for change, message in (
        ({"source": f"{parts[0]}:0.6, {parts[1]}:0.4"}, "share of data.source was 0.5 and is 0.6"),
        ({"source": parts[0]}, "data.source had 2 parts and has 1"),
        ({"sequences": "fixed"}, "data.sequences was packed and is fixed"),
        ({"shuffle": False}, "data.shuffle was 1 and is 0"),
        ({"min_document_length": 2}, "data.min_document_length was 0 and is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            open_loader(Data(**{"source": data.source, **change})).load_state_dict(state)
    loader = make_loader(RAGGED)
    for source, option, message in (
        (RAGGED, {"seq_len": 32}, "training.seq_len was 16 and is 32"),
        (RAGGED, {"seed": 4}, "training.seed was 3 and is 4"),
        (RAGGED[1:], {}, "documents of data.source was 8 and is 7"),
    ):
        with pytest.raises(ValueError, match=message):
            make_loader(source, **option).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("options", "message", "better"),
    [
        (
            {"source": ["a", "bb", ""], "min_document_length": 3},
            r"length = 3 \(the longest has 3 tokens\); write data.min_document_length = 2 or less$",
            {"min_document_length": 2},
        ),
        ({"source": [""]}, r"1 tokens\); name documents that have text$", {"source": ["a"]}),
        ({"source": []}, r"0 tokens\); name documents that have text$", {"source": ["a"]}),
        (
            {"source": ["a" * 90], "sequences": "fixed", "seq_len": 92},
            r'"fixed": .* write training.seq_len = 91 or less \(or data.sequences = "packed"\)$',
            {"seq_len": 91},
        ),
        (
            {"source": ["a" * 9], "sequences": "fixed", "min_document_length": 10},
            r"write data.min_document_length = 9 or less and training.seq_len = 10 or less",
            {"min_document_length": 9, "seq_len": 10},
        ),
    ],
)
def test_a_source_without_a_sequence_is_refused_when_opened(options, message, better, caplog):
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=message):
        make_loader(**options)
    assert not caplog.messages
    next(make_loader(**options | better))


def test_what_prepared_tokens_cannot_do_is_refused(tmp_path):
    folder = prepared(tmp_path)
    with pytest.raises(ValueError, match=r"training.seq_len = 1000.*\(the longest has 91 t"):
        open_loader(Data(source=folder, sequences="fixed"), seq_len=1000)
    for name, value in {"text_field": "x", "bad_rows": "skip", "split_special_tokens": 1}.items():
        with pytest.raises(ValueError, match=f"data.{name} = .* would be ignored with the prep"):
            open_documents(Data(source=folder, **{name: value}), ByteTokenizer())


RAGGED = random_documents([5, 40, 1, 15, 16, 17, 3, 90])


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
    local.shard = shard
    local.block_table = block_table if depends else None
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
    local.shard = lambda x, dim, table: x[:, 8:]
    for _ in range(3):
        expected, batch, part = next(pieces), next(through), next(local)
        assert batch.positions.dtype == torch.int64
        assert batch.positions.tolist() == [list(range(16))] * 2
        assert part.positions.tolist() == [list(range(8, 16))] * 2
        assert torch.equal(batch.tokens, expected.tokens)
        assert torch.equal(batch.labels, expected.labels)


def test_split_special_tokens_belong_to_the_stream(tmp_path):
    train_tokenizer(tmp_path, ["</s>"])
    ids, letters = (load_tokenizer(str(tmp_path), split) for split in (False, True))
    state = make_loader(RAGGED, tokenizer=ids).state_dict()
    with pytest.raises(ValueError, match="data.split_special_tokens was 0 and is 1"):
        make_loader(RAGGED, tokenizer=letters).load_state_dict(state)


@pytest.mark.parametrize("where", ["cursors", "fingerprint"])
def test_a_state_of_a_later_version_is_refused(where):
    state = make_loader(RAGGED).state_dict()
    (part,) = json.loads(state[where])
    later = state | {where: json.dumps([part | {"phase": 1}])}
    with pytest.raises(Refusal, match="phase"):
        make_loader(RAGGED).load_state_dict(later)
