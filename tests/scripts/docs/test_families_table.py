"""The table of families in docs/huggingface.md says what auto takes, for every family."""

import pytest

from scripts.docs import families_table
from scripts.docs.families_table import PAGE, main, page_text
from titan_sparse.models.transformers_families import FAMILIES


def test_a_row_for_every_family() -> None:
    rows = families_table.families_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(FAMILIES)
    code = {row.split("`")[1]: row.split("|")[2].strip() for row in rows}
    assert {name for name, by in code.items() if by == "native"} == {"llama", "qwen2", "qwen3"}
    assert set(code.values()) == {"native", "transformers"}


def test_the_page_is_that_of_today(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PAGE.read_text() == page_text(), "run python -m scripts.docs.families_table"
    stale = tmp_path / "page.md"
    stale.write_text(PAGE.read_text().replace("| `llama` | native", "| `llama` | transformers"))
    monkeypatch.setattr(families_table, "PAGE", stale)
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
