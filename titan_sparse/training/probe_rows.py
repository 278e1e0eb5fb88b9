"""When the rows that probes look at are drawn anew (attention.vertical_slash.probe_rows = "spread").

In each step they are others, and in an evaluation always the same.
"""

import contextlib
from collections.abc import Iterator

from titan_sparse.attention.patterns.vertical_slash.rows import probe_seed, set_probe_seed

_SEEDS = 2**32

_STEPS_APART = 1_000_003
"""Steps after which a run would look at the rows of a run with the next training.seed."""


def draw_probe_rows(training_seed: int, step: int) -> None:
    """The rows of this step: the same on all ranks, in its backward, and in a resumed run."""
    set_probe_seed((training_seed * _STEPS_APART + step) % _SEEDS)


@contextlib.contextmanager
def fixed_probe_rows() -> Iterator[None]:
    """Inside, the rows are those of no step, so that results do not depend on it."""
    before = probe_seed()
    set_probe_seed(0)
    try:
        yield
    finally:
        set_probe_seed(before)
