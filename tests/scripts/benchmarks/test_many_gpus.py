"""All runs on several GPUs by one command: what is run, left and failed, and words for GPUs."""

import subprocess
import sys
import time

import pytest

from scripts.benchmarks import context_parallel, many_gpus
from tests.faults.jobs import SETTINGS, words_of
from tests.faults.soak import ON_GPU
from titan_sparse.config import load_and_check

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
