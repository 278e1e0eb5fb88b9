"""The benchmark of packed documents in transformers' Trainer, at toy size on CPUs."""

import json

import pytest

pytest.importorskip("accelerate")

from scripts.benchmarks import huggingface_packed
from scripts.benchmarks.provenance import problems
from tests.distributed import run_program

TOY = (
    "--cpu --shape toy --tokens 256 --shortest 16 --longest 200 --steps 2 --block-size 16 "
    "--max-columns 16 --max-slashes 2 --dense-below 64"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_row_is_measured(processes, tmp_path):
    out = tmp_path / "packed.json"
    words = [*TOY, "--out", str(out)]
    printed = run_program(processes, huggingface_packed.main, words)
    result = json.loads(out.read_text())
    assert result["processes"] == processes
    assert problems(result) == [] or not result["commit"]
    rows = {row["attention"]: row for row in result["rows"]}
    assert list(rows) == ["dense", "sparse", "sdpa"][: 4 - processes]
    assert all(json.dumps(row) in printed for row in rows.values())
    for row in rows.values():
        assert len(row["steps_ms"]) == 2 and row["tokens_per_s"] > 0
        assert row["attention_ms"] > 0
    assert rows["dense"]["density"] == 1 and rows["sparse"]["density"] < 1
    if processes == 2:
        assert rows["dense"]["schedule"] == "group_cast"


def test_documents_fill_the_sequence():
    lengths = huggingface_packed.document_lengths(10_000, 50, 3_000)
    assert sum(lengths) == 10_000 and max(lengths) <= 3_000 and min(lengths[:-1]) >= 50
