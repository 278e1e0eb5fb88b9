"""titan-sparse show_data: what a terminal shows of samples."""

import re

import pytest

from tests.data.chat_helpers import ANSWER, CHAT, CHATML, write_tokenizer
from tests.data.helpers import write_rows
from titan_sparse.commands.show_data import main
from titan_sparse.data.preparing import prepare
from titan_sparse.data.recipe import Recipe

COLOR = re.compile("\033\\[\\d+m")


@pytest.fixture
def words(tmp_path) -> list[str]:
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    long = [CHAT[1], {**ANSWER, "content": "yes " * 200}]
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": long}])
    source = str(tmp_path / "chats.jsonl")
    options = {"source": source, "format": "messages", "tokenizer": folder}
    words = ["--training.seq_len", "100", "--parallelism.cp", "4"]
    for name, value in options.items():
        words += [f"--data.{name}", value]
    return words


def test_marks_colors_and_lengths(words, capsys):
    assert main([*words, "--samples", "1", "--plain"]) == 0
    printed = capsys.readouterr().out
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    for answer in ("the answer\n\nis \U0001f600 4", "yes"):
        text = text.replace(f"\n{answer}<|im_end|>", f"\n⟦{answer}<|im_end|>⟧")
    assert f"learned\n{text}<|endoftext|>\n" in printed
    assert "sample 2" not in printed

    assert main([*words, "--samples", "1"]) == 0
    colored = capsys.readouterr().out
    assert "⟦" not in colored
    assert "\033[32myes\033[0m\033[32m\033[1m<|im_end|>\033[0m\033[2m\n\033[0m" in colored
    plain = re.sub("[⟦⟧]", "", printed)
    assert COLOR.sub("", colored) == plain


def test_prepared_chats_and_text_are_shown_too(words, tmp_path, capsys):
    tokenizer = str(tmp_path / "tokenizer")
    recipe = Recipe(str(tmp_path / "chats.jsonl"), tokenizer=tokenizer, format="messages")
    prepare(recipe, str(tmp_path / "out"))
    write_rows(tmp_path / "text.jsonl", [{"text": "hello"}])
    source = f"{tmp_path}/out:0.5, {tmp_path}/text.jsonl:0.5"
    options = ["--data.source", source, "--data.tokenizer", tokenizer]
    assert main([*options, "--plain"]) == 0
    printed = capsys.readouterr().out
    assert "out: 2 samples, messages" in printed and "⟦yes<|im_end|>⟧" in printed
    assert (
        "text.jsonl: 1 samples, text" in printed
        and "⟦<|begin_of_text|>hello<|endoftext|>⟧" in printed
    )


def test_mistakes_are_one_line(words, tmp_path, capsys):
    assert main([*words, "--samples", "-1"]) == 2
    assert main([*words, "--dry-run"]) == 2
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT[:2]}])
    assert main(words) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    told = [line for line in errors if line.startswith("error: ")]
    assert len(told) == 3 and "--samples: -1 is too small" in told[0] and "flags" in told[1]
    assert 'chats.jsonl, row 1: "messages" holds no message of the role "assistant"' in told[2]
