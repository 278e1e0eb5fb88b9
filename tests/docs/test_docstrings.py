"""Docstrings begin with the thing that they describe, or with a verb."""

import ast

from tests.docs.pages import ROOT

FOLDERS = ("titan_sparse", "kernels", "scripts", "examples")
QUESTIONS = {"What", "Whether", "How", "Where", "Which", "Why", "When", "Who", "Of"}


def first_words(source: str) -> list[str]:
    """The first word of each docstring of a module, its classes, and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text.split()[0] for text in map(ast.get_docstring, nodes) if text]


def test_docstrings_begin_with_the_thing():
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += [(path, word) for word in first_words(path.read_text())]
    assert len(found) > 1500
    assert [(path, word) for path, word in found if word in QUESTIONS] == []
