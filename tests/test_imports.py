"""Who imports whom: the contracts of pyproject.toml hold, and no import goes round in a circle."""

import ast
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_sparse"
CONTRACTS = ("floors", "attention", "models", "torch-free")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract(contract):
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    options = ["--no-cache", "--no-logo", "--contract", contract]
    result = subprocess.run(
        [sys.executable, "-c", program, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 kept, 0 broken" in result.stdout


def _modules(package: Path) -> dict[str, Path]:
    """The file of each module of a package, itself included, by dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = path
    return modules


def _imports(package: Path) -> dict[str, set[str]]:
    """The modules of the package that each of them imports, anywhere in its file.

    Imports inside functions and under TYPE_CHECKING count.
    """
    modules = _modules(package)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imported = set()
        folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                if node.level:
                    origin = resolve_name("." * node.level + origin, folder)
                for alias in node.names:
                    # `from package import name`: a module of that package, or something in it.
                    inner = f"{origin}.{alias.name}"
                    imported.add(inner if inner in modules else origin)
        graph[module] = (imported & modules.keys()) - {module}
    return graph


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that `start` comes to over one import or more; itself only by a circle."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module."""
    reachable = {module: _reachable(graph, module) for module in graph}
    circles = set()
    for module, reached in reachable.items():
        if module in reached:
            circles.add(frozenset(other for other in reached if module in reachable[other]))
    return sorted(sorted(circle) for circle in circles)


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": {"e"}, "e": set()}
    assert _circles(graph) == [["b", "c"]]
    assert _circles(graph | {"e": {"a"}}) == [["a", "b", "c", "d", "e"]]
    assert _circles(graph | {"c": set()}) == []


def test_no_circles():
    assert _circles(_imports(PACKAGE)) == []


def test_no_circles_outside_of_attention():
    """Of the packages and files of titan_sparse, each taken as one module."""

    def top(module: str) -> str:
        return ".".join(module.split(".")[:2])

    graph: dict[str, set[str]] = {}
    for module, imported in _imports(PACKAGE).items():
        targets = {top(target) for target in imported} - {top(module)}
        graph.setdefault(top(module), set()).update(targets)
    assert _circles(graph) == []
