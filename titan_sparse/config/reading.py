"""Convert text to a configuration and back. The command line wins over the TOML file, and the file
over the defaults.

load() reads, to_toml() and save() write, usage() explains. The dotted keys (KINDS) are also here.
"""

import ast
import contextlib
import difflib
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, get_args

import tomli

from titan_sparse.config.sections import Attention, Config, Flags
from titan_sparse.models.huggingface_files import local_folder
from titan_sparse.options.values import as_toml, check_value, plain, show


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below a section with its type. Sub-sections come after the plain fields and
    before their own."""
    plain_fields_first = sorted(fields(section), key=lambda field: is_dataclass(field.type))
    for item in plain_fields_first:
        yield prefix + item.name, item.type
        if is_dataclass(item.type):
            yield from walk(item.type, f"{prefix}{item.name}.")


SECTIONS = {key: kind for key, kind in walk(Config) if is_dataclass(kind)}
"""Dotted key -> class of every section."""

KINDS = {key: kind for key, kind in walk(Config) if not is_dataclass(kind)}
"""Dotted key -> type of every other field, with its range."""


def field_docs(section: type) -> dict[str, str]:
    """The docstring below each field of a section class, in one line, by field name.

    A field without one is left out.
    """
    body = ast.parse(inspect.getsource(section)).body[0].body
    docs = {}
    for item, following in itertools.pairwise(body):
        is_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(item, ast.AnnAssign) and is_docstring:
            docs[item.target.id] = " ".join(following.value.value.split())
    return docs


_FLAGS = {item.name.replace("_", "-"): item for item in fields(Flags)}
"""Name of a flag on the command line -> field of Flags."""

_OPTIONS = [f"--{name}" for name in ("help", *_FLAGS)]
"""What stands on the command line beside dotted keys."""


class Refusal(ValueError):
    """Something that the user has to change. The message is always one line.

    Once there is a process group, all ranks raise it together, and it is reported once.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class ConfigError(Refusal):
    """A mistake of the user in the configuration."""


@contextlib.contextmanager
def config_errors(where: str = "") -> Iterator[None]:
    """Inside, a ValueError becomes a ConfigError, whose message begins with `where`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}{error}") from error


def load(argv: list[str]) -> tuple[Config, Flags]:
    """Configuration and flags from the words after the program's name.

    The words are `--section.key value`, `--section.key=value`, and the flags, such as
    `--config X.toml`. Prints usage() and exits with status 0 on `--help`. Models that are named as
    on the Hugging Face hub are downloaded, and the configuration has their folders. Raises
    ConfigError.
    """
    options = _split_words(argv)
    if any(name == "help" for name, _ in options):
        print(usage())
        raise SystemExit(0)
    files = [text for name, text in options if name == "config"]
    require(
        len(files) <= 1,
        f"command line: of {len(files)} --config, all but one would be ignored: "
        f"{', '.join(map(str, files))}; write one file, and other keys as --section.key value",
    )
    given = {}
    for name, text in options:
        if item := _FLAGS.get(name):
            value = _from_text(name, text, item.type)
            given[item.name] = checked(f"command line: --{name}", item.type, value)
    flags = Flags(**given)
    actions = [f"--{name}" for name, item in _FLAGS.items() if getattr(flags, item.name) is True]
    require(
        len(actions) <= 1,
        f"command line: {' and '.join(actions)} exclude each other; write one of them",
    )
    for name in ("ranks", "device_memory", "host_memory"):
        require(
            flags.dry_run or flags.find_max_length or name not in given,
            f"command line: --{name.replace('_', '-')} would be ignored; write --dry-run or "
            "--find-max-length too, or leave it out",
        )
    config = Config()
    # The file first, as the command line wins over it wherever --config stands.
    path = flags.config
    if path:
        try:
            values = list(flatten(tomli.loads(Path(path).read_text(encoding="utf-8-sig"))))
        except OSError as error:
            said = f"{path}: cannot read the file of --config: {error.strerror}"
            raise ConfigError(said) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        for key, value in values:
            _assign(config, key, value, path)
    for name, text in options:
        if name not in _FLAGS:
            value = _from_text(name, text, KINDS.get(name))
            _assign(config, name, value, "command line")
    # What reads the other paths expands them itself.
    for section, name in (
        (config.training, "output_dir"),
        (config.checkpoint, "initial_load_path"),
        (config.attention, "balance_costs"),
    ):
        setattr(section, name, os.path.expanduser(getattr(section, name)))
    with config_errors():
        model = config.model.initial_hf
        config.model.initial_hf = local_folder(model, "model.initial_hf", weights=True)
        tokenizer = config.data.tokenizer
        config.data.tokenizer = local_folder(tokenizer, "data.tokenizer", weights=False)
    return config, flags


def load_config(argv: list[str]) -> Config:
    """load() without flags but --config. Raises ConfigError."""
    config, flags = load(argv)
    require(
        flags == Flags(config=flags.config), "flags of train.py would be ignored; leave them out"
    )
    return config


def as_words(values: Mapping[str, object]) -> list[str]:
    """The words of the command line that give these keys their values."""
    words = []
    for key, value in values.items():
        text = show(value) if isinstance(value, bool) else str(value)
        words.append(f"--{key}={text}")
    return words


def given_keys(words: Iterable[str]) -> set[str]:
    """The keys and flags that words of the command line name."""
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


def _split_words(argv: list[str]) -> list[tuple[str, str | None]]:
    """Pairs of an option's name and its text, None where it has none."""
    options: list[tuple[str, str | None]] = []
    for word in argv:
        name, equals, text = word.removeprefix("--").partition("=")
        if word == "-h":
            options.append(("help", None))
        elif word.startswith("--") and name:
            options.append((name, text if equals else None))
            takes_text = not equals
            continue
        else:
            require(
                bool(options) and takes_text,
                f"command line: unexpected word {show(word)}; write --section.key value",
            )
            options[-1] = (options[-1][0], word)
        takes_text = False
    return options


def _from_text(name: str, text: str | None, kind: Any) -> Any:
    """The text of the command line as a value of that type, or unchanged if it is not one, which
    check_value() refuses. None stands for true."""
    kind = plain(kind)
    if text is None:
        require(kind in (bool, None), f"command line: {name} needs a value; write --{name} VALUE")
        return True
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        return text


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables.

    An empty table counts as a value, unless it is a section.
    """
    for name, value in table.items():
        key = prefix + name
        is_section = key in SECTIONS or bool(value)
        if isinstance(value, dict) and key not in KINDS and is_section:
            yield from flatten(value, key + ".")
        else:
            yield key, value


def _assign(config: Config, key: str, value: Any, where: str) -> None:
    if key not in KINDS:
        raise ConfigError(f"{where}: {_unknown(key)}")
    kind = KINDS[key]
    if "tokens" in get_args(kind) and isinstance(value, str):
        try:
            value = tokens(value)
        except ValueError as error:
            said = "is not a number of tokens; write for example 131072 or 128k"
            raise ConfigError(f"{where}: {key} = {show(value)} {said}") from error
    if "layers" in get_args(kind) and isinstance(value, list):
        value = ",".join(map(str, value))
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config), name, checked(f"{where}: {key}", kind, value))


def tokens(text: str, least: int = 0) -> int:
    """A number of tokens as our tables write it: 131072, or 128K, or 1M. Raises ValueError for
    other words, and for fewer than `least`."""
    scale = {"k": 2**10, "m": 2**20}.get(text[-1:].lower())
    number = int(text[:-1]) * scale if scale else int(text)
    if number < least:
        raise ValueError(f"{text} is below {least}")
    return number


def dense_layers(attention: Attention) -> list[int]:
    """The layers that attention.dense_layers lists. check() has refused what is none."""
    return [int(word) for word in attention.dense_layers.split(",") if word]


def layers_of(text: str, name: str, layers: int) -> list[int]:
    """Numbers of layers, such as "0,27". Raises ConfigError, with the option's name, for others."""
    words = [word.strip() for word in text.split(",")] if text else []
    require(
        all(word.isdecimal() and int(word) < layers for word in words),
        f"{name} = {show(text)} are not layers of the model; write some of 0 to {layers - 1}, such as "
        f"0,{layers - 1}",
    )
    return [int(word) for word in words]


def lengths_of(text: str, name: str) -> list[int]:
    """Lengths in tokens, such as "4096,128k". Raises ConfigError, with the option's name, for other
    words."""
    try:
        return [tokens(word.strip(), least=1) for word in text.split(",")]
    except ValueError as error:
        said = f"{name} = {show(text)} are no lengths; write for example 4096,128k"
        raise ConfigError(said) from error


def checked(key: str, kind: Any, value: Any) -> Any:
    """check_value(), whose error is a ConfigError."""
    with config_errors():
        return check_value(key, kind, value)


def _unknown(key: str) -> str:
    """The message for a key that does not exist: it suggests the most likely key."""
    if key in SECTIONS:
        keys = [other for other in KINDS if other.startswith(key + ".")]
        return f"{key} is a section, not a key; it has {', '.join(keys) or 'no keys'}"
    # The right name in the wrong section, however far, else any similar key.
    same_name = [other for other in KINDS if other.endswith("." + key.rpartition(".")[2])]
    near = difflib.get_close_matches(key, same_name, 1, cutoff=0.0)
    near += difflib.get_close_matches(key, [*KINDS, *SECTIONS, *_OPTIONS], 1)
    hint = f"did you mean {near[0]}?" if near else "--help lists all"
    return f"unknown key {key}; {hint}"


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def refuse_ignored(words: Iterable[str], reasons: dict[str, str]) -> None:
    """Raises ConfigError for a key among `words` that has a reason why it would be ignored, such as
    "with --lengths"; "" is none."""
    for key in sorted(given_keys(words)):
        reason = reasons.get(key)
        require(not reason, f"command line: {key} would be ignored {reason}; leave it out")


def clash(
    config: Config, key: str, other: str, instead: str = "", why: str = "does not go with"
) -> NoReturn:
    """Raises ConfigError: the value of `key` cannot be used because of that of `other`.

    instead: what to write; empty for the default of `key`.
    """
    value, reason = show(attrgetter(key)(config)), show(attrgetter(other)(config))
    instead = instead or f"{key} = {show(attrgetter(key)(Config()))}"
    raise ConfigError(f"{key} = {value} {why} {other} = {reason}; write {instead}")


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML, every key written; load() reads it back equal."""
    lines: list[str] = []
    for key, kind in walk(Config):
        if is_dataclass(kind):
            lines += ["", f"[{key}]"]
        else:
            name = key.rpartition(".")[2]
            value = attrgetter(key)(config)
            lines.append(f"{name} = {as_toml(value)}")
    return "\n".join(lines[1:]) + "\n"


def save(config: Config, folder: str | Path) -> None:
    """Writes to_toml(config) to `folder`/config.toml; makes the folder.

    Raises OSError where that is impossible.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.toml").write_text(to_toml(config), encoding="utf-8")


_USAGE = """\
usage: torchrun train.py [--config FILE.toml] [--section.key VALUE ...] [FLAG] [--help]

The command line wins over the file, the file over the defaults. A key that is true or false may
stand without a value: true. A number of tokens may be written as 128k (131,072) or 1m. Flags:
"""


def usage() -> str:
    """The text of --help: every section and key with its type, default and meaning."""
    lines = _USAGE.splitlines()
    docs = field_docs(Flags)
    for name, item in _FLAGS.items():
        # Switches take no value.
        value = "" if item.type is bool else " VALUE"
        lines.append(f"  --{name}{value}: {docs[item.name]}")
    # walk() gives a section just before its plain fields, so `docs` is always the field's own
    # section.
    for key, kind in walk(Config):
        if is_dataclass(kind):
            docs = field_docs(kind)
            summary = " ".join(inspect.getdoc(kind).split())
            lines += ["", f"[{key}] {summary}"]
        else:
            name = key.rpartition(".")[2]
            kind = plain(kind)
            choices = "|".join(get_args(kind)) or kind.__name__
            default = show(attrgetter(key)(Config()))
            lines.append(f"  --{key} {choices} (default {default}): {docs[name]}")
    return "\n".join(lines)
