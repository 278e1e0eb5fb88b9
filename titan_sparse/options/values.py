"""Values of options: their ranges, how they are checked, and how messages show
them. Imports no torch."""

import contextlib
import difflib
import errno
import json
import math
import numbers
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

MOST = 2**31 - 1
"""The greatest value of most integers. Tokens, steps and seconds stay far below it, and sums and
products of a few stay within int64."""


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have, written on its field: Annotated[int, Range(1)].

    least and most belong to it, unless it is open there. also: single numbers outside of it.
    """

    least: float
    most: float = math.inf
    open_left: bool = False
    open_right: bool = False
    also: tuple[int, ...] = ()

    def __contains__(self, number: float) -> bool:
        if number in self.also:
            return True
        above = number > self.least if self.open_left else number >= self.least
        below = number < self.most if self.open_right else number <= self.most
        return above and below

    def __str__(self) -> str:
        """The text that says what to write, such as "more than 0, at most 1"."""
        low = f"more than {self.least}" if self.open_left else f"{self.least} or more"
        text = ", or ".join([*map(str, self.also), low])
        if self.most < math.inf:
            text += f", {'below' if self.open_right else 'at most'} {self.most}"
        return text


Count = Annotated[int, Range(0, MOST)]
Positive = Annotated[int, Range(1, MOST)]
Tokens = Annotated[int, "tokens", Range(0, MOST)]
"""A number of tokens, which may be written as 128k."""
PositiveTokens = Annotated[int, "tokens", Range(1, MOST)]
NotNegative = Annotated[float, Range(0)]
PositiveShare = Annotated[float, Range(0, 1, open_left=True)]


_KIND_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


def plain(kind: Any) -> Any:
    """The type of a field without what Annotated adds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def check_value(key: str, kind: Any, value: Any) -> Any:
    """The value of a field of type `kind`. A bool is not an int here, and an int is a valid float.

    Raises ValueError, one line, for another type, a choice that does not exist, or a number out of
    range.
    """
    rules = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    kind = plain(kind)
    if get_origin(kind) is Literal:
        return one_of(key, value, get_args(kind))
    if kind is float:
        # The comparison refuses nan, inf and integers beyond every float.
        fits = _is_number(value, (int, float), numbers.Real) and abs(value) <= sys.float_info.max
    elif kind is int:
        fits = _is_number(value, (int,), numbers.Integral)
    else:
        fits = type(value) is kind
    if not fits:
        raise ValueError(f"{key} = {show(value)} is not {_KIND_NAMES[kind]}")
    value = kind(value)
    for allowed in rules:
        if isinstance(allowed, Range) and value not in allowed:
            shown = str(value) if abs(value) < 10**30 else "a huge number"
            raise ValueError(f"{key} = {shown} is out of range; write {allowed}")
    if value == "" and "not empty" in rules:
        raise ValueError(f"{key} is empty; write a value, or leave it out")
    # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
    if kind is str and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{key} = {ascii(value)} is not text in UTF-8; write other letters")
    return value


def _is_number(value: Any, types: tuple[type, ...], kind: type) -> bool:
    """True for a number of Python or NumPy. kind: its class in Python's module numbers."""
    # First, so that torch.compile traces the other test for numbers of NumPy alone.
    if type(value) in types:
        return True
    return isinstance(value, kind) and not isinstance(value, bool)


def one_of(key: str, value: Any, choices: Collection[str]) -> str:
    """The value. Raises ValueError, one line, when it is none of the choices."""
    if value in tuple(choices):
        return value
    # Whether letters are capital counts for little.
    by_letters = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(str(value).lower(), by_letters, 1)
    hint = f"; did you mean {show(by_letters[near[0]])}?" if near else ""
    listed = ", ".join(show(choice) for choice in choices)
    raise ValueError(f"{key} = {show(value)} is not one of {listed}{hint}")


def one_line(error: BaseException) -> str:
    """The text of an error of any library, for a message of one line."""
    return " ".join(str(error).split())


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write fails with where there is no room."""


@contextlib.contextmanager
def full_disk_at(path: str | Path) -> Iterator[None]:
    """Inside, errors of a full disk name `path`. By themselves they name no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK or error.filename is not None:
            raise
        raise OSError(error.errno, one_line(error), str(path)) from error


def show(value: Any) -> str:
    """A value as TOML writes it, for messages: its beginning and its end where it is long."""
    text = as_toml(value)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def as_toml(value: Any) -> str:
    """A value as TOML writes it; other objects (tables, dates) as Python does."""
    if isinstance(value, str):
        # A JSON string is a TOML string but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or arrays of thousands of levels.
        return f"(a huge {type(value).__name__})"
