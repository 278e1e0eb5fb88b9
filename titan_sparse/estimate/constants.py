"""Rates of a machine, which scripts/calibrate.py measures and the planner reckons with."""

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Constants:
    """Rates of a machine.

    forward_tflops, backward_tflops: TFLOP/s of visited pairs. launch_ms: ms a step for tables and
    kernels. inside_gb_s, across_gb_s: what a rank sends in a ring, inside a node and across nodes,
    1e9 bytes/s. inside_latency_ms, across_latency_ms: ms until a transfer's first byte.
    """

    forward_tflops: float
    backward_tflops: float
    launch_ms: float
    inside_gb_s: float
    across_gb_s: float
    inside_latency_ms: float
    across_latency_ms: float


def load_constants(path: str | Path) -> Constants:
    """Read JSON that has for each field of Constants its "value" and "source".

    Raises ValueError that names the wrong key.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        values = {name: float(entry["value"]) for name, entry in data["constants"].items()}
    except OSError as error:
        raise ValueError(f"--constants {path}: cannot read it: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'--constants {path}: write {{"constants": {{NAME: {{"value": NUMBER, "source": TEXT}}, '
            f"...}}}}"
        ) from error
    names = [field.name for field in dataclasses.fields(Constants)]
    for name in set(names) ^ set(values):
        raise ValueError(
            f"--constants {path}: {name} is {'missing' if name in names else 'unknown'}; "
            f"it has {', '.join(names)}"
        )
    for name in names:
        # Latencies and launches may take no time, but a rate of 0 would never end.
        may_be_zero = "_ms" in name
        # Written so that nan is refused too.
        if not values[name] >= 0 or (values[name] == 0 and not may_be_zero):
            raise ValueError(
                f"--constants {path}: {name} = {values[name]} is no rate; write a number above 0"
            )
    return Constants(**values)
