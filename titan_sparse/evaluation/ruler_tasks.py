"""Prompts of RULER's tasks that need no download (arXiv 2404.06654; github.com/NVIDIA/RULER, scripts/data/synthetic: the
wording and parameters of its constants.py and synthetic.yaml). Each task builds a prompt of a given number of units.

Exact in wording, parameters and structure, with random draws of our own: niah_single_1, niah_multikey_2, niah_multikey_3, vt,
cwe, fwe. The five tasks that RULER hides in essays, which are not ours to ship, hide in our own haystack and say so: "@own".
"""

import functools
import math
import random
import string
import uuid
from collections.abc import Callable
from typing import NamedTuple

from titan_sparse.evaluation.haystack import Haystack

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = [round(100 * step / 39) for step in range(40)]


class Prompt(NamedTuple):
    """text: with the answer's beginning at its end. references: what the answer must hold. answer: one that is right."""

    text: str
    references: tuple[str, ...]
    answer: str


class Task(NamedTuple):
    """build(units, tokens, draw, haystack): a prompt with that much context, for a prompt of up to `tokens` tokens.
    new_tokens: how many the answer may take. least: fewest units that make a prompt."""

    build: Callable[[int, int, random.Random, Haystack], Prompt]
    new_tokens: int
    least: int


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """All words of wonderwords of a kind: noun, adjective, verb. Raises ValueError where it is not installed."""
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise ValueError(
            'tasks with words need wonderwords: pip install -e ".[eval]"; niah_multikey_3, vt and fwe do not'
        ) from None
    return tuple(sorted(set(RandomWord().filter(include_categories=[kind]))))


# Needles ------------------------------------------------------------------------------------------------------------


def _value(kind: str, draw: random.Random) -> str:
    if kind == "words":
        return f"{draw.choice(words('adjective'))}-{draw.choice(words('noun'))}"
    if kind == "numbers":
        return str(draw.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _niah(
    units: int,
    _: int,
    draw: random.Random,
    haystack: Haystack,
    *,
    hay: str,
    key_kind: str,
    value_kind: str,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Prompt:
    """keys x values needles, of which all values of `queries` keys are asked for; RULER's niah.py."""

    def line(key: str, value: str) -> str:
        return f"One of the special magic {value_kind} for {key} is: {value}."

    chosen: dict[str, list[str]] = {}
    while len(chosen) < max(keys, queries):
        chosen.setdefault(_value(key_kind, draw), [_value(value_kind, draw) for _ in range(values)])
    needles = [line(key, value) for key, found in chosen.items() for value in found]
    draw.shuffle(needles)
    context = _hidden(
        needles,
        units,
        hay,
        draw,
        haystack,
        lambda: line(_value(key_kind, draw), _value(value_kind, draw)),
    )
    asked = draw.sample(list(chosen), queries)
    answers = tuple(value for key in asked for value in chosen[key])
    names = asked[0] if queries == 1 else ", ".join(asked[:-1]) + f", and {asked[-1]}"
    if len(answers) == 1:
        kind, first, are = value_kind[:-1], f"A special magic {value_kind[:-1]} is", "is"
    else:
        kind, first, are = value_kind, f"Some special magic {value_kind} are", "are"
    text = (
        f"{first} hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
        f"afterwards.\n{context}\nWhat {are}{'' if are == 'is' else ' all'} the special magic {kind} for {names} "
        f"mentioned in the provided text? The special magic {kind} for {names} mentioned in the provided text {are}"
    )
    return Prompt(text, answers, " " + ", ".join(answers) + ".")


def _hidden(
    needles: list[str],
    units: int,
    hay: str,
    draw: random.Random,
    haystack: Haystack,
    other: Callable[[], str],
) -> str:
    """The needles among `units` lines of noise or of `other` needles, or among sentences of the haystack at given depths."""
    if hay == "own":
        sentences = haystack.sentences(units)
        places = sorted(
            (len(sentences) * depth // 100 for depth in draw.sample(_DEPTHS, len(needles))),
            reverse=True,
        )
    else:
        sentences = [NOISE] * units if hay == "noise" else [other() for _ in range(units)]
        places = sorted(draw.sample(range(units), len(needles)), reverse=True)
    sentences = list(sentences)
    for place, needle in zip(places, needles, strict=True):
        sentences.insert(place, needle)
    return (" " if hay == "own" else "\n").join(sentences)


# Variables and words ------------------------------------------------------------------------------------------------

_HOPS = 4


def _tracking(units: int, draw: random.Random, letters: int, value: str) -> Prompt:
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    chain = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:])]
    lines = [NOISE] * units
    for offset, (place, step) in enumerate(
        zip(sorted(draw.sample(range(units), len(chain))), chain, strict=True)
    ):
        lines.insert(place + offset, step)
    context = "\n".join(lines)
    text = (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
        f"chain(s) of variable assignment in the text above, {len(names)} variables are assigned the value {value}, "
        "they are: "
    )
    return Prompt(text, tuple(names), " ".join(names))


def _vt(units: int, _: int, draw: random.Random, __: Haystack) -> Prompt:
    """One chain of five variables, after a worked example of three-letter names; RULER's variable_tracking.py."""
    example = _tracking(_HOPS + 1, draw, 3, "12345")
    prompt = _tracking(units, draw, 5, str(draw.randint(10_000, 99_999)))
    return prompt._replace(text=f"{example.text}{example.answer}\n{prompt.text}")


def _common(
    pool: tuple[str, ...], count: int, often: int, seldom: int, draw: random.Random
) -> Prompt:
    chosen = (
        draw.sample(pool, count)
        if count <= len(pool)
        else [
            *draw.sample(pool, len(pool)),
            *("".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(count - len(pool))),
        ]
    )
    common, rare = chosen[:10], chosen[10:]
    listed = common * often + rare * seldom
    draw.shuffle(listed)
    context = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
        "words that appear most often in the list are:"
    )
    return Prompt(
        text,
        tuple(common),
        " " + " ".join(f"{place}. {word}" for place, word in enumerate(common, 1)),
    )


def _cwe(units: int, tokens: int, draw: random.Random, _: Haystack) -> Prompt:
    """Ten words 30 times, the others 3 times, after a worked example; RULER's common_words_extraction.py."""
    pool = tuple(sorted({*words("noun"), *words("adjective"), *words("verb")}))
    example = _common(pool, 40, 10, 3, draw) if tokens >= 4096 else _common(pool, 20, 3, 1, draw)
    prompt = _common(pool, units, *((30, 3) if tokens >= 4096 else (6, 1)), draw)
    return prompt._replace(text=f"{example.text}{example.answer}\n{prompt.text}")


def _fwe(units: int, tokens: int, draw: random.Random, _: Haystack) -> Prompt:
    """Coded words by Zipf's law with exponent 2, the first of which is noise; RULER's freq_words_extraction.py."""
    distinct = {"...": None}  # the most frequent word is noise
    while len(distinct) < max(tokens // 50, 4):
        distinct["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    vocabulary = list(distinct)
    listed = [
        word
        for rank, word in enumerate(vocabulary, 1)
        for _ in range(int(units / rank**2 / (math.pi**2 / 6)))
    ]
    draw.shuffle(listed)
    top = vocabulary[1:4]
    text = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
        f"coded words. {' '.join(listed)}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
        "are the three most frequently appeared words in the above coded text? Answer: According to the coded text "
        "above, the three most frequently appeared words are:"
    )
    return Prompt(text, tuple(top), " " + " ".join(top))


def _needles(**options: str | int) -> Task:
    return Task(functools.partial(_niah, **options), 128, 4)


TASKS = {
    "niah_single_1": _needles(hay="noise", key_kind="words", value_kind="numbers"),
    "niah_single_2@own": _needles(hay="own", key_kind="words", value_kind="numbers"),
    "niah_single_3@own": _needles(hay="own", key_kind="words", value_kind="uuids"),
    "niah_multikey_1@own": _needles(hay="own", key_kind="words", value_kind="numbers", keys=4),
    "niah_multikey_2": _needles(hay="needles", key_kind="words", value_kind="numbers"),
    "niah_multikey_3": _needles(hay="needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue@own": _needles(hay="own", key_kind="words", value_kind="numbers", values=4),
    "niah_multiquery@own": _needles(hay="own", key_kind="words", value_kind="numbers", queries=4),
    "vt": Task(_vt, 30, _HOPS + 1),
    "cwe": Task(_cwe, 120, 11),
    # With fewer, ranks of the answer are as frequent as others.
    "fwe": Task(_fwe, 50, 50),
}
