"""Reads README.md, CONTRIBUTING.md, and docs/*.md: their fenced blocks, and the shell commands in these."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block. language: "" where the fence names none."""

    language: str
    text: str


class Command(NamedTuple):
    """A shell command: the page that shows it, and its words without variables set before it."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def fenced_blocks(text: str, language: str | None = None) -> list[Block]:
    """All fenced blocks of a page in order; only those of one language if it is given."""
    blocks = [Block(*match) for match in _FENCED.findall(text)]
    return [block for block in blocks if language is None or block.language == language]


def commands_of(text: str, page: str) -> list[Command]:
    """The commands of a page's bash blocks. A backslash at the end of a line joins it with the next."""
    commands = []
    for block in [*fenced_blocks(text, "bash"), *fenced_blocks(text, "sh")]:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                commands.append(Command(page, tuple(words)))
    return commands


def all_commands() -> list[Command]:
    commands: dict[tuple[str, ...], Command] = {}
    for page in PAGES:
        for command in commands_of(page.read_text(), page.name):
            commands.setdefault(command.words, command)
    return list(commands.values())


def demo_command() -> Command:
    """README's command that trains on the CPU. tests/test_train.py runs it."""
    [demo] = [
        command
        for command in commands_of(PAGES[0].read_text(), PAGES[0].name)
        if command.words[0] == "torchrun" and "train_configs/demo_cpu.toml" in command.words
    ]
    return demo
