"""The faults that are planted in a source file: small changes of its syntax tree, one at a time."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SWAPPED_METHODS = {"amin": "amax", "amax": "amin", "floor": "ceil", "ceil": "floor"}
UNTESTED_CALLS = ("logger.", "warnings.")
"""Messages: what they say is not the behavior that is looked for here."""


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file."""

    file: str
    function: str
    """dotted; "" outside of functions and classes"""
    operator: str
    lines: tuple[int, int]
    """first and last of the statement: what a test has to run to notice"""
    at_import: bool
    """the statement runs when the file is imported: any test may notice"""
    start: int
    """characters from the beginning of the file, as `end`"""
    end: int
    after: str
    """what stands there instead"""
    line: int
    column: int
    end_column: int
    shown: str
    """the source line with the change in it, {before => after}"""
    number: int = 1
    """of the mutants that look the same in this function"""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column}-{self.end_column}:{self.operator}"

    @property
    def key(self) -> str:
        """Identify the mutant by a name that does not change when lines are added elsewhere."""
        key = f"{self.file}::{self.function}: {self.shown}"
        return key if self.number == 1 else f"{key} (no. {self.number})"

    def applied(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file below root, in the order of their places."""
    source = (root / file).read_text()
    found = _Finder(file, source)
    found.visit(ast.parse(source))
    by_place = sorted(found.mutants, key=lambda mutant: (mutant.start, mutant.operator))
    alike: Counter = Counter()
    numbered = []
    for mutant in by_place:
        alike[mutant.key] += 1
        numbered.append(replace(mutant, number=alike[mutant.key]))
    return numbered


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str):
        self.file = file
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.mutants: list[Mutant] = []
        self.scope: list[str] = []
        self.functions = 0
        self.statement: tuple[int, int] = (1, 1)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = _lines_of(node)
        for operator, after in _changes(node):
            self._add(node, operator, after)
        super().visit(node)

    def _add(self, node: Any, operator: str, after: str) -> None:
        start = self._place(node.lineno, node.col_offset)
        end = self._place(node.end_lineno, node.end_col_offset)
        before = " ".join(self.source[start:end].split())
        first = self.lines[node.lineno - 1]
        last = self.lines[node.end_lineno - 1]
        left = first.encode()[: node.col_offset].decode()
        right = last.encode()[node.end_col_offset :].decode()
        self.mutants.append(
            Mutant(
                file=self.file,
                function=".".join(self.scope),
                operator=operator,
                lines=self.statement,
                at_import=self.functions == 0,
                start=start,
                end=end,
                after=after,
                line=node.lineno,
                column=node.col_offset,
                end_column=node.end_col_offset,
                shown=f"{left}{{{before} => {after}}}{right}".strip(),
            )
        )

    def _place(self, line: int, column: int) -> int:
        """ast counts bytes within a line."""
        before = sum(len(text) for text in self.lines[: line - 1])
        return before + len(self.lines[line - 1].encode()[:column].decode())

    def _visit_all(self, nodes: list) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Without annotations and decorators."""
        defaults = node.args.defaults + node.args.kw_defaults
        self._visit_all(defaults)
        self.scope.append(node.name)
        self.functions += 1
        self._visit_all(node.body)
        self.functions -= 1
        self.scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self._visit_all(node.body)
        self.scope.pop()

    def visit_If(self, node: ast.If) -> None:
        self._add(node.test, "condition_true", "True")
        self._add(node.test, "condition_false", "False")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._add(node.test, "condition_false", "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add(condition, "condition_true", "True")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.target, node.value])

    def visit_Call(self, node: ast.Call) -> None:
        if not ast.unparse(node.func).startswith(UNTESTED_CALLS):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip error messages."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings, which are mostly messages."""

    def visit_Import(self, node: ast.Import) -> None:
        """Nothing to change."""

    visit_ImportFrom = visit_Import


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    """First and last line, of a statement with a body those of its head."""
    body = getattr(statement, "body", None)
    if isinstance(body, list):
        return statement.lineno, max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(operator, new text) of all changes of this node itself."""
    if isinstance(node, ast.stmt):
        yield from _changed_statement(node)
    elif isinstance(node, ast.Call):
        yield from _changed_call(node)
    elif isinstance(node, ast.IfExp):
        yield "condition_true", f"({ast.unparse(node.body)})"
        yield "condition_false", f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            operators = list(node.ops)
            operators[number] = SWAPS[type(operator)]()
            changed = ast.Compare(node.left, operators, node.comparators)
            yield f"compare{number}", f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        changed = ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
        yield "arithmetic", f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        yield "and_or", f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "no_sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _changed_constant(node.value)


def _changed_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Return) and node.value is not None:
        # In place of False, 0 or "", a None is as good as the same.
        if not isinstance(node.value, ast.Constant) or node.value.value:
            yield "return_none", "return None"
    elif isinstance(node, ast.Break | ast.Continue):
        yield "no_jump", "pass"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if not ast.unparse(node).startswith(UNTESTED_CALLS):
            yield "deleted", "pass"
    elif isinstance(node, ast.AugAssign):
        yield "deleted", "pass"
        if type(node.op) in SWAPS:
            changed = ast.AugAssign(node.target, SWAPS[type(node.op)](), node.value)
            yield "arithmetic", ast.unparse(changed)
    elif isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Attribute | ast.Subscript
    ):
        yield "deleted", "pass"


def _changed_call(node: ast.Call) -> Iterator[tuple[str, str]]:
    if ast.unparse(node.func).startswith(UNTESTED_CALLS):
        return
    if isinstance(node.func, ast.Name) and node.func.id in SWAPPED_NAMES:
        changed = ast.Call(ast.Name(SWAPPED_NAMES[node.func.id]), node.args, node.keywords)
        yield "min_max", ast.unparse(changed)
    if isinstance(node.func, ast.Attribute) and node.func.attr in SWAPPED_METHODS:
        function = ast.Attribute(node.func.value, SWAPPED_METHODS[node.func.attr])
        yield "min_max", ast.unparse(ast.Call(function, node.args, node.keywords))
    for keyword in node.keywords:
        if keyword.arg is not None:
            others = [other for other in node.keywords if other is not keyword]
            changed = ast.Call(node.func, node.args, others)
            yield f"without_{keyword.arg}", ast.unparse(changed)


def _changed_constant(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "constant", str(not value)
    elif isinstance(value, int):
        yield "constant", str(value + 1)
    elif isinstance(value, float):
        yield "constant", str(value * 2 if value else 1.0)
