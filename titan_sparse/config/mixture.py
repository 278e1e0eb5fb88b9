"""data.source as text -> its parts and their weights."""

import re

from titan_sparse.config.reading import require, show

_WEIGHT = re.compile(r"\s*(?P<name>.+?)\s*:\s*(?P<weight>\d+(\.\d*)?|\.\d+)\s*")


def source_weights(source: str) -> dict[str, float]:
    """The parts of data.source and their shares of the sequences, which add up to 1.

    "a:0.7, b:0.3" is a mixture. Text with no weight anywhere is one part, including its commas and
    colons. Raises ConfigError for parts without a weight beside others, a weight of zero, or a part
    named twice.
    """
    matches = [_WEIGHT.fullmatch(part) for part in source.split(",")]
    if not any(matches):
        return {source: 1.0}
    example = 'write for example data.source = "books:0.7, code:0.3"'
    require(
        all(matches), f"data.source = {show(source)} gives a weight to some parts only; {example}"
    )
    weights = {match["name"]: float(match["weight"]) for match in matches}
    require(
        len(weights) == len(matches), f"data.source = {show(source)} names a part twice; {example}"
    )
    require(
        min(weights.values()) > 0,
        f"data.source = {show(source)} has a weight of 0; leave that part out",
    )
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def single_source(source: str, key: str) -> str:
    """The one part of `source`.

    Raises ConfigError for a mixture, naming the option `key` that must say which part.
    """
    parts = list(source_weights(source))
    require(
        len(parts) == 1,
        f"{show(source)} is a mixture, but evaluation reads one source; write one of its parts, "
        f"such as {key} = {show(parts[0])}",
    )
    return parts[0]
