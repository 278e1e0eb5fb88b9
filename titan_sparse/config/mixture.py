"""data.source as text -> its parts, their weights and formats."""

import re

from titan_sparse.config.reading import one_of, require, show
from titan_sparse.config.sections import Data

FORMATS = ("text", "messages", "prompt_completion")
"""Of a part of data.source."""

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


def source_formats(data: Data) -> dict[str, str]:
    """The format of each part of data.source, in their order.

    Raises ConfigError for an unknown format, and for another number of formats than 1 or the parts'.
    """
    parts = list(source_weights(data.source))
    formats = [word.strip() for word in data.format.split(",")]
    for name in formats:
        one_of("data.format", name, FORMATS)
    require(
        len(formats) in (1, len(parts)),
        f"data.format = {show(data.format)} has {len(formats)} formats for the {len(parts)} parts of "
        "data.source; write one for all, or one for each",
    )
    if len(formats) == 1:
        formats *= len(parts)
    return dict(zip(parts, formats, strict=True))


def format_of(data: Data, source: str, key: str) -> str:
    """The format of `source`, a part of data.source or another source like them.

    Raises ConfigError, naming the option `key` that names `source`, where the parts differ.
    """
    formats = source_formats(data)
    if source in formats:
        return formats[source]
    require(
        len(set(formats.values())) == 1,
        f"{key} = {show(source)} is no part of data.source, whose formats differ; write one of "
        f"{', '.join(show(part) for part in formats)}",
    )
    return next(iter(formats.values()))
