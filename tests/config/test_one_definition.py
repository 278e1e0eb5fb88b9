"""What the configuration states once more, because it imports no torch: it has to agree with attention.

Defaults and ranges of the patterns are in config/sections.py and in attention/patterns, as a section
can be changed and a pattern cannot. Zigzag's multiple is in config/checking.py and in layouts.py.
"""

from dataclasses import MISSING, asdict, fields
from itertools import product

import pytest

from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS, block_multiple
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention
from titan_sparse.config import Config, ConfigError, check, padding_multiple, sections

# Name of the sub-table of [attention] -> the section, the pattern, the keys that only the section has.
PATTERNS = {
    "dense": (sections.Dense, Dense, set()),
    # index = "xattention" makes an XAttention of the table, so the pattern knows nothing of it.
    "vertical_slash": (sections.VerticalSlash, VerticalSlash, {"index"}),
    "xattention": (sections.XAttention, XAttention, set()),
    "moba": (sections.MoBA, MoBA, set()),
}

# Values on both sides of every limit that a pattern has.
EDGES = {
    "vertical_slash": {
        "recall": (-0.5, 0.0, 1e-6, 0.5, 1.0, 1.000001),
        "budget": ("joint", "layer", "independent", "together"),
        "probe": (-1, 0, 64),
        "probe_rows": ("both", "spread", "last", "first"),
        "sinks": (-1, 0, 1),
        "count_sinks": (False, True),
        "local_diagonals": (-1, 0, 1, 2),
        "min_columns": (-1, 0, 4096, 4097),
        "max_columns": (-1, 1),
        "min_slashes": (-1, 0, 9),
        "max_slashes": (-1, 0, 1),
        "dense_below": (-1, 0, 127, 128, 4096),
    },
    "xattention": {
        "stride": (-1, 0, 1, 16),
        "threshold": (-0.5, 0.0, 1e-6, 0.5, 1.0, 1.000001),
        "dense_below": (-1, 0, 127, 128, 4096),
    },
    "moba": {
        "chunk_size": (-1, 0, 128, 4096),
        "top_k": (-1, 0, 1),
    },
}
SINGLE_EDGES = [
    (table, {name: value})
    for table, edges in EDGES.items()
    for name, values in edges.items()
    for value in values
]
PAIRS = [
    ("vertical_slash", {"min_columns": low, "max_columns": high})
    for low, high in product((1, 5, 6), (5, 6))
]
PAIRS += [
    ("vertical_slash", {"budget": budget, "count_sinks": count})
    for budget, count in product(("joint", "independent"), (True, False))
]
PAIRS += [
    ("vertical_slash", {"min_slashes": low, "max_slashes": high})
    for low, high in product((1, 5, 6), (0, 5, 6))
]


def defaults(dataclass: type) -> dict[str, object]:
    return {field.name: field.default for field in fields(dataclass)}


def is_refused_by_config(table: str, values: dict[str, object]) -> bool:
    config = Config()
    config.attention.pattern = table
    for name, value in values.items():
        setattr(getattr(config.attention, table), name, value)
    try:
        check(config, 1, 1)
    except ConfigError:
        return True
    return False


def is_refused_by_pattern(table: str, values: dict[str, object]) -> bool:
    section, pattern, only_in_section = PATTERNS[table]
    arguments = asdict(section()) | values
    for name in only_in_section:
        del arguments[name]
    try:
        pattern(**arguments).check_block_size(Config().attention.block_size)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("table", PATTERNS)
def test_names_and_defaults(table):
    section, pattern, only_in_section = PATTERNS[table]
    assert MISSING not in defaults(section).values()
    stated = {
        name: value for name, value in defaults(section).items() if name not in only_in_section
    }
    assert stated == defaults(pattern)
    assert only_in_section <= set(defaults(section))


def test_every_field_has_edges():
    for table, (_, pattern, _) in PATTERNS.items():
        assert set(EDGES.get(table, {})) == set(defaults(pattern))


@pytest.mark.parametrize("table, values", SINGLE_EDGES + PAIRS, ids=str)
def test_what_one_refuses_the_other_refuses(table, values):
    assert is_refused_by_config(table, values) == is_refused_by_pattern(table, values)


def test_no_verticals_but_the_sinks_can_only_be_written_in_python():
    """The one difference: a pattern takes max_columns = 0, the configuration wants 1 or more."""
    assert is_refused_by_config("vertical_slash", {"max_columns": 0})
    assert not is_refused_by_pattern("vertical_slash", {"max_columns": 0})


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_padding_is_a_multiple_for_the_layout(layout, cp):
    config = Config()
    config.attention.layout = layout
    config.parallelism.cp = cp
    assert padding_multiple(config) == block_multiple(layout, cp) * config.attention.block_size
