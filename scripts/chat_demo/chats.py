"""Writes the chats of make chat-demo: questions about a store's register, answered in a fixed form.

    python -m scripts.chat_demo.chats outputs/chat_demo/chats [--chats 240] [--entries 16]

A register says of each thing whose it is and on which shelf it lies, in changing words. An answer
has the form "owner=Mira Olsen; shelf=48". OUT/train.jsonl has chats with several questions about
one register. OUT/held_out.jsonl has chats with one: things and owners that no training chat names.
The same numbers always write the same files.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

SYSTEM = "Answer from the register. Each answer has the form owner=NAME; shelf=NUMBER"
SENTENCES = (
    "The {thing} belong to {owner} and lie on shelf {shelf}.",
    "{owner} has left the {thing} on shelf {shelf}.",
    "On shelf {shelf} are the {thing} of {owner}.",
    "The {thing}, which {owner} brought, are on shelf {shelf}.",
)
QUESTIONS = (
    "Where are the {thing}, and whose are they?",
    "Who owns the {thing}, and on which shelf do they lie?",
    "Find the {thing}.",
)
FIRST_NAMES = (
    "Mira Jonas Ada Felix Nora Oscar Lena Hugo Clara Simon Ruth Victor Iris Paul Greta Martin "
    "Alma Edgar Tessa Conrad Olive Ralph Wanda Leon"
).split()
LAST_NAMES = (
    "Olsen Baker Novak Reyes Lind Carter Moreau Hayes Fischer Quinn Rossi Webb Larsen Doyle Sato "
    "Marsh Keller Boyd Vargas Stone Petit Flynn Weber Nash Brandt Costa Evans Falk Gruber Holt Ivanov "
    "Jensen Koch Lopez Meyer Perez"
).split()
MATERIALS = (
    "copper wooden silver paper glass leather iron plastic cotton marble golden woolen brass "
    "rubber silk clay"
).split()
OBJECTS = (
    "lanterns baskets clocks maps bottles saddles kettles toys curtains statues rings blankets "
    "bells boots scarves bowls drums mirrors ropes hammers combs plates masks flutes candles spoons "
    "trays wheels gloves pens jars hats tables cages buttons ladders"
).split()
QUESTIONS_OF_A_CHAT = 6


class Entry(NamedTuple):
    """A line of a register."""

    thing: str
    owner: str
    shelf: int

    def sentence(self, draw: random.Random) -> str:
        return draw.choice(SENTENCES).format(**self._asdict())

    def question(self, draw: random.Random) -> str:
        return draw.choice(QUESTIONS).format(thing=self.thing)

    @property
    def answer(self) -> str:
        return f"owner={self.owner}; shelf={self.shelf}"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chat_demo.chats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--chats", type=int, default=240, help="to train on")
    parser.add_argument("--held-out", type=int, default=24, help="questions to answer")
    parser.add_argument("--entries", type=int, default=16, help="lines of a register")
    args = parser.parse_args(words)
    for name in ("chats", "held_out", "entries"):
        if getattr(args, name) < QUESTIONS_OF_A_CHAT:
            print(f"error: --{name} is below {QUESTIONS_OF_A_CHAT}; write more", file=sys.stderr)
            return 2
    draw = random.Random(0)
    train = []
    for _ in range(args.chats):
        train.append(chat(draw, args.entries, QUESTIONS_OF_A_CHAT, held_out=False))
    held_out = [chat(draw, args.entries, 1, held_out=True) for _ in range(args.held_out)]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in {"train": train, "held_out": held_out}.items():
        lines = [json.dumps({"messages": messages}) + "\n" for messages in rows]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {out}: {len(train)} chats to train on, {len(held_out)} held-out questions")
    return 0


def chat(draw: random.Random, entries: int, questions: int, held_out: bool) -> list[dict[str, str]]:
    """The messages of a chat about a new register of so many `entries`."""
    register = _register(draw, entries, held_out)
    lines = "\n".join(entry.sentence(draw) for entry in register)
    messages = [{"role": "system", "content": SYSTEM}]
    for number, entry in enumerate(draw.sample(register, questions)):
        question = entry.question(draw)
        content = question if number else f"{lines}\n\n{question}"
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": entry.answer})
    return messages


def _register(draw: random.Random, count: int, held_out: bool) -> list[Entry]:
    """Entries whose things and owners the other kind of chats never has."""
    things = _pairs(MATERIALS, OBJECTS, held_out)
    owners = _pairs(FIRST_NAMES, LAST_NAMES, held_out)
    return [
        Entry(*of_entry)
        for of_entry in zip(
            draw.sample(things, count),
            draw.sample(owners, count),
            draw.sample(range(10, 100), count),
            strict=True,
        )
    ]


def _pairs(firsts: list[str], lasts: list[str], held_out: bool) -> list[str]:
    """Two words each. The second half of `lasts` is held out."""
    kept = len(lasts) // 2
    own = lasts[kept:] if held_out else lasts[:kept]
    return [f"{first} {last}" for first in firsts for last in own]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
