"""The commands of titan-sparse, a module each with main(words). It returns the exit status."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NoReturn

from titan_sparse.options.extras import need_here

need_here("train")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser_of(
    description: str, program: str = "", kind: type[argparse.ArgumentParser] = _Parser
) -> argparse.ArgumentParser:
    """A parser for a command. description: its docstring, which begins with how it is called.

    program: how something else than a command is called. kind: what reports a mistake.
    """
    command = description.partition("titan-sparse ")[2].partition(" ")[0]
    return kind(
        prog=program or f"titan-sparse {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; write 1 or more")
    return int(text)


def refuses(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """The main() of a command. What it refuses is one line, and status 2."""

    @functools.wraps(main)
    def run(words: list[str]) -> int:
        try:
            return main(words)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run
