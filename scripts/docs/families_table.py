"""Writes the table of families in docs/huggingface.md.

python -m scripts.docs.families_table            write the page
python -m scripts.docs.families_table --check    write nothing; status 1 if the page is stale
"""

import sys

from scripts.docs import generated
from titan_sparse.models.huggingface_config import native_types
from titan_sparse.models.transformers_families import FAMILIES

PAGE = generated.ROOT / "docs/huggingface.md"
MARKER = "families"


def families_table() -> str:
    """A markdown table with a row for every family that can be trained."""
    rows = ["| model_type | by default | notes |", "|---|---|---|"]
    for model_type, family in FAMILIES.items():
        code = "native" if model_type in native_types() else "transformers"
        rows.append(f"| `{model_type}` | {code} | {family.notes} |")
    return "\n".join(rows)


def page_text() -> str:
    """The whole page with the table of today."""
    text = PAGE.read_text(encoding="utf-8")
    replaced = generated.replace_between(text, MARKER, families_table())
    if replaced is None:
        raise ValueError(f"{PAGE} has no <!-- {MARKER} --> and <!-- end of {MARKER} -->")
    return replaced


def main(words: list[str]) -> int:
    return generated.main(words, PAGE, page_text(), __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
