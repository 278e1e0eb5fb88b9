"""Writes the drawing in docs/architecture.md: the packages of titan_sparse and the floors of attention.

    python -m scripts.docs.architecture            write the page
    python -m scripts.docs.architecture --check    write nothing; status 1 if the drawing is stale

The order of the drawing is that of the import contracts in pyproject.toml, [tool.importlinter]. The
drawing stands between the comments <!-- drawing --> and <!-- end of drawing -->; everything else on
the page is written by hand.
"""

import sys
from pathlib import Path

import tomli

from scripts.docs import generated

PAGE = generated.ROOT / "docs/architecture.md"
PYPROJECT = generated.ROOT / "pyproject.toml"
MARKER = "drawing"

Layers = dict[str, list[list[str]]]
"""{package: its floors, top down}; a floor is the names of the files and folders that share it."""

PACKAGES = ("titan_sparse", "titan_sparse.attention")
"""What is drawn; the second opens a floor of the first."""

WORDS = {
    "titan_sparse": {
        "train": "the command: reads the options, starts a run",
        "integrations": "attend() in Hugging Face's models; our checkpoints in lm_eval",
        "trainer": "the loop: batch, step, log, save",
        "evaluation": "loss by position, needles, RULER, what attention keeps",
        "training": "parallelism, optimizer, checkpoints, metrics",
        "estimate": "memory, FLOPs and times before a run",
        "from_config": "configuration -> mask, pattern, schedule, group",
        "data": "text -> tokens -> packed sequences",
        "config": "TOML and command line -> checked options; no torch",
        "models": "decoders of published families",
        "loss": "LM head and cross-entropy in chunks",
        "attention": "mask, pattern, layout, schedule, backend",
        "kernels": "Triton kernels beside their twins in plain torch",
    },
    "titan_sparse.attention": {
        "attend": "the public call",
        "decode": "one new query by cached keys",
        "observe": "what was computed: density, recall, balance",
        "ops": "custom ops: forward, backward, shapes for torch.compile",
        "schedules": "in which order keys and values meet queries",
        "call": "what one call is made of, frozen",
        "backends": "which kernel computes: eager, flex, triton, flash",
        "tiles": "mask and selection -> tables of blocks for kernels",
        "patterns": "what is worth seeing: dense, vertical_slash, ...",
        "recorder": "where numbers go",
        "timing": "clocks",
        "inputs": "checks of inputs",
        "context_parallel": "who holds which blocks, and every transfer",
        "masks": "what may be seen",
        "blocks": "block arithmetic",
        "merge": "two results -> one",
        "registry": "objects of ops",
    },
}
"""A few words for each file or folder of the drawing."""


def contracts(pyproject: Path = PYPROJECT) -> list[dict]:
    """The layer contracts of import-linter."""
    tools = tomli.loads(pyproject.read_text(encoding="utf-8"))["tool"]
    every = tools["importlinter"]["contracts"]
    return [contract for contract in every if contract["type"] == "layers"]


def layers(pyproject: Path = PYPROJECT) -> Layers:
    """The floors of titan_sparse and of titan_sparse.attention, top down.

    They come from the contracts of pyproject.toml, whose names are absolute, or relative to the
    contract's `containers`.
    """
    found: Layers = {}
    for contract in contracts(pyproject):
        floors = [_names(layer) for layer in contract["layers"]]
        containers = contract.get("containers")
        if not containers:
            container = floors[0][0].rpartition(".")[0]
            containers = [container]
            # A contract may end below its package: attention's floors stand on kernels.
            prefix = f"{container}."
            floors = [
                [name.removeprefix(prefix) for name in floor if name.startswith(prefix)]
                for floor in floors
            ]
            floors = [floor for floor in floors if floor]
        for container in containers:
            found[container] = floors
    return {package: found[package] for package in PACKAGES}


def _names(layer: str) -> list[str]:
    """The modules of one layer: "a | b", "a : b" and optional "(a)", as import-linter writes them."""
    separated = layer.replace("|", " ").replace(":", " ").replace("(", " ").replace(")", " ")
    return separated.split()


def drawing() -> str:
    """The tree of packages as text, attention opened into its floors."""
    lines = ["titan_sparse"]
    lines += _branch("titan_sparse", "", layers())
    return "```text\n" + "\n".join(lines) + "\n```"


def _branch(package: str, indent: str, every: Layers) -> list[str]:
    floors = every[package]
    lines = []
    for number, floor in enumerate(floors):
        last = number == len(floors) - 1
        names = ", ".join(floor)
        # A name without words stays without: the test asks for them.
        words = "; ".join(WORDS[package].get(name, "") for name in floor)
        branch = indent + ("└── " if last else "├── ") + names
        lines.append(f"{branch:<32} {words}".rstrip())
        inner = f"{package}.{floor[0]}"
        if inner in every:
            lines += _branch(inner, indent + ("    " if last else "│   "), every)
    return lines


def page_text(page: Path = PAGE) -> str:
    """The whole page with the drawing of today."""
    text = page.read_text(encoding="utf-8")
    replaced = generated.replace_between(text, MARKER, drawing())
    if replaced is None:
        raise ValueError(f"{page} holds no <!-- {MARKER} --> and <!-- end of {MARKER} -->")
    return replaced


def main(words: list[str]) -> int:
    return generated.main(words, PAGE, page_text(), __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
