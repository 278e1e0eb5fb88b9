"""scripts/evaluate.py: from a run's checkpoint and from its export, dense and as trained, on one rank and two."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.evaluate import main
from tests.distributed import run_processes
from tests.runs import tiny_config, train, write_texts
from titan_sparse.config import save

ROOT = Path(__file__).parent.parent
WORDS = ["--lengths", "440", "--depths", "2", "--samples", "3", "--buckets", "4"]


def _train(folder) -> None:
    """The flavour debug, which another process knows too, in float32."""
    config = tiny_config(folder, "run", model__flavour="debug", training__steps=2, training__dtype="float32",
                         checkpoint__enable=True, optimizer__lr=0.05)
    train(config)
    save(config, config.training.output_dir)


def _evaluate(folder: Path, out: str, words: list[str], ranks: int = 1) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = (command if ranks > 1 else [sys.executable, "-m"]) + ["scripts.evaluate"]
    command += ["--config", str(folder / "run/config.toml"), *WORDS, *words, "--out", str(folder / out)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / out / "results.json").read_text())


def test_results_of_a_run(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(1, _train, tmp_path)
    one = _evaluate(tmp_path, "one", ["--checkpoint", str(tmp_path / "run")])
    assert one["about"]["checkpoint"].endswith("run/checkpoint/step-2") and one["about"]["pattern"] == "vertical_slash"
    (position,) = one["position"]
    assert position["length"] == 440 and position["tokens"] == sum(part["tokens"] for part in position["buckets"]) > 300
    assert [(cell["depth"], cell["samples"]) for cell in one["needle"]["cells"]] == [(0.0, 3), (1.0, 3)]
    files = {path.name for path in (tmp_path / "one").iterdir()}
    assert files >= {"results.json", "position.csv", "needle.csv"}
    with open(tmp_path / "one/position.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows if row["loss"]] == [
        part["loss"] for part in position["buckets"] if part["tokens"]]

    two = _evaluate(tmp_path, "two", ["--checkpoint", str(tmp_path / "run"), "--parallelism.cp", "2"], ranks=2)
    # The documents are shorter than both lengths: the windows are the same.
    dense = _evaluate(tmp_path, "dense", ["--checkpoint", str(tmp_path / "run/checkpoint/step-2"), "--attention", "dense",
                                          "--tasks", "position,niah_multikey_3", "--lengths", "1700", "--answers", "generated"])
    assert two["position"][0]["loss"] == pytest.approx(position["loss"], rel=1e-5)
    assert dense["about"]["pattern"] == "dense" and abs(dense["position"][0]["loss"] / position["loss"] - 1) > 1e-7
    (row,) = dense["ruler"]["scores"]
    assert (row["task"], row["length"], row["samples"]) == ("niah_multikey_3", 1700, 3) and 0 <= row["score"] <= 100
    assert (tmp_path / "dense/ruler.csv").is_file() and len(dense["ruler"]["records"]) == 3
    for ours, theirs in zip(two["needle"]["cells"], one["needle"]["cells"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize("words, reason", [
    (["--tasks", "needles"], "--tasks needles is unknown; write some of position, needle"),
    (["--lengths", "4k"], "--lengths 4k are no positive integers"),
    (["--stride", "500"], r"--stride 500 is not in [0, 440]"),
    (["--answers", "generated", "--parallelism.cp", "2"], "--answers generated needs parallelism.cp = 1, not 2"),
    (["--training.sede", "1"], "training.sede"),
    ([], "holds no complete checkpoint"),
])
def test_what_cannot_be_evaluated_is_refused(tmp_path, capsys, words, reason):
    path = tmp_path / "config.toml"
    path.write_text('[training]\ndevice = "cpu"\n')
    assert main(["--config", str(path), "--checkpoint", str(tmp_path), *WORDS, *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("error: ") and error.count("\n") == 1
