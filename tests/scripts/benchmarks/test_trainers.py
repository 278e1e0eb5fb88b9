"""The benchmark of whole trainers runs at toy size; all of them train the same model on the same text."""

import json

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from scripts.benchmarks import trainers


@pytest.mark.slow
def test_trainers_agree_on_the_loss(tmp_path):
    out = tmp_path / "trainers.json"
    arms = ["ours, dense", "torchtitan", "transformers"]
    words = ["--shapes", "toy", "--tokens", "128", "--steps", "1", "--device", "cpu"]
    assert trainers.main([*words, "--arms", *arms, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == arms
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(128e3 / row["step_ms"])
        for step in ("first_loss", "last_loss"):
            assert row[step] == pytest.approx(rows[0][step], abs=1e-4)
