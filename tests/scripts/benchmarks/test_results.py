"""What result files say about themselves, and all runs on several GPUs by one command."""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks import context_parallel, many_gpus, provenance, steps
from tests.faults.jobs import SETTINGS, words_of
from tests.faults.soak import ON_GPU
from tests.runs import tiny_config, train, write_texts
from titan_sparse.config import load_and_check

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


WRITES = "import json, sys; json.dump({'rows': [{'ms': 1}]}, open(sys.argv[1], 'w'))"


class Planned(many_gpus.Job):
    def command(self, out, names):
        return [sys.executable, "-c", self.module, str(out / f"{names[0]}.json")]


def planned(name, program, ranks=1, seconds=1):
    return Planned(1, name, ranks, seconds, program, {name: []})


def drive(monkeypatch, out, plan, *words):
    monkeypatch.setattr(many_gpus, "runs", lambda gpus: plan)
    return many_gpus.main(["--gpus", "2", "--out", str(out), *words])


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    plan = [planned("bad_1x", f"{WRITES}; sys.exit('no memory')"), planned("good_1x", WRITES)]
    assert drive(monkeypatch, tmp_path, plan) == 1
    assert "part 1  bad_1x: failed: status 1: no memory" in capsys.readouterr().out
    good = many_gpus.read(tmp_path, "good_1x")
    assert good["complete"] and good["rows"] == [{"ms": 1}] and good["run_seconds"] < 60

    # The next call does what has failed and what would not fit, and nothing else.
    plan = [planned("bad_1x", WRITES), planned("good_1x", "1 / 0")]
    plan += [planned("long_1x", WRITES, seconds=100), planned("wide_4x", WRITES, ranks=4)]
    assert drive(monkeypatch, tmp_path, plan, "--seconds", "30") == many_gpus.LEFT
    assert many_gpus.read(tmp_path, "bad_1x")["complete"]
    assert many_gpus.read(tmp_path, "long_1x") == many_gpus.read(tmp_path, "wide_4x") == {}
    assert "wide_4x: needs 4 GPUs, found 2" in capsys.readouterr().out
    assert drive(monkeypatch, tmp_path, plan, "--only", "good", "wide") == 0


def test_a_run_without_end_is_killed_with_its_children(tmp_path, monkeypatch, capsys):
    child = "import time; time.sleep(600)"
    program = (
        f"import subprocess, sys, time; job = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print(job.pid, flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(many_gpus, "LIMIT_SECONDS", 2)
    monkeypatch.setattr(many_gpus, "ORPHANS_SECONDS", 0.5)
    began = time.monotonic()
    assert drive(monkeypatch, tmp_path, [planned("slow_1x", program)]) == 1
    assert time.monotonic() - began < 20
    printed = capsys.readouterr().out
    assert "slow_1x: failed: not over after 2 s: " in printed
    pid = printed.split()[-1]
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z")


@pytest.mark.parametrize("gpus", [2, 4])
def test_words_for_gpus_are_taken(gpus):
    found = many_gpus.runs(gpus)
    names = [run.name for run in found]
    assert names == list(dict.fromkeys(names)) and {run.part for run in found} == {1, 2, 3, 4, 5}
    for run in found:
        assert run.seconds < many_gpus.LIMIT_SECONDS
        for name, words in run.files.items():
            assert f"_{run.ranks}x" in name
            if run.module == many_gpus.ATTENTION:
                args = context_parallel.parse(words)
                assert context_parallel.refusal(args, run.ranks) is None, name
            if run.module == many_gpus.TRAIN:
                config, _ = load_and_check(words, run.ranks, run.ranks)
                assert config.parallelism.cp == run.ranks
        if run.module == many_gpus.SOAK:
            settings = SETTINGS | ON_GPU | {"parallelism.cp": run.ranks}
            load_and_check(words_of(settings), run.ranks, run.ranks)
