"""Prompts of RULER's tasks that need no download.

arXiv 2404.06654; github.com/NVIDIA/RULER, scripts/data/synthetic: the wording and parameters of its
constants.py and synthetic.yaml. Each task builds a prompt of a given number of units.

Exact in wording, parameters and structure, with random draws of our own: niah_single_1,
niah_multikey_2, niah_multikey_3, vt, cwe, fwe. The five tasks that RULER hides in essays, which are
not ours to ship, hide in our own haystack and say so in their names: "@own".
"""

import functools
import itertools
import math
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from titan_sparse.evaluation.haystack import Haystack

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = [round(100 * step / 39) for step in range(40)]
"""Percent of the haystack before a needle."""
_HOPS = 4
"""Assignments of a chain of variables, after its first."""


class Prompt(NamedTuple):
    """A prompt and its answer."""

    text: str
    """ends with the answer's beginning"""
    references: tuple[str, ...]
    """what the answer must contain"""
    answer: str
    """one that is right"""


class Task(NamedTuple):
    """A task of RULER."""

    build: Callable[[int, int, random.Random, Haystack], Prompt]
    """build(units, tokens, draw, haystack): a prompt with `units` of context, of up to `tokens` tokens"""
    new_tokens: int
    """how many tokens the answer may take"""
    least: int
    """the fewest units that make a prompt"""


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """All words of wonderwords of a kind: noun, adjective, verb.

    Raises ValueError where it is not installed.
    """
    try:
        from wonderwords import RandomWord
    except ImportError:
        raise ValueError(
            'tasks with words need wonderwords: pip install -e ".[eval]"; niah_multikey_3, vt and fwe do not'
        ) from None
    return tuple(sorted(set(RandomWord().filter(include_categories=[kind]))))


def _value(kind: str, draw: random.Random) -> str:
    """A key or a value of a kind: words, numbers or uuids."""
    if kind == "words":
        return f"{draw.choice(words('adjective'))}-{draw.choice(words('noun'))}"
    if kind == "numbers":
        return str(draw.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


@dataclass(frozen=True)
class _Needles:
    """Builds a prompt with keys x values needles, of which all values of `queries` keys are asked for;
    RULER's niah.py."""

    hay: str
    """what needles are hidden in: noise, other needles, or sentences of our "own" haystack"""
    key_kind: str
    value_kind: str
    keys: int = 1
    values: int = 1
    queries: int = 1

    def build(self, units: int, tokens: int, draw: random.Random, haystack: Haystack) -> Prompt:
        chosen: dict[str, list[str]] = {}
        while len(chosen) < max(self.keys, self.queries):
            key = _value(self.key_kind, draw)
            chosen.setdefault(key, [_value(self.value_kind, draw) for _ in range(self.values)])
        needles = [self._line(key, value) for key, values in chosen.items() for value in values]
        draw.shuffle(needles)
        context = self._hidden(needles, units, draw, haystack)
        asked = draw.sample(list(chosen), self.queries)
        answers = tuple(value for key in asked for value in chosen[key])
        text = self._question(context, asked, several=len(answers) > 1)
        return Prompt(text, answers, " " + ", ".join(answers) + ".")

    def _line(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_kind} for {key} is: {value}."

    def _question(self, context: str, asked: list[str], several: bool) -> str:
        """The whole text. several: whether there is more than one answer."""
        names = asked[0]
        if len(asked) > 1:
            names = ", ".join(asked[:-1]) + f", and {asked[-1]}"
        if several:
            kind = self.value_kind
            first = f"Some special magic {kind} are"
            what_are = "What are all"
            are = "are"
        else:
            kind = self.value_kind[:-1]
            first = f"A special magic {kind} is"
            what_are = "What is"
            are = "is"
        return (
            f"{first} hidden within the following text. Make sure to memorize it."
            f" I will quiz you about the {kind} afterwards.\n"
            f"{context}\n"
            f"{what_are} the special magic {kind} for {names} mentioned in the provided text?"
            f" The special magic {kind} for {names} mentioned in the provided text {are}"
        )

    def _hidden(
        self, needles: list[str], units: int, draw: random.Random, haystack: Haystack
    ) -> str:
        """The needles among `units` lines or sentences of hay."""
        if self.hay == "own":
            sentences = list(haystack.sentences(units))
            depths = draw.sample(_DEPTHS, len(needles))
            places = [len(sentences) * depth // 100 for depth in depths]
        else:
            if self.hay == "noise":
                sentences = [NOISE] * units
            else:
                sentences = [self._other(draw) for _ in range(units)]
            places = draw.sample(range(units), len(needles))
        # From the back, so that places before are still right.
        for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
            sentences.insert(place, needle)
        separator = " " if self.hay == "own" else "\n"
        return separator.join(sentences)

    def _other(self, draw: random.Random) -> str:
        """A needle that nobody asks for."""
        key = _value(self.key_kind, draw)
        value = _value(self.value_kind, draw)
        return self._line(key, value)


def _tracking(units: int, draw: random.Random, letters: int, value: str) -> Prompt:
    """One chain of variables of so many letters, whose first is assigned `value`."""
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
    lines = [NOISE] * units
    places = sorted(draw.sample(range(units), len(chain)))
    for number, place in enumerate(places):
        # Each line that is put in moves the places after it by one.
        lines.insert(place + number, chain[number])
    context = "\n".join(lines)
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\n"
        f"Question: Find all variables that are assigned the value {value} in the text above."
        " Answer: According to the chain(s) of variable assignment in the text above,"
        f" {len(names)} variables are assigned the value {value}, they are: "
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
    """`count` words of the pool, of which ten appear `often` times and the others `seldom` times."""
    chosen = draw.sample(pool, min(count, len(pool)))
    # Where the pool has too few words, letters make up for them.
    for _ in range(count - len(pool)):
        chosen.append("".join(draw.choices(string.ascii_lowercase, k=8)))
    common = chosen[:10]
    listed = common * often + chosen[10:] * seldom
    draw.shuffle(listed)
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others."
        f" Memorize the ones that appear most often.\n{_numbered(listed)}\n"
        "Question: What are the 10 most common words in the above list?"
        " Answer: The top 10 words that appear most often in the list are:"
    )
    return Prompt(text, tuple(common), " " + _numbered(common))


def _numbered(listed: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))


def _cwe(units: int, tokens: int, draw: random.Random, _: Haystack) -> Prompt:
    """Ten words 30 times, the others 3 times, after a worked example; RULER's common_words_extraction.py."""
    pool = tuple(sorted({*words("noun"), *words("adjective"), *words("verb")}))
    if tokens >= 4096:
        example = _common(pool, 40, 10, 3, draw)
        prompt = _common(pool, units, 30, 3, draw)
    else:
        example = _common(pool, 20, 3, 1, draw)
        prompt = _common(pool, units, 6, 1, draw)
    return prompt._replace(text=f"{example.text}{example.answer}\n{prompt.text}")


def _fwe(units: int, tokens: int, draw: random.Random, _: Haystack) -> Prompt:
    """Coded words by Zipf's law with exponent 2, the first of which is noise; RULER's freq_words_extraction.py."""
    distinct = {"...": None}  # the most frequent word is noise
    while len(distinct) < max(tokens // 50, 4):
        distinct["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    vocabulary = list(distinct)
    listed: list[str] = []
    for rank, word in enumerate(vocabulary, 1):
        # The sum of 1 / rank**2 over all ranks is pi**2 / 6, so that about `units` words are listed.
        listed += [word] * int(units / rank**2 / (math.pi**2 / 6))
    draw.shuffle(listed)
    top = vocabulary[1:4]
    text = (
        "Read the following coded text and track the frequency of each coded word."
        f" Find the three most frequently appeared coded words. {' '.join(listed)}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'."
        " What are the three most frequently appeared words in the above coded text?"
        " Answer: According to the coded text above,"
        " the three most frequently appeared words are:"
    )
    return Prompt(text, tuple(top), " " + " ".join(top))


def _needles(hay: str, key_kind: str, value_kind: str, **counts: int) -> Task:
    """A task of _Needles. counts: keys, values or queries, where there is more than one."""
    return Task(_Needles(hay, key_kind, value_kind, **counts).build, new_tokens=128, least=4)


TASKS = {
    "niah_single_1": _needles(hay="noise", key_kind="words", value_kind="numbers"),
    "niah_single_2@own": _needles(hay="own", key_kind="words", value_kind="numbers"),
    "niah_single_3@own": _needles(hay="own", key_kind="words", value_kind="uuids"),
    "niah_multikey_1@own": _needles(hay="own", key_kind="words", value_kind="numbers", keys=4),
    "niah_multikey_2": _needles(hay="needles", key_kind="words", value_kind="numbers"),
    "niah_multikey_3": _needles(hay="needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue@own": _needles(hay="own", key_kind="words", value_kind="numbers", values=4),
    "niah_multiquery@own": _needles(hay="own", key_kind="words", value_kind="numbers", queries=4),
    "vt": Task(_vt, new_tokens=30, least=_HOPS + 1),
    "cwe": Task(_cwe, new_tokens=120, least=11),
    # With fewer, ranks of the answer are as frequent as others.
    "fwe": Task(_fwe, new_tokens=50, least=50),
}
