"""What is read from the source: functions, statements, kernels."""

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A file of the package. functions: with the names of the classes and functions around them."""

    file: str
    tree: ast.Module
    functions: list[tuple[str, Function]]


@functools.cache
def nodes_of(node: ast.AST) -> tuple[ast.AST, ...]:
    """A function, or a whole file, and all that is in it. Each is read many times."""
    return tuple(ast.walk(node))


@functools.cache
def text_of(node: ast.AST) -> str:
    """Its source."""
    return ast.unparse(node)


def functions_of(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """(name with those of its classes and functions, function) of all functions, also inner ones."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, Function | ast.ClassDef):
                inner = (*names, child.name)
            if isinstance(child, Function):
                yield ".".join(inner), child
            yield from walk(child, inner)

    yield from walk(tree, ())


def called_as(qualified: str, function: Function) -> str:
    """The name by which a function is called: a constructor by that of its class."""
    if function.name == "__init__":
        return qualified.split(".")[-2]
    return function.name


def kernels_of(modules: Sequence[Module]) -> set[str]:
    """The names of all Triton kernels."""
    kernels = set()
    for module in modules:
        for _, function in module.functions:
            if is_kernel(function):
                kernels.add(function.name)
    return kernels


def is_kernel(function: Function) -> bool:
    return any("triton.jit" in text_of(decorator) for decorator in function.decorator_list)


def is_of_cuda(annotation: ast.expr) -> bool:
    """Whether an annotation is of an object of torch.cuda, or None."""
    text = text_of(annotation)
    return "torch.cuda." in text and "None" in text


def imports_gpu_package(statement: ast.stmt) -> bool:
    """Whether it imports what is only installed beside a GPU."""
    return isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(
        "flash_attn"
    )


def leaves_block(body: Sequence[ast.stmt]) -> bool:
    """Whether nothing that follows these statements in their block is reached."""
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def bodies_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of statements inside a statement; functions and classes are read by themselves."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", []) + getattr(statement, "cases", []):
        yield handler.body


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """All expressions of a statement but those of statements inside it."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.withitem):
            yield from (node for node in nodes_of(child) if isinstance(node, ast.expr))


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if is_text else body


def first_position(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def last_position(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
