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
    rows = mask.rows(128)
    q, k = torch.randn(2, 4, 128, 8), torch.randn(2, 2, 128, 8)
    choose = lambda x: (
        pattern.select(x, k, rows, block_size=16)
        if pattern.dynamic
        else pattern.index([], rows, 2, 4, 16)
    )
    indexes = [choose(q), choose(-q)]
    save_indexes(tmp_path / "index.pt", pattern, rows, indexes)
    loaded_rows, loaded = load_indexes(tmp_path / "index.pt")
    assert all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b
        for a, b in zip(loaded_rows[:4], rows[:4])
    )
    assert len(loaded) == 2
    for a, b in zip(loaded, indexes):
        assert torch.equal(a.dense(mask), b.dense(mask)) and a.heads == b.heads


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no index")
    torch.save({"x": 1}, tmp_path / "other")
    for name in ("text", "other", "missing"):
        with pytest.raises(ValueError, match=f"--index .*{name}: "):
            load_indexes(tmp_path / name)
