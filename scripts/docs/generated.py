"""Pages of docs/ that hold a generated part: between two HTML comments, or, without them, the whole page."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def replace_between(text: str, name: str, part: str) -> str | None:
    """`text` with `part` between <!-- name --> and <!-- end of name -->, each on a line of its own.

    Returns None if the text does not hold both comments.
    """
    begin = f"<!-- {name} -->\n"
    end = f"\n<!-- end of {name} -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        return None
    return before + begin + part + end + after


def main(words: list[str], page: Path, text: str, description: str | None) -> int:
    """The command line of every program that generates a page: write it, or with --check compare.

    text: what the page has to hold. description: the program's docstring. Returns the exit status:
    0, or 1 if --check finds another text.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if stale")
    args = parser.parse_args(words)
    shown = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    if not args.check:
        page.write_text(text, encoding="utf-8")
        print(f"wrote {shown}")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{shown} is stale; run the same command without --check", file=sys.stderr)
    return 1
