"""The documents tell the truth: their examples run, the table of options is the config's, the files they name exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.docs.options_table import options_table
from titan_sparse.models.flavours import FLAVOURS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _python_blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


def _is_distributed(block: str) -> bool:
    return "init_process_group" in block


@pytest.mark.parametrize("page, least", [("docs/attention.md", 5), ("docs/masks.md", 1)])
def test_examples_run(page, least):
    torch.set_num_threads(1)
    blocks = [block for block in _python_blocks(page) if not _is_distributed(block)]
    names: dict = {}
    for block in blocks:  # one after the other, as a reader would
        exec(compile(block, page, "exec"), names)
    assert len(blocks) >= least


@pytest.mark.parametrize("processes", [1, 2])
def test_example_over_several_processes_runs(tmp_path, processes):
    blocks = [block for block in _python_blocks("docs/attention.md") if _is_distributed(block)]
    assert len(blocks) == 1
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
            str(script),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_table_of_options_is_the_config():
    text = (ROOT / "README.md").read_text()
    table = text.split("<!-- options -->\n")[1].split("\n<!-- end of options -->")[0]
    assert table == options_table(), (
        "run python -m scripts.docs.options_table and put what it prints into README.md"
    )


def test_flavours_are_listed():
    text = (ROOT / "docs/training.md").read_text()
    names = [
        name for name in FLAVOURS if name != "tiny"
    ]  # which tests/runs.py adds, in the process that ran it
    assert ", ".join(f"`{name}`" for name in names) + "." in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    text = page.read_text()
    named = re.findall(
        r"(?<![\w/.<])((?:docs|scripts|tests|titan_sparse|train_configs)/[\w/.-]*\.(?:py|toml|md))\b",
        text,
    )
    named += re.findall(r"\]\(([^)#:]+)\)", text)
    assert [
        name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()
    ] == []


def test_tree_of_the_design_names_all_files():
    tree = (ROOT / "docs/design.md").read_text().split("## The house\n```\n")[1].split("```")[0]
    files = {
        path.name
        for folder in ("titan_sparse", "kernels", "scripts")
        for path in (ROOT / folder).glob("**/*.*")
        if path.suffix in (".py", ".sh")
    } | {"train.py"}
    assert set(re.findall(r"[\w]+\.(?:py|sh)\b", tree)) == files


def test_pages_are_listed_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [
        page.name for page in PAGES[1:] if f"[docs/{page.name}](docs/{page.name}) |" not in text
    ] == []


def test_test_files_are_listed():
    text = (ROOT / "docs/testing.md").read_text()
    assert [
        path.name
        for path in (ROOT / "tests").glob("[!_]*.py")
        if f"`tests/{path.name}`" not in text
    ] == []
