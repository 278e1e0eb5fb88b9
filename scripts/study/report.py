"""The study's results, of what is done so far.

OUT/report/results.json, tables.md, differences.txt, and pictures.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from scripts.compare_runs import differences, table
from scripts.study.runs import PRETRAIN, Size, cost, is_done, methods
from titan_sparse.evaluation.pictures import has_matplotlib
from titan_sparse.training.metrics_file import read_metrics

BASE = "dense"
"""What the others are compared with."""
WITHIN = 0.01
"""How near its loss is near, as a share."""
TWINS = ("vertical_slash_xattention", "xattention")
"""On one GPU the same attention: what lies between them is noise."""


def report(size: Size, folder: Path, options: argparse.Namespace) -> None:
    """Write OUT/report. options: of the command line."""
    # Here, as they load torch.
    from scripts.benchmarks.provenance import provenance
    from titan_sparse.training.metrics import json_ready

    names = [name for name in [PRETRAIN, *methods(size)] if is_done(size, folder, name)]
    if not names:
        return
    out = folder / "report"
    out.mkdir(exist_ok=True)
    device = size.common["training.device"]
    found = provenance(options, device) | {
        "size": size.name,
        "text": _read_json(folder / "text/text.json"),
        "seconds": _read_json(folder / "seconds.json"),
        "runs": {name: run_results(size, folder, name) for name in names},
        "evaluations": evaluation_results(size, folder),
    }
    extensions = [name for name in methods(size) if name in names]
    found["differences"] = loss_differences(folder, extensions)
    (out / "results.json").write_text(
        json.dumps(json_ready(found), indent=1) + "\n", encoding="utf-8"
    )
    (out / "tables.md").write_text(tables(found), encoding="utf-8")
    print(tables(found))
    if has_matplotlib():
        from scripts.study import pictures as study_pictures

        study_pictures.draw(out, found)
    else:
        print('no pictures: they need pip install -e ".[eval]"')
    print(f"wrote {out}", flush=True)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def run_results(size: Size, folder: Path, name: str) -> dict[str, Any]:
    """Of a finished run: its curves by step, by layer too, and what stands in the table. Shares are of 1."""
    lines = [
        line
        | {"loss": math.nan if line["loss"] is None else line["loss"]}  # of a run that diverged
        for _, line in sorted(read_metrics(folder / name).items())
    ]
    intervals = [
        line["step"] - before for line, before in zip(lines, [0, *(line["step"] for line in lines)])
    ]
    last = lines[-max(1, len(lines) // 10) :]
    spent, density = cost(size, name), [line["density"] for line in lines]
    attention = spent.attention * sum(d * n for d, n in zip(density, intervals)) / sum(intervals)
    recalls = {line["step"]: line["recall"] for line in lines if "recall" in line}
    return {
        "steps": [line["step"] for line in lines],
        "loss": [line["loss"] for line in lines],
        "density": density,
        "recall": recalls,
        "final_loss": statistics.fmean(line["loss"] for line in last),
        "tokens": spent.tokens,
        "final_density": statistics.fmean(line["density"] for line in last),
        "final_recall": list(recalls.values())[-1] if recalls else None,
        "tokens_per_second": statistics.median(
            line["tokens_per_second_per_device"] for line in lines
        ),
        "peak_gib": lines[-1]["memory_gib"],
        "minutes": sum(line["step_seconds"] * n for line, n in zip(lines, intervals)) / 60,
        "pflop": (spent.linear + attention) / 1e15,
        "pflop_attention": attention / 1e15,
        "by_layer": {
            kind: by_layer(folder / name / "tensorboard", kind) for kind in ("density", "recall")
        },
    }


def by_layer(events: Path, kind: str) -> list[dict[int, float]]:
    """What TensorBoard has of `kind`, density or recall, means over heads: {step: value} for each layer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(events), size_guidance={"scalars": 0})
    board.Reload()
    tags = sorted(
        (tag for tag in board.Tags()["scalars"] if tag.startswith(f"attention_{kind}_by_layer/")),
        key=lambda tag: int(tag.rpartition("/")[2]),
    )
    return [{event.step: event.value for event in board.Scalars(tag)} for tag in tags]


def loss_differences(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each method to BASE, and between TWINS, by scripts.compare_runs: the share of the loss, signed, at each step,
    and its mean over the last tenth. Also as OUT/report/differences.txt."""
    pairs = [(BASE, name) for name in names if BASE in names and name != BASE]
    pairs += [TWINS] if set(TWINS) <= set(names) else []
    found, texts = {}, []
    for a, b in pairs:
        steps = differences(folder / a, folder / b)
        shares = [(step.b - step.a) / step.a for step in steps]
        found[f"{b} to {a}"] = {
            "a": a,
            "b": b,
            "steps": [step.step for step in steps],
            "shares": shares,
            "final": statistics.fmean(shares[-max(1, len(shares) // 10) :]),
        }
        texts.append(f"A = {a}, B = {b}\n{table(steps)}\n")
    (folder / "report/differences.txt").write_text("\n".join(texts), encoding="utf-8")
    return found


def evaluation_results(size: Size, folder: Path) -> list[dict[str, Any]]:
    """A row for each pair of weights and attention that has been evaluated, in the order of the methods."""
    rows = []
    order = [PRETRAIN, *methods(size)]
    for path in sorted((folder / "evaluation").glob("*/results.json")):
        results = _read_json(path)
        about, positions = results["about"], results["position"]
        rows.append(
            {
                "weights": about["weights"],
                "mode": about["mode"],
                "seconds": about["seconds"],
                "position": positions,
                "needle": results["needle"]["cells"],
                "ruler": results.get("ruler", {}).get("scores", []),
            }
        )
    return sorted(rows, key=lambda row: (order.index(row["weights"]), order.index(row["mode"])))


def tables(found: dict[str, Any]) -> str:
    """The tables as markdown."""
    minutes = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in found["seconds"].items())
    in_all = sum(found["seconds"].values()) / 60
    spent = f"Minutes by part: {minutes}, in all {in_all:.1f}."
    text = found["text"]["train"]
    parts = (
        _training_table(found),
        _evaluation_table(found),
        _findings(found),
        f"Text to train on: {text['tokens']:,} tokens. {spent}",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows]
    )


def _training_table(found: dict[str, Any]) -> str:
    rows = []
    for name, run in found["runs"].items():
        difference = found["differences"].get(f"{name} to {BASE}")
        recall = "" if run["final_recall"] is None else f"{100 * run['final_recall']:.1f} %"
        rows.append(
            [
                name,
                f"{run['final_loss']:.4f}",
                f"{100 * difference['final']:+.2f} %" if difference else "",
                f"{100 * run['final_density']:.1f} %",
                recall,
                f"{run['tokens_per_second']:,.0f}",
                f"{run['pflop']:.3g}",
                f"{run['minutes']:.1f}",
                f"{run['peak_gib']:.1f}",
            ]
        )
    return (
        "Training; loss, density and difference are means over the last tenth of the steps:\n\n"
        + _markdown(
            [
                "run",
                "loss",
                f"to {BASE}",
                "density",
                "recall",
                "tokens/s",
                "PFLOP",
                "minutes",
                "peak GiB",
            ],
            rows,
        )
    )


def _evaluation_table(found: dict[str, Any]) -> str:
    rows, columns = [], []
    for row in found["evaluations"]:
        longest = max(row["position"], key=lambda part: part["length"])
        cells = {
            f"loss at {longest['length']:,}": _loss(longest),
            "its last positions": _loss(longest["buckets"][-1]),
        }
        for length in sorted({cell["length"] for cell in row["needle"]}):
            here = [cell for cell in row["needle"] if cell["length"] == length]
            cells[f"needle {length:,}"] = (
                f"{100 * statistics.fmean(cell['score'] for cell in here):.0f} %"
            )
            cells[f"its tokens {length:,}"] = (
                f"{100 * statistics.fmean(cell['correct'] for cell in here):.0f} %"
            )
        cells |= {
            f"{score['task']} {score['length']:,}": f"{score['score']:.1f}"
            for score in row["ruler"]
        }
        columns = columns or list(cells)
        rows.append([row["weights"], row["mode"], *cells.values()])
    table = _markdown(["trained", "inference", *columns], rows)
    return f"Evaluation on held-out text; teacher-forced:\n\n{table}" if rows else ""


def _loss(part: dict[str, Any]) -> str:
    return "" if part["loss"] is None else f"{part['loss']:.4f}"


def _findings(found: dict[str, Any]) -> str:
    """What was expected, against what is."""
    lines, final = [], {name: part["final"] for name, part in found["differences"].items()}
    for name in found["runs"]:
        own, moba = final.get(f"{name} to {BASE}"), final.get(f"moba to {BASE}")
        if name.startswith("vertical_slash") and own is not None:
            near = f"{'' if abs(own) <= WITHIN else 'not '}within {100 * WITHIN:.0f} %"
            against = (
                ""
                if moba is None
                else (
                    f"; {'better' if own < moba else 'no better'} than moba ({100 * moba:+.2f} %)"
                )
            )
            lines.append(
                f"* {name}: {100 * own:+.2f} % of {BASE}'s loss at the end, {near}{against}"
            )
    twins = found["differences"].get(f"{TWINS[1]} to {TWINS[0]}")
    if twins:
        most = max(map(abs, twins["shares"]))
        lines.append(
            f"* noise: {TWINS[0]} and {TWINS[1]} are the same attention on one GPU, and differ by up to "
            f"{100 * most:.3f} % at a step, {100 * twins['final']:+.3f} % at the end"
        )
    return "\n".join(lines)
