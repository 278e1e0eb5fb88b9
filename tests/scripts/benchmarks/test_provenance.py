"""What every result file of a benchmark says about itself."""

import argparse
import datetime
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.benchmarks.provenance import KEYS, UNKNOWN, command, of_start, problems, provenance

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


def test_keys_that_every_result_has():
    about = provenance(argparse.Namespace(seq_len=5), "cpu")
    assert list(about) == ["command", "commit", "date", "gpu", "versions", "options"]
    assert about["date"] == datetime.date.today().isoformat() and about["gpu"] == "CPU"
    assert about["versions"]["torch"] == torch.__version__ and about["options"] == {"seq_len": 5}
    json.dumps(about)
    assert set(KEYS) < set(about) and problems(about | {"commit": 40 * "0"}) == []


@pytest.mark.parametrize(
    "started, told",
    [
        (
            "python -u train.py --config a.toml",
            "torchrun --nproc-per-node 2 train.py --config a.toml",
        ),
        ("python -m titan_sparse.train", "torchrun --nproc-per-node 2 -m titan_sparse.train"),
        ("python -u -c 'import sys'", "unknown: the run was no program of its own"),
    ],
)
def test_the_command_of_a_start(started, told):
    start = {
        "command": started,
        "world_size": 2,
        "git": None,
        "date": "2026-11-22T14:55:53+00:00",
        "ranks": [{"device": "CPU"}],
        "versions": {"torch": "2.13.0"},
    }
    assert of_start(start)["command"] == told
    assert problems(of_start(start)) == []


def test_every_result_says_where_it_comes_from():
    found = {path.name: problems(json.loads(path.read_text())) for path in RESULTS}
    assert len(found) > 30 and {name: why for name, why in found.items() if why} == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"date": None}, "date is missing"),
        ({"date": "yesterday"}, "date is 'yesterday'"),
        ({"commit": "3c81946"}, "commit is '3c81946'"),
        ({"commit": UNKNOWN}, "commit is unknown, but not why"),
        ({"versions": {"triton": "3.6.0"}}, "versions has no torch"),
        ({"command": "each run: its own key command", "rows": [{}]}, "not each run"),
    ],
)
def test_what_is_missing_is_named(change, words):
    about = provenance(argparse.Namespace(), "cpu") | {"commit": 40 * "0"}
    [problem] = problems(about | change)
    assert words in problem


def test_the_command_is_a_module_and_has_no_path_of_this_machine(monkeypatch):
    spec = SimpleNamespace(name="scripts.benchmarks.loss.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "loss.py"), "--out", "x.json"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert command() == "python -m scripts.benchmarks.loss --out x.json"
