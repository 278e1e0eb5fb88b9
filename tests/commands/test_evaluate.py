"""titan-sparse evaluate: from a run's checkpoint and its export, dense and as trained, on one rank and on two."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import tiny_config, train, write_texts
from titan_sparse.commands.evaluate import main, parse
from titan_sparse.config import save

ROOT = Path(__file__).parents[2]
WORDS = ["--lengths", "440", "--samples", "3", "--buckets", "4"]
NEEDLES = ["--depths", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A float32 run of the flavour debug, which other processes also know, with a checkpoint after two steps."""
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder / "texts")
    config = tiny_config(
        folder,
        "run",
        model__flavour="debug",
        training__steps=2,
        training__dtype="float32",
        checkpoint__enable=True,
        optimizer__lr=0.05,
    )
    train(config)
    save(config, config.training.output_dir)
    return folder


def _words(folder: Path, out: str, *words: str) -> list[str]:
    return [
        "--config",
        str(folder / "run/config.toml"),
        "--checkpoint",
        str(folder / "run"),
        *WORDS,
        *words,
        "--out",
        str(folder / out),
    ]


def _results(folder: Path, out: str) -> dict:
    return json.loads((folder / out / "results.json").read_text())


@pytest.fixture(scope="module")
def one(folder) -> dict:
    assert main(_words(folder, "one", *NEEDLES)) == 0
    return _results(folder, "one")


def test_results_of_a_run(folder, one):
    assert (
        one["about"]["checkpoint"].endswith("run/checkpoint/step-2")
        and one["about"]["pattern"] == "vertical_slash"
    )
    (position,) = one["position"]
    assert (
        position["length"] == 440
        and position["tokens"] == sum(part["tokens"] for part in position["buckets"]) > 300
    )
    assert [(cell["depth"], cell["samples"]) for cell in one["needle"]["cells"]] == [
        (0.0, 3),
        (1.0, 3),
    ]
    assert {path.name for path in (folder / "one").iterdir()} >= {
        "results.json",
        "position.csv",
        "needle.csv",
    }
    with open(folder / "one/position.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows if row["loss"]] == [
        part["loss"] for part in position["buckets"] if part["tokens"]
    ]


def test_dense_and_generated(folder, one):
    # As in the config.toml of a run over several ranks: what says how they share a sequence is no obstacle on one.
    several = [
        "--attention.schedule",
        "group_cast",
        "--attention.overlap_stages",
        "3",
        "--attention.layout",
        "balanced",
        "--parallelism.cp_intra",
        "8",
    ]
    assert (
        main(
            _words(
                folder,
                "dense",
                *several,
                "--attention",
                "dense",
                "--tasks",
                "position,needle",
                "--depths",
                "1",
                "--samples",
                "1",
                "--answers",
                "generated",
            )
        )
        == 0
    )
    dense = _results(folder, "dense")
    # The documents are shorter than both lengths: the windows are the same, but for their number.
    assert (
        dense["about"]["pattern"] == "dense"
        and abs(dense["position"][0]["loss"] / one["position"][0]["loss"] - 1) > 1e-7
    )
    (cell,) = dense["needle"]["cells"]
    assert (cell["length"], cell["samples"]) == (440, 1)
    # It was generated: there is no loss of the answer's tokens.
    assert "loss" not in cell


def _evaluate(words: list[str]) -> None:
    assert main(words) == 0


def _check_two_ranks(one: dict, two: dict) -> None:
    assert two["position"][0]["loss"] == pytest.approx(one["position"][0]["loss"], rel=1e-5)
    for ours, theirs in zip(two["needle"]["cells"], one["needle"]["cells"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_two_ranks_that_share_a_sequence_find_the_same(folder, one):
    words = [
        "--parallelism.cp",
        "2",
        "--attention.layout",
        "balanced",
        "--attention.schedule",
        "group_cast",
        "--attention.overlap_stages",
        "1",
    ]
    run_processes(2, _evaluate, _words(folder, "two", *NEEDLES, *words))
    _check_two_ranks(one, _results(folder, "two"))


def test_two_ranks_write_what_one_writes(folder):
    words = [*NEEDLES, "--answers", "generated"]
    assert main(_words(folder, "one_writes", *words)) == 0
    run_processes(2, _evaluate, _words(folder, "two_write", *words, "--parallelism.cp", "2"))
    texts = []
    for out in ("one_writes", "two_write"):
        records = _results(folder, out)["needle"]["records"]
        texts.append([record["prediction"] for record in records])
    assert texts[0] == texts[1] and len(texts[0]) == 6


@pytest.mark.parametrize(
    "words, reason",
    [
        (
            ["--data.min_document_length", "9999"],
            "no document has data.min_document_length = 9999 tokens",
        ),
        (["--lengths", "200"], "a needle and its question do not fit in 200 tokens; write"),
        (
            ["--model.layers", "5"],
            "has no layers.4.input_layernorm.weight, the model of --config has [128]",
        ),
        (
            ["--model.layers", "1"],
            "has [128] layers.1.input_layernorm.weight, the model of --config has none",
        ),
        (
            ["--model.vocab_size", "300"],
            "has [320, 128] embed_tokens.weight, the model of --config has [300, 128]",
        ),
    ],
)
def test_what_does_not_fit_a_run_is_refused_before_any_process_group(folder, capsys, words, reason):
    if dist.is_initialized():
        dist.destroy_process_group()
    assert main(_words(folder, "none", *words)) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # after the progress of reading texts
    assert reason in error and error.startswith("error: ") and not dist.is_initialized()


@pytest.mark.slow
def test_from_the_command_line(folder, one):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "titan_sparse",
        "evaluate",
    ]
    result = subprocess.run(
        command + _words(folder, "torchrun", *NEEDLES, "--parallelism.cp", "2"),
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    _check_two_ranks(one, _results(folder, "torchrun"))


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--tasks", "needles"], "--tasks needles is not one of position, needle."),
        (
            ["--tasks", "ruler"],
            "lm_eval --model titan_sparse --tasks ruler --model_args checkpoint=",
        ),
        (["--lengths", "4kb"], '--lengths = "4kb" are no lengths'),
        (["--stride", "500"], r"--stride 500 is not in [0, 440]"),
        (["--training.sede", "1"], "training.sede"),
        (["--tasks", "needle"], "--buckets would be ignored with --tasks needle"),
        (
            ["--tasks", "position", "--answers", "generated"],
            "--answers would be ignored with --tasks position",
        ),
        (["--dry-run"], "flags of train.py would be ignored"),
        (
            ["--data.source", "a:1, b:1"],
            'is a mixture, but evaluation reads one source; write one of its parts, such as data.source = "a"',
        ),
        ([], "holds no complete checkpoint"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path, capsys, words, reason):
    path = tmp_path / "config.toml"
    path.write_text('[training]\ndevice = "cpu"\n')
    assert main(["--config", str(path), "--checkpoint", str(tmp_path), *WORDS, *words]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("trained", "ranks", "shared"), [(2, 1, 1), (8, 4, 4), (8, 8, 8), (2, 6, 2), (3, 4, 1)]
)
def test_ranks_of_this_launch_take_the_place_of_training_s(
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
