"""Lists what only a GPU runs in titan_sparse: branches, launches of kernels, calls of torch.cuda.

    python -m scripts.gpu_branches

Each line is a place, the function, and the code that only a GPU reaches. tests/gpu/branches.toml
names a test for each.

The source is read, not run. An expression is worked out as far as it is known on a CPU: `x.is_cuda`
is False there, `device.type == "cuda"` too, and so is a name, an attribute, an argument or a function
that holds nothing else. Where a test is known, the other side belongs to a GPU.
"""

import ast
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "titan_sparse"

_QUESTIONS = {"is_available": False, "device_count": 0}
"""Functions of torch.cuda that a CPU may call, and their answers there."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


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


class Known(NamedTuple):
    """The value of an expression on a CPU. by_device: whether a GPU may have another one."""

    value: Any
    by_device: bool


class Module(NamedTuple):
    """A file of the package. functions: with the names of the classes and functions around them."""

    file: str
    tree: ast.Module
    functions: list[tuple[str, Function]]


class Facts(NamedTuple):
    """What is known on a CPU of names in the whole package.

    functions: results, by name. attributes: {(file, attribute of an object): value}.
    arguments: {(function, parameter): value}.
    """

    functions: dict[str, Known]
    attributes: dict[tuple[str, str], Known]
    arguments: dict[tuple[str, str], Known]


class Scope(NamedTuple):
    """Where an expression stands. names: of local variables and parameters."""

    file: str
    facts: Facts
    names: dict[str, Known]


def find(root: Path, package: str = PACKAGE) -> list[Branch]:
    """All branches of root/package, by file and line."""
    modules = []
    for path in sorted((root / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules.append(Module(str(path.relative_to(root)), tree, list(_functions(tree))))
    facts = Facts({}, {}, {})
    known = None
    while facts != known:
        known, facts = facts, _facts(modules, facts)
    kernels = _kernels(modules)
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


def on_cpu(node: ast.expr | None, scope: Scope) -> Known | None:
    """The value of an expression on a CPU; None if it is not known."""
    match node:
        case ast.Constant(value=value):
            return Known(value, False)
        case ast.Name(id=name):
            return _named(name, scope)
        case ast.Attribute():
            return _attribute(node, scope)
        case ast.Call():
            return _call(node, scope)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            known = on_cpu(operand, scope)
            return known and Known(not known.value, known.by_device)
        case ast.BoolOp():
            return _and_or(node, scope)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            known = on_cpu(test, scope)
            if known is None:
                return None
            value = on_cpu(body if known.value else orelse, scope)
            return value and Known(value.value, value.by_device or known.by_device)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _compared(left, operator, right, scope)
    return None


def _named(name: str, scope: Scope) -> Known | None:
    if name == "INTERPRETED":
        return Known(True, True)
    return scope.names.get(name)


def _attribute(node: ast.Attribute, scope: Scope) -> Known | None:
    if node.attr == "is_cuda":
        return Known(False, True)
    if node.attr == "INTERPRETED":
        return Known(True, True)
    return scope.facts.attributes.get((scope.file, node.attr))


def _call(node: ast.Call, scope: Scope) -> Known | None:
    text = ast.unparse(node.func)
    if text == "isinstance" and "torch.cuda." in ast.unparse(node.args[1]):
        return Known(False, True)
    name = text.rpartition(".")[2]
    if text.startswith("torch.cuda.") and name in _QUESTIONS:
        return Known(_QUESTIONS[name], True)
    return scope.facts.functions.get(name)


def _and_or(node: ast.BoolOp, scope: Scope) -> Known | None:
    values = [on_cpu(value, scope) for value in node.values]
    decides = isinstance(node.op, ast.Or)
    deciding = [known for known in values if known is not None and bool(known.value) == decides]
    if deciding:
        return Known(deciding[0].value, any(known.by_device for known in deciding))
    if None in values:
        return None
    return Known(values[-1].value, any(known.by_device for known in values))


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr, scope: Scope) -> Known | None:
    is_negated = isinstance(operator, ast.NotEq | ast.IsNot)
    if not is_negated and not isinstance(operator, ast.Eq | ast.Is):
        return None
    if isinstance(right, ast.Constant) and right.value in ("cuda", "cpu"):
        # "cpu" may also be what a user wrote, or did not write.
        is_of_device = ast.unparse(left).endswith((".type", "device_type"))
        if right.value == "cuda" or is_of_device:
            return Known((right.value == "cpu") != is_negated, True)
        return None
    a = on_cpu(left, scope)
    b = on_cpu(right, scope)
    if a is None or b is None:
        return None
    return Known((a.value == b.value) != is_negated, a.by_device or b.by_device)


def _facts(modules: Sequence[Module], before: Facts) -> Facts:
    """What is known of functions, attributes and arguments, from what was known before."""
    functions: dict[str, list[Known | None]] = defaultdict(list)
    attributes: dict[tuple[str, str], list[Known | None]] = defaultdict(list)
    arguments: dict[tuple[str, str], list[Known | None]] = defaultdict(list)
    parameters = _parameters(modules)
    for module in modules:
        for qualified, function in module.functions:
            scope = _scope(module.file, qualified, function, before)
            functions[function.name].append(_result(function, scope))
            for node in _nodes(function):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    _note_attributes(node, scope, attributes)
                if isinstance(node, ast.Call):
                    _note_arguments(node, scope, parameters, arguments)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and _is_of_cuda(field.annotation):
                        attributes[module.file, field.target.id].append(Known(None, True))
    return Facts(_alike(functions), _alike(attributes), _alike(arguments))


def _alike(values: dict[Any, list[Known | None]]) -> dict[Any, Known]:
    """Of those that have one value wherever they are given one, and owe it to the device."""
    alike = {}
    for name, given in values.items():
        if None in given or len({repr(known.value) for known in given}) > 1:
            continue
        if any(known.by_device for known in given):
            alike[name] = Known(given[0].value, True)
    return alike


def _note_attributes(
    node: ast.Assign | ast.AnnAssign, scope: Scope, attributes: dict[tuple[str, str], list]
) -> None:
    """What `self.name = value` says of the attribute."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        if not is_own:
            continue
        key = (scope.file, target.attr)
        if isinstance(node, ast.AnnAssign) and _is_of_cuda(node.annotation):
            attributes[key] = [Known(None, True)]
        elif attributes[key] != [Known(None, True)]:
            attributes[key].append(on_cpu(node.value, scope))


def _note_arguments(
    call: ast.Call,
    scope: Scope,
    parameters: dict[str, dict[str, ast.expr | None]],
    arguments: dict[tuple[str, str], list],
) -> None:
    """What a call of a function of the package says of its parameters."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name not in parameters:
        return
    given = dict(zip(parameters[name], call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords}
    for parameter, default in parameters[name].items():
        value = on_cpu(given.get(parameter, default), scope)
        arguments[name, parameter].append(value)


def _parameters(modules: Sequence[Module]) -> dict[str, dict[str, ast.expr | None]]:
    """{function, or class that is made: {parameter: default}}, of names that are there once."""
    found: dict[str, list[dict[str, ast.expr | None]]] = defaultdict(list)
    for module in modules:
        for qualified, function in module.functions:
            name = _called_as(qualified, function)
            given = function.args.posonlyargs + function.args.args
            missing = len(given) - len(function.args.defaults)
            defaults = [None] * missing + function.args.defaults
            named = dict(zip([a.arg for a in given], defaults, strict=True))
            only_by_name = [a.arg for a in function.args.kwonlyargs]
            named |= dict(zip(only_by_name, function.args.kw_defaults, strict=True))
            found[name].append({key: value for key, value in named.items() if key != "self"})
    return {name: given[0] for name, given in found.items() if len(given) == 1}


def _scope(file: str, qualified: str, function: Function, facts: Facts) -> Scope:
    """What is known of the function's names: its parameters, and what is assigned once."""
    names = {}
    owner = _called_as(qualified, function)
    for parameter in function.args.args + function.args.kwonlyargs:
        known = facts.arguments.get((owner, parameter.arg))
        if parameter.annotation is not None and _is_of_cuda(parameter.annotation):
            known = Known(None, True)
        if known is not None:
            names[parameter.arg] = known
    scope = Scope(file, facts, names)
    assigned: dict[str, list[ast.AST]] = defaultdict(list)
    for node in _nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned[node.id].append(node)
        if isinstance(node, ast.arg):
            assigned[node.arg].append(node)
    for node in _nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            known = on_cpu(node.value, scope)
            if len(assigned[name]) == 1 and known is not None and known.by_device:
                names[name] = known
    return scope


def _result(function: Function, scope: Scope) -> Known | None:
    """What a function returns on a CPU, if that is one value."""
    returned: list[Known | None] = []
    reaches_end = _collect_returns(function.body, scope, returned, by_device=False)
    if reaches_end:
        returned.append(Known(None, False))
    if not returned or None in returned or len({repr(known.value) for known in returned}) > 1:
        return None
    return Known(returned[0].value, any(known.by_device for known in returned))


def _collect_returns(
    body: Sequence[ast.stmt], scope: Scope, returned: list[Known | None], by_device: bool
) -> bool:
    """Collect what a CPU returns in these statements; whether it gets to their end."""
    for statement in body:
        if isinstance(statement, ast.Return):
            known = on_cpu(statement.value, scope) if statement.value else Known(None, False)
            returned.append(known and Known(known.value, known.by_device or by_device))
            return False
        if isinstance(statement, ast.Raise):
            return False
        if isinstance(statement, ast.If):
            test = on_cpu(statement.test, scope)
            if test is not None and test.by_device:
                by_device = True
                taken = statement.body if test.value else statement.orelse
                if not _collect_returns(taken, scope, returned, by_device):
                    return False
                continue
        for inner in _bodies(statement):
            _collect_returns(inner, scope, returned, by_device)
    return True


# What a CPU does not reach


def _branches(module: Module, facts: Facts, kernels: set[str]) -> Iterator[Branch]:
    refuses_cpus = _refuses_cpus(module, facts)
    for qualified, function in module.functions:
        if _is_kernel(function):
            # Its launch is listed.
            continue
        scope = _scope(module.file, qualified, function, facts)
        reader = _Reader(qualified, scope, kernels)
        body = _without_docstring(function.body)
        if refuses_cpus and function.name not in ("refusal", "describe"):
            reader.read_only_gpu("of a backend that refuses CPUs", body)
        else:
            reader.read(body)
        yield from reader.found


def _refuses_cpus(module: Module, facts: Facts) -> bool:
    """Whether the module is a backend of attention whose refusal() turns every CPU away."""
    for qualified, function in module.functions:
        if qualified == "refusal":
            result = _result(function, _scope(module.file, qualified, function, facts))
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
                    if test.value and _leaves(statement.body):
                        return
                    continue
            if _imports_gpu_package(statement) and later:
                self.read_only_gpu(f"after {ast.unparse(statement)}", later)
                return
            self._read_expressions(statement)
            for inner in _bodies(statement):
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
        if _leaves(statement.body) and later:
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
        for node in _own_expressions(statement):
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
        is_question = text.rpartition(".")[2] in _QUESTIONS
        is_inside = any(b.first <= _first(node) and _last(node) <= b.last for b in self.found)
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
        self.found.append(Branch(self.scope.file, key, _first(first), _last(last)))


# Syntax trees


@functools.cache
def _nodes(function: Function) -> tuple[ast.AST, ...]:
    """A function and all that is in it."""
    return tuple(ast.walk(function))


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
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


def _called_as(qualified: str, function: Function) -> str:
    """The name by which a function is called: a constructor by that of its class."""
    if function.name == "__init__":
        return qualified.split(".")[-2]
    return function.name


def _kernels(modules: Sequence[Module]) -> set[str]:
    """The names of all Triton kernels."""
    kernels = set()
    for module in modules:
        for _, function in module.functions:
            if _is_kernel(function):
                kernels.add(function.name)
    return kernels


def _is_kernel(function: Function) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _is_of_cuda(annotation: ast.expr) -> bool:
    """Whether an annotation is of an object of torch.cuda, or None."""
    text = ast.unparse(annotation)
    return "torch.cuda." in text and "None" in text


def _imports_gpu_package(statement: ast.stmt) -> bool:
    """Whether it imports what is only installed beside a GPU."""
    return isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(
        "flash_attn"
    )


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether nothing that follows these statements in their block is reached."""
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of statements inside a statement; functions and classes are read by themselves."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", []) + getattr(statement, "cases", []):
        yield handler.body


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """All expressions of a statement but those of statements inside it."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.withitem):
            yield from (node for node in ast.walk(child) if isinstance(node, ast.expr))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if is_text else body


def _first(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _last(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def main() -> int:
    """Print the list."""
    branches = find(ROOT)
    for branch in branches:
        print(f"{branch.place}: {branch.key}")
    print(f"{len(branches)} branches that only a GPU takes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
