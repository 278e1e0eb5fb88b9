"""The study's results, of what is done so far: OUT/report/results.json and tables.md."""

import argparse
import json
import math
from statistics import fmean, stdev
from typing import Any

from scripts.benchmarks.provenance import provenance
from scripts.study.settings import (
    DENSE,
    SPARSE,
    START,
    Run,
    Study,
    causal_share,
    evaluations,
    folder_of,
    is_done,
    read_json,
    runs,
)
from titan_sparse.data.shards import write_json
from titan_sparse.training.metrics import json_ready
from titan_sparse.training.metrics_output import read_metrics

STUDENT_95 = {2: 12.71, 3: 4.303}
"""A mean of so many values this many standard errors away from 0 is more than noise: Student's t
for a confidence of 95 %."""
BASELINES = (DENSE, SPARSE)
"""What every method is compared with, each read by itself."""
COMPARED = {
    "loss": "loss",
    "loss, names, far": "loss of far names",
    "needle forced": "needles lost",
}
"""Measures that a table compares, and how it names them."""


def report(study: Study, options: argparse.Namespace) -> None:
    """Write OUT/report. options: of the command line."""
    done = [run for run in runs(study.size).values() if is_done(study, run)]
    rows = evaluation_results(study)
    if not done and not rows:
        return
    out = study.folder / "report"
    found = provenance(options, study.size.common["training.device"]) | {
        "size": study.title,
        "model": study.model.name,
        "lengths": list(study.size.lengths),
        "text": read_json(study.text / "text.json"),
        "runs": {run.name: run_results(study, run) for run in done},
        "evaluations": rows,
        "comparisons": comparisons(rows),
    }
    write_json(out / "results.json", json_ready(found))
    (out / "tables.md").write_text(tables(found), encoding="utf-8")
    print(tables(found))
    print(f"wrote {out}", flush=True)


def run_results(study: Study, run: Run) -> dict[str, Any]:
    """The results of a finished run: its curves by step, and its numbers in the table.

    Density is the share of causal pairs, also of a window. Recall is by logged step, empty where
    nothing is chosen. seconds: of training since the start, without compilation and without the
    recording of attention. times_read: how often the run reads each token of the text.
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
    path = study.held_out(run.name)
    points = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    # Of a step that was repeated after a stop the last.
    held_out = {point["step"]: point for point in map(json.loads, points)}
    text = read_json(study.text / "text.json")
    times_read = lines[-1]["tokens_seen"] / text["train"]["tokens"]
    last_tenth = loss[-max(1, len(loss) // 10) :]
    mean_recall = fmean(recall.values()) if recall else None
    return {
        "method": run.method,
        "seed": run.seed,
        "steps": [line["step"] for line in lines],
        "loss": loss,
        "density": density,
        "recall": recall,
        "seconds": [step_seconds * line["step"] for line in lines],
        "step_seconds": step_seconds,
        "times_read": times_read,
        "final_loss": fmean(last_tenth),
        "mean_density": fmean(density),
        "mean_recall": mean_recall,
        "tokens_per_second": study.size.context / step_seconds,
        "peak_gib": lines[-1]["memory_gib"],
        "held_out": list(held_out.values()),
    }


def evaluation_results(study: Study) -> list[dict[str, Any]]:
    """A row for each pair of weights and attention that has answered anything, ordered by part.

    scores: {measure: value}, see scores_of(). attention: density and recall.
    """
    every = runs(study.size)
    rows = []
    for evaluation in [one for part in evaluations(study.size).values() for one in part]:
        files = sorted(folder_of(study, evaluation).glob("*.json"))
        answers = {path.stem: read_json(path)["answers"] for path in files}
        if not answers:
            continue
        run = every.get(evaluation.weights)
        position = answers.get("position", {"losses": {}, "attention": {}})
        rows.append(
            {
                **evaluation._asdict(),
                "method": run.method if run else START,
                "seed": run.seed if run else 0,
                "attention": _attention(study, evaluation.mode, position["attention"]),
                "scores": scores_of(answers),
                "position": position["losses"],
            }
        )
    return rows


def _attention(study: Study, mode: str, kinds: dict[str, Any]) -> dict[str, float | None]:
    """Density and recall, means over kinds of text. Recall only where keys are chosen."""
    if not kinds:
        return {"density": None, "recall": None}
    recall = None
    if mode not in (DENSE, "window"):
        recall = fmean(kind["recall"] for kind in kinds.values())
    density = fmean(kind["density"] for kind in kinds.values())
    density *= causal_share(study.size, mode)
    return {"density": density, "recall": recall}


def scores_of(answers: dict[str, Any]) -> dict[str, float]:
    """Each number by what it measures.

    "loss", the mean over kinds, "loss, KIND" and "loss, KIND, last positions" (natural log); in
    percent "needle forced", the mean over lengths, and "needle forced, LENGTH". "loss, names,
    DISTANCE": of names in code, see name_losses(). Forced: the share of
    the answer's tokens that are the most likely. Their text would not do: a model that repeats each
    token of the answer that it reads writes the answer too.
    """
    scores = {}
    by_kind = answers.get("position", {}).get("losses", {})
    if by_kind:
        scores["loss"] = fmean(losses["loss"] for losses in by_kind.values())
    for kind, losses in by_kind.items():
        scores[f"loss, {kind}"] = losses["loss"]
        scores[f"loss, {kind}, last positions"] = losses["buckets"][-1]["loss"]
    cells = answers.get("needle_forced", {}).get("cells", [])
    if cells:
        scores["needle forced"] = 100 * fmean(cell["correct"] for cell in cells)
    for length in sorted({cell["length"] for cell in cells}):
        correct = [cell["correct"] for cell in cells if cell["length"] == length]
        scores[f"needle forced, {length}"] = 100 * fmean(correct)
    for distance, found in answers.get("names", {}).get("distances", {}).items():
        if found["loss"] is not None:
            scores[f"loss, names, {distance}"] = found["loss"]
    return scores


def comparisons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each method, read by itself and by others, against each baseline read by itself, by measure.

    By seed: runs of one seed have the same order of data, so that differences are far smaller than
    those between seeds. worse: the differences, positive where the method is worse. is_noise:
    whether their mean is 0 with a confidence of 95 %, None with one seed.
    """
    sides: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in rows:
        sides.setdefault((row["method"], row["mode"]), {})[row["seed"]] = row["scores"]
    found = []
    for (method, mode), of_method in sides.items():
        for against in BASELINES:
            baseline = sides.get((against, against), {})
            if (method, mode) == (against, against):
                continue
            seeds = sorted(of_method.keys() & baseline.keys())
            for measure in dict.fromkeys(name for seed in seeds for name in of_method[seed]):
                # A later seed may not have answered everything yet.
                known = [
                    seed for seed in seeds if measure in of_method[seed].keys() & baseline[seed]
                ]
                sign = 1 if measure.startswith("loss") else -1
                worse = [
                    sign * (of_method[seed][measure] - baseline[seed][measure]) for seed in known
                ]
                if worse:
                    names = {"method": method, "mode": mode, "against": against}
                    tested = {"worse": worse, "is_noise": is_noise(worse)}
                    found.append({**names, "measure": measure, **tested})
    return found


def is_noise(values: list[float]) -> bool | None:
    """True if the mean of a few values is 0 by Student's t; None for one value."""
    if len(values) == 1:
        return None
    error = stdev(values) / math.sqrt(len(values))
    return abs(fmean(values)) <= STUDENT_95[len(values)] * error


def tables(found: dict[str, Any]) -> str:
    parts = [comparison_table(found), training_table(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_table(found: dict[str, Any]) -> str:
    """A row for each method and attention that reads it, against both baselines."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    columns = [f"{name} against {against}" for against in BASELINES for name in COMPARED.values()]
    for one in found["comparisons"]:
        if one["measure"] in COMPARED:
            cells = rows.setdefault((one["method"], one["mode"]), dict.fromkeys(columns, ""))
            column = f"{COMPARED[one['measure']]} against {one['against']}"
            cells[column] = f"{fmean(one['worse']):.4g}"
            if one["is_noise"] is not None:
                word = "noise" if one["is_noise"] else "sure"
                cells[column] += f" ± {stdev(one['worse']):.2g}, {word}"
    caption = (
        f"Differences to {DENSE} weights read densely, and to {SPARSE} weights read by {SPARSE}: "
        "held-out loss, loss of names in code that were last seen far back, and points of needles "
        "lost at all lengths. Negative is better. Mean and "
        "standard deviation over seeds of runs on the same data. Sure or noise: a t-test at 95 %. "
        "Without a word: one seed, not tested."
    )
    lines = [[*names, *cells.values()] for names, cells in rows.items()]
    return _markdown(caption, ["trained", "read by", *columns], lines)


def training_table(found: dict[str, Any]) -> str:
    columns = ["run", "steps", "seconds", "times read", "loss", "density", "recall"]
    rows = []
    for name, run in found["runs"].items():
        cells = [name, str(run["steps"][-1]), f"{run['seconds'][-1]:.0f}"]
        cells += [f"{run['times_read']:.2f}", f"{run['final_loss']:.4f}"]
        cells += [_percent(run["mean_density"]), _percent(run["mean_recall"])]
        rows.append([*cells, f"{run['tokens_per_second']:,.0f}", f"{run['peak_gib']:.1f}"])
    caption = (
        f"Training on {found['text']['train']['tokens']:,} tokens. Times read: above 1, the run has "
        "seen some text more than once. Loss is the mean over the last tenth of the steps. Density "
        "and recall are means over all steps."
    )
    return _markdown(caption, [*columns, "tokens/s", "peak GiB"], rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _markdown(caption: str, columns: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows]]
    return caption + "\n\n" + "\n".join(lines)
