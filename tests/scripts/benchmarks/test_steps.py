"""scripts.benchmarks.steps: a result file of training runs says where they come from."""

import json

import pytest
import torch.distributed as dist

from scripts.benchmarks.provenance import problems
from scripts.benchmarks.steps import main
from tests.runs import tiny_config, train, write_texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder / "texts", documents=4)
    for name in ("one", "two"):
        train(tiny_config(folder, name, training__steps=2))
        dist.destroy_process_group()
    return folder


def _start(folder):
    [path] = folder.glob("starts/*/start.json")
    return path, json.loads(path.read_text())


def test_steps_and_their_origin(runs, tmp_path, capsys):
    for name, command in (
        ("one", "/usr/bin/python -u /home/me/train.py --training.steps 2"),
        ("two", "python -m titan_sparse.train --training.steps 2"),
    ):
        path, start = _start(runs / name)
        git = {"commit": 40 * "a", "changed_files": 0}
        path.write_text(json.dumps(start | {"command": command, "git": git}))
    out = tmp_path / "steps.json"
    words = [f"a run={runs / 'one'}", f"b={runs / 'two'}", "--out", str(out)]
    assert main(words) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert problems(found) == [] and found["commit"] == 40 * "a" and found["gpu"] == "cpu"
    assert list(found["runs"]) == ["a run", "b"]
    one, two = found["runs"].values()
    assert one["command"] == "torchrun --nproc-per-node 1 train.py --training.steps 2"
    assert two["command"].endswith("1 -m titan_sparse.train --training.steps 2")
    assert [line["step"] for line in one["steps"]] == [1, 2] and one["gpus"] == 1


def test_runs_that_do_not_belong_together_are_refused(runs, tmp_path, capsys):
    path, start = _start(runs / "two")
    other = {"commit": 40 * "a", "changed_files": 2}
    path.write_text(json.dumps(start | {"git": other}))
    words = [f"a={runs / 'one'}", f"b={runs / 'two'}", "--out", str(tmp_path / "x.json")]
    assert main(words) == 2 and "another commit" in capsys.readouterr().err
    assert main([f"a={tmp_path}", "--out", str(tmp_path / "x.json")]) == 2
    assert "no starts/*/start.json" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
