"""Writes the table of options in docs/configuration.md, from the docstrings of the config's fields.

    python -m scripts.docs.options_table            write the page
    python -m scripts.docs.options_table --check    write nothing; status 1 if the page is stale

What stands around the table, outside of the comments <!-- options --> and <!-- end of options -->,
is written by hand and stays as it is.
"""

import sys
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import get_args

from scripts.docs import generated
from titan_sparse.config import Config, field_docs
from titan_sparse.config.keys import KINDS, walk
from titan_sparse.config.reading import show

PAGE = generated.ROOT / "docs/configuration.md"
MARKER = "options"
NEW_PAGE = """# Configuration

A run is described by a TOML file. Every key has a default, so a file holds only what differs.
The command line overrides the file: `--section.key value`.

## All options
<!-- options -->

<!-- end of options -->
"""
"""The page where there is none yet."""


def options_table() -> str:
    """A markdown table with a row for every key: section.key, default, meaning."""
    defaults = Config()
    rows = ["| option | default | meaning |", "|---|---|---|"]
    docs = field_docs(Config)
    # walk() gives a section just before its plain fields, so `docs` is always the field's section.
    for key, kind in walk(Config):
        if is_dataclass(kind):
            docs = field_docs(kind)
            continue
        meaning = docs[key.rpartition(".")[2]]
        choices = ", ".join(f"`{choice}`" for choice in get_args(KINDS[key]))
        if choices:
            meaning += f"; {choices}"
        default = show(attrgetter(key)(defaults))
        cells = [cell.replace("|", "\\|") for cell in (f"`{key}`", f"`{default}`", meaning)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def page_text(page: Path = PAGE) -> str:
    """The whole page with the table of today."""
    text = page.read_text(encoding="utf-8") if page.is_file() else NEW_PAGE
    replaced = generated.replace_between(text, MARKER, options_table())
    if replaced is None:
        raise ValueError(f"{page} holds no <!-- {MARKER} --> and <!-- end of {MARKER} -->")
    return replaced


def main(words: list[str]) -> int:
    return generated.main(words, PAGE, page_text(), __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
