"""train_configs/: in every file no query sees another document, and the claims of the comments
hold.

A file may let documents see each other only by attention.mask = "causal_across_documents".
"""

import re
from pathlib import Path

import pytest

from tests.demo_model import in_a_folder_with_the_model
from titan_sparse.config import load, load_and_check
from titan_sparse.estimate.dry_run import World, dry_run

FOLDER = Path(__file__).parents[2] / "train_configs"
FILES = sorted(FOLDER.rglob("*.toml"))

DEVICE_MEMORY = 139.8


def test_no_file_lets_a_query_see_another_document():
    for path in FILES:
        config, _ = load(["--config", str(path)])
        masks = ("documents", "causal") if config.data.sequences != "packed" else ("documents",)
        assert config.attention.mask in masks, path


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
