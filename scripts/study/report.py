"""The study's results, of what is done so far: OUT/report/results.json and tables.md."""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance
from scripts.study.settings import (
    DENSE,
    HELD_OUT,
    SPARSE,
    START,
    Evaluation,
    Run,
    Study,
    causal_share,
    evaluations,
    folder_of,
    is_done,
    runs,
)
from titan_sparse.training.metrics import json_ready
from titan_sparse.training.metrics_output import read_metrics

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
    results = {run.name: run_results(study, run) for run in done}
    minutes = sorted((study.folder / "seconds").glob("*.json"))
    found = provenance(options, study.size.common["training.device"]) | {
        "size": study.size.title,
        "lengths": list(study.size.asked.lengths),
        "text": _read_json(study.text / "text.json"),
        "seconds": {path.stem: _read_json(path) for path in minutes},
        "runs": results,
        "evaluations": rows,
        "costs": costs(rows),
        "equal_time": equal_time(results, rows) if study.size.equal_time else [],
    }
    text = json.dumps(json_ready(found), indent=1)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    (out / "tables.md").write_text(tables(found), encoding="utf-8")
    print(tables(found))
    print(f"wrote {out}", flush=True)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def run_results(study: Study, run: Run) -> dict[str, Any]:
    """Of a finished run: its curves by step, and what stands in the table.

    Density is the share of causal pairs, also of a window. Recall is by logged step, empty where
    nothing is chosen. seconds: of training since the start, without compilation and without the
    recording of attention.
    """
    metrics = read_metrics(study.folder / run.name)
    lines = [metrics[step] for step in sorted(metrics)]
    share = causal_share(study.size, run.method)
    density = [share * line["density"] for line in lines]
    loss = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    # What a window leaves out it does not count: its recall would say nothing.
    chooses = run.method not in (DENSE, "window")
    recall = {line["step"]: line["recall"] for line in lines if chooses and "recall" in line}
    step_seconds = study.step_seconds(run.method)
    path = study.folder / run.name / HELD_OUT
    points = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {
        "method": run.method,
        "seed": run.seed,
        "steps": [line["step"] for line in lines],
        "loss": loss,
        "density": density,
        "recall": recall,
        "seconds": [step_seconds * line["step"] for line in lines],
        "step_seconds": step_seconds,
        "final_loss": _last_tenth(loss),
        "mean_density": statistics.fmean(density),
        "mean_recall": statistics.fmean(recall.values()) if recall else None,
        "tokens_per_second": study.size.text.context / step_seconds,
        "peak_gib": lines[-1]["memory_gib"],
        # Of a step that was repeated after a stop the last.
        "held_out": list({point["step"]: point for point in map(json.loads, points)}.values()),
    }


def _last_tenth(values: list[float]) -> float:
    """The mean of the last tenth of them."""
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def evaluation_results(study: Study) -> list[dict[str, Any]]:
    """A row for each pair of weights and attention that has answered anything, ordered by part.

    scores: {measure: value}, see scores_of(). attention: density and recall.
    """
    every = runs(study.size)
    rows = []
    for evaluation in [one for part in evaluations(study.size).values() for one in part]:
        contents = {
            path.stem: _read_json(path)
            for path in sorted(folder_of(study, evaluation).glob("*.json"))
        }
        if not contents:
            continue
        answers = {name: content["answers"] for name, content in contents.items()}
        run = every.get(evaluation.weights)
        rows.append(
            {
                **evaluation._asdict(),
                "method": run.method if run else START,
                "seed": run.seed if run else 0,
                "seconds": sum(content["seconds"] for content in contents.values()),
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
    """Density and recall, means over kinds of text; recall only where keys are chosen."""
    kinds = list(answers.get("position", {}).get("attention", {}).values())
    if not kinds:
        return {"density": None, "recall": None}
    is_dense = evaluation.mode not in runs(study.size) or evaluation.mode == DENSE
    share = 1.0 if is_dense else causal_share(study.size, evaluation.mode)
    recall = None
    if not is_dense and evaluation.mode != "window":
        recall = statistics.fmean(kind["recall"] for kind in kinds)
    return {
        "density": share * statistics.fmean(kind["density"] for kind in kinds),
        "recall": recall,
    }


def scores_of(answers: dict[str, Any]) -> dict[str, float]:
    """Each number by what it measures.

    "loss", the mean over kinds, "loss, KIND" and "loss, KIND, last positions" (natural log); in
    percent "needle forced", the mean over lengths, "needle forced, LENGTH", and the same generated.
    Forced: the share of the answer's tokens that are the most likely. Their text would not do: a
    model that repeats each token of the answer that it reads writes the answer too.
    """
    scores = {}
    by_kind = answers.get("position", {}).get("losses", {})
    if by_kind:
        scores["loss"] = statistics.fmean(losses["loss"] for losses in by_kind.values())
    for kind, losses in by_kind.items():
        scores[f"loss, {kind}"] = losses["loss"]
        scores[f"loss, {kind}, last positions"] = losses["buckets"][-1]["loss"]
    for way, kind in (("forced", "correct"), ("generated", "score")):
        by_length: dict[int, list[float]] = {}
        cells = answers.get(f"needle_{way}", {}).get("cells", [])
        if cells:
            scores[f"needle {way}"] = 100 * statistics.fmean(cell[kind] for cell in cells)
        for cell in cells:
            by_length.setdefault(cell["length"], []).append(100 * cell[kind])
        for length, values in sorted(by_length.items()):
            scores[f"needle {way}, {length}"] = statistics.fmean(values)
    return scores


def costs(
    rows: list[dict[str, Any]], method: str = SPARSE, mode: str = SPARSE
) -> list[dict[str, Any]]:
    """Where a method costs quality: for each measure DENSE weights read densely, and the method's
    read in the attention `mode`.

    By seed: runs of one seed have the same order of data, so that differences are far smaller than
    those between seeds. worse: the differences, positive where the method is worse. is_noise:
    whether their mean is 0 with a confidence of 95 %, None with one seed.
    """
    sides = []
    for weights, read in ((DENSE, DENSE), (method, mode)):
        side = [row for row in rows if (row["method"], row["mode"]) == (weights, read)]
        sides.append({row["seed"]: row["scores"] for row in side})
    of_dense, of_method = sides
    found = []
    for measure in dict.fromkeys(measure for scores in of_dense.values() for measure in scores):
        # A later seed may not have answered everything yet.
        known = [
            seed
            for seed in sorted(of_dense.keys() & of_method.keys())
            if measure in of_dense[seed].keys() & of_method[seed].keys()
        ]
        if not known:
            continue
        dense = [of_dense[seed][measure] for seed in known]
        sparse = [of_method[seed][measure] for seed in known]
        sign = 1 if measure.startswith("loss") else -1
        worse = [sign * (b - a) for a, b in zip(dense, sparse)]
        values = {"dense": dense, "sparse": sparse, "worse": worse}
        found.append({"measure": measure, **values, "is_noise": is_noise(worse)})
    return found


def equal_time(results: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method: what the time was enough for, and costs() as trained and read densely."""
    found = []
    for run in results.values():
        method = run["method"]
        if method in [row["method"] for row in found]:
            continue
        read = [row for row in rows if row["method"] == row["mode"] == method]
        density = [row["attention"]["density"] for row in read]
        found.append(
            {
                "method": method,
                "seconds": run["seconds"][-1],
                "steps": run["steps"][-1],
                "density": density[0] if density else None,
                "as_trained": costs(rows, method, method),
                "read_densely": costs(rows, method, DENSE),
            }
        )
    return found


def is_noise(values: list[float]) -> bool | None:
    """Whether the mean of a few values is 0 by Student's t; None for one value."""
    if len(values) == 1:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return abs(statistics.fmean(values)) <= STUDENT_95[len(values)] * error


def tables(found: dict[str, Any]) -> str:
    """All tables of a results.json, in markdown."""
    minutes = [f"{name} {seconds / 60:.1f}" for name, seconds in found["seconds"].items()]
    parts = (
        equal_time_table(found),
        training_table(found),
        evaluation_table(found),
        costs_table(found),
        f"Text to train on: {found['text']['train']['tokens']:,} tokens. "
        f"Minutes by part: {', '.join(minutes)}.",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def equal_time_table(found: dict[str, Any]) -> str:
    """Empty for a study of equal steps."""
    rows = []
    for row in found["equal_time"]:
        cells = [row["method"], f"{row['seconds']:.0f}", str(row["steps"])]
        cells.append(_percent(row["density"]))
        for side in ("as_trained", "read_densely"):
            for measure in ("loss", "needle forced"):
                of_measure = [cost for cost in row[side] if cost["measure"] == measure]
                cells += [_mean_and_spread(cost["worse"]) for cost in of_measure] or [""]
        rows.append(cells)
    caption = (
        "Equal time. Held-out loss, and points of needles lost (all lengths), compared with dense "
        "weights read densely: negative is better. Mean and standard deviation over seeds."
    )
    columns = ["method", "seconds", "steps", "density", "loss above dense", "needles lost"]
    return _markdown(caption, [*columns, "loss, read densely", "needles, read densely"], rows)


def training_table(found: dict[str, Any]) -> str:
    columns = ["run", "loss", "density", "recall", "tokens/s", "minutes", "peak GiB"]
    rows = []
    for name, run in found["runs"].items():
        rows.append(
            [
                name,
                f"{run['final_loss']:.4f}",
                _percent(run["mean_density"]),
                _percent(run["mean_recall"]),
                f"{run['tokens_per_second']:,.0f}",
                f"{run['seconds'][-1] / 60:.2f}",
                f"{run['peak_gib']:.1f}",
            ]
        )
    caption = (
        "Training. Loss is the mean over the last tenth of the steps; density and recall over all."
    )
    return _markdown(caption, columns, rows)


def evaluation_table(found: dict[str, Any]) -> str:
    """A row for each pair of weights and attention; a column holds a task's scores at all lengths."""
    names = list(dict.fromkeys(name for row in found["evaluations"] for name in row["scores"]))
    losses = [name for name in names if name.startswith("loss")]
    tasks = _tasks(names)
    rows = []
    for row in found["evaluations"]:
        scores = row["scores"]
        cells = [row["weights"], row["mode"]]
        cells += [_percent(row["attention"][name]) for name in ("density", "recall")]
        cells += [f"{scores[name]:.4f}" if name in scores else "" for name in losses]
        for task in tasks:
            values = [scores.get(f"{task}, {length}") for length in found["lengths"]]
            cells.append(" / ".join("-" if value is None else f"{value:.0f}" for value in values))
        rows.append(cells)
    lengths = " / ".join(f"{length:,}" for length in found["lengths"])
    caption = (
        f"Evaluation on held-out text. Tasks, in % at {lengths} tokens: generated answers that are "
        "right; forced: tokens of the answer that are the most likely."
    )
    return _markdown(caption, ["trained", "inference", "density", "recall", *losses, *tasks], rows)


def _tasks(names: list[str]) -> list[str]:
    """Tasks among the names of scores, which have a score at each length."""
    tasks = [name.rpartition(", ")[0] for name in names if not name.startswith("loss")]
    return list(dict.fromkeys(task for task in tasks if task))


def costs_table(found: dict[str, Any]) -> str:
    rows = []
    for measured in found["costs"]:
        beyond = {True: "no", False: "yes", None: "one seed"}[measured["is_noise"]]
        values = [_mean_and_spread(measured[side]) for side in ("dense", "sparse", "worse")]
        rows.append([measured["measure"], *values, beyond])
    caption = (
        f"{DENSE} weights read densely against {SPARSE} weights read sparsely: mean and standard "
        "deviation over seeds. Differences are of runs on the same data. Beyond noise: 95 % sure."
    )
    columns = ["measure", DENSE, SPARSE, "sparse is worse by", "beyond noise"]
    return _markdown(caption, columns, rows)


def _mean_and_spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.4g}"
    return f"{mean} ± {statistics.stdev(values):.2g}" if len(values) > 1 else mean


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _markdown(caption: str, columns: list[str], rows: list[list[str]]) -> str:
    """Empty without rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows]]
    return caption + "\n\n" + "\n".join(lines)
