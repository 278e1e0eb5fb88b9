"""The commands of titan-sparse, a module each with main(words). It returns the exit status."""

import argparse


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser for a command. description: its docstring, which begins with how it is called."""
    command = description.partition("titan-sparse ")[2].partition(" ")[0]
    return argparse.ArgumentParser(
        prog=f"titan-sparse {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
