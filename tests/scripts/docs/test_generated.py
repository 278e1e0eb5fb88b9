"""Writing and checking a generated page."""

from scripts.docs import generated

TEXT = "by hand\n<!-- part -->\nold\n<!-- end of part -->\nby hand\n"


def test_only_what_stands_between_the_comments_is_replaced():
    new = generated.replace_between(TEXT, "part", "a\nb")
    assert new == "by hand\n<!-- part -->\na\nb\n<!-- end of part -->\nby hand\n"
    assert generated.replace_between(new, "part", "old") == TEXT
    empty = TEXT.replace("old", "")
    assert generated.replace_between(empty, "part", "old") == TEXT


def test_a_page_without_both_comments_is_left_alone():
    assert generated.replace_between("by hand\n", "part", "a") is None
    assert generated.replace_between(TEXT, "other", "a") is None
    assert generated.replace_between("<!-- part -->\nold\n", "part", "a") is None


def test_check_tells_a_stale_page_and_writes_nothing(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert generated.main(["--check"], page, "new\n", None) == 1 and not page.exists()
    page.write_text("old\n")
    assert generated.main(["--check"], page, "new\n", None) == 1
    assert page.read_text() == "old\n" and "is stale" in capsys.readouterr().err
    assert generated.main([], page, "new\n", None) == 0 and page.read_text() == "new\n"
    assert generated.main(["--check"], page, "new\n", None) == 0
