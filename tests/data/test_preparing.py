"""Prepared shards, fixed-length samples and mixtures: what the loader hands out is what the source holds."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.loader import NODE_TOKENS_PER_SECOND, tokens_per_second
from scripts.prepare_data import main, show_histogram
from tests.data.test_loader import stream
from tests.data.test_sources import END, PADDING, cache, train_tokenizer, write_rows, write_texts  # noqa: F401  (cache is a fixture)
from titan_sparse.config import Config, ConfigError, Data, check
from titan_sparse.config.mixture import source_weights
from titan_sparse.data.loader import PackedLoader, build_loader
from titan_sparse.data.preparing import Recipe, histogram, prepare
from titan_sparse.data.shards import TokenShards, token_dtype, write_shard
from titan_sparse.data.tokenizer import ByteTokenizer, load_tokenizer

LENGTHS = [5, 40, 0, 1, 15, 16, 17, 33, 3, 90]


def texts(letter: str, lengths: list[int] = LENGTHS) -> list[str]:
    """Documents that are told apart by their first letter and their length."""
    return [letter * length for length in lengths]


def no_progress(done: int, shards: int) -> None:
    pass


def prepared(folder: Path, letter: str = "a", lengths: list[int] = LENGTHS, **options) -> str:
    """A folder of shards of texts(), three rows to a shard."""
    source = folder / f"{letter}.jsonl"
    write_rows(source, [{"text": text} for text in texts(letter, lengths)])
    prepare(
        Recipe(str(source), **{"shard_rows": 3, **options}), str(folder / letter), 1, no_progress
    )
    return str(folder / letter)


def documents(folder: str, tokenizer=None) -> list[list[int]]:
    shards = TokenShards(folder, tokenizer or ByteTokenizer())
    assert shards.lengths().tolist() == [shards.length(i) for i in range(len(shards))]
    return [shards.tokens(i).tolist() for i in range(len(shards))]


def loader(
    data: Data, seq_len: int = 16, dp_rank: int = 0, dp_size: int = 1, batch_size: int = 1
) -> PackedLoader:
    return build_loader(data, seq_len, batch_size, 3, dp_rank, dp_size)


# ---- preparing


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("ending", [".txt", ".jsonl.zst", ".parquet"])
def test_shards_hold_the_documents_of_the_source_in_order(tmp_path, ending):
    source = write_texts(tmp_path / "texts", ending)
    meta = prepare(Recipe(str(source), shard_rows=2), str(tmp_path / "out"), 1, no_progress)
    files = [path.read_bytes() for path in sorted(source.iterdir())] if ending == ".txt" else None
    expected = [[*raw, END] for raw in files if raw] if files else documents_of(tmp_path)
    assert documents(str(tmp_path / "out")) == expected
    assert (meta["documents"], meta["tokens"]) == (len(expected), sum(map(len, expected)))
    assert meta["dtype"] == "uint16" and len(meta["shards"]) == 3


def documents_of(folder: Path) -> list[list[int]]:
    from tests.data.test_sources import TEXTS

    return [[*text.encode(), END] for text in TEXTS if text]


@pytest.mark.usefixtures("cache")
def test_processes_make_the_same_files_as_one_and_the_command_line_prints_a_histogram(
    tmp_path, capsys
):
    one = prepared(tmp_path)
    words = [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "two"),
        "--processes",
        "2",
        "--shard-rows",
        "3",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "16 - 31           2" in " ".join(printed.split(",")) and "9 documents" in printed
    for path in Path(one).iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.usefixtures("cache")
def test_filters_and_histogram(tmp_path):
    folder = prepared(tmp_path, min_length=5, max_length=40)
    assert [len(ids) - 1 for ids in documents(folder)] == [5, 40, 15, 16, 17, 33]
    meta = json.loads((tmp_path / "a/meta.json").read_text())
    assert meta["histogram"] == histogram([n for n in LENGTHS if n])
    assert meta["histogram"] == {
        "1": [1, 1],
        "2": [1, 3],
        "4": [1, 5],
        "8": [1, 15],
        "16": [2, 33],
        "32": [2, 73],
        "64": [1, 90],
    }
    assert meta["kept"] == histogram([5, 40, 15, 16, 17, 33])
    assert show_histogram(meta).splitlines()[-1].split() == [
        "64",
        "-",
        "127",
        "1",
        "90",
        "40.9%",
        "0",
    ]
    with pytest.raises(ValueError, match="no document"):
        prepare(
            Recipe(str(tmp_path / "a.jsonl"), min_length=1000),
            str(tmp_path / "none"),
            1,
            no_progress,
        )


@pytest.mark.usefixtures("cache")
def test_interrupted_it_goes_on_and_keeps_finished_shards(tmp_path):
    class Stop(Exception):
        pass

    def stop(done: int, shards: int) -> None:
        if done == 2:
            raise Stop

    expected = documents(prepared(tmp_path))
    recipe = Recipe(str(tmp_path / "a.jsonl"), shard_rows=3)
    out = tmp_path / "out"
    with pytest.raises(Stop):
        prepare(recipe, str(out), 1, stop)
    with pytest.raises(ValueError, match="data.source.*not finished"):
        TokenShards(str(out), ByteTokenizer())
    (out / "shard_00002.bin").write_bytes(b"half a sh")
    times = {number: (out / f"shard_{number:05d}.bin").stat().st_mtime_ns for number in range(2)}
    seen = []
    prepare(recipe, str(out), 1, lambda done, shards: seen.append((done, shards)))
    assert seen == [(2, 4), (3, 4), (4, 4)] and documents(str(out)) == expected
    assert all(
        (out / f"shard_{number:05d}.bin").stat().st_mtime_ns == time
        for number, time in times.items()
    )


@pytest.mark.usefixtures("cache")
def test_another_source_tokenizer_or_option_is_refused(tmp_path, capsys):
    prepared(tmp_path)
    train_tokenizer(tmp_path, ["</s>"])
    recipe, out = Recipe(str(tmp_path / "a.jsonl"), shard_rows=3), str(tmp_path / "a")
    with pytest.raises(ValueError, match="min_length was 0 and is 2"):
        prepare(replace(recipe, min_length=2), out, 1, no_progress)
    with pytest.raises(ValueError, match="tokenizer_digest was bytes and is"):
        prepare(replace(recipe, tokenizer=str(tmp_path)), out, 1, no_progress)
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts("b")])
    with pytest.raises(ValueError, match="source's files have changed"):
        prepare(recipe, out, 1, no_progress)
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path), "--processes", "1"]) == 2
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.usefixtures("cache")
def test_a_tokenizer_file_travels_with_the_shards_and_another_is_refused(tmp_path):
    tokens = tmp_path / "tokenizer"
    tokens.mkdir()
    train_tokenizer(tokens, ["</s>"])
    folder = prepared(tmp_path, tokenizer=str(tokens))
    shutil.rmtree(tokens)
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode(ids) for ids in documents(folder, tokenizer)] == [
        text for text in texts("a") if text
    ]
    with pytest.raises(ValueError, match=rf'data.tokenizer = "{folder}"'):
        TokenShards(folder, ByteTokenizer())


def test_large_vocabularies_take_uint32(tmp_path):
    assert [token_dtype(size) for size in (258, 65536, 65537, 151936)] == [
        "uint16",
        "uint16",
        "uint32",
        "uint32",
    ]
    ids = np.array([0, 65536, 151935], dtype=np.int32)
    assert write_shard(tmp_path, 0, [ids, ids[:1]], 151643, "uint32") == 6
    assert np.fromfile(tmp_path / "shard_00000.bin", "<u4").tolist() == [
        0,
        65536,
        151935,
        151643,
        0,
        151643,
    ]
    assert np.load(tmp_path / "shard_00000.idx.npy").tolist() == [0, 4, 6]


@pytest.mark.usefixtures("cache")
def test_a_shard_that_was_cut_off_is_refused(tmp_path):
    folder = prepared(tmp_path)
    path = Path(folder, "shard_00001.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="data.source.*shard_00001.bin has"):
        TokenShards(folder, ByteTokenizer())


def test_folders_of_source_code_become_one_document_each(tmp_path):
    root = tmp_path / "repositories"
    for name, content in {
        "b/x.py": "x",
        "a/sub/z.c": "z",
        "a/A.md": "A",
        "loose.txt": "l",
        ".git/config": "no",
        "a/.hidden": "no",
        "a/image.png": "\0png",
        "a/empty.py": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "link.py").symlink_to(root / "b/x.py")
    decode = ByteTokenizer().decode
    prepare(Recipe(str(root), document="folder"), str(tmp_path / "folders"), 1, no_progress)
    assert [decode(ids) for ids in documents(str(tmp_path / "folders"))] == [
        "# loose.txt\nl",
        "# a/A.md\nA\n# a/sub/z.c\nz",
        "# b/x.py\nx",
    ]
    prepare(Recipe(str(root), document="source"), str(tmp_path / "whole"), 1, no_progress)
    joined = [decode(ids) for ids in documents(str(tmp_path / "whole"))]
    assert joined == ["# loose.txt\nl\n# a/A.md\nA\n# a/sub/z.c\nz\n# b/x.py\nx"]
    with pytest.raises(ValueError, match="--split would be ignored"):
        prepare(
            Recipe(str(root), document="folder", split="test"), str(tmp_path / "x"), 1, no_progress
        )


def test_mds_shards_need_the_streaming_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "streaming", None)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"mosaicml-streaming.*pip install"):
        prepare(Recipe(str(tmp_path)), str(tmp_path / "out"), 1, no_progress)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("same", [True, False])
def test_mds_shards_of_tokens_are_decoded_and_encoded_anew(tmp_path, compression, same):
    streaming = pytest.importorskip("streaming")
    train_tokenizer(tmp_path, ["</s>"])
    source = load_tokenizer(str(tmp_path))
    target = str(tmp_path) if same else "bytes"
    expected = ["first", "second document", "third", "zweites: \u00e4"]
    encoded = [
        np.append(source.encode(text), source.end_of_document).astype(np.uint32)
        for text in expected
    ]
    columns = {"input_ids": "ndarray", "indices": "ndarray", "domain": "str"}
    with streaming.MDSWriter(
        out=str(tmp_path / "mds"), columns=columns, compression=compression, size_limit=200
    ) as writer:
        for first, second in (encoded[:2], encoded[2:]):
            bounds = np.array(
                [[0, len(first)], [len(first), len(first) + len(second)]], dtype=np.uint32
            )
            writer.write(
                {"input_ids": np.concatenate([first, second]), "indices": bounds, "domain": "book"}
            )
    with pytest.raises(ValueError, match="--source-tokenizer"):
        prepare(Recipe(str(tmp_path / "mds"), target), str(tmp_path / "none"), 1, no_progress)
    recipe = Recipe(str(tmp_path / "mds"), target, str(tmp_path), shard_rows=1)
    prepare(recipe, str(tmp_path / "out"), 1, no_progress)
    prepare(recipe, str(tmp_path / "out"), 1, no_progress)  # unpacking has not changed the source
    tokenizer = load_tokenizer(target)
    written = documents(str(tmp_path / "out"), tokenizer)
    assert [tokenizer.decode(ids) for ids in written] == expected
    assert not same or written == [ids.tolist() for ids in encoded]


# ---- loading


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dp_size", [1, 3])
def test_packed_shards_give_the_stream_of_the_texts(tmp_path, dp_size):
    folder = prepared(tmp_path)
    nonempty = tmp_path / "nonempty.jsonl"
    write_rows(nonempty, [{"text": text} for text in texts("a") if text])
    ranks = [loader(Data(source=folder), dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    assert stream(ranks, 24 // dp_size) == stream([loader(Data(source=str(nonempty)))], 24)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("sequences", ["fixed", "fixed_and_rest"])
def test_fixed_samples_cut_each_document_from_its_beginning(tmp_path, sequences):
    folder = prepared(tmp_path, lengths=[5, 40, 15, 16, 0, 31, 33])
    data = Data(source=folder, sequences=sequences, shuffle=False, min_document_length=6)
    samples = []
    for tokens, labels, positions, (lengths,) in stream([loader(data)], 12):
        samples.append(lengths)
        assert positions == [*range(lengths), *[0] * (16 - lengths)]
        assert tokens[lengths:] == [PADDING] * (16 - lengths) and labels[lengths:] == [-100] * (
            16 - lengths
        )
        assert labels[: lengths - 1] == tokens[1:lengths]
        assert labels[lengths - 1] == (
            -100 if tokens[lengths - 1] == END else tokens[0] if END not in labels else END
        )
    # With their end: 41, 16, 17, 32, 34 tokens.
    whole = [16, 16, 16, 16, 16, 16, 16, 16]
    rests = [16, 16, 9, 16, 16, 16, 16, 16, 16, 2]
    assert samples == ([*whole, *whole] if sequences == "fixed" else [*rests, *rests])[:12]


@pytest.mark.usefixtures("cache")
def test_fixed_samples_are_each_handed_out_once_an_epoch_in_a_new_order(tmp_path):
    folder = prepared(tmp_path, lengths=[100, 100, 40, 3])
    one = loader(Data(source=folder, sequences="fixed"), seq_len=8)
    stream_ = one.mixture.streams[0]
    epochs = [[stream_.next_sequence()[0] for _ in range(29)] for _ in range(2)]
    expected = [
        (index, start, start + 8)
        for index, count in enumerate([12, 12, 5])
        for start in range(0, 8 * count, 8)
    ]
    assert all(sorted(map(tuple, epoch)) == expected for epoch in epochs) and epochs[0] != epochs[1]
    assert one.epoch == 2 and one.documents_seen == 6


@pytest.mark.usefixtures("cache")
def test_what_prepared_tokens_cannot_do_is_refused(tmp_path):
    folder = prepared(tmp_path)
    with pytest.raises(ValueError, match="training.seq_len = 1000"):
        loader(Data(source=folder, sequences="fixed"), seq_len=1000)
    with pytest.raises(ValueError, match="data.text_field"):
        loader(Data(source=folder, text_field="body"))
    with pytest.raises(ValueError, match='data.sequences = "fixed" needs tokens'):
        loader(Data(source=str(tmp_path / "a.jsonl"), sequences="fixed"))
    with pytest.raises(ConfigError, match='data.sequences = "fixed" needs tokens'):
        check(Config(data=Data(sequences="fixed")), 1, 1)


# ---- mixtures


@pytest.mark.parametrize(
    ("source", "weights"),
    [
        ("python", {"python": 1.0}),
        ("a:7, b/c.d : 3", {"a": 0.7, "b/c.d": 0.3}),
        ("a:1", {"a": 1.0}),
        ("odd, name", {"odd, name": 1.0}),
        ("c:/x:.25,d:.75", {"c:/x": 0.25, "d": 0.75}),
    ],
)
def test_weights_of_a_mixture(source, weights):
    assert source_weights(source) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a:0.7, b", "to some parts only"),
        ("a:1, a:2", "a part twice"),
        ("a:1, b:0", "a weight of 0"),
    ],
)
def test_wrong_mixtures_are_refused_before_anything_is_opened(source, message):
    with pytest.raises(ConfigError, match=message):
        check(Config(data=Data(source=source)), 1, 1)


def mixture(tmp_path: Path, weights: tuple[float, ...] = (5, 3, 2)) -> Data:
    folders = [
        prepared(tmp_path, letter) if not (tmp_path / letter).exists() else str(tmp_path / letter)
        for letter in "abc"
    ]
    return Data(
        source=", ".join(
            f"{folder}:{weight}" for folder, weight in zip(folders, weights, strict=False)
        )
    )


def origin(row: tuple) -> str:
    return chr(min(token for token in row[0] if token < 256))


@pytest.mark.usefixtures("cache")
def test_a_mixture_keeps_its_shares_and_each_part_its_own_stream(tmp_path):
    data = mixture(tmp_path)
    taken = stream([loader(data)], 50)
    letters = [origin(row) for row in taken]
    for count in range(1, 51):
        assert all(
            abs(letters[:count].count(letter) - share * count) <= 1.0
            for letter, share in zip("abc", (0.5, 0.3, 0.2))
        )
    for letter in "abc":
        alone = stream([loader(Data(source=str(tmp_path / letter)))], 50)
        own = [row for row in taken if origin(row) == letter]
        assert own == alone[: len(own)]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("dp_size", "batch_size"), [(1, 1), (3, 1), (2, 2)])
def test_a_mixture_resumes_on_any_number_of_ranks(tmp_path, dp_size, batch_size):
    data = mixture(tmp_path)
    saved = [loader(data, dp_rank=rank, dp_size=2) for rank in range(2)]
    start = stream(saved, 7)
    state = json.loads(json.dumps(saved[1].state_dict()))
    assert state == saved[0].state_dict()
    ranks = [loader(data, 16, rank, dp_size, batch_size) for rank in range(dp_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    resumed = stream(ranks, 6)
    assert start + resumed == stream([loader(data)], len(start) + len(resumed))
    with pytest.raises(ValueError, match="share of data.source was 0.5 and is 0.6"):
        loader(mixture(tmp_path, (6, 2, 2))).load_state_dict(state)
    with pytest.raises(ValueError, match="data.source had 3 parts and has 1"):
        loader(Data(source=str(tmp_path / "a"))).load_state_dict(state)
    with pytest.raises(ValueError, match="data.sequences was packed and is fixed"):
        loader(replace(data, sequences="fixed")).load_state_dict(state)


# ---- speed


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("sequences", ["packed", "fixed"])
def test_the_loader_is_twenty_times_as_fast_as_a_node_trains(tmp_path, sequences):
    folder = prepared(tmp_path, lengths=[600_000, 1_300_000, 530_000])
    config = Config(data=Data(source=folder, sequences=sequences))
    config.training.seq_len = 524_288
    # Processor time would be fairer on a busy machine, but waiting for pages counts too; the margin is tenfold.
    assert tokens_per_second(config, 0.5) > 20 * NODE_TOKENS_PER_SECOND
