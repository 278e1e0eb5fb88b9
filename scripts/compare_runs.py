"""Compares two runs step by step: how far their losses lie apart, as a table, a plot and an exit status.

From the project's root: python -m scripts.compare_runs A B [--field loss] [--max-difference 0.01] [--relative 0.01] [--plot P]

A and B are output_dirs of runs, or files metrics.jsonl. Status 0: no step is further apart than the thresholds (or none was
given); 1: some step is; 2: the runs cannot be compared, as their logged steps differ, or the
plot cannot be written. Plots need pip install -e ".[eval]"
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple


class Difference(NamedTuple):
    """Of one step: the values of both runs, |b - a|, and that as a share of |a|. Infinite where a value is not finite."""

    step: int
    a: float
    b: float
    absolute: float
    relative: float


def read_metrics(run: str | Path) -> dict[int, dict]:
    """The lines of a run's metrics.jsonl by step; of a step that is there twice, after resuming, the later line.

    run: an output_dir or the file. Raises ValueError, one line, if there is no such file or a line is no metrics.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{run} is neither a run's output_dir with metrics.jsonl nor such a file; write one of them"
        )
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {line["step"]: line for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds a line that is no step's metrics: {error!r}") from error


def differences(a: str | Path, b: str | Path, field: str = "loss") -> list[Difference]:
    """What lies between two runs in `field`, for every logged step in order.

    Raises ValueError, one line, if they have not logged the same steps, or steps without that field.
    """
    first, second = read_metrics(a), read_metrics(b)
    if first.keys() != second.keys() or not first:
        apart = sorted(first.keys() ^ second.keys())
        raise ValueError(
            f"the runs have logged different steps: {a} has {len(first)}, {b} has {len(second)}"
            + (f", and only one of them has step {apart[0]}" if apart else "")
        )
    missing = [
        step for step in sorted(first) if field not in first[step] or field not in second[step]
    ]
    if missing:
        raise ValueError(
            f"{field} was not logged by both runs at step {missing[0]}; write --field loss or another"
        )
    return [_difference(step, first[step][field], second[step][field]) for step in sorted(first)]


def _difference(step: int, a: float | None, b: float | None) -> Difference:
    a, b = (math.nan if value is None else float(value) for value in (a, b))
    absolute = abs(b - a)
    if not math.isfinite(absolute):  # also where both are not finite: nothing says that they agree
        return Difference(step, a, b, math.inf, math.inf)
    relative = absolute / abs(a) if a else (0.0 if absolute == 0 else math.inf)
    return Difference(step, a, b, absolute, relative)


def beyond(
    found: list[Difference], max_difference: float | None, relative: float | None
) -> list[Difference]:
    """Those further apart than a threshold; None: that threshold does not count."""
    return [
        item
        for item in found
        if (max_difference is not None and item.absolute > max_difference)
        or (relative is not None and item.relative > relative)
    ]


def table(found: list[Difference], rows: int = 10) -> str:
    """About `rows` steps evenly spread, and the largest difference of all."""
    every = max(1, -(-len(found) // rows))
    shown = found[::every] if found[-1] in found[::every] else [*found[::every], found[-1]]
    worst = max(found, key=lambda item: item.absolute)
    lines = [f"{'step':>8} {'A':>12} {'B':>12} {'B - A':>12} {'share':>10}"]
    lines += [
        f"{item.step:>8} {item.a:>12.6g} {item.b:>12.6g} {item.b - item.a:>+12.3e} {item.relative:>10.2e}"
        for item in shown
    ]
    return "\n".join(
        [
            *lines,
            f"largest difference: {worst.absolute:.3e} at step {worst.step}, over {len(found)} steps; "
            f"mean of B - A {sum(item.b - item.a for item in found) / len(found):+.3e}",
        ]
    )


def plot(found: list[Difference], names: tuple[str, str], field: str, path: str) -> None:
    """A picture: both curves above, their difference below. Raises ValueError without matplotlib, OSError for the path."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no display
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install -e ".[eval]"') from None
    steps, figure = [item.step for item in found], Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, values in zip(
        names, ([item.a for item in found], [item.b for item in found]), strict=True
    ):
        above.plot(steps, values, label=name)
    above.set_ylabel(field)
    above.legend()
    below.plot(steps, [item.b - item.a for item in found], color="tab:red")
    below.axhline(0, color="gray", linewidth=0.8)
    below.set(xlabel="step", ylabel="B - A")
    figure.savefig(path, dpi=120)


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nothing would ever be beyond NaN
        raise argparse.ArgumentTypeError(f"{text} is no finite number of 0 or more")
    return value


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--field", default="loss", help="a field of metrics.jsonl")
    parser.add_argument("--max-difference", type=_threshold, help="largest |B - A| of a step")
    parser.add_argument("--relative", type=_threshold, help="largest |B - A| / |A| of a step")
    parser.add_argument("--plot", help="PNG to write")
    args = parser.parse_args(words)
    try:
        found = differences(args.a, args.b, args.field)
        if args.plot:
            plot(found, (args.a, args.b), args.field, args.plot)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found))
    too_far = beyond(found, args.max_difference, args.relative)
    if too_far:
        print(
            f"{len(too_far)} of {len(found)} steps are beyond the threshold, step {too_far[0].step} first"
        )
    return 1 if too_far else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
