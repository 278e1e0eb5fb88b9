"""What every result file of a benchmark says about itself."""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

import torch

from scripts.benchmarks.provenance import commit, provenance

ROOT = Path(__file__).parents[3]


def test_keys_that_every_result_has():
    about = provenance(argparse.Namespace(seq_len=5), "cpu")
    assert list(about) == ["command", "commit", "date", "gpu", "versions", "options"]
    assert about["date"] == datetime.date.today().isoformat() and about["gpu"] == "CPU"
    assert about["versions"]["torch"] == torch.__version__ and about["options"] == {"seq_len": 5}
    json.dumps(about)


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
