"""Texts, files, shards and loaders that several data tests use."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers

from titan_sparse.config import Data
from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.loader import Batch, PackedLoader, build_loader
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe
from titan_sparse.data.shards import TokenShards
from titan_sparse.data.stream import WalkedStream
from titan_sparse.data.tokenizer import ByteTokenizer

TEXTS = ["first\nline", "", "zweites: \u00e4\u00f6\u20ac \U0001f600", "x" * 50, "last\n"]

END = ByteTokenizer.end_of_document
PADDING = ByteTokenizer.padding

LENGTHS = [5, 40, 0, 1, 15, 16, 17, 33, 3, 90]


def write_texts(folder: Path, ending: str) -> Path:
    """TEXTS in a folder of two files, or of one file a document for .txt."""
    folder.mkdir()
    if ending == ".txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text, encoding="utf-8")
        return folder
    for part, texts in enumerate([TEXTS[:2], TEXTS[2:]]):
        table = [{"text": text, "number": i} for i, text in enumerate(texts)]
        write_rows(folder / f"{part}{ending}", table)
    return folder


def write_rows(path: Path, table: list[dict]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        return
    raw = "".join(json.dumps(row) + "\n" for row in table).encode()
    if path.suffix == ".zst":
        raw = pyarrow.compress(raw, "zstd", asbytes=True)
    path.write_bytes(raw)


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
    pad_id = tokenizer.token_to_id(special[-1])
    tokenizer.enable_padding(length=9, pad_token=special[-1], pad_id=pad_id)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def random_documents(lengths: list[int]) -> list[str]:
    """Documents of the given byte lengths, no two alike."""
    generator = np.random.default_rng(len(lengths))
    texts = []
    for length in lengths:
        characters = generator.integers(32, 127, length)
        texts.append("".join(map(chr, characters)))
    return texts


def lettered_texts(letter: str, lengths: list[int] = LENGTHS) -> list[str]:
    """Documents that can be identified by their first letter and their length."""
    return [letter * length for length in lengths]


def prepared(folder: Path, letter: str = "a", lengths: list[int] = LENGTHS, **options) -> str:
    """A folder of shards of lettered_texts(), three rows to a shard."""
    source = folder / f"{letter}.jsonl"
    write_rows(source, [{"text": text} for text in lettered_texts(letter, lengths)])
    recipe = Recipe(str(source), **{"shard_rows": 3, **options})
    prepare(recipe, str(folder / letter))
    return str(folder / letter)


def read_shards(folder: str, tokenizer=None) -> list[list[int]]:
    """The tokens of every document in a folder of shards."""
    shards = TokenShards(folder, tokenizer or ByteTokenizer())
    assert shards.lengths().tolist() == [shards.length(i) for i in range(len(shards))]
    return [shards[i].tokens.tolist() for i in range(len(shards))]


def make_loader(
    source: list[str],
    tokenizer=None,
    seq_len: int = 16,
    seed: int = 3,
    shuffle: bool = True,
    min_document_length: int = 0,
    sequences: str = "packed",
    batch_size: int = 1,
    **options,
) -> PackedLoader:
    """A loader of texts; `options` are those of PackedLoader."""
    tokenizer = tokenizer or ByteTokenizer()
    data = Data(shuffle=shuffle, min_document_length=min_document_length, sequences=sequences)
    stream = WalkedStream(TokenizedTexts(source, tokenizer), tokenizer, data, seq_len, seed)
    return PackedLoader([stream], [1.0], batch_size, 0, 1, **options)


def open_loader(
    data: Data, seq_len: int = 16, dp_rank: int = 0, dp_size: int = 1, batch_size: int = 1
) -> PackedLoader:
    """build_loader() with a seed and small sizes."""
    return build_loader(data, seq_len, batch_size, 3, dp_rank, dp_size)


def loaders(
    data: Data, ranks: int = 1, batch_size: int = 1, seq_len: int = 16
) -> list[PackedLoader]:
    return [open_loader(data, seq_len, rank, ranks, batch_size) for rank in range(ranks)]


def rows(batch: Batch) -> Iterator[tuple]:
    """Each sequence of a batch as a value that can be compared with ==."""
    fields = (batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist(), batch.lengths)
    return zip(*fields, strict=True)


def global_stream(ranks: list[PackedLoader], batches: int) -> list[tuple]:
    """The global stream that the ranks together hand out."""
    sequences = []
    for _ in range(batches):
        for rank in ranks:
            sequences.extend(rows(next(rank)))
    return sequences


def check_resume(data: Data, consumed: int, seq_len: int = 16) -> None:
    """After `consumed` batches on two ranks, other numbers of ranks and batch sizes continue as if
    nothing had happened."""
    saved = loaders(data, 2, 1, seq_len)
    start = global_stream(saved, consumed)
    state = json.loads(json.dumps(saved[0].state_dict()))
    assert state == saved[1].state_dict() and state["sequence"] == 2 * consumed
    for dp_size, batch_size in ((1, 1), (3, 2)):
        ranks = loaders(data, dp_size, batch_size, seq_len)
        for rank in ranks:
            rank.load_state_dict(state)
        resumed = global_stream(ranks, 5)
        (alone,) = loaders(data, seq_len=seq_len)
        assert start + resumed == global_stream([alone], len(start) + len(resumed))
        assert {counters(rank) for rank in ranks} == {counters(alone)}
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)


def counters(loader: PackedLoader) -> tuple[int, int]:
    cursor = loader.streams[0].cursor
    return cursor.epoch, cursor.documents_seen
