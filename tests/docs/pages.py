"""Reads README.md, CONTRIBUTING.md, and docs/*.md: their fenced blocks, and the shell commands in these."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

Command = tuple[str, ...]
"""The words of a shell command, without variables set before it."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's bash blocks. A backslash at the end of a line joins it with the next."""
    commands = []
    for block in blocks(page, "(?:ba)?sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                commands.append(tuple(words))
    return commands


def demo_command() -> Command:
    """README's command that trains on the CPU. tests/test_train.py runs it."""
    [demo] = [
        words
        for words in commands_of(PAGES[0])
        if words[0] == "torchrun" and "train_configs/demo_cpu.toml" in words
    ]
    return demo
