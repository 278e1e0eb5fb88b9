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
from titan_sparse.config.keys import KINDS

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
    if config.attention.mask == "causal":
        config.data.sequences = "fixed"
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
    lines = ["", "| mask | pattern | layouts | schedules | backends | but not |"]
    lines.append("|---|---|---|---|---|---|")
    refused: dict[str, list[str]] = {}  # {refusal with "..." for the pattern: its patterns}
    rows: dict[str, dict[str, list[str]]] = {}  # {mask: {what runs: patterns}}
    for mask, pattern in itertools.product(MASKS, choices("pattern")):
        refusals = refusals_of(mask, pattern)
        for message in filter(None, refusals.values()):
            general = message.replace(f'pattern = "{pattern}"', "pattern = ...")
            refused.setdefault(general, []).append(pattern)
        rows.setdefault(mask, {}).setdefault(row_of_what_runs(refusals), []).append(pattern)
    for names, patterns_by_row in keys_with_equal_values(rows):
        for row, patterns in patterns_by_row.items():
            shown = "every one" if patterns == choices("pattern") else ", ".join(patterns)
            lines.append(f"| {'; '.join(names)} | {shown} | {row} |")
    lines += ["", "The refusals:", ""]
    for message, patterns in refused.items():
        lines.append(
            f"* {message} ({len(patterns)} combinations: {', '.join(dict.fromkeys(patterns))})"
        )
    return lines


def refusals_of(mask: str, pattern: str) -> Refusals:
    """What check() says to every layout, schedule and backend with this mask and pattern."""
    dimensions = [choices("layout"), choices("schedule"), choices("backend")]
    return {
        combination: refusal(mask, pattern, *combination)
        for combination in itertools.product(*dimensions)
    }


def row_of_what_runs(refusals: Refusals) -> str:
    """The cells of a line of the table: layouts, schedules, backends, and what does not go together."""
    runs = [combination for combination, message in refusals.items() if message is None]
    cells = [list(dict.fromkeys(dimension)) for dimension in zip(*runs)] or [[], [], []]
    shown = " | ".join(", ".join(cell) or "none" for cell in cells)
    return f"{shown} | {', '.join(exceptions(cells, refusals))}"


def keys_with_equal_values(table: dict[str, dict]) -> list[tuple[list[str], dict]]:
    """[(keys, the value that all of them have)], in the order of the table."""
    groups: list[tuple[list[str], dict]] = []
    for key, value in table.items():
        same = [keys for keys, known in groups if known == value]
        if same:
            same[0].append(key)
        else:
            groups.append(([key], value))
    return groups


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
    q = torch.zeros(1, 2, 64, 8)  # [B, H, S, D]
    messages: list[str] = []
    rows: dict[str, dict[str, str]] = {}  # {mask: {pattern: cell}}
    for name, mask in masks.items():
        rows[f"`{name}`"] = {}
        for shown, pattern in patterns.items():
            cell = "yes"
            try:
                attend(q, q, q, mask, pattern, backend="eager", block_size=16)
            except ValueError as error:
                message = str(error).replace(f'"{pattern.name}"', "...")
                if message not in messages:
                    messages.append(message)
                cell = f"no ({messages.index(message) + 1})"
            rows[f"`{name}`"][shown] = cell
    lines = ["", f"| mask | {' | '.join(patterns)} |", f"|---{'|---' * len(patterns)}|"]
    for names, cells in keys_with_equal_values(rows):
        lines.append(f"| {', '.join(names)} | {' | '.join(cells.values())} |")
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
