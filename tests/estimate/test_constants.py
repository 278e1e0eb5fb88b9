"""Constants of a machine are read from JSON and checked."""

import json

import pytest

from titan_sparse.commands import plan as script
from titan_sparse.estimate.constants import load_constants


def test_constants_are_read_and_checked(tmp_path):
    default = load_constants(script.DEFAULT_CONSTANTS)
    assert default.forward_tflops > default.across_gb_s > 0
    data = json.loads(script.DEFAULT_CONSTANTS.read_text())
    assert all(entry["source"] for entry in data["constants"].values())
    for change, words in (
        (lambda c: c.pop("launch_ms"), "launch_ms is missing"),
        (lambda c: c.update(x={"value": 1}), "x is unknown"),
        (lambda c: c["inside_gb_s"].update(value=0), "inside_gb_s = 0.0"),
        (lambda c: c["inside_gb_s"].clear(), "write"),
    ):
        broken = json.loads(json.dumps(data))
        change(broken["constants"])
        (tmp_path / "c.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=words):
            load_constants(tmp_path / "c.json")
