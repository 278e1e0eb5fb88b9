"""Finds the branches: a condition that is known on a CPU leaves one side to a GPU."""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.gpu_branches.source import (
    Module,
    bodies_of,
    first_position,
    functions_of,
    imports_gpu_package,
    is_kernel,
    kernels_of,
    last_position,
    leaves_block,
    own_expressions,
    without_docstring,
)
from scripts.gpu_branches.values import (
    QUESTIONS,
    Facts,
    Scope,
    facts_of,
    on_cpu,
    result_of,
    scope_of,
)

PACKAGE = "titan_sparse"


class Branch(NamedTuple):
    """What only a GPU runs: a span of source, in lines from 1 and columns from 0 (in bytes).

    key: names it without line numbers, by the function and the code of the condition.
    """

    file: str
    key: str
    first: tuple[int, int]
    last: tuple[int, int]

    @property
    def place(self) -> str:
        """file:line"""
        return f"{self.file}:{self.first[0]}"

    @property
    def file_and_key(self) -> str:
        """What names the branch in the whole package, in one line."""
        return f"{self.file} {self.key}"


def find(root: Path, package: str = PACKAGE) -> list[Branch]:
    """All branches of root/package, by file and line."""
    modules = []
    for path in sorted((root / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules.append(Module(str(path.relative_to(root)), tree, list(functions_of(tree))))
    facts = Facts({}, {}, {})
    known = None
    while facts != known:
        known, facts = facts, facts_of(modules, facts)
    kernels = kernels_of(modules)
    branches = []
    for module in modules:
        found = sorted(_branches(module, facts, kernels), key=lambda b: (b.first, b.last))
        branches += _numbered(found)
    return branches


def _numbered(branches: Sequence[Branch]) -> Iterator[Branch]:
    """The same with different keys: the second of a name gets (2)."""
    seen: Counter[str] = Counter()
    for branch in branches:
        seen[branch.key] += 1
        if seen[branch.key] > 1:
            branch = branch._replace(key=f"{branch.key} ({seen[branch.key]})")
        yield branch


# What is known on a CPU


def _branches(module: Module, facts: Facts, kernels: set[str]) -> Iterator[Branch]:
    refuses_cpus = _refuses_cpus(module, facts)
    for qualified, function in module.functions:
        if is_kernel(function):
            # Its launch is listed.
            continue
        scope = scope_of(module.file, qualified, function, facts)
        reader = _Reader(qualified, scope, kernels)
        body = without_docstring(function.body)
        if refuses_cpus and function.name not in ("refusal", "describe"):
            reader.read_only_gpu("of a backend that refuses CPUs", body)
        else:
            reader.read(body)
        yield from reader.found


def _refuses_cpus(module: Module, facts: Facts) -> bool:
    """Whether the module is a backend of attention whose refusal() turns every CPU away."""
    for qualified, function in module.functions:
        if qualified == "refusal":
            result = result_of(function, scope_of(module.file, qualified, function, facts))
            return result is not None and result.by_device
    return False


class _Reader:
    """Reads one function. found: what only a GPU runs in it."""

    def __init__(self, qualified: str, scope: Scope, kernels: set[str]) -> None:
        self.qualified = qualified
        self.scope = scope
        self.kernels = kernels
        self.found: list[Branch] = []

    def read(self, body: Sequence[ast.stmt]) -> None:
        """Statements that a CPU reaches."""
        for number, statement in enumerate(body):
            later = body[number + 1 :]
            if isinstance(statement, ast.If):
                test = on_cpu(statement.test, self.scope)
                if test is not None and test.by_device:
                    self._read_if(statement, test.value, later)
                    if test.value and leaves_block(statement.body):
                        return
                    continue
            if imports_gpu_package(statement) and later:
                self.read_only_gpu(f"after {ast.unparse(statement)}", later)
                return
            self._read_expressions(statement)
            for inner in bodies_of(statement):
                self.read(inner)

    def _read_if(self, statement: ast.If, value: Any, later: Sequence[ast.stmt]) -> None:
        """A test whose value on a CPU is known."""
        test = ast.unparse(statement.test)
        if not value:
            self.read_only_gpu(f"if {test}", statement.body)
            self.read(statement.orelse)
            return
        self.read(statement.body)
        if statement.orelse:
            self.read_only_gpu(f"else of {test}", statement.orelse)
        if leaves_block(statement.body) and later:
            self.read_only_gpu(f"after {test}", later)

    def read_only_gpu(self, condition: str, body: Sequence[ast.stmt]) -> None:
        """Statements that only a GPU reaches: they, and each branch and kernel among them."""
        self._add(condition, body[0], body[-1])
        for statement in body:
            for node in ast.walk(statement):
                if isinstance(node, ast.If):
                    test = ast.unparse(node.test)
                    self._add(f"if {test}", node.body[0], node.body[-1])
                    if node.orelse:
                        self._add(f"else of {test}", node.orelse[0], node.orelse[-1])
                if isinstance(node, ast.Call) and self._kernel_of(node):
                    self._add(f"kernel {self._kernel_of(node)}", node, node)

    def _read_expressions(self, statement: ast.stmt) -> None:
        """The statement's own expressions, not those of statements inside it."""
        for node in own_expressions(statement):
            if isinstance(node, ast.IfExp):
                test = on_cpu(node.test, self.scope)
                if test is not None and test.by_device:
                    other = node.orelse if test.value else node.body
                    sign = "not " if test.value else ""
                    self._add(
                        f"{ast.unparse(other)} if {sign}{ast.unparse(node.test)}", other, other
                    )
            if isinstance(node, ast.Call):
                self._read_call(node)

    def _read_call(self, node: ast.Call) -> None:
        kernel = self._kernel_of(node)
        if kernel:
            self._add(f"kernel {kernel}", node, node)
        text = ast.unparse(node.func)
        is_question = text.rpartition(".")[2] in QUESTIONS
        is_inside = any(
            b.first <= first_position(node) and last_position(node) <= b.last for b in self.found
        )
        if text.startswith("torch.cuda.") and not is_question and not is_inside:
            self._add(text, node, node)

    def _kernel_of(self, node: ast.Call) -> str:
        """The name of the kernel that a call launches, `kernel[grid](...)`; else empty."""
        if not isinstance(node.func, ast.Subscript):
            return ""
        name = ast.unparse(node.func.value).rpartition(".")[2]
        return name if name in self.kernels else ""

    def _add(self, condition: str, first: ast.stmt | ast.expr, last: ast.stmt | ast.expr) -> None:
        key = f"{self.qualified}: {condition}"
        self.found.append(Branch(self.scope.file, key, first_position(first), last_position(last)))


# Syntax trees
