"""All tables by one command: runs over gloo, what is left and failed, words for GPUs, tables."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.benchmarks import context_parallel, masks
from scripts.benchmarks.many_gpus import __main__ as many_gpus
from scripts.benchmarks.many_gpus import parity, results, runs, step
from scripts.benchmarks.many_gpus.tables import tables
from tests.faults.jobs import SETTINGS, words_of
from tests.faults.soak import ON_GPU
from titan_sparse.config import load_and_check

PROGRAMS = {"context_parallel": context_parallel, "masks": masks}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A run that was started, and one that needs more than two processes."""
    return _toy_runs(tmp_path_factory.mktemp("toy"), "scaling_2x", "nodes_4x")


def _toy_runs(out: Path, *names: str) -> Path:
    words = ["--device", "cpu", "--toy", "--out", str(out), "--parts", "1", "3"]
    status = many_gpus.main([*words, "--only", *names])
    assert status == 0, [path.read_text()[-2000:] for path in (out / "logs").iterdir()]
    return out


def test_attention_over_two_processes(toy):
    result = results.read(toy / "scaling_2x_1024_eager.json")
    assert result["complete"] and result["ranks"] == 2 and result["gpu"] == "CPU"
    assert "-m scripts.benchmarks.context_parallel scaling --seq-len 1024" in result["command"]
    schedules = [row["schedule"] for row in result["rows"]]
    assert schedules == ["alone", "all_gather", "ring"]
    assert all(row["backend"] == "eager" and row["total_ms"] > 0 for row in result["rows"])
    ours, torchs = results.read(toy / "dense_2x_1024.json")["rows"]
    assert ours["tflops"] > 0 and "error" in torchs  # no cuDNN here


@pytest.mark.slow
def test_a_step_of_two_processes(tmp_path):
    result = results.read(_toy_runs(tmp_path, "step_2x") / "step_2x_toy.json")
    assert result["complete"] and result["expected_gib"] > 0
    assert [row["step"] for row in result["rows"]] == [1, 2]
    first, second = result["rows"]
    assert 0 < first["recall"] <= 1 and "recall" not in second
    assert second["step_seconds"] > 0 and second["tokens_seen"] == 2048
    assert result["kernel"].startswith("eager")


def test_what_needs_more_gpus_is_recorded(toy):
    result = results.read(toy / "nodes_4x_1024.json")
    assert result["not_run"] == "needs 4 GPUs, found 2" and not result.get("complete")
    text = (toy / "tables.md").read_text()
    assert "* nodes_4x_1024: needs 4 GPUs, found 2" in text
    assert "| 1024 | 2 | eager | all_gather |" in text


def test_what_is_complete_is_not_done_again(toy, capsys):
    before = (toy / "scaling_2x_1024_eager.json").stat().st_mtime_ns
    words = ["--device", "cpu", "--toy", "--out", str(toy), "--only", "scaling_2x"]
    assert many_gpus.main(words) == 0
    assert (toy / "scaling_2x_1024_eager.json").stat().st_mtime_ns == before
    assert "scaling_2x: was complete" in capsys.readouterr().out


# The driver, with programs that take no time ------------------------------------------------------

WRITES = "import json, sys; json.dump({'rows': [{'ms': 1}]}, open(sys.argv[1], 'w'))"


class Planned(runs.Run):
    """A run whose module is a Python program."""

    def command(self, out, names):
        return [sys.executable, "-c", self.module, str(out / f"{names[0]}.json")]


def planned(name, program, ranks=1, seconds=1, flash=False):
    needs_flash = frozenset([name] if flash else [])
    return Planned(1, name, ranks, seconds, program, {name: []}, needs_flash)


def drive(monkeypatch, out, plan, *words):
    monkeypatch.setattr(many_gpus, "runs", lambda gpus, toy: plan)
    return many_gpus.main(["--device", "cpu", "--toy", "--out", str(out), *words])


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    plan = [planned("bad_1x", f"{WRITES}; sys.exit('no memory')"), planned("good_1x", WRITES)]
    assert drive(monkeypatch, tmp_path, plan) == 1
    bad = results.read(tmp_path / "bad_1x.json")
    assert bad["error"] == "status 1: no memory" and bad["rows"] == [{"ms": 1}]
    assert not results.is_done(tmp_path / "bad_1x.json")
    assert results.read(tmp_path / "good_1x.json")["complete"]
    assert "* bad_1x: status 1: no memory\n" in (tmp_path / "tables.md").read_text()

    # The next call does what has failed, and nothing else.
    plan = [planned("bad_1x", WRITES), planned("good_1x", "1 / 0")]
    assert drive(monkeypatch, tmp_path, plan) == 0
    assert "error" not in results.read(tmp_path / "bad_1x.json")
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
    error = results.read(tmp_path / "slow_1x.json")["error"]
    assert error.startswith("not over after 2 s: ")
    pid = error.split()[-1]
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z")


def test_what_does_not_fit_any_more_is_left(tmp_path, monkeypatch):
    plan = [planned("long_1x", WRITES, seconds=100), planned("short_1x", WRITES)]
    assert drive(monkeypatch, tmp_path, plan, "--seconds", "30") == many_gpus.LEFT
    assert not (tmp_path / "long_1x.json").exists()
    assert results.is_done(tmp_path / "short_1x.json")
    assert drive(monkeypatch, tmp_path, plan) == 0


def test_without_flash_attn_4_its_rows_are_recorded_as_not_run(tmp_path, monkeypatch):
    plan = [planned("flex_1x", WRITES, flash=True)]
    monkeypatch.setattr(many_gpus, "has_flash", lambda: False)
    assert drive(monkeypatch, tmp_path, plan) == 0
    result = results.read(tmp_path / "flex_1x.json")
    assert result["not_run"] == "flash-attn-4 is not installed"
    monkeypatch.setattr(many_gpus, "has_flash", lambda: True)
    assert drive(monkeypatch, tmp_path, plan) == 0
    assert results.is_done(tmp_path / "flex_1x.json")


# What would run on GPUs ---------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_words_for_gpus_are_taken(gpus):
    kinds = set()
    for run in runs.runs(gpus, toy=False):
        kinds.add(run.name.partition("_")[0])
        assert run.seconds < many_gpus.LIMIT_SECONDS
        for name, words in run.files.items():
            assert f"_{run.ranks}x" in name
            if run.module == runs.ATTENTION:
                module = PROGRAMS[words[0]]
                assert module.refusal(module.parse(words[1:]), run.ranks) is None, name
            if run.module.endswith(".step"):
                _, options = step.parse([*words, "--out", "x"])
                config, _ = load_and_check(options, run.ranks, run.ranks)
                assert config.parallelism.cp == run.ranks
        if run.module == "tests.faults.soak":
            settings = SETTINGS | ON_GPU | {"parallelism.cp": run.ranks}
            load_and_check(words_of(settings), run.ranks, run.ranks)
    assert kinds >= {"scaling", "nodes", "masks", "step", "parity", "hang", "soak", "restart"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_words_of_meshes_are_taken(ranks):
    names = [mesh.name for mesh in parity.meshes(ranks)]
    assert len(set(names)) == len(names)
    for mesh in parity.meshes(ranks):
        words = [*parity.WORDS["cuda"], *parity.COMMON, *mesh.words()]
        config, _ = load_and_check(words, ranks, ranks)
        sequences = mesh.replicas * config.training.gradient_accumulation_steps
        assert mesh.replicas * config.parallelism.cp == ranks and sequences == 2
    if ranks == 8:
        assert names == ["2 x 2 x 2", "1 x 2 x 4", "1 x 1 x 8"]


def test_all_issues_are_asked_for_on_eight():
    names = [run.name for run in runs.runs(8, toy=False)]
    assert names == list(dict.fromkeys(names))
    assert sorted(runs.runs(8, toy=False), key=lambda run: run.part)[-1].part == 5
    for wanted in ("step_8x_qwen3_8b_1048576", "step_8x_qwen2_5_3b_2097152", "nodes_8x"):
        assert wanted in names


def test_parity_notices_a_run_that_differs(tmp_path):
    for name, loss in (("a", 2.0), ("b", 2.1)):
        (tmp_path / name).mkdir()
        lines = []
        for number in range(1, parity.STEPS + 1):
            value = 2.0 if number < parity.STEPS else loss
            lines.append({"step": number, "loss": value, "grad_norm": 1.0, "tokens_seen": number})
        text = "\n".join(json.dumps(line) for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text + "\n")
    mesh = parity.Mesh(1, 1, 2)
    bounds = parity.BOUNDS["cuda"]
    differs = parity.compared(mesh, tmp_path / "a", tmp_path / "b", bounds)
    assert not differs["equal"] and differs["differences"]["loss"] == pytest.approx(0.05)
    assert parity.compared(mesh, tmp_path / "a", tmp_path / "a", bounds)["equal"]


def test_tables_have_the_goals(tmp_path):
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "total_ms": 3.0}
    alone = times | {"schedule": "alone", "seq_len": 64, "backend": "triton", "visited_tflops": 400}
    ring = alone | {"schedule": "ring", "of_alone": 0.9, "visited_tflops": 360}
    results.write(tmp_path / "scaling_4x_64_triton.json", {"ranks": 4, "rows": [alone, ring]})
    double = times | {"schedule": "double_ring", "seq_len": 64, "gradient_dtype": "float32"}
    double |= {"compute_alone": times, "outer_alone": times, "total_of_limit": 1.2}
    results.write(tmp_path / "nodes_4x_64.json", {"ranks": 4, "rows": [double]})
    documents = times | {"name": "ours", "seq_len": 64, "mask": "documents", "layout": "balanced"}
    documents |= {"schedule": "group_cast", "overlap_stages": 2, "backend": "triton"}
    documents |= {"forward_tflops": 227.4, "backward_tflops": 177.1, "sent_of_needed": 1.0}
    results.write(tmp_path / "masks_4x_16.json", {"ranks": 4, "rows": [documents]})
    words = ["--config", "train_configs/a.toml", "--training.seq_len", "1000"]
    rows = [
        {"step": 1, "step_seconds": 9.0, "memory_gib": 5.0, "mfu": 0.1, "recall": 0.5},
        {"step": 2, "step_seconds": 2.0, "memory_gib": 7.0, "mfu": 0.3, "density": 0.05},
    ]
    about = {"ranks": 4, "train": words, "expected_gib": 6.5, "kernel": "triton; x", "rows": rows}
    results.write(tmp_path / "step_4x_a.json", about)
    text = tables(tmp_path)
    assert "| 64 | 4 | triton | ring | 1.0 + 2.0 | 360 | 0.900 | 0.88 |" in text
    assert "| 1.200 | 1.1 |" in text and "459 / 360" in text and "380 s" in text
    assert "| 16 | 4 | documents | balanced | group_cast, 2 stages | triton |" in text
    assert "| all | triton | 2.0 | 500 | 30.0 % | 7.0 (6.5) | 5.0 % | 0.500 |" in text
