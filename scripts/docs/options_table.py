"""Prints the table of options that README.md holds, from the docstrings of the config's dataclasses.

From the project's root: python -m scripts.docs.options_table
"""

from dataclasses import is_dataclass
from operator import attrgetter
from typing import get_args

from titan_sparse.config import Config, field_docs
from titan_sparse.config.reading import show
from titan_sparse.config.sections import walk


def options_table() -> str:
    """A markdown table with a row for every key of the configuration: section.key, default, meaning."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    docs = field_docs(Config)
    # walk() gives a section just before its plain fields, so `docs` is always the field's own section.
    for key, kind in walk(Config):
        if is_dataclass(kind):
            docs = field_docs(kind)
            continue
        choices = " / ".join(f"`{choice}`" for choice in get_args(kind))
        meaning = docs[key.rpartition(".")[2]] + (f"; one of {choices}" if choices else "")
        cells = (f"`{key}`", f"`{show(attrgetter(key)(Config()))}`", meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(options_table())
