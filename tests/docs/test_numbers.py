"""Numbers of README and docs/benchmarks.md are those of the result files."""

import re

import pytest

from tests.docs import numbers
from tests.docs.numbers_of_attention import (
    CP4,
    attention_by_density,
    attention_by_length,
    context_parallel,
    cudnn_backend,
    headlines,
    loss,
    many_gpus,
    masks,
    patterns,
)
from tests.docs.numbers_of_huggingface import huggingface
from tests.docs.numbers_of_real_model import real_model
from tests.docs.numbers_of_steps import (
    restart,
    scaling_of_steps,
    scaling_with_triton,
    where_a_step_goes,
    whole_steps,
)
from tests.docs.numbers_of_study import study
from tests.docs.pages import ROOT

CLAIMS = [
    *headlines(),
    *attention_by_length(),
    *attention_by_density(),
    *context_parallel(),
    *masks(),
    *many_gpus(),
    *cudnn_backend(),
    *patterns(),
    *real_model(),
    *study(),
    *huggingface(),
    *whole_steps(),
    *scaling_of_steps(),
    *scaling_with_triton(),
    *where_a_step_goes(),
    restart(),
    *loss(),
]


def _flat(text: str) -> str:
    """The text with single spaces in place of line breaks and runs of spaces."""
    return " ".join(text.split())


def _page(name: str) -> str:
    return _flat((ROOT / name).read_text())


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_a_number_is_that_of_its_result(claim):
    assert _flat(claim.text.format(*claim.values)) in _page(claim.page)


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_another_number_in_the_result_would_be_noticed(claim):
    """Every number that a claim takes from a file shows in the page."""
    shown = claim.text.format(*claim.values)
    for place, value in enumerate(claim.values):
        changed = list(claim.values)
        changed[place] = f"{value}0" if isinstance(value, str) else round(value * 1.2 + 1)
        assert claim.text.format(*changed) != shown


def test_every_row_of_readme_is_covered():
    """No number of the column `result` stands in README without a claim."""
    table = (ROOT / "README.md").read_text().split("## Results")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    claimed = [
        _flat(claim.text.format(*claim.values)) for claim in CLAIMS if claim.page == numbers.README
    ]
    for line in rows:
        cell = _flat(line.split("|")[2])
        found = re.findall(r"\d[\d,.]*\d|\d", cell)
        here = [text for text in claimed if text in _flat(line)]
        assert found and here, line
        for number in found:
            is_name = f"Qwen2.5-{number}B" in cell or f"Qwen{number}" in cell
            is_name = is_name or f"FlashAttention-{number}" in cell
            assert is_name or any(number in text for text in here), (number, line)


def test_every_table_of_benchmarks_is_covered():
    """Each has a row at least that is compared."""
    page = (ROOT / numbers.BENCHMARKS).read_text()
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    claimed = [
        _flat(claim.text.format(*claim.values))
        for claim in CLAIMS
        if claim.page == numbers.BENCHMARKS
    ]
    assert len(tables) >= 11
    for table in tables:
        assert any(text in _flat(table) for text in claimed), table


def test_an_edited_page_or_result_is_noticed(monkeypatch):
    """The mechanism itself: a digit changed in either place."""
    [claim] = [
        claim for claim in CLAIMS if "one GPU alone" in claim.text and "triton" in claim.text
    ]
    page = _page(claim.page)
    shown = claim.text.format(*claim.values)
    assert shown in page
    assert shown not in page.replace("31.4 + 95.6", "31.5 + 95.6")
    row = numbers.row(CP4, case="scaling", schedule="alone")
    monkeypatch.setitem(row, "forward_ms", row["forward_ms"] + 1)
    changed = [other for other in context_parallel() if other.text == claim.text]
    assert changed[0].text.format(*changed[0].values) not in page
