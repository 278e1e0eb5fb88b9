"""Answers held-out questions of chats by generation, and counts what is right.

    torchrun --standalone --nproc-per-node 2 -m scripts.chat_demo.answers --config X.toml \\
        --questions held_out.jsonl (--hf FOLDER | --checkpoint RUN) --out before.json

A question is a chat whose last message is the answer. Other words are options of the configuration,
as train.py takes them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from scripts.evaluate import run
from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.data import Tokenizer, load_tokenizer
from titan_sparse.data.chat_template import load_template
from titan_sparse.evaluation.generation import generate
from titan_sparse.evaluation.load import build_scorer, find_checkpoint
from titan_sparse.evaluation.scorer import Scorer
from titan_sparse.evaluation.settings import load_for_evaluation

TOGETHER = 12
"""Prompts that go through the model together."""
NEW_TOKENS = 32


class Question(NamedTuple):
    """A chat up to the answer, and the answer."""

    prompt: NDArray[np.int64]
    """int64 [n], with the template's generation prompt"""
    answer: str


def main(words: list[str]) -> int:
    try:
        args, config = _parse(words)
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.split_special_tokens)
        questions = read_questions(args.questions, config, tokenizer)
        checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
        scorer = build_scorer(config, checkpoint, tokenizer)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    answers = ask(scorer, questions)
    if dist.get_rank() == 0:
        records = []
        for question, answer in zip(questions, answers, strict=True):
            records.append({"answer": answer, "expected": question.answer})
        Path(args.out).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        exact = sum(record["answer"] == record["expected"] for record in records)
        print(f"{exact} of {len(records)} answers are exact")
    return 0


def _parse(words: list[str]) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chat_demo.answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--checkpoint", help="output_dir of a run, or its checkpoint/step-N")
    weights.add_argument("--hf", help="folder of Hugging Face, in place of a checkpoint")
    parser.add_argument("--questions", required=True, help=".jsonl of chats")
    parser.add_argument("--attention", choices=["dense", "as_trained"], default="as_trained")
    parser.add_argument("--out", required=True, help=".json to write")
    args, rest = parser.parse_known_args(words)
    config = load_for_evaluation(
        ["--config", args.config, *rest], args.hf, args.attention == "dense"
    )
    check(config, *world_from_environment())
    return args, config


def read_questions(path: str, config: Config, tokenizer: Tokenizer) -> list[Question]:
    """The questions of a file. Raises ValueError for one that the template refuses."""
    template = load_template(config.data, config.model.initial_hf)
    questions = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        *asked, answer = json.loads(line)["messages"]
        text = template.render(asked, [], add_generation_prompt=True)
        questions.append(Question(tokenizer.encode(text).astype(np.int64), answer["content"]))
    return questions


def ask(scorer: Scorer, questions: list[Question]) -> list[str]:
    """What the model writes after each question, up to the token that ends its turn.

    Collective, the same on all ranks: they share each question.
    """
    tokenizer = scorer.tokenizer
    special = list(tokenizer.special_ids)
    answers = []
    for start in range(0, len(questions), TOGETHER):
        prompts = [question.prompt for question in questions[start : start + TOGETHER]]
        for tokens in generate(scorer, prompts, NEW_TOKENS, lambda text: text[-1] in special):
            if tokens[-1] in special:
                tokens = tokens[:-1]
            answers.append(tokenizer.decode(tokens))
    return answers


if __name__ == "__main__":
    run(main)
