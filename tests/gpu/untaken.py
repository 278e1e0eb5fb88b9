"""A plugin of pytest that prints at the end which branches of a GPU no test took (make test-gpu).

    python -m pytest -m gpu -p tests.gpu.untaken

Processes that tests start take part through GPU_BRANCHES_FOLDER and a sitecustomize.py in their
PYTHONPATH.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from scripts import gpu_branches
from scripts.gpu_branches import Branch
from tests.gpu import recorder

LIST = Path(__file__).parent / "branches.toml"
_STARTS_WITH_PYTHON = Path(__file__).parent / "recording"
_BRANCHES = pytest.StashKey[list[Branch]]()
_FOLDER = pytest.StashKey[Path]()


def read_list(path: Path = LIST) -> dict[tuple[str, str], str]:
    """{(file, key of a branch): the test that takes it}."""
    tables = tomli.loads(path.read_text())
    return {(file, key): test for file, table in tables.items() for key, test in table.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The package whose branches are listed; a test of this plugin has one of its own."""
    parser.addoption("--untaken-package", default=gpu_branches.PACKAGE)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start to record: here, in the workers of pytest-xdist, and in what tests start."""
    if hasattr(config, "workerinput"):
        # It has begun as it started.
        return
    branches = gpu_branches.find(config.rootpath, config.getoption("--untaken-package"))
    spans: dict[str, list] = {}
    for branch in branches:
        span = (branch.file_and_key, (*branch.first, *branch.last))
        spans.setdefault(str(config.rootpath / branch.file), []).append(span)
    folder = Path(tempfile.mkdtemp(prefix="gpu_branches_"))
    recorder.write_list(folder, spans)
    config.stash[_BRANCHES] = branches
    config.stash[_FOLDER] = folder
    os.environ[recorder.FOLDER] = str(folder)
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(_STARTS_WITH_PYTHON), *([inherited] if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    recorder.start()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was not taken, with the test that ought to have taken it."""
    branches = config.stash[_BRANCHES]
    noted = recorder.noted(config.stash[_FOLDER])
    left = [branch for branch in branches if branch.file_and_key not in noted]
    terminalreporter.section("branches that only a GPU takes")
    for line in lines(branches, left, read_list()):
        terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no folder behind."""
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


def lines(
    branches: list[Branch], left: list[Branch], tests: dict[tuple[str, str], str]
) -> Iterator[str]:
    """The report. left: those of the branches that were not taken."""
    for branch in left:
        test = tests.get((branch.file, branch.key), "no test")
        yield f"not taken: {branch.place}: {branch.key} ({test})"
    yield f"{len(branches) - len(left)} of {len(branches)} branches taken"
    if sys.version_info < (3, 12):
        yield "On Python 3.11 the threads of autograd are not seen: some may have been taken there."
