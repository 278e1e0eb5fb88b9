"""What every result file of a benchmark says about itself."""

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.benchmarks.provenance import KEYS, UNKNOWN, commit, of_start, problems, provenance

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
    "command, told",
    [
        (
            "python -u train.py --config a.toml",
            "torchrun --nproc-per-node 2 train.py --config a.toml",
        ),
        ("python -m titan_sparse.train", "torchrun --nproc-per-node 2 -m titan_sparse.train"),
        ("python -u -c 'import sys'", "unknown: the run was no program of its own"),
    ],
)
def test_the_command_of_a_start(command, told):
    start = {
        "command": command,
        "world_size": 2,
        "git": None,
        "date": "2026-11-22T14:55:53+00:00",
        "ranks": [{"device": "CPU"}],
        "versions": {"torch": "2.13.0"},
    }
    assert of_start(start)["command"] == told
    assert problems(of_start(start)) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_says_where_it_comes_from(path):
    assert problems(json.loads(path.read_text())) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_names_files_that_exist(path):
    """Wherever it cites one. Commands name scripts of their time, and files that they wrote."""
    missing = []
    for text in _texts(json.loads(path.read_text())):
        for name in re.findall(
            r"[\w/.-]+/[\w.-]+\.(?:json|md|py|toml)\b|\w+h[12]00\w*\.json", text
        ):
            places = (ROOT / name, path.parent / name)
            if not any(place.exists() for place in places):
                missing.append(name)
    assert missing == []


def _texts(value: object) -> Iterator[str]:
    """All strings in a result, but commands and options."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in ("command", "options"):
                yield from _texts(each)


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


def test_the_commit_is_one_of_this_checkout():
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40


def test_the_command_is_a_module_and_has_no_path_of_this_machine():
    program = "from scripts.benchmarks.provenance import command; print(command())"
    result = subprocess.run(
        [sys.executable, "-c", program, "--out", "x.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip().endswith("--out x.json") and str(ROOT) not in result.stdout
