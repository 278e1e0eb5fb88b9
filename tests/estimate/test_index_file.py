"""Indexes survive their file, and other files are refused."""

import pytest
import torch

from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.estimate.index_file import load_indexes, save_indexes


@pytest.mark.parametrize(
    "mask, pattern",
    [
        (Documents([[90, 7, 31], [120]]), VerticalSlash(recall=0.6, sinks=2, dense_below=32)),
        (Causal(), Dense()),
    ],
)
def test_an_index_survives_its_file(tmp_path, mask, pattern):
    torch.manual_seed(0)
    ranges = mask.rows(128)
    q = torch.randn(2, 4, 128, 8)
    k = torch.randn(2, 2, 128, 8)

    def choose(queries: torch.Tensor):
        if pattern.dynamic:
            return pattern.select(queries, k, ranges, block_size=16)
        return pattern.index([], ranges, 2, 4, 16)

    indexes = [choose(q), choose(-q)]
    save_indexes(tmp_path / "index.pt", pattern, ranges, indexes)
    loaded_ranges, loaded = load_indexes(tmp_path / "index.pt")
    for a, b in zip(loaded_ranges[:4], ranges[:4]):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    assert len(loaded) == 2
    for a, b in zip(loaded, indexes):
        assert torch.equal(a.dense(mask), b.dense(mask)) and a.heads == b.heads


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no index")
    torch.save({"x": 1}, tmp_path / "other")
    for name in ("text", "other", "missing"):
        with pytest.raises(ValueError, match=f"--index .*{name}: "):
            load_indexes(tmp_path / name)
