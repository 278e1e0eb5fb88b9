"""What is read off at equal recall and at equal density, as rows and as tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scripts.study.density.oracles import value_at

AT_RECALLS = (0.8, 0.9, 0.95)
TIMED_RECALLS = (0.9, 0.95)
AT_DENSITIES = (0.05, 0.1, 0.15, 0.2)


def at_recall(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each oracle and pattern and each of AT_RECALLS, as oracles.value_at() reads it off.

    density: of one setting for all layers, where their mean recall is this. density_each_layer:
    where each layer has this recall, the mean. kernel_ms: forward + backward by backend. None where
    nothing kept so much. measured: what measure.measure() gives.
    """
    for name, points in _curves((*measured["oracles"], *measured["rows"])).items():
        recalls = [point["recall"] for point in points]
        densities = [point["density"] for point in points]
        for recall in AT_RECALLS:
            row = {
                "name": name,
                "at_recall": recall,
                "density": _rounded(value_at(recall, recalls, densities)),
                "density_each_layer": _each_layer(recall, points),
            }
            timed = [point for point in points if "kernel_ms" in point]
            if timed and recall in TIMED_RECALLS:
                row |= _times(recall, timed)
            yield row


def at_density(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each pattern and each of AT_DENSITIES, as value_within() reads it off.

    above_dense: loss with the pattern in all layers less that of dense attention. needles: as
    quality.quality() has them, where they were measured. Densities are those of the same forward.
    """
    for name, points in _curves(measured["rows"]).items():
        found = [point["in_all_layers"] for point in points]
        densities = [quality["density"] for quality in found]
        for density in AT_DENSITIES:
            row: dict[str, Any] = {"name": name, "at_density": density}
            for key in ("above_dense", "needles"):
                if key in found[0]:
                    values = [quality[key] for quality in found]
                    row[key] = _rounded(value_within(density, densities, values))
            yield row


def value_within(
    density: float, densities: Sequence[float], values: Sequence[float]
) -> float | None:
    """What a pattern gives that may compute `density`, where values[i] comes with densities[i].

    Linear between the two around it. The value of the densest setting where all compute less; None
    where all compute more.
    """
    if density < min(densities):
        return None
    order = np.argsort(densities)
    ascending = np.asarray(densities, dtype=np.float64)[order]
    values_of_them = np.asarray(values, dtype=np.float64)[order]
    return float(np.interp(density, ascending, values_of_them))


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each oracle and pattern."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        curves.setdefault(row["name"], []).append(row)
    return curves


def _each_layer(recall: float, points: list[dict[str, Any]]) -> float | None:
    """The mean over layers of what each takes for this recall; None where one never keeps it."""
    layers = len(points[0]["recall_by_layer"])
    densities = []
    for layer in range(layers):
        recalls = [point["recall_by_layer"][layer] for point in points]
        values = [point["density_by_layer"][layer] for point in points]
        densities.append(value_at(recall, recalls, values))
    return _mean(densities)


def _times(recall: float, points: list[dict[str, Any]]) -> dict[str, Any]:
    """selection_ms, and kernel_ms by backend."""
    recalls = [point["recall"] for point in points]
    selection = [point["selection_ms"] for point in points]
    by_backend = {}
    for backend in points[0]["kernel_ms"]:
        spent = [sum(point["kernel_ms"][backend].values()) for point in points]
        by_backend[backend] = _rounded(value_at(recall, recalls, spent))
    return {
        "selection_ms": _rounded(value_at(recall, recalls, selection)),
        "kernel_ms": by_backend,
    }


def means(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of at_recall(), each the mean over texts; None where one of them has None.

    Times are means over the texts that have them. texts: values of "texts" in a result, all of the
    same patterns.
    """
    rows = []
    for of_texts in zip(*(text["at_recall"] for text in texts), strict=True):
        row = {key: of_texts[0][key] for key in ("name", "at_recall")}
        for key in ("density", "density_each_layer"):
            row[key] = _mean([of_text[key] for of_text in of_texts])
        timed = [of_text for of_text in of_texts if "kernel_ms" in of_text]
        if timed:
            row["selection_ms"] = _mean([of_text["selection_ms"] for of_text in timed])
            row["kernel_ms"] = {
                backend: _mean([of_text["kernel_ms"][backend] for of_text in timed])
                for backend in timed[0]["kernel_ms"]
            }
        rows.append(row)
    return rows


def means_at_density(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of at_density(), each the mean over texts; None where one of them has None.

    texts: values of "texts" in a result, all of the same patterns. Those without these rows, which
    an older version wrote, are left out.
    """
    rows = []
    found = [text["at_density"] for text in texts if "at_density" in text]
    for of_texts in zip(*found, strict=True):
        row = {key: of_texts[0][key] for key in ("name", "at_density")}
        for key in ("above_dense", "needles"):
            if key in of_texts[0]:
                row[key] = _mean([of_text[key] for of_text in of_texts])
        rows.append(row)
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Rows of at_recall() or means() for people: densities in %, then times of the best backend."""
    width = max(len(row["name"]) for row in rows)
    heads = [f"at {recall:.2f}" for recall in AT_RECALLS]
    heads += [f"layers {recall:.2f}" for recall in AT_RECALLS]
    heads += [f"ms {recall:.2f}" for recall in TIMED_RECALLS]
    lines = [title, _line("density, %", heads, width)]
    for name in dict.fromkeys(row["name"] for row in rows):
        of_name = [row for row in rows if row["name"] == name]
        cells = [_percent(row["density"]) for row in of_name]
        cells += [_percent(row["density_each_layer"]) for row in of_name]
        cells += [_least(row["kernel_ms"]) for row in of_name if "kernel_ms" in row]
        lines.append(_line(name, cells, width))
    return "\n".join(lines)


def quality_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Rows of at_density() or means_at_density() for people: losses, then needles in %."""
    corner = "loss above dense"
    width = max(len(corner), *(len(row["name"]) for row in rows))
    heads = [f"at {density:.0%}" for density in AT_DENSITIES]
    if "needles" in rows[0]:
        heads += [f"needles {density:.0%}" for density in AT_DENSITIES]
    lines = [title, _line(corner, heads, width)]
    for name, of_name in _curves(rows).items():
        cells = [_nats(row["above_dense"]) for row in of_name]
        cells += [_percent(row["needles"]) for row in of_name if "needles" in row]
        lines.append(_line(name, cells, width))
    return "\n".join(lines)


def _line(name: str, cells: list[str], width: int) -> str:
    """Of a table whose first column is `width` wide."""
    columns = [name.ljust(width)]
    columns += [cell.rjust(11) for cell in cells]
    return "  ".join(columns)


def asked_and_kept(measured: dict[str, Any]) -> str:
    """What each pattern that is asked for a recall keeps: mean, and least and most by layer."""
    lines = []
    for row in measured["rows"]:
        # Only VerticalSlash counts caps, and only it is asked for a recall.
        is_asked = "capped" in row
        if not is_asked or row["value"] not in TIMED_RECALLS:
            continue
        by_layer = row["recall_by_layer"]
        lines.append(
            f"{row['name']}: asked {row['value']}, kept {row['recall']:.3f}, "
            f"{min(by_layer):.3f} to {max(by_layer):.3f} by layer, "
            f"worst head {row['recall_of_worst_head']:.3f}, capped {row['capped']:.1%}"
        )
    return "\n".join(lines)


def dense_lines(measured: dict[str, Any]) -> str:
    """Milliseconds of dense attention, a line each; empty where nothing was timed."""
    lines = []
    for name, spent in measured.get("dense_ms", {}).items():
        lines.append(f"dense, {name}: {sum(spent.values()):.2f} ms")
    return "\n".join(lines)


def _mean(values: list[float | None]) -> float | None:
    """None where one of them is."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return _rounded(sum(known) / len(known))


def _least(kernel_ms: dict[str, float | None]) -> str:
    """Of the best backend."""
    known = [value for value in kernel_ms.values() if value is not None]
    return f"{min(known):.2f}" if known else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _nats(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
