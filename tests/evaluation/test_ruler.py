"""RULER's prompts: lengths, what is hidden and what is asked.

Scores through a model are in tests/scripts/test_evaluate.py.
"""

import re
import sys
from collections import Counter

import pytest

from titan_sparse.data.documents import TokenizedTexts
from titan_sparse.data.tokenizer import ByteTokenizer
from titan_sparse.evaluation import ruler_tasks
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.ruler import TASKS, by_task, ruler_samples

TOKENIZER = ByteTokenizer()
HAYSTACK = Haystack(
    TokenizedTexts(
        ["Call me Ishmael. Some years ago, never mind how long precisely.\nI sailed!", ""],
        TOKENIZER,
    ),
    TOKENIZER,
)
WITHOUT_WORDS = ["niah_multikey_3", "vt", "fwe"]
EXPECTED = {"niah_multivalue@own": 4, "niah_multiquery@own": 4, "vt": 5, "cwe": 10, "fwe": 3}


@pytest.fixture(params=["without words", "with words"])
def tasks(request) -> list[str]:
    if request.param == "without words":
        return WITHOUT_WORDS
    pytest.importorskip("wonderwords")
    return [name for name in TASKS if name not in WITHOUT_WORDS]


def test_lengths_and_references(tasks):
    for length in (3000, 9000):
        samples = ruler_samples(HAYSTACK, tasks, [length], 2, seed=3)
        assert [sample.about["task"] for sample in samples] == [
            name for name in tasks for _ in range(2)
        ]
        for sample in samples:
            name = sample.about["task"]
            total = len(sample.prompt) + max(TASKS[name].new_tokens, len(sample.answer))
            assert 0.9 * length < total <= length, (name, total)
            assert len(sample.references) == EXPECTED.get(name, 1) == len(set(sample.references))
            text, answer = TOKENIZER.decode(sample.prompt), TOKENIZER.decode(sample.answer)
            assert all(reference in text and reference in answer for reference in sample.references)
        assert samples[0].references != samples[1].references
        again = ruler_samples(HAYSTACK, tasks, [length], 2, seed=3)
        assert all((a.prompt == b.prompt).all() for a, b in zip(samples, again, strict=True))


def _prompt(name: str, length: int = 6000) -> tuple[str, tuple[str, ...]]:
    (sample,) = ruler_samples(HAYSTACK, [name], [length], 1, seed=0)
    return TOKENIZER.decode(sample.prompt), sample.references


def test_variable_tracking_follows_the_chain():
    text, references = _prompt("vt")
    value = re.search(
        r"Find all variables that are assigned the value (\d{5}) in the text above", text[-400:]
    ).group(1)
    held = {
        match[0]: match[1]
        for match in re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+)$", text, re.MULTILINE)
    }

    def follow(name: str) -> str:
        return name if name.isdigit() else follow(held[name])

    assert {name for name in held if follow(name) == value} == set(references)
    assert text.count("they are: ") == 2 and "12345" in text  # a worked example in front
    assert text.index(f"VAR {references[0]} =") < text.index(f"VAR {references[-1]} =")


def test_frequent_words_are_the_most_frequent():
    text, references = _prompt("fwe")
    counts = Counter(re.search(r"coded words\. (.*)\nQuestion", text).group(1).split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *references]
    assert counts[references[-1]] > counts.most_common(5)[4][1]
    assert counts["..."] / counts[references[0]] == pytest.approx(4, rel=0.1)  # exponent 2


def test_the_question_names_the_key_of_the_value():
    text, (value,) = _prompt("niah_multikey_3")
    key = re.search(r"What is the special magic uuid for ([\w-]+) mentioned", text).group(1)
    assert text.count(f"One of the special magic uuids for {key} is: {value}.") == 1
    assert len(re.findall(r"One of the special magic uuids for ", text)) > 20 and text.endswith(
        f"for {key} mentioned in the provided text is"
    )


def test_common_words_and_many_needles():
    pytest.importorskip("wonderwords")
    text, references = _prompt("cwe", 12000)
    listed = text.rsplit("most often.\n", 1)[1].split("\nQuestion")[0]
    counts = Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", listed))
    assert {word for word, count in counts.items() if count == 30} == set(references)
    assert set(counts.values()) == {30, 3}
    for name, needles in (
        ("niah_multiquery@own", 4),
        ("niah_multivalue@own", 4),
        ("niah_multikey_1@own", 4),
        ("niah_single_2@own", 1),
    ):
        text, references = _prompt(name, 3000)
        assert (
            len(re.findall(r"One of the special magic numbers for ", text)) == needles
            and "Ishmael." in text
        )
        assert ("What are all the" in text) == (len(references) > 1)


def test_what_does_not_fit_and_missing_words_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="vt does not fit in 500 tokens; write .... or more"):
        ruler_samples(HAYSTACK, ["vt"], [500], 1, 0)
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    ruler_tasks.words.cache_clear()
    with pytest.raises(ValueError, match=r'need wonderwords: pip install -e "\.\[eval\]"'):
        ruler_samples(HAYSTACK, ["cwe"], [6000], 1, 0)
    ruler_tasks.words.cache_clear()


def test_scores_are_percents():
    records = [
        {"task": "vt", "length": 8, "score": score, "prediction": ""} for score in (1.0, 0.2)
    ]
    assert by_task(records) == [{"task": "vt", "length": 8, "samples": 2, "score": 60.0}]
