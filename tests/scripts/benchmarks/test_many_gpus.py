"""All tables by one command: what is run, left and failed, words for GPUs, tables."""

import json
import subprocess
import sys
import time

import pytest

from scripts.benchmarks import context_parallel, many_gpus
from scripts.benchmarks.harness import write
from tests.faults.jobs import SETTINGS, words_of
from tests.faults.soak import ON_GPU
from titan_sparse.config import load_and_check

WRITES = "import json, sys; json.dump({'rows': [{'ms': 1}]}, open(sys.argv[1], 'w'))"


@pytest.mark.slow
def test_toy_runs(tmp_path):
    words = ["--device", "cpu", "--toy", "--out", str(tmp_path), "--parts", "1", "3"]
    assert many_gpus.main([*words, "--only", "scaling_2x", "nodes_4x", "step_2x"]) == 0
    result = many_gpus.read(tmp_path, "scaling_2x_1024_eager")
    assert result["complete"] and result["ranks"] == 2
    assert [row["schedule"] for row in result["rows"]] == ["alone", "all_gather", "ring"]
    [run] = many_gpus.read(tmp_path, "step_2x_toy")["runs"].values()
    assert [step["step"] for step in run["steps"]] == [1, 2]
    text = (tmp_path / "tables.md").read_text()
    assert "* nodes_4x_1024: needs 4 GPUs, found 2" in text
    assert "| 1024 | 2 | eager | all_gather |" in text and "| step_2x_toy | 2 | 2 |" in text


class Planned(many_gpus.Run):
    def command(self, out, names):
        return [sys.executable, "-c", self.module, str(out / f"{names[0]}.json")]


def planned(name, program, ranks=1, seconds=1):
    return Planned(1, name, ranks, seconds, program, {name: []})


def drive(monkeypatch, out, plan, *words):
    monkeypatch.setattr(many_gpus, "runs", lambda gpus, toy: plan)
    return many_gpus.main(["--device", "cpu", "--toy", "--out", str(out), *words])


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    plan = [planned("bad_1x", f"{WRITES}; sys.exit('no memory')"), planned("good_1x", WRITES)]
    assert drive(monkeypatch, tmp_path, plan) == 1
    bad = many_gpus.read(tmp_path, "bad_1x")
    assert bad["error"] == "status 1: no memory" and bad["rows"] == [{"ms": 1}]
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
    monkeypatch.setattr(many_gpus, "versions", lambda: {"flash-attn-4": None})
    assert drive(monkeypatch, tmp_path, plan, "--seconds", "30") == many_gpus.LEFT
    assert many_gpus.read(tmp_path, "long_1x") == {}
    flex = many_gpus.read(tmp_path, "scaling_1x_flex")
    assert flex["not_run"] == "flash-attn-4 is not installed" and "complete" not in flex
    text = (tmp_path / "tables.md").read_text()
    assert "* scaling_4x: needs 4 GPUs, found 2" in text


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_words_for_gpus_are_taken(gpus):
    found = many_gpus.runs(gpus, toy=False)
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


def test_tables_have_the_goals(tmp_path):
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "seq_len": 64, "backend": "triton"}
    ring = times | {"schedule": "ring", "of_alone": 0.9, "visited_tflops": 360}
    failed = {"case": "scaling", "error": "rank 0: out of memory"}
    write(tmp_path / "scaling_4x.json", {"ranks": 4, "rows": [ring, failed]})
    steps = {"gpus": 4, "steps": [{"step": 2, "step_seconds": 2.5, "mfu": 0.3}]}
    write(tmp_path / "step_4x_a.json", {"ranks": 4, "runs": {"a": steps}})
    text = many_gpus.tables(tmp_path)
    assert "| 64 | 4 | triton | ring | 1.0 + 2.0 | 360 | 0.9 | 0.88 |" in text
    assert "| a | 4 | 2 | 2.5 |  | 0.3 |" in text
    assert "* scaling_4x: rank 0: out of memory" in text and "459 / 360" in text
    assert json.loads((tmp_path / "step_4x_a.json").read_text())["ranks"] == 4
