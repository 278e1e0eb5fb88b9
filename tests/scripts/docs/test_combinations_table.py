"""docs/combinations.md is what the code refuses and accepts."""

from scripts.docs.combinations_table import PAGE, page, refusal


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m scripts.docs.combinations_table"


def test_a_refusal_and_its_absence():
    assert refusal("causal", "vertical_slash", "striped", "double_ring", "triton") is None
    message = refusal("documents, window with sinks", "moba", "striped", "ring", "triton")
    assert 'attention.pattern = "moba"' in message and "write" in message
