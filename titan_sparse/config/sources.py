"""data.source: its parts, weights and formats; and which files a source or a
tokenizer is read from.

Only names and sizes of files are looked at. os.path, unlike Path, takes a name that is too long for
one that does not exist.
"""

import os.path
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from titan_sparse.config.reading import ConfigError, checked, require
from titan_sparse.config.sections import Config, Data
from titan_sparse.models.huggingface_files import TOKENIZERS, files_to_copy
from titan_sparse.options.values import show

FORMATS = ("text", "messages", "prompt_completion")
"""Of a part of data.source."""

KINDS_SHOWN = 8
"""Kinds of files that are not read and have a count of their own in the log."""

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


def single_source(source: str, key: str, formats: str = "") -> str:
    """The one part of `source`. Raises ConfigError for a mixture, naming the option `key`, and
    data.format if there are several `formats`."""
    parts = list(source_weights(source))
    first, several, _ = formats.partition(",")
    together = f" and data.format = {show(first.strip())}" if several else ""
    require(
        len(parts) == 1,
        f"{show(source)} is a mixture, but evaluation reads one source; write one of its parts, "
        f"such as {key} = {show(parts[0])}{together}",
    )
    return parts[0]


def source_formats(data: Data) -> dict[str, str]:
    """The format of each part of data.source, in their order.

    Raises ConfigError for an unknown format, and for another number of formats
    than 1 or the parts'.
    """
    parts = list(source_weights(data.source))
    formats = [word.strip() for word in data.format.split(",")]
    for name in formats:
        checked("data.format", Literal[FORMATS], name)
    require(
        len(formats) in (1, len(parts)),
        f"data.format = {show(data.format)} has {len(formats)} formats for the {len(parts)} parts of "
        "data.source; write one for all, or one for each",
    )
    if len(formats) == 1:
        formats *= len(parts)
    return dict(zip(parts, formats, strict=True))


def has_chats(data: Data) -> bool:
    """True if a part of data.source holds chats. Raises ConfigError as source_formats() does."""
    return set(source_formats(data).values()) != {"text"}


def parts_of(data: Data) -> Iterator[Data]:
    """The [data] section of each part of data.source. Raises ConfigError as
    source_formats() does."""
    for source, row_format in source_formats(data).items():
        yield replace(data, source=source, format=row_format)


def format_of(data: Data, source: str, key: str) -> str:
    """The format of `source`, a part of data.source or another source like them. Raises
    ConfigError, naming the option `key` that names `source`, where the parts differ."""
    formats = source_formats(data)
    if source in formats:
        return formats[source]
    require(
        len(set(formats.values())) == 1,
        f"{key} = {show(source)} is not a part of data.source, whose formats differ; write one of "
        f"{', '.join(show(part) for part in formats)}",
    )
    return next(iter(formats.values()))


_PACKED = (".txt", ".json", ".jsonl")
"""Endings of data files that may be followed by .gz or .zst."""
ENDINGS = (*_PACKED, ".parquet")
"""Of data files, in any case."""


def is_path(source: str) -> bool:
    """True for what exists, and for what can only be meant as a path: a typing error must not go to
    the hub."""
    looks_like_path = source.startswith((".", "/", "~")) or data_ending(source)[0] != ""
    return looks_like_path or os.path.exists(source)


def is_local(source: str) -> bool:
    """False for the name of a Hugging Face dataset."""
    return source == "python" or is_path(source)


def data_ending(name: str) -> tuple[str, str]:
    """The ending of a data file (one of ENDINGS) and that of its compression (.gz, .zst or empty).

    Both are empty for other files.
    """
    stem, last = os.path.splitext(name.lower())
    if last in (".gz", ".zst"):
        ending = os.path.splitext(stem)[1]
        return (ending, last) if ending in _PACKED else ("", "")
    return (last, "") if last in ENDINGS else ("", "")


def data_files(source: str, key: str = "data.source") -> tuple[list[str], str]:
    """The sorted data files of a file or folder, and in words how much else the folder holds.

    Links are followed, but no folder is read twice. Raises ConfigError, naming `key`, if
    there is no such path, no data file with a byte in it, a link to nothing, or a folder that
    cannot be listed.
    """
    named = f"{key} = {show(source)}"
    path = Path(source).expanduser()
    require(
        os.path.exists(path),
        f'{named}: this file or folder does not exist; write a path that exists, or "python"',
    )
    files: dict[str, list[Path]] = defaultdict(list)
    for file, problem in files_below(path, named) if path.is_dir() else [(path, "")]:
        ending, _ = data_ending(file.name)
        files[problem or ending or ending_of(file)].append(file)
    # Lines of JSON are often named .json. Beside other data it describes them.
    if files.keys().isdisjoint((".txt", ".parquet")):
        files[".jsonl"] += files.pop(".json", [])
    endings = [ending for ending in (".jsonl", ".parquet", ".txt") if files[ending]]
    has_others = any(found and kind.startswith(".") for kind, found in files.items())
    advice = (
        f'; "titan-sparse prepare_data {shlex.quote(source)} OUT --document folder" reads text files of '
        "any kind"
    )
    require(
        len(endings) > 0,
        f"{named} holds no data files; write a path of {', '.join(ENDINGS)}, or of one of the first "
        "three with .gz or .zst" + advice * (path.is_dir() and has_others),
    )
    require(
        len(endings) == 1,
        f"{named} mixes {', '.join(endings)}; write a folder with files of one ending",
    )
    found = sorted(files.pop(endings[0]))
    require(
        any(file.stat().st_size for file in found),
        f"{named} holds only empty files; write a path of files with text",
    )
    others = Counter({kind: len(of_kind) for kind, of_kind in files.items()})
    return [str(file) for file in found], in_words(others)


def files_below(folder: Path, named: str, follow_links: bool = True) -> Iterator[tuple[Path, str]]:
    """Each file below `folder`, sorted, and why it is not read, if it is not.

    Hidden folders (.ipynb_checkpoints), and those that were read by another way, are not entered.
    Raises ConfigError, with the words `named` in front, for a folder that cannot be listed and a
    link to nothing.
    """

    def refuse(error: OSError) -> NoReturn:
        raise ConfigError(f"{named}: {error.filename} cannot be listed: {error.strerror}")

    entered = {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=follow_links):
        # Links last, so that a folder goes by its own name if it has one here.
        below = sorted(folders, key=lambda name: (os.path.islink(os.path.join(place, name)), name))
        # In place: os.walk goes on by this list.
        folders.clear()
        for name in [*below, *sorted(names)]:
            file = Path(place, name)
            real = os.path.realpath(file)
            if name.startswith("."):
                yield file, "hidden"
            elif file.is_symlink() and not follow_links:
                yield file, "links"
            elif real in entered and name in below:
                yield file, "links to folders that are read already"
            elif name in below:
                entered.add(real)
                folders.append(name)
            else:
                require(
                    file.exists() or not file.is_symlink(),
                    f"{named}: the link {file} leads to nothing; mount or restore what it leads to, "
                    "or delete the link",
                )
                yield file, "" if file.is_file() else "neither file nor folder"


def ending_of(file: Path) -> str:
    """The ending by which a file that is not read is counted, such as ".png"."""
    ending = file.suffix.lower()
    # What follows the dot of run.2026-11-27T10:31:07 is not an ending.
    return ending if 1 < len(ending) <= 10 else "without an ending"


def in_words(counts: Counter[str]) -> str:
    """ "1,204 .png, 31 .log, 2 hidden", the most frequent first; empty for none. Rare kinds are counted
    together."""
    shown = [(kind, count) for kind, count in counts.most_common() if count]
    shown, rare = shown[:KINDS_SHOWN], shown[KINDS_SHOWN:]
    if rare:
        shown.append((f"of {len(rare)} other kinds", sum(count for _, count in rare)))
    return ", ".join(f"{count:,} {kind}" for kind, count in shown)


def tokenizer_name(config: Config) -> str:
    """data.tokenizer. Where that is empty: the folder model.initial_hf, or "bytes" for random
    weights without a tokenizer of their own.

    Raises ConfigError if the weights of model.initial_hf come without a tokenizer.
    """
    folder = config.model.initial_hf
    if config.data.tokenizer:
        return config.data.tokenizer
    if not folder or (config.model.random_weights and not holds_tokenizer(folder)):
        return "bytes"
    require(
        holds_tokenizer(folder),
        f"model.initial_hf = {show(folder)} holds no tokenizer; write data.tokenizer = the folder of "
        'the one that the model was trained with, or "bytes"',
    )
    return folder


def holds_tokenizer(folder: str) -> bool:
    """True if a Hugging Face folder has a tokenizer, in any form."""
    return any(
        os.path.isfile(os.path.join(os.path.expanduser(folder), name)) for name in TOKENIZERS
    )


def tokenizer_folder(name: str) -> Path:
    """The folder of data.tokenizer, which names it or a tokenizer.json in it.

    Raises ConfigError if there is no tokenizer, and ValueError if one of its files is a link that
    leaves the folder.
    """
    path = Path(name).expanduser()
    is_there = holds_tokenizer(str(path)) if os.path.isdir(path) else os.path.isfile(path)
    require(
        is_there,
        f'data.tokenizer = {show(name)}: this file does not exist; write "bytes" or the path of a '
        "tokenizer.json",
    )
    folder = path if os.path.isdir(path) else path.parent
    files_to_copy(str(folder), "data.tokenizer")
    return folder
