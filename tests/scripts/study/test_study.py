"""scripts.study: the toy from text to report, stopped and gone on; configurations of all sizes; what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from scripts.benchmarks.provenance import problems
from scripts.study import __main__ as study
from scripts.study import text as study_text
from scripts.study.runs import FULL, PRETRAIN, SIZES, TOY, configuration, cost, methods
from titan_sparse.config import load
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.evaluation.pictures import has_matplotlib
from titan_sparse.training.checkpoint import newest_checkpoint
from titan_sparse.training.metrics_file import read_metrics

CHOSEN = "dense,vertical_slash_90"


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Text; some steps of the first run, until the time is over; then all the rest for two methods."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("study")
    words = ["--toy", "--out", str(out)]
    assert study.main([*words, "--part", "0"]) == 0
    assert study.main([*words, "--part", "1", "--minutes", "0.005"]) == study.MORE_TO_DO
    stopped = newest_checkpoint(str(out / PRETRAIN))
    assert stopped is not None and 1 <= int(stopped.rpartition("-")[2]) < TOY.pretrain_steps
    assert study.main([*words, "--methods", CHOSEN]) == 0
    return out


@pytest.mark.slow
def test_validation_holds_whole_packages_that_are_not_trained_on(toy):
    packages = {
        name: {
            path.name.split("-", 1)[1].rpartition("-")[0]
            for path in (toy / f"text/{name}_texts").iterdir()
        }
        for name in ("train", "validation")
    }
    assert (
        packages["validation"]
        and packages["train"]
        and not packages["train"] & packages["validation"]
    )
    assert packages["validation"] == set(
        json.loads((toy / "text/text.json").read_text())["held_out"]
    )


@pytest.mark.slow
def test_runs_have_the_same_weights_data_and_steps(toy):
    before, dense, sparse = (read_metrics(toy / name) for name in (PRETRAIN, *CHOSEN.split(",")))
    assert max(before) == TOY.pretrain_steps and dense.keys() == sparse.keys() == set(
        range(1, TOY.steps + 1)
    )
    assert dense[1]["loss"] < before[1]["loss"] - 0.2  # not from random weights
    assert [line["tokens_seen"] for line in dense.values()] == [
        line["tokens_seen"] for line in sparse.values()
    ]
    assert dense[1]["density"] == 1 > sparse[1]["density"]
    assert (
        0 < abs(dense[1]["loss"] - sparse[1]["loss"]) < 0.01
    )  # the same tokens, in another attention


@pytest.mark.slow
def test_evaluation_is_in_the_attention_that_its_name_says(toy):
    found = {
        path.name: load(["--config", str(path / "config.toml")])[0].attention
        for path in (toy / "evaluation").iterdir()
        if path.is_dir()
    }
    assert set(found) == {
        "pretrain--dense",
        "dense--dense",
        "dense--minference",
        "vertical_slash_90--dense",
        "vertical_slash_90--vertical_slash_90",
    }
    assert found["vertical_slash_90--dense"].pattern == "dense"
    assert found["vertical_slash_90--vertical_slash_90"].vertical_slash.recall == 0.9
    assert found["dense--minference"].vertical_slash.min_columns == TOY.fixed_columns
    results = {
        name: json.loads((toy / "evaluation" / name / "results.json").read_text()) for name in found
    }
    losses = {name: part["position"][0]["loss"] for name, part in results.items()}
    assert losses["dense--dense"] < losses["pretrain--dense"] - 0.01
    # The same weights, and text, in two attentions.
    assert 1e-7 < abs(losses["dense--dense"] - losses["dense--minference"]) < 0.01
    assert all(
        len(part["needle"]["records"]) == TOY.depths * TOY.samples for part in results.values()
    )


@pytest.mark.slow
def test_report_says_what_the_runs_have_logged(toy):
    found = json.loads((toy / "report/results.json").read_text())
    assert problems(found | {"commit": 40 * "0"}) == []
    dense, sparse = (read_metrics(toy / name) for name in CHOSEN.split(","))
    shares = [(sparse[step]["loss"] - dense[step]["loss"]) / dense[step]["loss"] for step in dense]
    part, run = (
        found["differences"]["vertical_slash_90 to dense"],
        found["runs"]["vertical_slash_90"],
    )
    assert part["shares"] == pytest.approx(shares) and part["final"] == pytest.approx(shares[-1])
    density = sum(line["density"] for line in sparse.values()) / len(sparse)
    assert run["pflop_attention"] == pytest.approx(density * cost(TOY, "dense").attention / 1e15)
    assert len(run["by_layer"]["density"]) == TOY.model["layers"]
    for step, line in sparse.items():
        layers = [layer[str(step)] for layer in run["by_layer"]["density"]]
        assert sum(layers) / len(layers) == pytest.approx(line["density"], rel=1e-5)
    text = (toy / "report/tables.md").read_text()
    assert (
        f"| vertical_slash_90 | {sparse[TOY.steps]['loss']:.4f} |" in text and "within 1 %" in text
    )
    pictures = {path.stem for path in (toy / "report").glob("*.png")}
    assert pictures == ({"loss", "sparsity", "position", "needle"} if has_matplotlib() else set())


@pytest.mark.slow
def test_what_is_there_is_not_done_again(toy):
    def state() -> dict[str, int]:
        return {
            str(path): path.stat().st_mtime_ns
            for folder in (PRETRAIN, "dense", "evaluation", "text/train")
            for path in (toy / folder).rglob("*")
            if path.is_file()
        }

    before = state()
    study.do_part(TOY, toy, PRETRAIN, study.Clock(1))
    study.do_part(TOY, toy, "dense", study.Clock(1))
    assert state() == before and len(before) > 10


@pytest.mark.slow
def test_a_folder_of_another_size_or_of_something_else_is_refused(toy, tmp_path, capsys):
    assert study.main(["--short", "--out", str(toy)]) == 2
    assert "holds a study of the size toy, not short" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    assert study.main(["--toy", "--out", str(tmp_path)]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert study.main(["--toy", "--out", str(tmp_path / "new"), "--part", "2"]) == 2
    assert "needs part 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--part", "20"], "--part 20 is none"),
        (["--methods", "sparse"], "--methods sparse is unknown"),
        (["--minutes", "2"], "--minutes 2 is too little"),
        (["--part", "2", "--methods", "moba"], "which --methods leaves out"),
    ],
)
def test_options_that_cannot_be_are_refused(words, reason, capsys):
    with pytest.raises(SystemExit) as refused:
        study.main(words)
    assert refused.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_configurations_differ_in_attention_alone(size, tmp_path):
    dense, *others = (configuration(size, tmp_path, name) for name in methods(size))
    assert (
        dense.training.seq_len
        == size.context
        == round(dense.model.rope_factor * dense.model.rope_original_length)
    )
    for config in others:
        assert config.attention != dense.attention
        training = dataclasses.replace(config.training, output_dir=dense.training.output_dir)
        assert dataclasses.replace(config, attention=dense.attention, training=training) == dense
    start = configuration(size, tmp_path, PRETRAIN)
    assert (
        start.model.rope_scaling == "flavour"
        and start.training.seq_len == size.short
        and start.data == dense.data
    )


def test_cost_counts_parameters_and_pairs():
    # 6 layers of Qwen2.5-0.5B: q and o 896 x 896, k and v 896 x 128, three of 896 x 4864; the head 896 x 16384.
    weights = 6 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) + 896 * 16384
    spent = cost(FULL, "dense")
    assert spent.tokens == FULL.steps * 65536 and spent.linear == pytest.approx(
        6 * weights * spent.tokens
    )
    assert spent.attention == pytest.approx(FULL.steps * 12 * 64 * 6 * 14 * 65536 * 65537 / 2)
    assert cost(FULL, PRETRAIN).tokens == FULL.pretrain_steps * 64 * 4096


def test_documents_are_joined_and_none_is_lost():
    texts = [letter * length for letter, length in zip("abcdef", (3, 4, 9, 1, 1, 1))]
    assert list(study_text.documents(texts, 6)) == ["aaabbbb", "ccccccccc", "def"]


def test_text_that_was_stopped_goes_on(tmp_path, monkeypatch):
    packages = {
        f"p{number}": [f"def f{number}_{file}(): return {file}\n" * 20 for file in range(3)]
        for number in range(12)
    }
    monkeypatch.setattr(study_text, "installed_packages", lambda most: packages)
    about = study_text.prepare_text(tmp_path, 300, 64, 1)
    for name in ("text.json", "validation/meta.json", "train/shard_00000.json"):
        (tmp_path / name).unlink()
    assert (
        study_text.prepare_text(tmp_path, 300, 64, 1) == about and about["train"]["tokens"] > 1000
    )


def test_held_out_packages_are_neither_small_nor_large():
    packages = {"large": ["x" * 50_000], "small": ["x" * 10]} | {
        f"p{number}": ["x" * 900] for number in range(20)
    }
    chosen = study_text.choose_held_out(packages, 100)
    assert len(chosen) == 3 and not chosen & {"large", "small"}  # 2,700 of 68,010
    with pytest.raises(ValueError, match="none of the 2 packages"):
        study_text.choose_held_out({"large": ["x" * 50_000], "small": ["x"]}, 100)


def test_tokenizer_takes_digits_one_by_one(tmp_path):
    text = "for i in range(1234567): print('é')\n" * 40
    study_text.train_tokenizer(iter([text]), 300, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode("range 1234567")
    assert [tokenizer.decode([token]) for token in ids[-7:]] == list(
        "1234567"
    ) and tokenizer.vocab_size <= 300
    assert (
        tokenizer.decode(tokenizer.encode(text)) == text
        and tokenizer.end_of_document != tokenizer.padding
    )


@pytest.mark.slow
def test_all_methods(tmp_path):
    assert study.main(["--toy", "--out", str(tmp_path / "all")]) == 0
    found = json.loads((tmp_path / "all/report/results.json").read_text())
    assert set(found["runs"]) == {PRETRAIN, *methods(TOY)}
    assert (
        max(map(abs, found["differences"]["xattention to vertical_slash_xattention"]["shares"]))
        < 1e-6
    )
    pairs = [(row["weights"], row["mode"]) for row in found["evaluations"]]
    assert pairs == [
        (name, mode)
        for name, modes in study.evaluations(TOY).items()
        for mode in sorted(modes, key=list(methods(TOY)).index)
    ]
    assert all(
        0 < run["final_density"] < 1
        for name, run in found["runs"].items()
        if name not in (PRETRAIN, "dense")
    )
