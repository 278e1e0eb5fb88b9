"""The commands of titan-sparse, a module each with main(words). It returns the exit status."""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from titan_sparse.options.extras import need_here

need_here("train")

from titan_sparse.config.reading import KINDS, tokens
from titan_sparse.options.values import plain


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but the value of an option that the command does not know, such as a key
        of the configuration, is never taken for a positional argument."""
        own, others = self.split(list(sys.argv[1:] if args is None else args))
        parsed, rest = super().parse_known_args(own, namespace)
        return parsed, [*rest, *others]

    def split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """The words of the command, and the other options with their values."""
        own: list[str] = []
        others: list[str] = []
        while words:
            word = words.pop(0)
            name, equals, _ = word.partition("=")
            if word == "--":
                return [*own, word, *words], others
            if not word.startswith("--") or " " in name or name in self._option_string_actions:
                own.append(word)
                continue
            others.append(word)
            # A key that is true or false may stand alone.
            is_switch = plain(KINDS.get(name[2:], str)) is bool
            takes_next = words and not words[0].startswith("--")
            if not equals and takes_next and (not is_switch or words[0] in ("true", "false")):
                others.append(words.pop(0))
        return own, others


def parser_of(description: str, program: str = "") -> argparse.ArgumentParser:
    """A parser for a command. description: its docstring, which begins with how it is called.

    program: a module that is not a command, which a mistake ends with status 2.
    """
    command = description.partition("titan-sparse ")[2].partition(" ")[0]
    kind = argparse.ArgumentParser if program else _Parser
    return kind(
        prog=f"python -m {program}" if program else f"titan-sparse {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; write 1 or more")
    return int(text)


def in_tokens(text: str) -> int:
    """An argparse type: tokens, such as 4096 or 4k."""
    try:
        return tokens(text)
    except ValueError as error:
        said = f"{text} is not a number of tokens; write for example 4096 or 4k"
        raise argparse.ArgumentTypeError(said) from error


def refuses(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """The main() of a command. What it refuses is one line, and status 2."""

    @functools.wraps(main)
    def run(words: list[str]) -> int:
        try:
            return main(words)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run
