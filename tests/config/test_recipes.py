"""train_configs/: in every file no query sees another document, and the claims of the comments
hold.

A file may let documents see each other only by attention.mask = "causal_across_documents".
"""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import END, PADDING, write_rows
from tests.demo_model import in_a_folder_with_the_model
from titan_sparse.config import Attention, Config, ConfigError, check, load, load_and_check
from titan_sparse.data.loader import Batch
from titan_sparse.estimate.dry_run import World, dry_run
from titan_sparse.from_config import build_mask
from titan_sparse.models.flavours import resolve
from titan_sparse.training.setup import open_data

FOLDER = Path(__file__).parents[2] / "train_configs"
FILES = sorted(FOLDER.rglob("*.toml"))
NAMES = [str(path.relative_to(FOLDER)) for path in FILES]

SEQ_LEN = 72
LENGTHS = [90, 30, 20, 250, 75, 1, 40, 160, 71]
"""Tokens of the small documents; the n-th consists of the n-th letter."""
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
"""Of chats: what is said, and nothing else."""
DEVICE_MEMORY = 139.8

every_file = pytest.mark.parametrize("path", FILES, ids=NAMES)


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of documents of one letter each, which is read into a folder of the test's."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "letters.jsonl"
    rows = []
    for number, length in enumerate(LENGTHS):
        text = chr(65 + number) * length
        question, answer = text[: length // 2], text[length // 2 :]
        chat = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"text": text, "messages": chat})
    write_rows(path, rows)
    path.with_name("template.jinja").write_text(TEMPLATE)
    return path


def _small(config: Config, letters: Path) -> Config:
    """The file's data and mask, at 72 tokens on one rank, over the documents of `letters`."""
    attention = config.attention
    is_chats = config.data.format == "messages"
    small = Config(
        data=replace(
            config.data,
            source=str(letters),
            join_packages=False,
            tokenizer="bytes",
            chat_template=str(letters.with_name("template.jinja")) if is_chats else "",
            min_document_length=min(config.data.min_document_length, 20),
        ),
        attention=Attention(
            mask=attention.mask,
            sliding_window=min(attention.sliding_window, 10),
            window_sinks=min(attention.window_sinks, 2),
            pattern="dense",
            block_size=16,
        ),
    )
    small.training.seq_len = SEQ_LEN
    small.training.device = "cpu"
    return small


def _batches(small: Config) -> list[Batch]:
    return list(itertools.islice(open_data(small, resolve(**vars(small.model))), 6))


def _pairs(small: Config, batch: Batch) -> dict[str, int]:
    """How many (query, key) pairs of a batch the mask allows, and of how many of the own it does not."""
    tokens = batch.tokens[0].numpy()
    # The token that ends a document belongs to it, even where it is alone in the next sequence.
    owners = tokens.copy()
    for place in np.flatnonzero(tokens == END):
        owners[place] = owners[place - 1] if place else END
    seen = build_mask(small.attention, batch.lengths).dense(len(tokens))[0].numpy()
    own = (owners[:, None] == owners) & (tokens[:, None] != PADDING)
    earlier = np.tri(len(tokens), dtype=bool)
    return {
        "own, seen": (seen & own & earlier).sum(),
        "own, not seen": (~seen & own & earlier).sum(),
        "later, seen": (seen & own & ~earlier).sum(),
        "other, seen": (seen & ~own).sum(),
    }


@every_file
def test_no_query_sees_another_document(letters, path):
    config, _ = load(["--config", str(path)])
    assert config.attention.mask != "causal_across_documents", "none of these says so"
    small = _small(config, letters)
    check(small, 1, 1)
    batches = _batches(small)
    for batch in batches:
        counts = _pairs(small, batch)
        assert counts["own, seen"] > SEQ_LEN and counts["later, seen"] == 0
        assert counts["other, seen"] == 0
        assert small.attention.sliding_window or counts["own, not seen"] == 0
    most = max(len(batch.lengths[0]) for batch in batches)
    assert (most > 1) == (config.data.sequences == "packed")


def test_documents_see_each_other_only_by_a_mask_that_says_so(letters):
    small = _small(Config(attention=Attention(mask="causal")), letters)
    with pytest.raises(ConfigError, match='"causal_across_documents"'):
        check(small, 1, 1)
    small.attention.mask = "causal_across_documents"
    check(small, 1, 1)
    batches = _batches(small)
    assert sum(_pairs(small, batch)["other, seen"] for batch in batches) > SEQ_LEN
    # Positions go on where attention does.
    length = batches[0].tokens.shape[1]
    assert batches[0].positions[0].tolist() == list(range(length))


def test_the_shares_are_what_a_dry_run_says(monkeypatch, tmp_path):
    """The percentages of verticals and of pairs that the comments of files claim."""
    in_a_folder_with_the_model(monkeypatch, tmp_path)
    claims = 0
    for path in FILES:
        text = path.read_text().replace("\n# ", " ")
        verticals = re.findall(r"([\d.]+) % of the keys", text)
        pairs = re.findall(r"([\d.]+) % of the causal pairs", text)
        claims += text.count(" % of the ")
        assert text.count(" % of the ") == len(verticals) + len(pairs)
        ranks = load(["--config", str(path)])[0].parallelism.cp
        config, _ = load_and_check(["--config", str(path)], ranks, 8)
        for share in verticals:
            most = config.attention.vertical_slash.max_verticals
            assert float(share) == pytest.approx(100 * most / config.training.seq_len, abs=0.05)
        for share in pairs:
            report, _ = dry_run(config, World(ranks, 8, DEVICE_MEMORY))
            density = re.search(r"density ([\d.]+) %", report).group(1)
            assert float(share) == pytest.approx(float(density), abs=0.3)
    assert claims == 11
