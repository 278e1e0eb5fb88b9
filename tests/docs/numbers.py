"""Numbers of README and docs/, each with the result file that it comes from.

A claim is a piece of a page with a place for each number, {:.1f} as str.format() takes it, and the
numbers as they follow from benchmarks/results. Line breaks and runs of spaces in a page do not
count. tests/docs/test_numbers.py fills the numbers in and looks for the piece.
"""

import functools
import json
from statistics import median
from typing import Any, NamedTuple

from tests.docs.pages import ROOT

README = "README.md"
BENCHMARKS = "docs/benchmarks.md"
EVALUATION = "docs/evaluation.md"
CONTEXT_PARALLEL = "docs/context_parallel.md"

LENGTH = "attention_h200_length"
CP_DENSE = "context_parallel_dense_4xh200"


class Claim(NamedTuple):
    """page: from the root. text: a piece of it with places for numbers. values: the numbers."""

    page: str
    text: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


@functools.cache
def result(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def row(file: str, /, **wanted: object) -> dict[str, Any]:
    """The first row of a result file that has these values."""
    for candidate in result(file)["rows"]:
        if all(candidate.get(key) == value for key, value in wanted.items()):
            return candidate
    raise LookupError(f"{file} has no row with {wanted}")


def both(file: str, /, **wanted: object) -> tuple[float, float]:
    """ms of a row's forward and backward."""
    found = row(file, **wanted)
    return found["forward_ms"], found["backward_ms"]


def steps(name: str, run: str) -> list[dict[str, Any]]:
    """The logged steps of a run but the first, which compiles."""
    found = result(name)
    if "runs" in found:
        return found["runs"][run]["steps"][1:]
    return row(name, name=run)["steps"][1:]


def mean_seconds(name: str, run: str) -> float:
    logged = [step["step_seconds"] for step in steps(name, run)]
    return sum(logged) / len(logged)


def three_digits(number: float) -> int:
    """The number to three significant digits."""
    return int(float(f"{number:.3g}"))


def speed(logged: list[dict[str, Any]]) -> float:
    """Tokens/s of a GPU."""
    return median(step["tokens_per_second_per_device"] for step in logged)
