"""All runs on several GPUs by one command: what is run, left and failed, words for GPUs, tables."""

import subprocess
import sys
import time

import pytest

from scripts.benchmarks import context_parallel, many_gpus
from scripts.benchmarks.harness import write
from tests.faults.jobs import SETTINGS, words_of
from tests.faults.soak import ON_GPU
from titan_sparse.config import load_and_check

WRITES = "import json, sys; json.dump({'rows': [{'seconds': 1}]}, open(sys.argv[1], 'w'))"


class Planned(many_gpus.Run):
    def command(self, out, names):
        return [sys.executable, "-c", self.module, str(out / f"{names[0]}.json")]


def planned(name, program, ranks=1, seconds=1):
    return Planned(1, name, ranks, seconds, program, {name: []})


def drive(monkeypatch, out, plan, *words):
    monkeypatch.setattr(many_gpus, "runs", lambda gpus: plan)
    return many_gpus.main(["--gpus", "2", "--out", str(out), *words])


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    plan = [planned("bad_1x", f"{WRITES}; sys.exit('no memory')"), planned("good_1x", WRITES)]
    assert drive(monkeypatch, tmp_path, plan) == 1
    bad = many_gpus.read(tmp_path, "bad_1x")
    assert bad["error"] == "status 1: no memory" and bad["rows"] == [{"seconds": 1}]
    assert "complete" not in bad and many_gpus.read(tmp_path, "good_1x")["complete"]

    # The next call does what has failed, and nothing else.
    plan = [planned("bad_1x", WRITES), planned("good_1x", "1 / 0")]
    assert drive(monkeypatch, tmp_path, plan) == 0
    assert "error" not in many_gpus.read(tmp_path, "bad_1x")
    assert drive(monkeypatch, tmp_path, plan, "--again", "--only", "good") == 1


def test_a_run_without_end_is_killed_with_its_children(tmp_path, monkeypatch):
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
    error = many_gpus.read(tmp_path, "slow_1x")["error"]
    assert error.startswith("not over after 2 s: ")
    pid = error.split()[-1]
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z")


def test_what_does_not_fit_is_left_and_what_cannot_run_is_recorded(tmp_path, monkeypatch):
    plan = [planned("long_1x", WRITES, seconds=100), planned("scaling_1x_flex", WRITES)]
    plan.append(planned("scaling_4x", WRITES, ranks=4))
    monkeypatch.setattr(many_gpus, "version", lambda package: None)
    assert drive(monkeypatch, tmp_path, plan, "--seconds", "30") == many_gpus.LEFT
    assert many_gpus.read(tmp_path, "long_1x") == {}
    flex = many_gpus.read(tmp_path, "scaling_1x_flex")
    assert flex["not_run"] == "flash-attn-4 is not installed" and "complete" not in flex
    text = (tmp_path / "tables.md").read_text()
    assert "## scaling_4x\n\nneeds 4 GPUs, found 2" in text


@pytest.mark.parametrize("gpus", [2, 4, 8])
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


def test_tables(tmp_path):
    ring = {"forward_ms": 1.0, "seq_len": 4096, "schedule": "ring", "of_alone": 0.9, "heads": 2}
    failed = {"seq_len": 4096, "error": "rank 0: out of memory"}
    write(tmp_path / "scaling_4x.json", {"ranks": 4, "rows": [ring, failed]})
    steps = {"gpus": 4, "steps": [{"step": 2, "step_seconds": 2.5, "mfu": 0.3}]}
    write(tmp_path / "step_4x_a.json", {"ranks": 4, "runs": {"a": steps}})
    lines = many_gpus.tables(tmp_path).splitlines()
    assert "| 4096 | 4 | ring | 1 | 0.9 |  |" in lines
    assert "| 4096 | 4 |  |  |  | rank 0: out of memory |" in lines
    assert "| run | step | ranks | step_seconds | mfu |" in lines
    assert "| a | 2 | 4 | 2.5 | 0.3 |" in lines
