"""scripts.study: the toy from text to report, stopped and gone on;
configurations; what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from scripts.benchmarks import plots
from scripts.study import __main__ as study
from scripts.study import real_model
from scripts.study.report import comparison_table, comparisons
from scripts.study.settings import (
    DENSE,
    SIZES,
    SPARSE,
    START,
    TOY,
    Study,
    causal_share,
    evaluation_configuration,
    runs,
    training_configuration,
)
from titan_sparse.training.checkpoint.folders import newest_checkpoint
from titan_sparse.training.metrics_output import read_metrics

CHOSEN = (DENSE, SPARSE, "window")


def answers(out: Path, weights: str, mode: str, question: str) -> dict:
    path = out / f"evaluation/{weights}--{mode}/{question}.json"
    return json.loads(path.read_text())["answers"]


def report_of(out: Path) -> dict:
    return json.loads((out / "report/results.json").read_text())


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """Text; some steps of the dense run, until the time is over; then all of three runs."""
    out = tmp_path_factory.mktemp("study")
    words = ["--toy", "--out", str(out)]
    assert study.main([*words, "--parts", "text"]) == 0
    assert study.main([*words, "--parts", DENSE, "--minutes", "0.003"]) == study.MORE_TO_DO
    stopped = newest_checkpoint(str(out / DENSE))
    assert stopped is None or int(stopped.rpartition("-")[2]) < TOY.steps
    assert study.main([*words, "--parts", ",".join((START, *CHOSEN))]) == 0
    return out


@pytest.mark.slow
def test_evaluations_are_of_the_weights_and_the_attention_that_they_name(toy):
    found = {path.name for path in (toy / "evaluation").iterdir()}
    expected = {"start--dense", "dense--dense", f"dense--{SPARSE}", "window--window"}
    assert found == expected | {f"{SPARSE}--dense", f"{SPARSE}--{SPARSE}", "window--dense"}

    def loss(weights: str, mode: str) -> float:
        return answers(toy, weights, mode, "position")["losses"]["prose"]["loss"]

    # Trained weights are better; one set of weights in two attentions differs, but not by much.
    assert loss(DENSE, DENSE) < loss(START, DENSE) - 0.005
    for weights in (SPARSE, "window"):
        assert 1e-7 < abs(loss(weights, weights) - loss(weights, DENSE)) < 0.1
    seen = answers(toy, SPARSE, SPARSE, "position")["attention"]["code"]
    assert 0 < seen["density"] < 1 and 0 < seen["recall"] < 1
    assert answers(toy, SPARSE, DENSE, "position")["attention"]["code"]["density"] == 1
    cells = answers(toy, DENSE, DENSE, "needle_forced")["cells"]
    places = {(cell["length"], cell["depth"]) for cell in cells}
    assert places == {(512, 0.0), (512, 1.0), (1024, 0.0), (1024, 1.0)}


@pytest.mark.slow
def test_report_says_what_was_logged(toy):
    found = report_of(toy)
    assert {"command", "commit", "date", "gpu", "versions"} <= found.keys()
    sparse = read_metrics(toy / SPARSE)
    run = found["runs"][SPARSE]
    # Step 1, and every second.
    assert len(run["recall"]) == 3
    recall = {str(step): line["recall"] for step, line in sparse.items() if "recall" in line}
    assert run["recall"] == recall
    densities = [line["density"] for line in sparse.values()]
    assert run["mean_density"] == pytest.approx(sum(densities) / len(densities))
    assert run["times_read"] == TOY.steps * TOY.context / found["text"]["train"]["tokens"]
    # Of steps beyond the last, which are neither logged nor saved.
    step_seconds = json.loads((toy / f"steps/{SPARSE}.json").read_text())
    assert step_seconds > 0 and max(sparse) == TOY.steps
    assert newest_checkpoint(str(toy / SPARSE)).endswith(f"step-{TOY.steps}")
    assert run["seconds"] == [step_seconds * step for step in sparse]
    text = (toy / "report/tables.md").read_text()
    assert f" | {run['final_loss']:.4f} |" in text
    assert "± " not in text, "one seed has no spread"
    window = found["runs"]["window"]
    assert window["mean_density"] == pytest.approx(causal_share(TOY, "window"))
    assert window["recall"] == {} and window["mean_recall"] is None


def test_folders_and_options_that_are_refused(tmp_path, capsys):
    new = str(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")

    def refused(*words: str) -> str:
        assert study.main([*words]) == 2
        return capsys.readouterr().err

    assert "holds something else" in refused("--toy", "--out", str(tmp_path))
    error = refused("--toy", "--out", new, "--model", str(tmp_path / "none"))
    assert "none has no config.json; write a folder that has" in error
    assert "dense needs the part text" in refused("--toy", "--out", new, "--parts", DENSE)
    with pytest.raises(SystemExit):
        study.main(["--parts", "sparse"])
    assert "--parts sparse is unknown; write some of text,start,dense," in capsys.readouterr().err
    error = refused("--short", "--out", new)
    assert "holds a study of the size toy, not short" in error


def test_options_hold_for_all_runs(tmp_path, toy_model):
    words = ["--short", "--out", str(tmp_path), "--model", str(toy_model)]
    chosen = ["--activation_checkpoint.mode=full", "--training.loss_chunk_tokens", "4096"]
    _, here = study.parse([*words, *chosen])
    plain = Study(here.size, here.folder, here.model)
    for run in runs(here.size).values():
        config = training_configuration(here, run, 9)
        assert config.training.loss_chunk_tokens == 4096
        assert config.activation_checkpoint.mode == "full"
        config.training.loss_chunk_tokens = 8192
        config.activation_checkpoint.mode = "none"
        assert config == training_configuration(plain, run, 9)
    # A folder of other options is another study.
    study.claim(here)
    with pytest.raises(ValueError, match="holds a study of the size short --activation_check"):
        study.check_folder(plain)


@pytest.mark.parametrize("parts", [[], ["--parts", "text"]], ids=["all parts", "text"])
@pytest.mark.parametrize("key", ["training.seq_len", "attention.pattern", "model.rope_factor", "a"])
def test_options_are_refused_before_anything_is_made(toy_model, tmp_path, capsys, key, parts):
    words = ["--short", "--out", str(tmp_path), "--model", str(toy_model), *parts]
    assert study.main([*words, f"--{key}=5"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    expected = "unknown key a;" if key == "a" else f"the study itself sets {key}; leave it out"
    assert expected in line
    assert not list(tmp_path.iterdir())


def test_a_study_is_claimed_once(toy_model, tmp_path):
    _, here = study.parse(["--toy", "--out", str(tmp_path), "--model", str(toy_model)])
    study.claim(here)
    written = here.claim_file.stat().st_mtime_ns
    study.check_folder(here)
    study.claim(here)
    assert here.claim_file.stat().st_mtime_ns == written


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    real_model.write_toy_model(folder)
    return folder


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_configurations_differ_in_attention_and_order_alone(size, tmp_path, toy_model):
    here = Study(size, tmp_path, toy_model)
    every = runs(size)
    for method in (DENSE, SPARSE):
        assert sorted(run.seed for run in every.values() if run.method == method) == [0, 1, 2]
    dense = training_configuration(here, every[DENSE], size.steps)
    assert dense.training.seq_len == size.context
    assert dense.model.rope_factor * dense.model.rope_original_length == size.context
    for run in every.values():
        config = training_configuration(here, run, size.steps)
        assert (config.attention == dense.attention) == (run.method == DENSE)
        assert config.training.seed == run.seed
        same = dataclasses.replace(
            config.training, output_dir=dense.training.output_dir, seed=dense.training.seed
        )
        assert dataclasses.replace(config, attention=dense.attention, training=same) == dense
        # The attention of an evaluation is that of training.
        assert evaluation_configuration(here, run.method).attention == config.attention


def row(method: str, seed: int, loss: float, needles: float, mode: str = "") -> dict:
    scores = {"loss": loss, "needle forced": needles}
    return {"method": method, "mode": mode or method, "seed": seed, "scores": scores}


def test_comparisons_are_differences_on_the_same_data():
    rows = [row(START, 0, 9.0, 0.0, DENSE)]
    for seed, noise in enumerate((-0.01, 0.0, 0.01)):
        rows.append(row(DENSE, seed, 1 + 20 * noise, 90.0))
        # The loss: small beside what lies between seeds, but the same for each. Needles: not.
        rows.append(row(SPARSE, seed, 1.1 + 21 * noise, 89.5 + 100 * noise))
        rows.append(row("window", seed, 1.0 + 21 * noise, 80.0))
    # Two measures, and one seed of another attention.
    rows.append(row("window", 0, 99.0, 80.0, DENSE))
    found = {
        (one["method"], one["mode"], one["against"], one["measure"]): one
        for one in comparisons(rows)
    }
    loss = found[SPARSE, SPARSE, DENSE, "loss"]
    assert loss["worse"] == pytest.approx([0.09, 0.1, 0.11]) and loss["is_noise"] is False
    needles = found[SPARSE, SPARSE, DENSE, "needle forced"]
    assert needles["worse"] == pytest.approx([1.5, 0.5, -0.5]) and needles["is_noise"] is True
    # A lower loss than that of the default is negative.
    against = found["window", "window", SPARSE, "loss"]
    assert against["worse"] == pytest.approx([-0.1] * 3) and against["is_noise"] is False
    assert found["window", DENSE, DENSE, "loss"]["is_noise"] is None
    assert (DENSE, DENSE, DENSE, "loss") not in found
    assert found[START, DENSE, DENSE, "loss"]["worse"] == pytest.approx([8.2])
    text = comparison_table({"comparisons": list(found.values())})
    assert f"| {SPARSE} | {SPARSE} | 0.1 ± 0.01, sure |  | 0.5 ± 1, noise |  |  |  |" in text
    assert "| window | dense | 98.2 |  | 10 | 98.11 |  | 8.5 |" in text


def test_equal_time(tmp_path):
    """Methods have the steps that fit into the seconds of the dense ones, and
    held-out loss on the way."""
    out = tmp_path / "equal"
    words = ["--toy", "--equal-time", "--out", str(out), "--parts", f"text,{DENSE},{SPARSE}"]
    (out / "steps").mkdir(parents=True)
    (out / "study.json").write_text('{"size": "toy, equal time"}')
    for method, seconds in ((DENSE, 3.0), (SPARSE, 2.0)):
        (out / f"steps/{method}.json").write_text(str(seconds))
    assert study.main(words) == 0
    found = report_of(out)
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
    for against in ("seconds", "tokens"):
        picture = tmp_path / f"{against}.png"
        words = [str(out / "report/results.json"), "--out", str(picture), "--against", against]
        assert plots.main(words) == 0 and picture.stat().st_size > 5000


def test_a_band_holds_the_curves_of_all_seeds():
    runs_of = {}
    for seed, losses in enumerate(([3.0, 2.0], [3.4, 1.8])):
        points = [{"step": step, "loss": {"code": loss}} for step, loss in zip((5, 9), losses)]
        run = {"method": DENSE, "seed": seed, "step_seconds": 2.0, "held_out": points}
        runs_of[f"dense_seed{seed}"] = run
    found = {"model": "a model", "lengths": [512, 1024], "runs": runs_of}
    [axes] = plots.equal_time_figure([found], [DENSE], "seconds").axes
    assert axes.get_title() == "a model, 1,024 tokens, 2 seeds"
    [line] = axes.lines
    assert line.get_xydata().tolist() == [[10.0, pytest.approx(3.2)], [18.0, pytest.approx(1.9)]]
    [band] = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(10.0, 3.0), (10.0, 3.4), (18.0, 1.8), (18.0, 2.0)}
