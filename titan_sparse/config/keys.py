"""The dotted keys of the configuration, and what is said of each: all from sections.py."""

import ast
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from titan_sparse.config.sections import Config, Tokens


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below a section with its type. Sub-sections come after the plain fields and
    before their own."""
    plain_fields_first = sorted(fields(section), key=lambda field: is_dataclass(field.type))
    for item in plain_fields_first:
        yield prefix + item.name, item.type
        if is_dataclass(item.type):
            yield from walk(item.type, f"{prefix}{item.name}.")


SECTIONS = {key: kind for key, kind in walk(Config) if is_dataclass(kind)}
"""Dotted key -> class of every section."""

KINDS = {
    key: int if kind is Tokens else kind for key, kind in walk(Config) if not is_dataclass(kind)
}
"""Dotted key -> type of every other field."""

TOKENS = frozenset(key for key, kind in walk(Config) if kind is Tokens)
"""Keys that count tokens."""


def field_docs(section: type) -> dict[str, str]:
    """The docstring below each field of a section class, in one line, by field name.

    A field without one is left out.
    """
    body = ast.parse(inspect.getsource(section)).body[0].body
    docs = {}
    for item, following in itertools.pairwise(body):
        is_docstring = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(item, ast.AnnAssign) and is_docstring:
            docs[item.target.id] = " ".join(following.value.value.split())
    return docs
