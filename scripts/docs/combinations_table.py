"""Writes which masks, patterns, layouts, schedules and backends go together.

    python -m scripts.docs.combinations_table            write the page
    python -m scripts.docs.combinations_table --check    write nothing; status 1 if it is stale

Nothing in it is written by hand: every combination is put to the code that refuses, config.check()
for train.py's options and attend() for what only the library can say. A page with the comments
<!-- combinations --> and <!-- end of combinations --> gets the tables between them; a page without
them is nothing but the tables.
"""

import itertools
import sys
import warnings
from pathlib import Path
from typing import get_args

import torch

from scripts.docs import generated
from titan_sparse.attention import attend
from titan_sparse.attention.masks.packed import prefix_lm
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, SlidingWindow
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention
from titan_sparse.config import Config, ConfigError, check
from titan_sparse.config.sections import KINDS

PAGE = generated.ROOT / "docs/masks_and_patterns.md"
MARKER = "combinations"
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
"""Masks that train.py has options for: keys of [attention]."""
TITLE = "# What goes with what\n\n"
INTRO = """\
Written by `python -m scripts.docs.combinations_table`, which asks the code that refuses; do not
edit. What is not listed is refused in one line before anything starts.

## train.py, 4 context-parallel ranks on 2 nodes
`auto` always finds a schedule and a backend. `local` is the schedule of one rank.
"""
LIBRARY = """
## attend() on one rank
Masks that have no option of train.py are there for users of the library.
"""

Refusals = dict[tuple[str, ...], str | None]
"""{(layout, schedule, backend): the refusal, None if they run}."""


def choices(name: str) -> list[str]:
    """What attention.NAME can be, without "auto" and the schedule of one rank."""
    every = get_args(KINDS[f"attention.{name}"])
    return [choice for choice in every if choice not in ("auto", "local")]


def build_config(mask: dict, pattern: str, layout: str, schedule: str, backend: str) -> Config:
    """A configuration of 65,536 tokens over four ranks on two nodes with these choices."""
    config = Config()
    config.training.device = "cuda"
    config.training.dtype = "bfloat16"
    config.training.seq_len = 65536
    config.parallelism.cp = 4
    config.parallelism.cp_intra = 2
    for key, value in mask.items():
        setattr(config.attention, key, value)
    config.attention.pattern = pattern
    config.attention.layout = layout
    config.attention.schedule = schedule
    config.attention.backend = backend
    return config


def refusal(mask: str, pattern: str, layout: str, schedule: str, backend: str) -> str | None:
    """What check() says against a mask of MASKS with these choices; None if it runs."""
    try:
        check(build_config(MASKS[mask], pattern, layout, schedule, backend), 4, 2)
    except ConfigError as error:
        return str(error)
    return None


def table_of_options() -> list[str]:
    """The lines of the table for train.py, and of its refusals."""
    dimensions = [choices("layout"), choices("schedule"), choices("backend")]
    lines = ["", "| mask | pattern | layouts | schedules | backends | but not |"]
    lines.append("|---|---|---|---|---|---|")
    counts: dict[str, int] = {}  # of each refusal
    for mask, pattern in itertools.product(MASKS, choices("pattern")):
        refusals: Refusals = {}
        for layout, schedule, backend in itertools.product(*dimensions):
            message = refusal(mask, pattern, layout, schedule, backend)
            refusals[layout, schedule, backend] = message
            if message is not None:
                counts[message] = counts.get(message, 0) + 1
        runs = [combination for combination, message in refusals.items() if message is None]
        cells = []
        for place, dimension in enumerate(dimensions):
            runs_somehow = {combination[place] for combination in runs}
            cells.append([choice for choice in dimension if choice in runs_somehow])
        shown = " | ".join(", ".join(cell) or "none" for cell in cells)
        but_not = ", ".join(exceptions(cells, refusals))
        lines.append(f"| {mask} | {pattern} | {shown} | {but_not} |")
    lines += ["", "The refusals:", ""]
    lines += [f"* {message} ({count} combinations)" for message, count in counts.items()]
    return lines


def exceptions(cells: list[list[str]], refusals: Refusals) -> list[str]:
    """Pairs of choices that run with others but not with each other, then triples refused besides.

    cells: the layouts, schedules and backends of a line of the table.
    """
    listed = set(itertools.product(*cells))
    refused = {combination for combination in listed if refusals[combination]}
    said = []
    for i, j in itertools.combinations(range(3), 2):
        for pair in itertools.product(cells[i], cells[j]):
            with_pair = {
                combination for combination in listed if (combination[i], combination[j]) == pair
            }
            if with_pair and with_pair <= refused:
                said.append(" + ".join(pair))
                refused -= with_pair
    said += [" + ".join(combination) for combination in sorted(refused)]
    return said


def table_of_masks() -> list[str]:
    """The lines of the table for attend(), and of its refusals."""
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
    lines = ["", f"| mask | {' | '.join(patterns)} |", f"|---{'|---' * len(patterns)}|"]
    q = torch.zeros(1, 2, 64, 8)  # [B, H, S, D]
    messages: list[str] = []
    for name, mask in masks.items():
        cells = []
        for pattern in patterns.values():
            try:
                attend(q, q, q, mask, pattern, backend="eager", block_size=16)
                cells.append("yes")
            except ValueError as error:
                if str(error) not in messages:
                    messages.append(str(error))
                cells.append(f"no ({messages.index(str(error)) + 1})")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {message}" for number, message in enumerate(messages, 1)]
    return lines


def generated_part() -> str:
    """Both tables with their introductions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = "\n".join(table_of_options())
        masks = "\n".join(table_of_masks())
    return f"{INTRO}{options}\n{LIBRARY}{masks}"


def page_text(page: Path = PAGE) -> str:
    """The whole page with the tables of today."""
    part = generated_part()
    if page.is_file():
        # Between the comments the tables belong to a section of a page: one level of heading down.
        lower = part.replace("\n## ", "\n### ")
        text = page.read_text(encoding="utf-8")
        replaced = generated.replace_between(text, MARKER, lower)
        if replaced is not None:
            return replaced
    return f"{TITLE}{part}\n"


def main(words: list[str]) -> int:
    return generated.main(words, PAGE, page_text(), __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
