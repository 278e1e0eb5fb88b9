"""Writes docs/combinations.md: which masks, patterns, layouts, schedules and backends go together.

Nothing in it is written by hand: every combination is put to the code that refuses, config.check() for train.py's options
and attend() for what only the library can say. From the project's root: python -m scripts.docs.combinations_table
"""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch

from titan_sparse.attention import attend
from titan_sparse.attention.masks.packed import prefix_lm
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, SlidingWindow
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.config.sections import KINDS

PAGE = Path(__file__).parents[2] / "docs/combinations.md"
MASKS = {
    "causal": {"mask": "causal"},
    "documents": {"mask": "documents"},
    "causal, window": {"mask": "causal", "sliding_window": 4096},
    "documents, window": {"mask": "documents", "sliding_window": 4096},
    "documents, window with sinks": {
        "mask": "documents",
        "sliding_window": 4096,
        "window_sinks": 64,
    },
}
INTRO = """# What goes with what

Written by `python -m scripts.docs.combinations_table`, which asks the code that refuses; do not edit. The dimensions are those of
docs/design.md. What is not listed is refused in one line before anything starts.

## train.py, 4 context-parallel ranks on 2 nodes
`auto` always finds a schedule and a backend. `local` is the schedule of one rank.
"""
LIBRARY = """
## attend() on one rank
Masks that have no option of train.py are there for users of the library (docs/masks.md).
"""


def _choices(name: str) -> list[str]:
    return [
        choice for choice in get_args(KINDS[f"attention.{name}"]) if choice not in ("auto", "local")
    ]


def _config(mask: dict, pattern: str, layout: str, schedule: str, backend: str) -> Config:
    config = Config()
    config.training.device, config.training.dtype, config.training.seq_len = (
        "cuda",
        "bfloat16",
        65536,
    )
    config.parallelism.cp, config.parallelism.cp_intra = 4, 2
    for key, value in {
        **mask,
        "pattern": pattern,
        "layout": layout,
        "schedule": schedule,
        "backend": backend,
    }.items():
        setattr(config.attention, key, value)
    return config


def refusal(mask: str, *others: str) -> str | None:
    """What check() says against a mask of MASKS, pattern, layout, schedule and backend; None if it runs."""
    try:
        check(_config(MASKS[mask], *others), 4, 2)
    except ConfigError as error:
        return str(error)
    return None


def _by_options() -> Iterator[str]:
    """Table rows and the refusals."""
    dims = [_choices(name) for name in ("layout", "schedule", "backend")]
    yield "\n| mask | pattern | layouts | schedules | backends | but not |\n|---|---|---|---|---|---|"
    messages: dict[str, int] = {}
    for mask, pattern in itertools.product(MASKS, _choices("pattern")):
        found = {others: refusal(mask, pattern, *others) for others in itertools.product(*dims)}
        runs = [others for others, message in found.items() if message is None]
        cells = [
            [choice for choice in dim if any(others[i] == choice for others in runs)]
            for i, dim in enumerate(dims)
        ]
        for message in filter(None, found.values()):
            messages[message] = messages.get(message, 0) + 1
        shown = " | ".join(", ".join(cell) or "none" for cell in cells)
        yield f"| {mask} | {pattern} | {shown} | {', '.join(_exceptions(cells, found))} |"
    yield "\nThe refusals:\n"
    yield from (f"* {message} ({count} combinations)" for message, count in messages.items())


def _exceptions(cells: list[list[str]], found: dict[tuple[str, ...], str | None]) -> list[str]:
    """Pairs of choices that run with others but not with each other, and what of three is refused besides."""
    refused = {others for others in itertools.product(*cells) if found[others]}
    said = []
    for i, j in itertools.combinations(range(3), 2):
        for pair in itertools.product(cells[i], cells[j]):
            of_pair = {
                others for others in itertools.product(*cells) if (others[i], others[j]) == pair
            }
            if of_pair and of_pair <= refused:
                said.append(" + ".join(pair))
                refused -= of_pair
    return [*said, *(" + ".join(others) for others in sorted(refused))]


def _by_masks() -> Iterator[str]:
    masks = {
        "Full()": Full(),
        "Causal()": Causal(),
        "Causal() & SlidingWindow(8)": Causal() & SlidingWindow(8),
        "Documents([40, 24])": Documents([40, 24]),
        "prefix_lm([64], [20])": prefix_lm([64], [20]),
    }
    patterns = {
        "Dense()": Dense(),
        "VerticalSlash()": VerticalSlash(dense_below=16),
        "XAttention()": XAttention(stride=4, dense_below=16),
        "MoBA()": MoBA(chunk_size=16, top_k=2),
    }
    yield f"\n| mask | {' | '.join(patterns)} |\n|---{'|---' * len(patterns)}|"
    q = torch.zeros(1, 2, 64, 8)
    messages: list[str] = []
    for name, mask in masks.items():
        cells = []
        for pattern in patterns.values():
            try:
                attend(q, q, q, mask, pattern, backend="eager", block_size=16)
                cells.append("yes")
            except ValueError as error:
                messages += [] if str(error) in messages else [str(error)]
                cells.append(f"no ({messages.index(str(error)) + 1})")
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {message}" for number, message in enumerate(messages, 1))


def page() -> str:
    """The whole of docs/combinations.md."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return INTRO + "\n".join(_by_options()) + "\n" + LIBRARY + "\n".join(_by_masks()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
