"""Writes answers into data/chats.jsonl: the real model's own, to questions written by hand.

    python -m scripts.study.density.write_chats outputs/smollm2

Chats that have answers are left alone, so that the same command goes on. Sampled, with a seed;
another machine may answer otherwise.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.study.density.texts import CHATS, Chat, read_chats

SEED = 0
TEMPERATURE = 0.7
TOP_P = 0.9
CHATS_AT_ONCE = 8
MOST_TOKENS = 288
"""Of an answer. A longer one ends with its last whole sentence."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.study.density.write_chats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of scripts.study.real_model")
    args = parser.parse_args(words)
    chats = read_chats()
    waiting = [number for number, chat in enumerate(chats) if not has_answers(chat)]
    for first in range(0, len(waiting), CHATS_AT_ONCE):
        numbers = waiting[first : first + CHATS_AT_ONCE]
        answered = answer(args.model, [chats[number] for number in numbers])
        for number, chat in zip(numbers, answered):
            chats[number] = chat
        CHATS.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
        print(f"{CHATS}: {first + len(numbers)} of {len(waiting)} chats", flush=True)
    return 0


def has_answers(chat: Chat) -> bool:
    return any(message["role"] == "assistant" for message in chat)


@torch.no_grad()
def answer(folder: Path, chats: list[Chat]) -> list[Chat]:
    """The chats with an answer behind each question. All chats have equally many questions."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    torch.manual_seed(SEED)
    answered: list[Chat] = [[] for _ in chats]
    for questions in zip(*chats, strict=True):
        for chat, question in zip(answered, questions, strict=True):
            chat.append(question)
        inputs = tokenizer.apply_chat_template(
            answered,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        # [chats, prompt + answer]
        tokens = model.generate(
            **inputs,
            max_new_tokens=MOST_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
        )
        prompt = inputs["input_ids"].shape[1]
        for chat, row in zip(answered, tokens):
            text = tokenizer.decode(row[prompt:], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": _whole_sentences(text)})
    return answered


def _whole_sentences(text: str) -> str:
    """The text up to the end of its last sentence; all of it where there is no sentence."""
    end = max(text.rfind(mark) for mark in (". ", ".\n", "!", "?", "```\n"))
    if text.rstrip().endswith((".", "!", "?", "```")) or end < 0:
        return text.strip()
    return text[: end + 1].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
