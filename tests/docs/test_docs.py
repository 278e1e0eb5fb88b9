"""The docs are correct: their examples and commands run, and what they name exists."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from scripts.docs import numbers
from tests.distributed import run_program
from tests.docs.commands import PAGES, ROOT, blocks, commands_of, try_command, workspace
from titan_sparse.config import Config, load
from titan_sparse.config.reading import SECTIONS, walk
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.huggingface_config import FAMILIES

COMMANDS = list(dict.fromkeys(words for page in PAGES for words in commands_of(page)))


def _is_distributed(block: str) -> bool:
    return "init_process_group" in block


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page, "python"):  # one after the other, as a reader would
        if not _is_distributed(block):
            exec(compile(block, page.name, "exec"), names)


def test_example_over_several_processes_runs():
    examples = [block for page in PAGES for block in blocks(page, "python")]
    distributed = [block for block in examples if _is_distributed(block)]
    assert len(distributed) == 1 and len(examples) > 10
    run_program(2, _run_block, distributed)


def _run_block(words: list[str]) -> int:
    exec(compile(words[0], "example", "exec"), {})
    return 0


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    workspace(folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_run(command, files, monkeypatch):
    monkeypatch.chdir(files)
    try_command(command, files)


def test_toml_examples_are_configurations(tmp_path):
    path = tmp_path / "example.toml"
    texts = [block for page in PAGES for block in blocks(page, "toml")]
    for text in texts:
        path.write_text(text)
        load(["--config", str(path)])
        assert tomllib.loads(text)
    assert len(texts) >= 3


def test_numbers_are_those_of_the_results(monkeypatch):
    assert numbers.main(["--check"]) == 0
    page = (ROOT / "docs/benchmarks.md").read_text()
    # A number edited by hand in the page, and one that changes in the result.
    assert numbers.with_tables(page.replace("31.4 + 95.6", "31.5 + 95.6")) == page
    found = numbers.row("context_parallel_4xh200", case="scaling", schedule="alone")
    monkeypatch.setitem(found, "forward_ms", 32.0)
    assert "| 32.0 + 95.6 |" in numbers.with_tables(page)
    with pytest.raises(ValueError, match="there is no table x. Write one of headlines"):
        numbers.with_tables("<!-- table x -->\n<!-- end of table -->")


def test_models_are_listed():
    # tests/runs.py adds "tiny" in the process that ran it.
    names = [name for name in FLAVOURS if name != "tiny"]
    listed = ", ".join(f"`{name}`" for name in names) + "."
    # The list has line breaks.
    assert listed in " ".join((ROOT / "docs/training.md").read_text().split())
    page = (ROOT / "docs/huggingface.md").read_text()
    assert [name for name in FAMILIES if f"| `{name}` |" not in page] == []


FOLDERS = "docs|scripts|tests|titan_sparse|train_configs|benchmarks"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    keys = {key for key, _ in walk(Config)}
    options = re.findall(rf"`(?:--)?((?:{'|'.join(SECTIONS)})\.[a-z0-9_.]*[a-z0-9_])", text)
    assert [name for name in options if name not in keys] == []

    named = re.findall(rf"(?<![\w/.<])((?:{FOLDERS})/[\w/.-]*\.(?:py|toml|md|sh|json|png))\b", text)
    named += re.findall(rf"`((?:{FOLDERS})/[\w/.-]*/)`", text)
    named += re.findall(r"\]\(([^)#:]+)\)", text)
    results = re.findall(r"`([\w]+_[\w]*h200[\w]*\.json)`", text)
    named += [f"benchmarks/results/{name}" for name in results]
    places = (ROOT, page.parent)
    assert [name for name in named if not any((at / name).exists() for at in places)] == []

    # [page.md](page.md), "Section": a heading or a bold paragraph.
    for path, section in re.findall(r'\]\(([\w/.]+\.md)\)[,\s]+"([^"]+)"', text):
        target = (page.parent / path).read_text()
        assert re.search(rf"^(#+ |\*\*){re.escape(section)}", target, re.MULTILINE), section


def test_readme_links_to_every_page():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([\w/]+\.md)\)", text)
    assert [page.name for page in PAGES[1:] if str(page.relative_to(ROOT)) not in links] == []


def test_words():
    """The docs stay short enough to be read. Lines and bars of tables are not words."""
    words = [word for page in PAGES for word in page.read_text().split()]
    assert len([word for word in words if re.search(r"\w", word)]) <= 16_000


def test_no_merge_is_left_half_done():
    pages = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "kernels").rglob("*.md")]
    marks = ("<<<<<<< ", "=======\n", ">>>>>>> ")
    found = [
        (page, line)
        for page in pages
        for line in page.read_text().splitlines(keepends=True)
        if line.startswith(marks)
    ]
    assert found == []


CODE = ("titan_sparse", "kernels", "scripts", "examples")
QUESTIONS = {"What", "Whether", "How", "Where", "Which", "Why", "When", "Who", "Of"}


def first_words(source: str) -> list[str]:
    """The first word of each docstring of a module, its classes, and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text.split()[0] for text in map(ast.get_docstring, nodes) if text]


def test_docstrings_begin_with_the_thing():
    found = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += [(path, word) for word in first_words(path.read_text())]
    assert len(found) > 1500
    assert [(path, word) for path, word in found if word in QUESTIONS] == []
