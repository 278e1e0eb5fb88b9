"""The study's results as tables of markdown."""

import statistics
from typing import Any

from scripts.study.runs import DENSE, SPARSE


def tables(found: dict[str, Any]) -> str:
    """All tables of a results.json."""
    minutes = []
    for name, seconds in found["seconds"].items():
        minutes.append(f"{name} {seconds / 60:.1f}")
    in_all = sum(found["seconds"].values()) / 60
    parts = (
        training_table(found),
        evaluation_table(found),
        costs_table(found),
        statement(found),
        f"Text to train on: {found['text']['train']['tokens']:,} tokens. "
        f"Minutes by part: {', '.join(minutes)}, in all {in_all:.1f}.",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def training_table(found: dict[str, Any]) -> str:
    """A row for each run."""
    columns = ["run", "loss", "to dense", "density", "recall", "capped", "tokens/s", "minutes"]
    columns += ["PFLOP", "peak GiB"]
    rows = []
    for name, run in found["runs"].items():
        difference = found["differences"].get(name)
        rows.append(
            [
                name,
                f"{run['final_loss']:.4f}",
                f"{100 * difference['final']:+.2f} %" if difference else "",
                _percent(run["mean_density"]),
                _percent(run["mean_recall"]),
                _percent(run["mean_capped"]),
                f"{run['tokens_per_second']:,.0f}",
                f"{run['seconds'][-1] / 60:.2f}",
                f"{run['pflop']:.3g}",
                f"{run['peak_gib']:.1f}",
            ]
        )
    if not rows:
        return ""
    return (
        "Training. Loss, and its difference to the dense run on the same data, are means over the "
        "last tenth of the steps; density, recall and capped over all.\n\n"
        + _markdown(columns, rows)
    )


def evaluation_table(found: dict[str, Any]) -> str:
    """A row for each pair of weights and attention; a column holds a task's scores at all lengths."""
    rows = []
    names = list(dict.fromkeys(name for row in found["evaluations"] for name in row["scores"]))
    losses = [name for name in names if name.startswith("loss")]
    tasks = list(dict.fromkeys(name.rpartition(", ")[0] for name in names if name not in losses))
    for row in found["evaluations"]:
        scores = row["scores"]
        cells = [row["weights"], row["mode"]]
        cells += [_percent(row["attention"][name]) for name in ("density", "recall", "capped")]
        cells += [f"{scores[name]:.4f}" if name in scores else "" for name in losses]
        for task in tasks:
            values = [scores.get(f"{task}, {length}") for length in found["lengths"]]
            cells.append(" / ".join("-" if value is None else f"{value:.0f}" for value in values))
        rows.append(cells)
    if not rows:
        return ""
    lengths = " / ".join(f"{length:,}" for length in found["lengths"])
    columns = ["trained", "inference", "density", "recall", "capped", *losses, *tasks]
    return (
        f"Evaluation on held-out text. Tasks, in % at {lengths} tokens: generated answers that are "
        "right; forced: tokens of the answer that are the most likely. Density, recall and capped "
        "are of the inference.\n\n" + _markdown(columns, rows)
    )


def costs_table(found: dict[str, Any]) -> str:
    """Dense against sparse over all seeds, for each measure."""
    rows = []
    for cost in found["costs"]:
        beyond = {True: "no", False: "yes", None: "one seed"}[cost["is_noise"]]
        values = [_mean_and_spread(cost[side]) for side in ("dense", "sparse", "worse")]
        rows.append([cost["measure"], *values, beyond])
    if not rows:
        return ""
    columns = ["measure", DENSE, SPARSE, "sparse is worse by", "beyond noise"]
    return (
        f"{DENSE} weights read densely against {SPARSE} weights read sparsely: mean and standard "
        "deviation over seeds. Differences are of runs on the same data. Beyond noise: 95 % sure.\n\n"
        + _markdown(columns, rows)
    )


def statement(found: dict[str, Any]) -> str:
    """Where sparse costs something, in words, with the recall that it had."""
    known = []
    for cost in found["costs"]:
        if cost["is_noise"] is not None:
            known.append((statistics.fmean(cost["worse"]), cost))
    if not known:
        return ""
    beyond = [(mean, cost) for mean, cost in known if not cost["is_noise"]]
    worse = [(mean, cost) for mean, cost in beyond if mean > 0]
    recalls = []
    for row in found["evaluations"]:
        if row["method"] == row["mode"] == SPARSE and row["attention"]["recall"] is not None:
            recalls.append(row["attention"]["recall"])
    at = f" at a recall of {100 * statistics.fmean(recalls):.1f} %" if recalls else ""
    lines = [
        f"Sparse{at}: {len(worse)} of {len(known)} measures are worse than dense beyond the noise "
        f"of seeds, {len(beyond) - len(worse)} are better."
    ]
    for mean, cost in worse:
        spread = statistics.stdev(cost["dense"])
        lines.append(
            f"* worse: {cost['measure']}, by {mean:.4g}; between seeds of dense {spread:.2g}"
        )
    if not worse:
        mean, cost = max(known, key=lambda one: one[0])
        lines.append(f"* closest to it: {cost['measure']}, by {mean:+.4g}")
    return "\n".join(lines)


def _mean_and_spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.4g}"
    return f"{mean} ± {statistics.stdev(values):.2g}" if len(values) > 1 else mean


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows]]
    return "\n".join(lines)
