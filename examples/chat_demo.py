"""Teach a small chat model to answer from a register of about 650 tokens (`make chat-demo`).

    python -m examples.chat_demo write outputs/chat_demo/chats
    torchrun --standalone --nproc-per-node 2 -m examples.chat_demo answer --config X.toml \\
        --questions held_out.jsonl (--hf FOLDER | --checkpoint RUN) --out before.json
    python -m examples.chat_demo compare before.json after.json

A register is a text that says who owns each thing and on which shelf it lies. A question asks for
one thing, and its answer has the form "owner=Mira Olsen; shelf=48". The held-out questions use
things and owners that no training chat names, so a model that answers them has learned to look them
up. Further options of `answer` are options of the configuration, as train.py takes them.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from titan_sparse.commands import parser_of, refuses
from titan_sparse.config import check, world_from_environment
from titan_sparse.data.chat_template import load_template
from titan_sparse.data.tokenizer import open_tokenizer
from titan_sparse.evaluation.generation import generate
from titan_sparse.training.load import build_scorer, find_checkpoint, load_for_evaluation

SYSTEM = "Answer from the register. Each answer has the form owner=NAME; shelf=NUMBER"
SENTENCE = "The {thing} belong to {owner} and lie on shelf {shelf}."
QUESTIONS = (
    "Where are the {thing}, and whose are they?",
    "Who owns the {thing}, and on which shelf do they lie?",
    "Find the {thing}.",
)
ANSWER = "owner={owner}; shelf={shelf}"
ANSWER_PATTERN = re.compile(r"owner=([^;=]+); shelf=(\d+)")
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
PROMPTS_PER_BATCH = 12
MAX_ANSWER_TOKENS = 32


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__, "examples.chat_demo")
    commands = parser.add_subparsers(required=True)
    write = commands.add_parser("write")
    write.set_defaults(command=write_chats)
    write.add_argument("out", help="folder to write")
    write.add_argument("--chats", type=int, default=60, help="chats to train on")
    write.add_argument("--held-out", type=int, default=24, help="questions to answer")
    write.add_argument("--entries", type=int, default=36, help="lines of a register")
    answer = commands.add_parser("answer", allow_abbrev=False)
    answer.set_defaults(command=answer_questions)
    answer.add_argument("--config", required=True, help="of the run")
    weights = answer.add_mutually_exclusive_group(required=True)
    weights.add_argument("--checkpoint", help="output_dir of the run")
    weights.add_argument("--hf", help="Hugging Face folder, instead of a checkpoint")
    answer.add_argument("--questions", required=True, help=".jsonl of chats")
    answer.add_argument("--out", required=True, help=".json to write")
    compare = commands.add_parser("compare")
    compare.set_defaults(command=compare_answers)
    compare.add_argument("before")
    compare.add_argument("after")
    args, options = parser.parse_known_args(words)
    if options and args.command is not answer_questions:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    return args.command(args, options)


def write_chats(args: argparse.Namespace, _: list[str]) -> int:
    """Write train.jsonl, with 16 questions a chat, and held_out.jsonl, with one question a chat.

    The same arguments always write the same files.
    """
    questions_per_chat = 16
    if args.entries < questions_per_chat:
        raise ValueError(f"--entries must be at least {questions_per_chat}, got {args.entries}")
    draw = random.Random(0)
    train = [_chat(draw, args.entries, questions_per_chat, False) for _ in range(args.chats)]
    held_out = [_chat(draw, args.entries, 1, True) for _ in range(args.held_out)]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, chats in (("train", train), ("held_out", held_out)):
        lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {out}: {len(train)} chats to train on, {len(held_out)} held-out questions")
    return 0


def _chat(draw: random.Random, entries: int, questions: int, held_out: bool) -> list[dict]:
    """Return the messages of a chat about a new register with so many entries."""
    things = draw.sample(_pairs(MATERIALS, OBJECTS, held_out), entries)
    owners = draw.sample(_pairs(FIRST_NAMES, LAST_NAMES, held_out), entries)
    shelves = draw.sample(range(10, 100), entries)
    names = ("thing", "owner", "shelf")
    register = [dict(zip(names, entry)) for entry in zip(things, owners, shelves)]
    text = "\n".join(SENTENCE.format(**entry) for entry in register)
    messages = [{"role": "system", "content": SYSTEM}]
    for number, entry in enumerate(draw.sample(register, questions)):
        question = draw.choice(QUESTIONS).format(**entry)
        content = question if number else f"{text}\n\n{question}"
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": ANSWER.format(**entry)})
    return messages


def _pairs(firsts: list[str], seconds: list[str], held_out: bool) -> list[str]:
    """Return names of two words. The second half of `seconds` is for held-out chats only."""
    half = len(seconds) // 2
    seconds = seconds[half:] if held_out else seconds[:half]
    return [f"{first} {second}" for first in firsts for second in seconds]


def answer_questions(args: argparse.Namespace, options: list[str]) -> int:
    """Generate an answer to the last question of each chat and write all answers to a file.

    This runs on every rank. The ranks share each prompt.
    """
    config = load_for_evaluation(["--config", args.config, *options], args.hf, dense=False)
    check(config, *world_from_environment())
    data = config.data
    tokenizer = open_tokenizer(config)
    template = load_template(data, config.model.initial_hf, tokenizer)
    prompts, expected = [], []
    for line in Path(args.questions).read_text(encoding="utf-8").splitlines():
        *asked, answer = json.loads(line)["messages"]
        text, _ = template.render(asked, [], add_generation_prompt=True)
        prompts.append(tokenizer.encode(text).astype(np.int64))
        expected.append(answer["content"])

    checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
    scorer = build_scorer(config, checkpoint, tokenizer)
    special = set(tokenizer.special_ids)
    answers = []
    for start in range(0, len(prompts), PROMPTS_PER_BATCH):
        batch = prompts[start : start + PROMPTS_PER_BATCH]
        for tokens in generate(scorer, batch, MAX_ANSWER_TOKENS, lambda text: text[-1] in special):
            answers.append(tokenizer.decode([token for token in tokens if token not in special]))
    if dist.get_rank() == 0:
        pairs = zip(answers, expected, strict=True)
        records = [{"answer": answer, "expected": right} for answer, right in pairs]
        Path(args.out).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        exact = sum(map(str.__eq__, answers, expected))
        print(f"{exact} of {len(expected)} answers are exact")
    dist.destroy_process_group()
    return 0


class Counts(NamedTuple):
    """The number of right answers in a file."""

    exact: int
    """The whole answer is right, letter by letter."""
    in_the_form: int
    owner: int
    """The right owner is named, in whatever form."""
    shelf: int


def compare_answers(args: argparse.Namespace, _: list[str]) -> int:
    """Print the counts of two files. Return 1 unless at least 80 % of `after` is exact."""
    print(f"{'answers':<12}{'exact':>12}{'in the form':>14}{'owner':>8}{'shelf':>8}")
    for file in (args.before, args.after):
        records = json.loads(Path(file).read_text(encoding="utf-8"))
        counts = count([(record["answer"], record["expected"]) for record in records])
        exact = f"{counts.exact} of {len(records)}"
        numbers = f"{exact:>12}{counts.in_the_form:>14}{counts.owner:>8}{counts.shelf:>8}"
        print(f"{Path(file).stem:<12}{numbers}")
    return 0 if counts.exact >= 0.8 * len(records) else 1


def count(records: list[tuple[str, str]]) -> Counts:
    """records: pairs of an answer and what was expected."""
    exact = in_the_form = owners = shelves = 0
    for answer, expected in records:
        owner, shelf = ANSWER_PATTERN.fullmatch(expected).groups()
        exact += answer == expected
        in_the_form += ANSWER_PATTERN.fullmatch(answer) is not None
        owners += owner in answer
        shelves += re.search(rf"\b{shelf}\b", answer) is not None
    return Counts(exact, in_the_form, owners, shelves)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
