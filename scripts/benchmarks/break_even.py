"""Where sparse attention stops paying against dense, from rows of scripts.benchmarks.attention.

    python -m scripts.benchmarks.break_even benchmarks/results/A.json benchmarks/results/B.json

Sparse costs forward + backward + selection. Dense costs FlashAttention-4's forward + backward, or
cuDNN's where FlashAttention-4 was not timed. Nothing is extrapolated: outside of what was measured
the answer is "above" or "below".
"""

import json
import math
import sys
from collections.abc import Iterable
from itertools import pairwise

DENSE_PEERS = ("flash-attn-4", "cudnn")
"""Whom sparse has to beat: the first of them that was timed at a length."""


def cost(row: dict) -> float:
    """Milliseconds of forward, backward and, for a sparse row, the selection."""
    return row["forward_ms"] + row["backward_ms"] + row.get("selection_ms", 0)


def head_set(row: dict) -> str:
    """ "16:2/128": query heads, KV heads, head_dim."""
    return f"{row['heads']}:{row['kv_heads']}/{row['head_dim']}"


def is_sparse(row: dict) -> bool:
    """Whether the row is one of our backends on a sparse pattern."""
    return row["target_density"] is not None


def first_reaching(points: Iterable[tuple[float, float]], level: float) -> tuple[str, float]:
    """("at", x): the smallest x where y, linear between the (x, y) points, rises to `level`.

    ("above", largest x) if y stays below the level, ("below", smallest x) if it starts there.
    Raises ValueError without points.
    """
    points = sorted(points)
    if not points:
        raise ValueError("first_reaching() needs one point or more")
    if points[0][1] >= level:
        return "below", points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 >= level:
            return "at", x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return "above", points[-1][0]


def dense_costs(rows: list[dict], heads: str) -> tuple[str, dict[int, float]]:
    """The dense peer for these heads, and its cost at each length.

    It is the first of DENSE_PEERS that was timed at all lengths of these heads, so that lengths
    compare. ("", {}) if there is none.
    """
    rows = [row for row in rows if head_set(row) == heads]
    lengths = {row["seq_len"] for row in rows if is_sparse(row)}
    for peer in DENSE_PEERS:
        costs = {row["seq_len"]: cost(row) for row in rows if row["name"] == peer}
        if lengths and lengths <= costs.keys():
            return peer, costs
    return "", {}


def break_even(rows: list[dict]) -> list[dict]:
    """Where sparse stops paying, per backend and head set.

    For each length the density, for each density the length. At longer sequences, and at lower
    densities, sparse pays. Head sets without a dense peer have no answer.

    rows: as scripts.benchmarks.attention writes them. An answer is {"backend", "heads", "against",
    and either "seq_len" with "density" or "density" with "seq_len"; "sought" names the key that
    was sought, "is" is "at", "above" or "below"}.
    """
    answers = []
    for heads in dict.fromkeys(map(head_set, rows)):
        peer, dense = dense_costs(rows, heads)
        if not peer:
            continue
        sparse = [row for row in rows if head_set(row) == heads and is_sparse(row)]
        for backend in dict.fromkeys(row["name"] for row in sparse):
            about = {"backend": backend, "heads": heads, "against": peer}
            measured = [row for row in sparse if row["name"] == backend]
            for answer in _densities(measured, dense) + _lengths(measured, dense):
                answers.append(about | answer)
    return answers


def _densities(rows: list[dict], dense: dict[int, float]) -> list[dict]:
    answers = []
    for seq_len in sorted({row["seq_len"] for row in rows}):
        points = [(row["density"], cost(row)) for row in rows if row["seq_len"] == seq_len]
        relation, density = first_reaching(points, dense[seq_len])
        answers.append(
            {"sought": "density", "seq_len": seq_len, "is": relation, "density": round(density, 4)}
        )
    return answers


def _lengths(rows: list[dict], dense: dict[int, float]) -> list[dict]:
    answers = []
    for density in sorted({row["target_density"] for row in rows}):
        # From the longest sequence downwards, hence the minus, the share of dense's time rises until
        # it reaches 1.
        points = [
            (-math.log2(row["seq_len"]), cost(row) / dense[row["seq_len"]])
            for row in rows
            if row["target_density"] == density
        ]
        relation, place = first_reaching(points, 1.0)
        relation = {"at": "at", "above": "below", "below": "above"}[relation]
        answers.append(
            {"sought": "seq_len", "density": density, "is": relation, "seq_len": round(2**-place)}
        )
    return answers


def in_words(answer: dict) -> str:
    """One answer of break_even() as a line."""
    density = f"{answer['density']:.1%}"
    seq_len = f"{answer['seq_len']:,} tokens"
    relation = "" if answer["is"] == "at" else answer["is"] + " "
    if answer["sought"] == "density":
        sentence = f"at {seq_len} sparse pays up to a density: {relation}{density}"
    else:
        sentence = f"at a density of {density} sparse pays down to a length: {relation}{seq_len}"
    return f"{answer['backend']}, heads {answer['heads']}, against {answer['against']}: {sentence}"


def read_rows(paths: list[str]) -> list[dict]:
    """Rows of several result files together; of rows for the same case the last file's.

    Ends the program with one line for a file that scripts.benchmarks.attention did not write, and
    for files of different GPUs.
    """
    rows = {}
    gpus = set()
    for path in paths:
        with open(path) as file:
            result = json.load(file)
        if not all("target_density" in row for row in result.get("rows", [{}])):
            sys.exit(
                f"{path}: rows without target_density; "
                f"write it anew with python -m scripts.benchmarks.attention --out {path}"
            )
        gpus.add(result["gpu"])
        for row in result["rows"]:
            size = (head_set(row), row["block_size"], row["seq_len"])
            rows[row["name"], size, row["target_density"]] = row
    if len(gpus) > 1:
        sys.exit(f"the files are of different GPUs ({', '.join(sorted(gpus))}); give those of one")
    return list(rows.values())


def main(paths: list[str]) -> None:
    if not paths:
        sys.exit("usage: python -m scripts.benchmarks.break_even RESULT.json ...")
    for answer in break_even(read_rows(paths)):
        print(in_words(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
