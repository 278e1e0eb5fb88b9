"""Compares two runs step by step: how far their losses lie apart.

    python -m scripts.compare_runs A B [--field loss] [--max-difference 0.01] [--relative 0.01] \\
        [--plot P]

A and B are output_dirs of runs, or files metrics.jsonl. Prints a table. Status 0: no step is
further apart than the thresholds (or none was given); 1: some step is; 2: the runs cannot be
compared, as their logged steps differ, or the plot cannot be written.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

from titan_sparse.commands import parser_of, refuses
from titan_sparse.training.metrics_output import read_metrics

ROWS = 10
"""Of the table, about."""


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "scripts.compare_runs")
    add = parser.add_argument
    add("a", metavar="A")
    add("b", metavar="B")
    add("--field", default="loss", help="a field of metrics.jsonl")
    add("--max-difference", type=_threshold, default=math.inf, help="largest |B - A| of a step")
    add("--relative", type=_threshold, default=math.inf, help="largest |B - A| / |A| of a step")
    add("--plot", help="PNG to write")
    args = parser.parse_args(words)
    steps = differences(args.a, args.b, args.field)
    if args.plot:
        plot(steps, args)
    print(table(steps))
    too_far = []
    for step in steps:
        if step.absolute > args.max_difference or step.relative > args.relative:
            too_far.append(step.step)
    if too_far:
        found = f"{len(too_far)} of {len(steps)} steps"
        print(f"{found} are beyond the threshold, step {too_far[0]} first")
    return 1 if too_far else 0


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nothing would ever be beyond NaN
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of 0 or more")
    return value


class Difference(NamedTuple):
    """One step: the values of both runs, |b - a|, and that as a share of |a|.

    absolute and relative are infinite where a value is not finite.
    """

    step: int
    a: float
    b: float
    absolute: float
    relative: float


def differences(one: str | Path, other: str | Path, field: str = "loss") -> list[Difference]:
    """The differences of two runs in `field`, for every logged step in order.

    Raises ValueError if they have not logged the same steps, or steps without that field.
    """
    first = read_metrics(one)
    second = read_metrics(other)
    apart = sorted(first.keys() ^ second.keys())
    if apart:
        raise ValueError(
            f"the runs have logged different steps: {one} has {len(first)}, {other} has {len(second)}, "
            f"and only one of them has step {apart[0]}"
        )
    found = []
    for step in sorted(first):
        values = [first[step].get(field, "missing"), second[step].get(field, "missing")]
        if "missing" in values:
            raise ValueError(
                f"{field} was not logged by both runs at step {step}; write another --field"
            )
        # metrics.jsonl holds null where a number is not finite.
        a, b = (math.nan if value is None else float(value) for value in values)
        # Also where both are not finite: nothing says that they agree.
        absolute = abs(b - a) if math.isfinite(b - a) else math.inf
        relative = 0.0
        if absolute > 0:
            relative = absolute / abs(a) if a and math.isfinite(absolute) else math.inf
        found.append(Difference(step, a, b, absolute, relative))
    return found


def table(steps: list[Difference]) -> str:
    """Steps evenly spread and the last one, and the largest difference of all."""
    every = -(-len(steps) // ROWS)
    lines = [f"{'step':>8} {'A':>12} {'B':>12} {'B - A':>12} {'share':>10}"]
    for step in [*steps[:-1:every], steps[-1]]:
        lines.append(
            f"{step.step:>8} {step.a:>12.6g} {step.b:>12.6g} "
            f"{step.b - step.a:>+12.3e} {step.relative:>10.2e}"
        )
    worst = max(steps, key=lambda step: step.absolute)
    mean = sum(step.b - step.a for step in steps) / len(steps)
    found = (
        f"largest difference: {worst.absolute:.3e} at step {worst.step}, over {len(steps)} steps"
    )
    return "\n".join([*lines, f"{found}; mean of B - A {mean:+.3e}"])


def plot(steps: list[Difference], args: argparse.Namespace) -> None:
    """A plot with both curves above and their difference below."""
    from matplotlib.figure import Figure  # no pyplot: no display

    numbers = [step.step for step in steps]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(numbers, [step.a for step in steps], label=args.a)
    above.plot(numbers, [step.b for step in steps], label=args.b)
    above.set_ylabel(args.field)
    above.legend()
    below.plot(numbers, [step.b - step.a for step in steps], color="tab:red")
    below.axhline(0, color="gray", linewidth=0.8)
    below.set(xlabel="step", ylabel="B - A")
    figure.savefig(args.plot, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
