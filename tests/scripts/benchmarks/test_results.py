"""What result files say about themselves, and all runs on several GPUs by one command."""

import argparse
import datetime
import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import provenance, steps
from tests.runs import tiny_config, train, write_texts

RESULTS = sorted((provenance.ROOT / "benchmarks/results").glob("*.json"))


def test_a_result_begins_with_its_origin(monkeypatch):
    spec = SimpleNamespace(name="scripts.benchmarks.loss.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", [str(provenance.ROOT / "loss.py"), "--out", "x.json"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    about = provenance.provenance(argparse.Namespace(seq_len=5), "cpu")
    # The command is a module, without a path of this machine.
    assert about.pop("command") == "python -m scripts.benchmarks.loss --out x.json"
    assert about.pop("versions")["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown: .*checkout", about.pop("commit"))
    today = datetime.date.today().isoformat()
    assert about == {"date": today, "gpu": "CPU", "options": {"seq_len": 5}}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_says_where_it_comes_from(path):
    """What was not recorded says so: "unknown: " and why."""
    result = json.loads(path.read_text())
    assert result["gpu"] and result["versions"]["torch"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|(unknown|none): .{10,}", result["commit"])
    runs = result.get("runs") or result.get("rows")
    for run in runs.values() if isinstance(runs, dict) else runs or []:
        assert run.get("command") or not result["command"].startswith("each run: ")
    assert len(result["command"]) > 10


def _record(folder, **recorded):
    [path] = folder.glob("starts/*/start.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | recorded))


def test_steps_and_their_origin(tmp_path, capsys):
    write_texts(tmp_path / "texts", documents=4)
    train(tiny_config(tmp_path, "one", training__steps=2))
    dist.destroy_process_group()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    runs = [f"a run={tmp_path / 'one'}", f"b={tmp_path / 'two'}"]
    for name, command in (
        ("one", "/usr/bin/python -u /home/me/train.py --training.steps 2"),
        ("two", "python -m titan_sparse.train --training.steps 2"),
    ):
        _record(tmp_path / name, command=command, git={"commit": 40 * "a", "changed_files": 0})
    out = tmp_path / "steps.json"
    assert steps.main([*runs, "--out", str(out)]) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert found["commit"] == 40 * "a" and found["gpu"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__ and found["date"].startswith("20")
    assert list(found["runs"]) == ["a run", "b"]
    one, two = found["runs"].values()
    assert one["command"] == "torchrun --nproc-per-node 1 train.py --training.steps 2"
    assert two["command"].endswith("1 -m titan_sparse.train --training.steps 2")
    assert [line["step"] for line in one["steps"]] == [1, 2] and one["gpus"] == 1

    _record(tmp_path / "two", command="python -c x", git={"commit": 40 * "a", "changed_files": 2})
    [two] = steps.collect([("b", tmp_path / "two")])["runs"].values()
    assert two["command"] == "unknown: the run was no program of its own"
    nothing = tmp_path / "x.json"
    assert steps.main([*runs, "--out", str(nothing)]) == 2
    assert "another commit" in capsys.readouterr().err
    assert steps.main([f"a={tmp_path}", "--out", str(nothing)]) == 2
    assert "no starts/*/start.json" in capsys.readouterr().err
    assert not nothing.exists()
