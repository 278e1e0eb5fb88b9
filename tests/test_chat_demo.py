"""make chat-demo: its commands on a tiny model (and by hand on the real
one), and what it counts."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from examples import chat_demo
from tests.data.helpers import CHATML, write_tokenizer
from tests.distributed import run_program
from titan_sparse.commands import train

ROOT = Path(__file__).parents[1]
TINY_RUN = (
    "--training.steps=2",
    "--lr_scheduler.warmup_steps=0",
    "--checkpoint.interval=2",
)


def _commands(folder: Path) -> list[list[str]]:
    """What make chat-demo runs after installation, in `folder` instead of outputs/chat_demo."""
    command = ["make", "--no-print-directory", "-n", "chat-demo", f"CHAT_DEMO={folder}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in shown.splitlines() if "pip install" not in line][-6:]


def _train_and_ask(words: list[str]) -> int:
    split = words.index("then")
    sys.argv = ["train.py", *words[:split]]
    return train.main() or chat_demo.main(words[split + 1 :])


def _after(words: list[str], program: str) -> list[str]:
    return words[words.index(program) + 1 :]


def test_the_commands_work_on_a_tiny_model(tmp_path, capsys):
    model = tmp_path / "model"
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    write_tokenizer(model, CHATML, end="<|im_end|>")
    tiny = [
        f"--model.initial_hf={model}",
        f"--data.tokenizer={model}",
        f"--data.source={tmp_path}/chats/train.jsonl",
        "--training.seq_len=4096",
    ]
    of_training = [f"--training.output_dir={tmp_path}/run", *TINY_RUN]
    real, write, before, training, after, compare = _commands(tmp_path)
    assert real[-2:] == ["--out", "outputs/smollm2"] and "outputs/smollm2" in before
    few = ["--chats=8", "--held-out=6", "--entries=16"]
    assert chat_demo.main([*_after(write, "examples.chat_demo"), *few]) == 0

    before[before.index("--hf") + 1] = str(model)
    printed = run_program(2, chat_demo.main, [*_after(before, "examples.chat_demo"), *tiny])
    assert "of 6 answers are exact" in printed
    asking = [*_after(after, "examples.chat_demo"), *tiny]
    run_program(
        2, _train_and_ask, [*_after(training, "train.py"), *tiny, *of_training, "then", *asking]
    )

    # Nothing is learned in two steps.
    assert chat_demo.main(_after(compare, "examples.chat_demo")) == 1
    assert "0 of 6" in capsys.readouterr().out


def test_held_out_questions_name_nothing_that_is_trained_on(tmp_path):
    assert chat_demo.main(["write", str(tmp_path), "--chats=40"]) == 0
    words = {}
    for name in ("train", "held_out"):
        words[name] = set()
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            system, first, *rest = json.loads(line)["messages"]
            for answer in rest[::2]:
                owner, shelf = chat_demo.ANSWER_PATTERN.fullmatch(answer["content"]).groups()
                [entry] = [row for row in first["content"].splitlines() if owner in row]
                assert f"shelf {shelf}." in entry
                words[name] |= {owner.split()[1], entry.split()[2]}
    assert words["held_out"] and not words["train"] & words["held_out"]


def test_answers_are_counted():
    right = "owner=Mira Olsen; shelf=48"
    for answer, counts in {
        right: (1, 1, 1, 1),
        f"{right}.": (0, 0, 1, 1),
        "owner=Mira Olsen; shelf=4": (0, 1, 1, 0),
        "shelf 480": (0, 0, 0, 0),
    }.items():
        assert chat_demo.count([(answer, right)]) == counts, answer


@pytest.mark.parametrize("exact, status", [(4, 0), (3, 1)])
def test_the_demo_fails_below_80_percent(tmp_path, exact, status):
    right = {"answer": "owner=A B; shelf=10", "expected": "owner=A B; shelf=10"}
    records = [right] * exact + [right | {"answer": ""}] * (5 - exact)
    (tmp_path / "after.json").write_text(json.dumps(records))
    assert chat_demo.main(["compare", *[str(tmp_path / "after.json")] * 2]) == status
