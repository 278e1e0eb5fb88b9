"""What is known of expressions on a CPU: through names, attributes, arguments and functions."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.gpu_branches.source import (
    Function,
    Module,
    bodies_of,
    called_as,
    is_of_cuda,
    nodes_of,
    text_of,
)

QUESTIONS = {"is_available": False, "device_count": 0}
"""Functions of torch.cuda that a CPU may call, and their answers there."""


class Known(NamedTuple):
    """The value of an expression on a CPU. by_device: whether a GPU may have another one."""

    value: Any
    by_device: bool


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
    text = text_of(node.func)
    if text == "isinstance" and "torch.cuda." in text_of(node.args[1]):
        return Known(False, True)
    name = text.rpartition(".")[2]
    if text.startswith("torch.cuda.") and name in QUESTIONS:
        return Known(QUESTIONS[name], True)
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
        is_of_device = text_of(left).endswith((".type", "device_type"))
        if right.value == "cuda" or is_of_device:
            return Known((right.value == "cpu") != is_negated, True)
        return None
    a = on_cpu(left, scope)
    b = on_cpu(right, scope)
    if a is None or b is None:
        return None
    return Known((a.value == b.value) != is_negated, a.by_device or b.by_device)


def facts_of(modules: Sequence[Module], before: Facts) -> Facts:
    """What is known of functions, attributes and arguments, from what was known before."""
    functions: dict[str, list[Known | None]] = defaultdict(list)
    attributes: dict[tuple[str, str], list[Known | None]] = defaultdict(list)
    arguments: dict[tuple[str, str], list[Known | None]] = defaultdict(list)
    parameters = _parameters(modules)
    for module in modules:
        for qualified, function in module.functions:
            scope = scope_of(module.file, qualified, function, before)
            functions[function.name].append(result_of(function, scope))
            for node in nodes_of(function):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    _note_attributes(node, scope, attributes)
                if isinstance(node, ast.Call):
                    _note_arguments(node, scope, parameters, arguments)
        for node in nodes_of(module.tree):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and is_of_cuda(field.annotation):
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
        is_own = isinstance(target, ast.Attribute) and text_of(target.value) == "self"
        if not is_own:
            continue
        key = (scope.file, target.attr)
        if isinstance(node, ast.AnnAssign) and is_of_cuda(node.annotation):
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
    name = text_of(call.func).rpartition(".")[2]
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
            name = called_as(qualified, function)
            given = function.args.posonlyargs + function.args.args
            missing = len(given) - len(function.args.defaults)
            defaults = [None] * missing + function.args.defaults
            named = dict(zip([a.arg for a in given], defaults, strict=True))
            only_by_name = [a.arg for a in function.args.kwonlyargs]
            named |= dict(zip(only_by_name, function.args.kw_defaults, strict=True))
            found[name].append({key: value for key, value in named.items() if key != "self"})
    return {name: given[0] for name, given in found.items() if len(given) == 1}


def scope_of(file: str, qualified: str, function: Function, facts: Facts) -> Scope:
    """What is known of the function's names: its parameters, and what is assigned once."""
    names = {}
    owner = called_as(qualified, function)
    for parameter in function.args.args + function.args.kwonlyargs:
        known = facts.arguments.get((owner, parameter.arg))
        if parameter.annotation is not None and is_of_cuda(parameter.annotation):
            known = Known(None, True)
        if known is not None:
            names[parameter.arg] = known
    scope = Scope(file, facts, names)
    assigned: dict[str, list[ast.AST]] = defaultdict(list)
    for node in nodes_of(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned[node.id].append(node)
        if isinstance(node, ast.arg):
            assigned[node.arg].append(node)
    for node in nodes_of(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            known = on_cpu(node.value, scope)
            if len(assigned[name]) == 1 and known is not None and known.by_device:
                names[name] = known
    return scope


def result_of(function: Function, scope: Scope) -> Known | None:
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
        for inner in bodies_of(statement):
            _collect_returns(inner, scope, returned, by_device)
    return True


# What a CPU does not reach
