"""docs/architecture.md is the code's: its drawing names every package, and no import runs up in it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.docs.architecture import PAGE, WORDS, drawing, layers, page_text

ROOT = Path(__file__).parents[2]
PACKAGES = ["titan_sparse", "titan_sparse.attention"]


def _drawn() -> dict[str, dict[str, int]]:
    """{package: {name: line of the drawing}}, as a reader sees it on the page."""
    text = PAGE.read_text().split("```text\n")[1].split("```")[0]
    places: dict[str, dict[str, int]] = {package: {} for package in PACKAGES}
    for number, line in enumerate(text.splitlines()[1:]):
        indent, names = re.fullmatch(r"([│ ]*)[├└]── (\w+(?:, \w+)*)\b.*", line).groups()
        package = PACKAGES[len(indent) // 4]
        for name in names.split(", "):
            places[package][name] = number
    return places


def _modules_of(package: str) -> set[str]:
    """The files and folders directly under a package, without its __init__."""
    folder = ROOT / package.replace(".", "/")
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports: lazy imports and imports for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: to the file's folder, or a folder above
                folder = path.relative_to(ROOT).parts[: -node.level]
                base = ".".join([*folder, base]).rstrip(".")
            for alias in node.names:
                yield f"{base}.{alias.name}"


def _arrows(package: str) -> Iterator[tuple[str, str, str]]:
    """(importing name, imported name, where) between different files and folders of a package.

    An import of the package itself is one of its __init__.
    """
    modules = _modules_of(package)
    folder = ROOT / package.replace(".", "/")
    for path in sorted(folder.rglob("*.py")):
        importer = path.relative_to(folder).with_suffix("").parts[0]
        if importer == "__init__":
            continue  # the public face stands above everything
        for imported in _imports(path):
            if not f"{imported}.".startswith(f"{package}."):
                continue
            name = imported.removeprefix(package).strip(".").partition(".")[0]
            target = name if name in modules else "__init__"
            if target != importer:
                yield importer, target, f"{path.relative_to(ROOT)} imports {imported}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_drawn(package):
    assert set(_drawn()[package]) == _modules_of(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_goes_down(package):
    place = _drawn()[package]
    wrong = []
    for importer, imported, where in _arrows(package):
        known = importer in place and imported in place
        if not known or place[importer] >= place[imported]:
            wrong.append(where)
    assert wrong == []


def test_the_drawing_is_that_of_the_contracts():
    assert PAGE.read_text() == page_text(), "run python -m scripts.docs.architecture"
    assert len(PAGE.read_text().splitlines()) < 60  # one screen


def test_every_name_has_words():
    for package, floors in layers().items():
        for floor in floors:
            for name in floor:
                assert WORDS[package].get(name), f"{package}.{name}"


def test_layers_come_from_the_contracts(tmp_path):
    """Absolute names, names relative to a container, siblings, optional layers."""
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        "[tool.importlinter]\n"
        'root_package = "titan_sparse"\n'
        "[[tool.importlinter.contracts]]\n"
        'type = "layers"\n'
        'layers = ["titan_sparse.a", "titan_sparse.b | titan_sparse.c", "(titan_sparse.d)"]\n'
        "[[tool.importlinter.contracts]]\n"
        'type = "forbidden"\n'
        "[[tool.importlinter.contracts]]\n"
        'type = "layers"\n'
        'containers = ["titan_sparse.attention"]\n'
        'layers = ["e", "f : g"]\n'
    )
    assert layers(pyproject) == {
        "titan_sparse": [["a"], ["b", "c"], ["d"]],
        "titan_sparse.attention": [["e"], ["f", "g"]],
    }
    pyproject.write_text(
        "[[tool.importlinter.contracts]]\n"
        'type = "layers"\n'
        'layers = ["titan_sparse.attention.e", "titan_sparse.attention.f", "titan_sparse.kernels"]\n'
        "[[tool.importlinter.contracts]]\n"
        'type = "layers"\n'
        'layers = ["titan_sparse.a", "titan_sparse.b"]\n'
    )
    assert layers(pyproject)["titan_sparse.attention"] == [["e"], ["f"]]
    assert layers(pyproject)["titan_sparse"] == [["a"], ["b"]]


def test_the_drawing_opens_attention():
    lines = drawing().splitlines()
    [attention] = [number for number, line in enumerate(lines) if line.startswith("├── attention")]
    assert lines[attention + 1].startswith("│   ├── attend ")
    assert lines[-2].startswith("└── kernels")
