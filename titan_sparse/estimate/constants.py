"""Rates of a machine, which scripts/calibrate.py measures and the planner reckons with."""

import dataclasses
import json
import math
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Constants:
    """Rates of a machine.

    forward_tflops, backward_tflops: TFLOP/s of visited pairs. launch_ms: ms a step for tables and
    kernels. inside_gb_s, across_gb_s: what a rank sends in a ring, inside a node and across nodes,
    1e9 bytes/s. inside_latency_ms, across_latency_ms: ms until a transfer's first byte.

    Files of earlier versions lack what follows.
    dense_tflops: TFLOP/s of dense attention in whole tiles, forward and backward together.
    partial_tile: time of a tile that the mask cuts through, in whole tiles.
    """

    forward_tflops: float
    backward_tflops: float
    launch_ms: float
    inside_gb_s: float
    across_gb_s: float
    inside_latency_ms: float
    across_latency_ms: float
    dense_tflops: float | None = None
    partial_tile: float | None = None


def load_constants(path: str | Path, named: str = "") -> Constants:
    """Read JSON that has for each field of Constants its "value" and "source".

    named: how the user wrote the file's name, by default --constants. Raises ValueError that says
    so, and the wrong name in the file.
    """
    named = named or f"--constants {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        values = {name: float(entry["value"]) for name, entry in data["constants"].items()}
    except OSError as error:
        raise ValueError(f"{named}: cannot read it: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{named}: write {{"constants": {{NAME: {{"value": NUMBER, "source": TEXT}}, '
            f"...}}}}, as scripts.calibrate does"
        ) from error
    fields = dataclasses.fields(Constants)
    names = [field.name for field in fields]
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    for name in sorted(needed - set(values)):
        raise ValueError(f"{named}: {name} is missing; it has {', '.join(names)}")
    for name in sorted(set(values) - set(names)):
        raise ValueError(f"{named}: {name} is unknown; it has {', '.join(names)}")
    for name, value in values.items():
        # Latencies and launches may take no time, but a rate of 0 would never end.
        may_be_zero = "_ms" in name
        is_rate = value > 0 or (value == 0 and may_be_zero)
        # nan is no rate either: it compares as false.
        if not is_rate or math.isinf(value):
            raise ValueError(f"{named}: {name} = {value} is no rate; write a number above 0")
    return Constants(**values)
