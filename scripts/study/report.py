"""The study's results, of what is done so far: OUT/report/results.json, tables.md and pictures."""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance
from scripts.compare_runs import differences
from scripts.study.runs import (
    DENSE,
    SPARSE,
    START,
    STEP_SECONDS,
    Evaluation,
    Run,
    Study,
    causal_share,
    cost,
    evaluations,
    is_done,
    runs,
)
from scripts.study.tables import tables
from titan_sparse.evaluation.pictures import has_matplotlib
from titan_sparse.training.metrics import json_ready
from titan_sparse.training.metrics_file import read_metrics

STUDENT_95 = {2: 12.71, 3: 4.303}
"""A mean of so many values this many standard errors away from 0 is more than noise: Student's t
for a confidence of 95 %."""


def report(study: Study, options: argparse.Namespace) -> None:
    """Write OUT/report. options: of the command line."""
    done = [run for run in runs(study.size).values() if is_done(study, run.name)]
    rows = evaluation_results(study)
    if not done and not rows:
        return
    out = study.folder / "report"
    out.mkdir(exist_ok=True)
    found = provenance(options, study.size.common["training.device"]) | {
        "size": study.size.name,
        "lengths": list(study.size.asked.lengths),
        "text": _read_json(study.text / "text.json"),
        "seconds": read_seconds(study.folder),
        "runs": {run.name: run_results(study, run) for run in done},
        "evaluations": rows,
        "costs": costs(rows),
    }
    found["differences"] = loss_differences(study, done)
    text = json.dumps(json_ready(found), indent=1)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    (out / "tables.md").write_text(tables(found), encoding="utf-8")
    print(tables(found))
    if has_matplotlib():
        from scripts.study import pictures

        pictures.draw(out, found)
    else:
        print('no pictures: they need pip install -e ".[eval]"')
    print(f"wrote {out}", flush=True)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_seconds(folder: Path) -> dict[str, float]:
    """What each part took, over all calls."""
    return {path.stem: _read_json(path) for path in sorted((folder / "seconds").glob("*.json"))}


def run_results(study: Study, run: Run) -> dict[str, Any]:
    """Of a finished run: its curves by step, and what stands in the table.

    Shares are of 1. Density is the share of causal pairs, also of a window. Recall and capped are
    by logged step, empty where nothing is chosen. seconds: of training since the start, without
    compilation and without the recording of attention.
    """
    metrics = read_metrics(study.folder / run.name)
    lines = [metrics[step] for step in sorted(metrics)]
    share = causal_share(study.size, run.method)
    density = [share * line["density"] for line in lines]
    step_seconds = read_step_seconds(study, run)
    # What a window leaves out it does not count: its recall would say nothing.
    chooses = run.method not in (DENSE, "window")
    recall, capped = {}, {}
    for line in lines:
        if chooses and "recall" in line:
            recall[line["step"]] = line["recall"]
        if chooses and "capped" in line:
            capped[line["step"]] = line["capped"]
    spent = cost(study)
    last = max(1, len(lines) // 10)
    return {
        "method": run.method,
        "seed": run.seed,
        "steps": [line["step"] for line in lines],
        "loss": [math.nan if line["loss"] is None else line["loss"] for line in lines],
        "density": density,
        "recall": recall,
        "capped": capped,
        "seconds": [step_seconds * line["step"] for line in lines],
        "step_seconds": step_seconds,
        "logged_step_seconds": statistics.median(line["step_seconds"] for line in lines),
        "final_loss": statistics.fmean(line["loss"] or math.nan for line in lines[-last:]),
        "mean_density": statistics.fmean(density),
        "mean_recall": statistics.fmean(recall.values()) if recall else None,
        "mean_capped": statistics.fmean(capped.values()) if capped else None,
        "tokens_per_second": study.size.text.context / step_seconds,
        "peak_gib": lines[-1]["memory_gib"],
        "pflop": (spent.linear + spent.attention * statistics.fmean(density)) / 1e15,
        "by_layer": {
            kind: by_layer(study.folder / run.name / "tensorboard", kind)
            for kind in ("density", "recall")
        },
    }


def read_step_seconds(study: Study, run: Run) -> float:
    """Of a step that is not logged, of the method's first run; nan where its end was cut off."""
    path = study.folder / run.method / STEP_SECONDS
    return _read_json(path) if path.is_file() else math.nan


def by_layer(events: Path, kind: str) -> list[dict[int, float]]:
    """What TensorBoard has of `kind`, density or recall: {step: mean over heads} for each layer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(events), size_guidance={"scalars": 0})
    board.Reload()
    prefix = f"attention_{kind}_by_layer/"
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith(prefix)]
    tags.sort(key=lambda tag: int(tag.removeprefix(prefix)))
    return [{event.step: event.value for event in board.Scalars(tag)} for tag in tags]


def loss_differences(study: Study, done: list[Run]) -> dict[str, dict[str, Any]]:
    """Of each run to the dense one with the same data: the share of the loss, signed, at each step.

    final: the mean over the last tenth of the steps.
    """
    dense = {run.seed: run.name for run in done if run.method == DENSE}
    found = {}
    for run in done:
        if run.method == DENSE or run.seed not in dense:
            continue
        steps = differences(study.folder / dense[run.seed], study.folder / run.name)
        shares = [(step.b - step.a) / step.a for step in steps]
        found[run.name] = {
            "steps": [step.step for step in steps],
            "shares": shares,
            "final": statistics.fmean(shares[-max(1, len(shares) // 10) :]),
        }
    return found


def evaluation_results(study: Study) -> list[dict[str, Any]]:
    """A row for each pair of weights and attention that has answered anything, ordered by part.

    scores: {measure: value}, see scores_of(). attention: density, recall and capped by kind of text.
    """
    # Not at the top, as it loads the trainer.
    from scripts.study.work import folder_of

    every = runs(study.size)
    rows = []
    for evaluation in [one for part in evaluations(study.size).values() for one in part]:
        answers = {}
        seconds = 0.0
        for path in sorted(folder_of(study, evaluation).glob("*.json")):
            content = _read_json(path)
            answers[path.stem] = content["answers"]
            seconds += content["seconds"]
        if not answers:
            continue
        run = every.get(evaluation.weights)
        rows.append(
            {
                **evaluation._asdict(),
                "method": run.method if run else START,
                "seed": run.seed if run else 0,
                "seconds": seconds,
                "attention": _attention(study, evaluation, answers),
                "scores": scores_of(answers),
                "position": answers.get("position", {}).get("losses", {}),
                "needle": answers.get("needle_generated", {}).get("cells", []),
            }
        )
    return rows


def _attention(
    study: Study, evaluation: Evaluation, answers: dict[str, Any]
) -> dict[str, float | None]:
    """Density, recall and capped, means over kinds of text; recall only where keys are chosen."""
    kinds = list(answers.get("position", {}).get("attention", {}).values())
    found: dict[str, float | None] = {"density": None, "recall": None, "capped": None}
    if not kinds:
        return found
    is_dense = evaluation.mode not in runs(study.size) or evaluation.mode == DENSE
    share = 1.0 if is_dense else causal_share(study.size, evaluation.mode)
    found["density"] = share * statistics.fmean(kind["density"] for kind in kinds)
    for name in ("recall", "capped"):
        if not is_dense and evaluation.mode != "window" and name in kinds[0]:
            found[name] = statistics.fmean(kind[name] for kind in kinds)
    return found


def scores_of(answers: dict[str, Any]) -> dict[str, float]:
    """Each number by what it measures.

    "loss, KIND" and "loss, KIND, last positions" (natural log); in percent "needle forced, LENGTH",
    "needle generated, LENGTH", and of RULER "TASK forced, LENGTH" and "TASK generated, LENGTH".
    Forced: the share of the answer's tokens that are the most likely. Their text would not do: a
    model that repeats each token of the answer that it reads writes the answer too.
    """
    scores = {}
    for kind, losses in answers.get("position", {}).get("losses", {}).items():
        scores[f"loss, {kind}"] = losses["loss"]
        scores[f"loss, {kind}, last positions"] = losses["buckets"][-1]["loss"]
    for way, kind in (("forced", "correct"), ("generated", "score")):
        by_length: dict[int, list[float]] = {}
        for cell in answers.get(f"needle_{way}", {}).get("cells", []):
            by_length.setdefault(cell["length"], []).append(100 * cell[kind])
        for length, values in sorted(by_length.items()):
            scores[f"needle {way}, {length}"] = statistics.fmean(values)
        for name in sorted(answers):
            if name.startswith(f"ruler_{way}"):
                for cell in answers[name]["cells"]:
                    # RULER's score is in percent already.
                    value = cell["score"] if kind == "score" else 100 * cell[kind]
                    scores[f"{cell['task']} {way}, {cell['length']}"] = value
    return scores


def costs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where sparse costs something: for each measure DENSE weights read densely, SPARSE ones sparsely.

    By seed: runs of one seed have the same data, so that differences are far smaller than what
    lies between seeds. worse: the differences, positive where sparse is worse. is_noise: whether
    their mean is 0 with a confidence of 95 %, None with one seed.
    """
    sides = []
    for method in (DENSE, SPARSE):
        side = [row for row in rows if row["method"] == row["mode"] == method]
        sides.append({row["seed"]: row["scores"] for row in side})
    of_dense, of_sparse = sides
    seeds = sorted(of_dense.keys() & of_sparse.keys())
    if not seeds:
        return []
    found = []
    for measure in of_dense[seeds[0]]:
        # A later seed may not have answered everything yet.
        known = [seed for seed in seeds if measure in of_dense[seed].keys() & of_sparse[seed]]
        if not known:
            continue
        dense = [of_dense[seed][measure] for seed in known]
        sparse = [of_sparse[seed][measure] for seed in known]
        sign = 1 if measure.startswith("loss") else -1
        worse = [sign * (b - a) for a, b in zip(dense, sparse)]
        values = {"dense": dense, "sparse": sparse, "worse": worse}
        found.append({"measure": measure, **values, "is_noise": is_noise(worse)})
    return found


def is_noise(values: list[float]) -> bool | None:
    """Whether the mean of a few values is 0 by Student's t; None for one value."""
    if len(values) == 1:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return abs(statistics.fmean(values)) <= STUDENT_95[len(values)] * error
