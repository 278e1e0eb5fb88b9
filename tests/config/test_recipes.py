"""train_configs/: in every file no query sees another document, the claims of the comments hold."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.demo_model import in_a_folder_with_the_model
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention
from titan_sparse.config import load, load_and_check
from titan_sparse.training.attention import build_pattern
from titan_sparse.training.dry_run import World, dry_run

FOLDER = Path(__file__).parents[2] / "train_configs"
ALL_FILES = sorted(FOLDER.rglob("*.toml"))

DEVICE_MEMORY = 139.8


def test_no_file_lets_a_query_see_another_document():
    for path in ALL_FILES:
        config, _ = load(["--config", str(path)])
        masks = ("documents", "causal") if config.data.sequences != "packed" else ("documents",)
        assert config.attention.mask in masks, path


def test_the_shares_are_what_a_dry_run_says(monkeypatch, tmp_path):
    """The percentages of verticals and of pairs that the comments of files claim."""
    in_a_folder_with_the_model(monkeypatch, tmp_path)
    claims = 0
    for path in ALL_FILES:
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


FILES = sorted((Path(__file__).parents[2] / "train_configs/variants").glob("*.toml"))
PUBLISHED = VerticalSlash(
    recall=0.95,
    budget="independent",
    probe=64,
    probe_rows="last",
    sinks=30,
    count_sinks=True,
    local_slashes=2,
)
ROWS = {
    "mtraining": (PUBLISHED, "striped", "double_ring"),
    "mtraining_without_hierarchy": (PUBLISHED, "striped", "ring"),
    "mtraining_zigzag": (PUBLISHED, "zigzag", "ring"),
    "mtraining_xattention": (XAttention(stride=16, threshold=0.9), "striped", "double_ring"),
    "xattention": (XAttention(stride=16, threshold=0.9), "zigzag", "ring"),
    "moba": (MoBA(chunk_size=4096, top_k=12), "zigzag", "ring"),
    "minference": (
        replace(PUBLISHED, min_verticals=1000, max_verticals=1000, min_slashes=48, max_slashes=48),
        "striped",
        "double_ring",
    ),
    "dense_zigzag": (Dense(), "zigzag", "ring"),
    "dense_striped": (Dense(), "striped", "ring"),
    "burst_engine": (Dense(), "striped", "double_ring"),
    "packed": (PUBLISHED, "striped", "double_ring"),
    "magi_attention": (Dense(), "balanced", "group_cast"),
}


def test_every_variant_is_listed():
    assert {path.stem for path in FILES} == set(ROWS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_variant_says_what_was_published(path):
    config, _ = load_and_check(["--config", str(path)], 32, 8)
    attention = config.attention
    assert (build_pattern(attention), attention.layout, attention.schedule) == ROWS[path.stem]
    has_documents = path.stem in ("packed", "magi_attention")
    assert attention.mask == ("documents" if has_documents else "causal")
    sizes = (config.training.seq_len, config.parallelism.cp, config.model.rope_factor)
    assert sizes == (524288, 32, 32.0)
    assert Path(config.training.output_dir).name == path.stem
