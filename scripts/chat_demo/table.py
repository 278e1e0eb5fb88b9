"""Prints what scripts.chat_demo.answers wrote, a line a file: how many answers are right.

    python -m scripts.chat_demo.table outputs/chat_demo/before.json outputs/chat_demo/after.json

exact: the answer, letter by letter. in the form: "owner=...; shelf=..." and nothing else. owner,
shelf: the right one, in whatever form. Status 1 unless the last file has more exact answers than
the first one.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

FORM = re.compile(r"owner=([^;=]+); shelf=(\d+)")


class Counts(NamedTuple):
    """Of the answers in a file."""

    exact: int
    in_the_form: int
    owner: int
    shelf: int
    answers: int


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chat_demo.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    args = parser.parse_args(words)
    counts = {}
    for file in args.files:
        path = Path(file)
        if not path.is_file():
            print(f"error: {file} is not there; run scripts.chat_demo.answers", file=sys.stderr)
            return 2
        counts[path.stem] = count(json.loads(path.read_text(encoding="utf-8")))
    print(table(counts))
    exact = [of_file.exact for of_file in counts.values()]
    return 0 if len(exact) == 1 or exact[-1] > exact[0] else 1


def count(records: list[dict[str, str]]) -> Counts:
    """records: what a model answered to each question, and what was expected."""
    exact = in_the_form = owners = shelves = 0
    for record in records:
        owner, shelf = FORM.fullmatch(record["expected"]).groups()
        answer = record["answer"]
        exact += answer == record["expected"]
        in_the_form += FORM.fullmatch(answer) is not None
        owners += owner in answer
        shelves += re.search(rf"\b{shelf}\b", answer) is not None
    return Counts(exact, in_the_form, owners, shelves, len(records))


def table(counts: dict[str, Counts]) -> str:
    """A line for each file."""
    lines = [f"{'answers':<16}{'exact':>12}{'in the form':>14}{'owner':>10}{'shelf':>10}"]
    for name, of_file in counts.items():
        exact = f"{of_file.exact} of {of_file.answers}"
        lines.append(
            f"{name:<16}{exact:>12}{of_file.in_the_form:>14}{of_file.owner:>10}{of_file.shelf:>10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
