"""The page of combinations is what the code refuses and accepts."""

from scripts.docs import combinations_table
from scripts.docs.combinations_table import (
    PAGE,
    keys_with_equal_values,
    page_text,
    refusal,
    row_of_what_runs,
)


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page_text(), "run python -m scripts.docs.combinations_table"


def test_tables_stand_between_the_comments_of_a_larger_page(tmp_path, monkeypatch):
    monkeypatch.setattr(combinations_table, "generated_part", lambda: "intro\n\n## table\n| a |")
    page = tmp_path / "page.md"
    before = "# Masks\n\nBy hand.\n\n## What goes with what\n"
    page.write_text(f"{before}<!-- combinations -->\nold\n<!-- end of combinations -->\nThe end.\n")
    expected = (
        f"{before}<!-- combinations -->\nintro\n\n### table\n| a |\n<!-- end of combinations -->\n"
        "The end.\n"
    )
    assert page_text(page) == expected
    page.write_text(expected)
    assert page_text(page) == expected
    assert page_text(tmp_path / "new.md") == "# What goes with what\n\nintro\n\n## table\n| a |\n"


def test_a_refusal_and_its_absence():
    assert refusal("causal", "vertical_slash", "striped", "double_ring", "triton") is None
    message = refusal("documents, window with sinks", "moba", "striped", "ring", "triton")
    assert 'attention.pattern = "moba"' in message and "write" in message


def test_equal_rows_are_one():
    rows = {"a": {"x": ["1"]}, "b": {"x": ["2"]}, "c": {"x": ["1"]}}
    assert keys_with_equal_values(rows) == [(["a", "c"], {"x": ["1"]}), (["b"], {"x": ["2"]})]


def test_a_row_says_what_runs_and_what_does_not():
    runs = {("striped", "ring", "flex"): None, ("striped", "ring", "triton"): None}
    assert row_of_what_runs(runs) == "striped | ring | flex, triton | "
    runs |= {("zigzag", "ring", "flex"): None, ("zigzag", "ring", "triton"): "no"}
    assert row_of_what_runs(runs) == "striped, zigzag | ring | flex, triton | zigzag + triton"
    assert row_of_what_runs({("zigzag", "ring", "flex"): "no"}) == "none | none | none | "
