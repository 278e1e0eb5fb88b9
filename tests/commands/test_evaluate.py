"""titan-sparse evaluate: from a run's checkpoint, dense and as trained, on one rank and on two."""

import csv
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runs import tiny_config
from titan_sparse.commands.evaluate import main, parse
from titan_sparse.config import save

SMALL = "--lengths 440 --samples 3 --buckets 4"


def _words(folder: Path, out: str, words: str) -> list[str]:
    run = folder / "run"
    of_run = ["--config", str(run / "config.toml"), "--checkpoint", str(run)]
    return [*of_run, *SMALL.split(), *words.split(), "--out", str(folder / out)]


def _results(folder: Path, out: str) -> dict:
    return json.loads((folder / out / "results.json").read_text())


@pytest.fixture(scope="module")
def one(folder) -> dict:
    assert main(_words(folder, "one", "--depths 2")) == 0
    return _results(folder, "one")


def test_results_of_a_run(folder, one):
    assert one["about"]["checkpoint"].endswith("run/checkpoint/step-2")
    assert one["about"]["pattern"] == "vertical_slash"
    (position,) = one["position"]
    buckets = position["buckets"]
    assert position["length"] == 440
    assert position["tokens"] == sum(part["tokens"] for part in buckets) > 300
    cells = [(cell["depth"], cell["samples"]) for cell in one["needle"]["cells"]]
    assert cells == [(0.0, 3), (1.0, 3)]
    names = {path.name for path in (folder / "one").iterdir()}
    assert names >= {"results.json", "position.csv", "needle.csv"}
    with open(folder / "one/position.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert losses == [part["loss"] for part in buckets if part["tokens"]]


def test_dense_and_generated(folder, one):
    # As in the config.toml of a run over several ranks.
    several = "--attention.schedule group_cast --attention.overlap_stages 3 "
    several += "--attention.layout balanced --parallelism.cp_intra 8"
    words = f"{several} --attention dense --depths 1 --samples 1 --answers generated"
    assert main(_words(folder, "dense", words)) == 0
    dense = _results(folder, "dense")
    assert dense["about"]["pattern"] == "dense"
    # The documents are shorter than both lengths: the windows are the same, but for their number.
    assert abs(dense["position"][0]["loss"] / one["position"][0]["loss"] - 1) > 1e-7
    (cell,) = dense["needle"]["cells"]
    assert (cell["length"], cell["samples"]) == (440, 1)
    # It was generated: there is no loss of the answer's tokens.
    assert "loss" not in cell


def test_lengths_that_are_dense_are_named(folder, capsys):
    capsys.readouterr()
    for below, is_dense in (("440", False), ("441", True)):
        words = f"--tasks position --attention.vertical_slash.dense_below {below}"
        assert main(_words(folder, "below", words)) == 0
        assert ("--lengths 440: attention was dense, as" in capsys.readouterr().out) == is_dense


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--data.min_document_length 9999", "no document has 9999 tokens (data.min_document_len"),
        ("--lengths 200", "a needle and its question do not fit in 200 tokens; write"),
        ("--model.layers 5", "has no layers.4.input_layernorm.weight, the model of --config has ["),
    ],
)
def test_what_does_not_fit_a_run_is_refused_before_any_process_group(folder, capsys, words, reason):
    if dist.is_initialized():
        dist.destroy_process_group()
    assert main(_words(folder, "none", words)) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # after the progress of reading texts
    assert reason in error and error.startswith("error: ") and not dist.is_initialized()


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--tasks ruler", "lm_eval --model titan_sparse --tasks ruler --model_args checkpoint="),
        ("--lengths 4kb", '--lengths = "4kb" are no lengths'),
        ("--samples 0", "--samples: 0 is too small"),
        ("--buckets 441", "--buckets 441 is above 440"),
        ("--tasks needle", "--buckets would be ignored with --tasks needle; leave it out"),
        ("--tasks position --seed 1", "--seed would be ignored with --tasks position"),
        ("--dry-run", "flags of train.py would be ignored"),
        ("--data.source a:1,b:1", "is a mixture, but evaluation reads one source; write one of"),
        ("", "holds no complete checkpoint"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path, capsys, words, reason):
    path = tmp_path / "config.toml"
    path.write_text('[training]\ndevice = "cpu"\n')
    of_run = ["--config", str(path), "--checkpoint", str(tmp_path)]
    assert main([*of_run, *SMALL.split(), *words.split()]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("trained", "ranks", "shared"), [(2, 1, 1), (8, 4, 4), (2, 6, 2), (3, 4, 1)]
)
def test_ranks_of_this_launch_take_the_place_of_others(
    trained, ranks, shared, tmp_path, monkeypatch
):
    """A run over several ranks is evaluated on the ranks of this launch, which share a sequence."""
    config = tiny_config(tmp_path, "run", model__flavour="debug", parallelism__cp=trained)
    config.parallelism.dp_replicate = 3
    save(config, tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    words = ["--config", str(tmp_path / "run/config.toml"), "--checkpoint", "run"]
    args, evaluated = parse([*words, "--lengths", "128,1k"])
    assert args.lengths == [128, 1024]
    parallelism = evaluated.parallelism
    assert (parallelism.cp, parallelism.dp_replicate, parallelism.dp_shard) == (shared, 1, -1)
    if shared < trained:
        with pytest.raises(ValueError, match="does not fit"):
            parse([*words, "--lengths", "128", "--parallelism.cp", str(trained)])
