"""Print every option of train.py, and which of attention's choices do not run together.

    titan-sparse options [--config X.toml] [--key value ...]

The second part asks the check that refuses a run before it starts, once for each mask (with and
without a window), pattern, layout, schedule, and backend. Other options are those of the
configuration, by default four GPUs on two nodes that share sequences of 65,536 tokens.
"""

import itertools
from collections import Counter
from dataclasses import replace
from typing import get_args

from titan_sparse.commands import parser_of, refuses
from titan_sparse.config import Config, ConfigError, check, usage
from titan_sparse.config.reading import KINDS, load_config

_DEFAULTS = """
    --training.device cuda --training.seq_len 64k --parallelism.cp 4 --parallelism.cp_intra 2
""".split()
_CHOICES = ("mask", "pattern", "layout", "schedule", "backend")


@refuses
def main(words: list[str]) -> int:
    _, rest = parser_of(__doc__).parse_known_args(words)
    config = load_config([*_DEFAULTS, *rest])
    print(usage())
    print(
        "\nMasks, with and without a window, patterns, layouts, schedules, and backends all run together,"
    )
    print("except:\n")
    print("\n".join(refused_combinations(config)))
    return 0


def refused_combinations(config: Config) -> list[str]:
    """A line for each reason that check() gives: the number of combinations, and the reason with
    "..." where only the pattern's name differs.
    """
    ranks = config.parallelism.cp
    on_a_node = config.parallelism.cp_intra or ranks
    reasons: Counter[str] = Counter()
    # "auto" always finds one, and "local" is the schedule of one rank.
    choices = [
        [word for word in get_args(KINDS[f"attention.{name}"]) if word not in ("auto", "local")]
        for name in _CHOICES
    ]
    for values in itertools.product(*choices, (0, 4096)):
        chosen = dict(zip((*_CHOICES, "sliding_window"), values))
        attention = replace(config.attention, **chosen)
        # A sequence must be one document if queries may see all of it.
        data = replace(config.data, sequences="fixed" if attention.mask == "causal" else "packed")
        try:
            check(replace(config, attention=attention, data=data), ranks, on_a_node)
        except ConfigError as error:
            reasons[str(error).replace(f'pattern = "{attention.pattern}"', "pattern = ...")] += 1
    return [f"* {reason} ({number} combinations)" for reason, number in reasons.most_common()]
