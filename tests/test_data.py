"""titan_sparse.data: sources, tokenizers, packing, and the resumable loader."""

import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import zstandard

from titan_sparse.config import Data
from titan_sparse.data.loader import Batch, PackedLoader, build_loader
from titan_sparse.data.packing import Piece, pack, pad_to_multiple
from titan_sparse.data.sources import open_source
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer

TEXTS = ["first\nline", "", "zweites: \u00e4\u00f6\u20ac \U0001f600", "x" * 50, "last\n"]
END, PADDING = ByteTokenizer.end_of_document, ByteTokenizer.padding


def documents(lengths: list[int]) -> list[str]:
    """Documents of the given byte lengths, no two alike."""
    generator = np.random.default_rng(len(lengths))
    return ["".join(map(chr, generator.integers(32, 127, length))) for length in lengths]


def make_loader(source: list[str], **options) -> PackedLoader:
    defaults = dict(
        tokenizer=ByteTokenizer(), seq_len=16, batch_size=1, seed=3, shuffle=True, min_document_length=0,
        dp_rank=0, dp_size=1,
    )  # fmt: skip
    return PackedLoader(source, **{**defaults, **options})


def rows(batch: Batch) -> Iterator[tuple]:
    """Each sequence of a batch as something that can be compared with ==."""
    fields = (batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist(), batch.lengths)
    return zip(*fields, strict=True)


def stream(ranks: list[PackedLoader], batches: int) -> list[tuple]:
    """The global stream that the ranks together hand out."""
    return [row for _ in range(batches) for rank in ranks for row in rows(next(rank))]


# ---- sources


def test_python_source_is_deterministic_and_not_empty():
    first, second = open_source(Data()), open_source(Data())
    assert len(first) == len(second) > 500
    assert [name for name, _ in first.items] == sorted(name for name, _ in second.items)
    assert any("import" in first[i] for i in range(5))
    assert {name.split("/")[0] for name, _ in first.items} == {"stdlib", "torch"}
    assert not any("site-packages" in name for name, _ in first.items)


def test_join_packages_makes_fewer_and_longer_documents():
    files, packages = open_source(Data()), open_source(Data(join_packages=True))
    assert len(packages) < len(files) / 2
    members = next(group for group in packages.items if group[0][0].startswith("stdlib/json/"))
    document = packages[packages.items.index(members)]
    assert [name for name, _ in members] == sorted(name for name, _ in members)
    assert document.startswith(f"# {members[0][0]}\n")
    assert all(f"# {name}\n{path.read_text()}" in document for name, path in members)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_texts(folder: Path, ending: str, field: str = "text") -> Path:
    """TEXTS in a folder of two files, or of one file a document for .txt."""
    folder.mkdir()
    if ending == ".txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    for part, texts in enumerate([TEXTS[:2], TEXTS[2:]] if ending != ".txt" else []):
        write_rows(folder / f"{part}{ending}", [{field: text, "number": i} for i, text in enumerate(texts)])
    return folder


def write_rows(path: Path, table: list[dict]) -> None:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return
    raw = "".join(json.dumps(row) + "\n" for row in table).encode()
    path.write_bytes(zstandard.compress(raw) if path.suffix == ".zst" else raw)


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".jsonl.zst", ".parquet"])
def test_files_of_each_ending_hold_the_same_texts(cache, tmp_path, ending):
    source = open_source(Data(source=str(write_texts(tmp_path / "data", ending))))
    assert list(source) == TEXTS
    single = open_source(Data(source=str(tmp_path / "data" / f"0{ending}")))
    assert single[0] == TEXTS[0]


def test_text_field_is_read_and_null_is_empty(cache, tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"body": "one"}, {"body": None}])
    source = open_source(Data(source=str(tmp_path / "a.jsonl"), text_field="body"))
    assert list(source) == ["one", ""]


def test_missing_and_wrong_text_field_name_the_key_and_the_columns(cache, tmp_path):
    folder = write_texts(tmp_path / "data", ".jsonl", field="body")
    with pytest.raises(ValueError, match=r"data\.text_field.*body, number"):
        open_source(Data(source=str(folder)))
    with pytest.raises(ValueError, match=r"data\.text_field = \"number\" holds no text"):
        open_source(Data(source=str(folder), text_field="number"))


@pytest.mark.parametrize(
    "source", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere.txt", "no/where.jsonl.zst", "a.parquet"]
)
def test_a_missing_path_is_refused_without_the_hub(monkeypatch, source):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="data.source.*no such file or folder") as error:
        open_source(Data(source=source))
    assert "\n" not in str(error.value)


def test_folders_of_mixed_or_no_endings_and_unreadable_files_are_refused(cache, tmp_path):
    with pytest.raises(ValueError, match="data.source.*holds no data files"):
        open_source(Data(source=str(tmp_path)))
    (tmp_path / "a.jsonl").write_text("{broken")
    with pytest.raises(ValueError, match="data.source.*cannot be read"):
        open_source(Data(source=str(tmp_path / "a.jsonl")))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data.source.*mixes \.jsonl, \.txt"):
        open_source(Data(source=str(tmp_path)))


@pytest.mark.parametrize("option", [{"subset": "en"}, {"split": "test"}])
def test_options_of_the_hub_are_refused_for_files(tmp_path, option):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="data.subset and data.split"):
        open_source(Data(source=str(tmp_path), **option))


def test_hub_dataset(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return datasets.Dataset.from_dict({"text": TEXTS, "other": [1] * len(TEXTS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(open_source(Data(source="owner/name", subset="en", split="test"))) == TEXTS
    assert list(open_source(Data(source="owner/name"))) == TEXTS
    assert calls == [(("owner/name", "en"), {"split": "test"}), (("owner/name", None), {"split": "train"})]


@pytest.mark.parametrize("kind", ["DatasetNotFoundError", "ConnectionError", "ValueError"])
def test_hub_dataset_not_found_is_one_line(monkeypatch, kind):
    datasets = pytest.importorskip("datasets")
    error = {"ConnectionError": ConnectionError, "ValueError": ValueError}.get(kind)
    error = error or datasets.exceptions.DatasetNotFoundError

    def load_dataset(*_, **__):
        raise error("not\nthere")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match='data.source = "owner/nothing".*not there') as raised:
        open_source(Data(source="owner/nothing"))
    assert "\n" not in str(raised.value)


def test_empty_source_is_refused(monkeypatch):
    datasets = pytest.importorskip("datasets")
    empty = datasets.Dataset.from_dict({"text": ["a"]}).select([])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: empty)
    with pytest.raises(ValueError, match="data.source.*holds no documents"):
        open_source(Data(source="owner/name"))


# ---- tokenizers


@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) == len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end_of_document, tokenizer.padding]) == text
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padding) == (258, 256, 257)


def train_tokenizer(folder: Path, special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_file_round_trip_ignores_stored_truncation_and_padding(tmp_path, text):
    train_tokenizer(tmp_path, ["</s>", "<pad>"])
    by_folder, by_file = load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = by_folder.encode(text)
    assert ids.dtype == np.int32 and (ids == by_file.encode(text)).all()
    assert len(ids) == 0 or ids.max() < by_folder.vocab_size
    assert by_folder.decode(ids) == text
    assert by_folder.decode([*ids, by_folder.end_of_document]) == text


@pytest.mark.parametrize(
    ("special", "config", "end", "padding"),
    [
        (["<eos>", "<|endoftext|>"], None, "<|endoftext|>", "<|endoftext|>"),
        (["<eos>", "<pad>"], None, "<eos>", "<pad>"),
        (["<eos>", "<stop>"], {"eos_token": "<stop>"}, "<stop>", "<stop>"),
        (["<eos>", "<stop>"], {"eos_token": {"content": "<stop>"}, "pad_token": "<eos>"}, "<stop>", "<eos>"),
        (["</s>"], {"eos_token": None}, "</s>", "</s>"),
    ],
)
def test_special_tokens_of_a_tokenizer_file(tmp_path, special, config, end, padding):
    trained = train_tokenizer(tmp_path, special)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.end_of_document == trained.token_to_id(end)
    assert tokenizer.padding == trained.token_to_id(padding)
    assert tokenizer.vocab_size == trained.get_vocab_size()


def test_tokenizer_errors_name_the_key(tmp_path):
    with pytest.raises(ValueError, match="data.tokenizer.*no such file"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="data.tokenizer.*no readable tokenizer.json"):
        load_tokenizer(str(tmp_path))
    train_tokenizer(tmp_path, ["<other>"])
    with pytest.raises(ValueError, match="data.tokenizer.*no end-of-document token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<absent>"}')
    with pytest.raises(ValueError, match="data.tokenizer.*<absent>"):
        load_tokenizer(str(tmp_path))


# ---- packing


def test_pack_by_hand():
    first, second = np.array([10, 11, 12, END]), np.array([20, 21, 22, 23, END])
    packed = pack([Piece(first, 2, 4), Piece(second, 0, 3)], 7, PADDING)
    assert packed.tokens.tolist() == [12, END, 20, 21, 22, PADDING, PADDING]
    assert packed.labels.tolist() == [END, -100, 21, 22, 23, -100, -100]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert packed.lengths == [2, 3]
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == np.int64


def test_pack_of_nothing_is_padding_and_of_too_much_is_refused():
    assert pack([], 2, PADDING).tokens.tolist() == [PADDING, PADDING]
    with pytest.raises(ValueError, match="do not fit"):
        pack([Piece(np.arange(5), 0, 5)], 4, PADDING)


@pytest.mark.parametrize(("multiple", "total"), [(1, 5), (4, 8), (5, 5), (8, 8)])
def test_pad_to_multiple(multiple, total):
    packed = pack([Piece(np.arange(9), 2, 7)], 5, PADDING)
    padded = pad_to_multiple(packed, multiple, PADDING)
    extra = total - 5
    assert padded.tokens.tolist() == [2, 3, 4, 5, 6] + [PADDING] * extra
    assert padded.labels.tolist() == [3, 4, 5, 6, 7] + [-100] * extra
    assert padded.positions.tolist() == [0, 1, 2, 3, 4] + [0] * extra
    assert padded.lengths == [5]


# ---- loader


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("multiple", [1, 5])
def test_pieces_of_the_stream_are_the_documents_in_order(seq_len, multiple):
    source = documents([5, 40, 1, 15, 16, 17, 0, 3])
    loader = make_loader(source, seq_len=seq_len, shuffle=False, padding_multiple=multiple)
    whole = [[*text.encode(), END] for text in source if text]
    expected = [token for document in whole for token in document]
    expected_labels = [label for document in whole for label in [*document[1:], -100]]
    tokens, labels = [], []
    while len(tokens) < 2 * len(expected):
        batch = next(loader)
        used = sum(batch.lengths[0])
        assert used == seq_len and batch.tokens.shape == (1, -(-seq_len // multiple) * multiple)
        assert batch.positions[0, :used].tolist() == [i for length in batch.lengths[0] for i in range(length)]
        assert (batch.tokens[0, used:] == PADDING).all() and (batch.labels[0, used:] == -100).all()
        assert (batch.positions[0, used:] == 0).all()
        tokens += batch.tokens[0, :used].tolist()
        labels += batch.labels[0, :used].tolist()
    assert tokens == (expected * (len(tokens) // len(expected) + 1))[: len(tokens)]
    assert labels == (expected_labels * (len(labels) // len(expected) + 1))[: len(labels)]


def test_pieces_end_where_documents_or_sequences_end():
    for batch in islice(make_loader(documents([5, 40, 1, 15, 30])), 50):
        ends = np.cumsum(batch.lengths[0])
        closed = (batch.tokens[0] == END).nonzero().flatten() + 1
        assert set(closed.tolist()) | {16} == set(ends.tolist())


RAGGED = documents([5, 40, 1, 15, 16, 17, 3, 90])


@pytest.mark.parametrize("dp_size", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_global_stream_is_the_same_on_any_number_of_ranks(dp_size, batch_size):
    ranks = [make_loader(RAGGED, dp_rank=r, dp_size=dp_size, batch_size=batch_size) for r in range(dp_size)]
    alone = make_loader(RAGGED)
    batches = 12
    assert stream(ranks, batches) == stream([alone], batches * dp_size * batch_size)
    assert all(rank.epoch == alone.epoch >= 1 for rank in ranks)
    assert all(rank.documents_seen == alone.documents_seen for rank in ranks)
    assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)


@pytest.mark.parametrize("consumed", [0, 1, 5, 13])
@pytest.mark.parametrize(("dp_size", "batch_size"), [(2, 1), (1, 1), (3, 2), (4, 1)])
def test_resume_equals_uninterrupted_also_on_other_ranks(consumed, dp_size, batch_size):
    saved = [make_loader(RAGGED, dp_rank=r, dp_size=2) for r in range(2)]
    start = stream(saved, consumed)
    state = json.loads(json.dumps(saved[0].state_dict()))
    ranks = [make_loader(RAGGED, dp_rank=r, dp_size=dp_size, batch_size=batch_size) for r in range(dp_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = stream(ranks, 6)
    assert start + resumed == stream([make_loader(RAGGED)], len(start) + len(resumed))
    assert state["sequence"] == 2 * consumed


def test_resume_on_other_ranks_is_logged(caplog):
    saved = make_loader(RAGGED, dp_size=2)
    stream([saved], 6)
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

    def shard(x: torch.Tensor, dim: int) -> torch.Tensor:
        calls.append((tuple(x.shape), dim))
        return x.unflatten(dim, (-1, 4))[:, 1::2].flatten(1)

    options = dict(batch_size=3, padding_multiple=8, seq_len=13)
    full, local = make_loader(RAGGED, **options), make_loader(RAGGED, **options, shard=shard)
    for _ in range(5):
        whole, part = next(full), next(local)
        for field in ("tokens", "labels", "positions"):
            expected = getattr(whole, field)[:, [4, 5, 6, 7, 12, 13, 14, 15]]
            assert getattr(part, field).dtype == torch.int64 and torch.equal(getattr(part, field), expected)
        assert part.lengths == whole.lengths and all(sum(lengths) == 13 for lengths in part.lengths)
    assert calls == [((3, 16), 1)] * 15


def test_short_documents_are_skipped_in_tokens_without_the_end():
    loader = make_loader(["a", "bb", "ccc", "", "dd"], min_document_length=2, shuffle=False, seq_len=10)
    first = bytes(int(token) for token in next(loader).tokens[0] if token != END)
    assert first == b"bbcccdd"
    assert loader.documents_seen == 3


@pytest.mark.parametrize("source", [["a", "bb", ""], [""], []])
def test_all_documents_skipped_is_refused(source):
    with pytest.raises(ValueError, match="data.min_document_length = 3"):
        next(make_loader(source, min_document_length=3))


def test_one_long_document_among_many_is_found_in_each_epoch():
    loader = make_loader(["a"] * 9 + ["long enough"], min_document_length=5, seq_len=12)
    texts = {ByteTokenizer().decode(next(loader).tokens[0].numpy()) for _ in range(20)}
    assert texts == {"long enough"} and loader.epoch >= 19


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="training.seed = -1"):
        make_loader(RAGGED, seed=-1)


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> np.ndarray:
        self.calls += 1
        return super().encode(text)


def test_each_document_is_tokenised_once_an_epoch_and_passed_over_without_later():
    alone, skipping = CountingTokenizer(), CountingTokenizer()
    loader = make_loader(RAGGED, tokenizer=alone)
    stream([loader], 11)
    assert loader.epoch == 0 and alone.calls == loader.documents_seen
    far = one_byte_documents(20, tokenizer=skipping, dp_rank=0, dp_size=10)
    stream([far], 2)
    assert skipping.calls == 20
    stream([far], 2)
    assert skipping.calls == 22


def test_build_loader_opens_source_and_tokenizer(cache, tmp_path):
    folder = write_texts(tmp_path / "data", ".jsonl")
    data = Data(source=str(folder), shuffle=False, min_document_length=1)
    batch = next(build_loader(data, 24, 2, 0, 0, 1, padding_multiple=16))
    assert isinstance(batch, Batch) and batch.tokens.shape == (2, 32)
    assert batch.tokens[0, : len(TEXTS[0]) + 1].tolist() == [*TEXTS[0].encode(), END]
    given = CountingTokenizer()
    loader = build_loader(data, 24, 1, 0, 0, 1, 1, None, given)
    assert next(loader).lengths[0][0] == len(TEXTS[0]) + 1 and given.calls > 0
