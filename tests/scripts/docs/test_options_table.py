"""The table of options: a row for every key, between the comments of docs/configuration.md."""

import pytest

from scripts.docs.options_table import PAGE, options_table, page_text


def test_a_row_for_every_key():
    rows = options_table().splitlines()
    assert rows[:2] == ["| option | default | meaning |", "|---|---|---|"]
    assert sum(row.startswith("| `training.seq_len` | `") for row in rows) == 1
    [schedule] = [row for row in rows if row.startswith("| `attention.schedule` |")]
    assert "; `auto`, `local`, " in schedule


def test_text_written_by_hand_stays(tmp_path):
    page = tmp_path / "configuration.md"
    page.write_text("# Mine\n<!-- options -->\nold\n<!-- end of options -->\nMore.\n")
    text = page_text(page)
    assert text.startswith("# Mine\n<!-- options -->\n| option |") and text.endswith("-->\nMore.\n")
    page.write_text("# Mine\n")
    with pytest.raises(ValueError, match="holds no <!-- options -->"):
        page_text(page)


def test_a_new_page_has_an_introduction(tmp_path):
    text = page_text(tmp_path / "configuration.md")
    assert text.startswith("# Configuration\n") and options_table() in text


@pytest.mark.skipif(not PAGE.exists(), reason="the table still stands in README.md")
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page_text(), "run python -m scripts.docs.options_table"
