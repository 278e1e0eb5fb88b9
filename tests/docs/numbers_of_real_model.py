"""Claims about patterns on the real model: numbers.py says what a claim is."""

from statistics import mean

from tests.docs.numbers import BENCHMARKS, Claim, result

FILE = "density_h200"
DEFAULT = "joint, behind sinks, both"
_TABLE = {
    "best verticals + diagonals, all rows known": "best verticals + diagonals",
    "`layer`": "layer",
    "`joint`, one local diagonal": "joint, spread, sinks 4, local 1",
    "two local diagonals": "joint, spread, sinks 4, local 2",
    "and sinks not counted": "joint, behind sinks, local 2",
    "and a quarter last rows: the default": DEFAULT,
    "the same, last rows alone": "joint, behind sinks, last rows",
    "independent, as published": "independent",
    "xattention": "xattention, stride 16",
    "moba": "moba, chunk 128",
}
"""From a row of the table to its name in the file."""


def real_model() -> list[Claim]:
    claims = [_row(shown, name) for shown, name in _TABLE.items()]

    texts = result(FILE)["texts"].values()
    dense = []
    for name in ("ours, triton", "cudnn"):
        times = [text["dense_ms"][name] for text in texts]
        dense.append(mean(time["forward_ms"] + time["backward_ms"] for time in times))
    dense.append(100 * mean(text["dense"]["needles"] for text in texts))
    text = "Dense takes {:.1f} ms, cuDNN {:.1f}, and finds {:.0f} % of the needles."
    claims.append(Claim(BENCHMARKS, text, tuple(dense)))

    kept = (*_whole(DEFAULT, 0.9), *_whole("independent", 0.95))
    text = (
        "the default loses {:.3f} at {:.1f} % density and finds {:.0f} %; "
        "published at 0.95, {:.3f} at {:.1f} % and {:.0f} %."
    )
    return [*claims, Claim(BENCHMARKS, text, kept), *_routes()]


def _routes() -> list[Claim]:
    """What a ring sends by the index, of what a plain ring sends."""

    def share(key: str, ranks: int) -> float:
        rows = result("route_bytes")["rows"]
        return mean(row[key] for row in rows if row["ranks"] == ranks)

    ring = [share("ring", ranks) for ranks in (4, 8, 16)]
    across = [share("across", ranks) for ranks in (4, 8, 16)]
    text = (
        "sends {:.2f} of a plain ring's bytes\nwith 4 ranks by the index, {:.2f} with 8, and {:.2f} "
        "with 16; between two nodes {:.2f}, {:.2f}, and {:.2f}"
    )
    return [Claim("docs/context_parallel.md", text, (*ring, *across))]
