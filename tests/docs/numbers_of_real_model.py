"""Claims about patterns on the real model: numbers.py says what a claim is."""

from statistics import mean

from tests.docs.numbers import BENCHMARKS, Claim, result

NOW = "density_h200"
BEFORE = "density_before_h200"
_TABLE = {
    "best verticals + diagonals, all rows known": (NOW, "best verticals + diagonals", (0.9, 0.95)),
    "vertical_slash, layer": (NOW, "layer", (0.9, 0.95)),
    "joint": (NOW, "joint, spread, sinks 4, local 1", (0.9, 0.95)),
    "independent, as published": (NOW, "independent", (0.9, 0.95)),
    "joint of before, last rows": (BEFORE, "joint", (0.9,)),
    "xattention": (NOW, "xattention, stride 16", (0.9, 0.95)),
    "moba": (NOW, "moba, chunk 128", (0.9, 0.95)),
}
"""From a row of the table to file, name there, and recalls that are reached."""


def real_model() -> list[Claim]:
    claims = []
    for shown, (file, name, recalls) in _TABLE.items():
        text = f"| {shown} |"
        values = []
        for recall in recalls:
            found = _at_recall(file, name, recall)
            text += " {:.1f} % |"
            values.append(100 * mean(at["density"] for at in found))
        text += " |" * (2 - len(recalls))
        for recall in recalls:
            found = _at_recall(file, name, recall)
            if "kernel_ms" in found[0]:
                text += " {:.1f} |"
                values.append(mean(at["kernel_ms"]["triton"] for at in found))
        claims.append(Claim(BENCHMARKS, text, tuple(values)))

    dense = []
    for name in ("ours, triton", "cudnn"):
        times = [text["dense_ms"][name] for text in result(NOW)["texts"].values()]
        dense.append(mean(time["forward_ms"] + time["backward_ms"] for time in times))
    claims.append(Claim(BENCHMARKS, "Dense takes {:.1f} ms, cuDNN {:.1f}.", tuple(dense)))

    kept = []
    for recall in (0.9, 0.95):
        for text in result(NOW)["texts"].values():
            for row in text["rows"]:
                if row["name"] == "layer" and row["value"] == recall:
                    kept += row["recall_by_layer"]
    first = kept[: len(kept) // 2]
    second = kept[len(kept) // 2 :]
    values = (min(first), max(first), min(second), max(second))
    text = "Asked for 0.9, single layers keep {:.3f} to {:.3f}; for 0.95, {:.3f} to {:.3f}."
    claims.append(Claim(BENCHMARKS, text, values))
    return claims


def _at_recall(file: str, name: str, recall: float) -> list[dict]:
    """What each text says of a pattern at a recall."""
    found = []
    for text in result(file)["texts"].values():
        for at in text["at_recall"]:
            if (at["name"], at["at_recall"]) == (name, recall):
                found.append(at)
    return found
