"""A plugin of pytest that prints at the end which branches of a GPU no test took (make test-gpu).

    python -m pytest -m gpu -p tests.gpu.untaken

Processes that tests start take part through GPU_BRANCHES_FOLDER and a sitecustomize.py in their
PYTHONPATH. Several runs that are given one GPU_BRANCHES_FOLDER count together.
"""

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from scripts.gpu_branches.finding import PACKAGE, Branch, find
from tests.gpu import recorder

LIST = Path(__file__).parent / "branches.toml"
_STARTS_WITH_PYTHON = Path(__file__).parent / "recording"
_BRANCHES = pytest.StashKey[list[Branch]]()
_FOLDER = pytest.StashKey[Path]()
_RAN: set[str] = set()
"""Names of tests that were neither skipped nor left out."""


def read_list(path: Path = LIST) -> dict[tuple[str, str], str]:
    """{(file, key of a branch): the test that takes it}."""
    tables = tomli.loads(path.read_text())
    return {(file, key): test for file, table in tables.items() for key, test in table.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The package whose branches are listed; a test of this plugin has one of its own."""
    parser.addoption("--untaken-package", default=PACKAGE)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start to record: here, in the workers of pytest-xdist, and in what tests start."""
    if hasattr(config, "workerinput"):
        # It has begun as it started.
        return
    branches = find(config.rootpath, config.getoption("--untaken-package"))
    spans: dict[str, list] = {}
    for branch in branches:
        span = (branch.file_and_key, (*branch.first, *branch.last))
        spans.setdefault(str(config.rootpath / branch.file), []).append(span)
    if recorder.FOLDER in os.environ:
        # Of several runs, which count together.
        folder = Path(os.environ[recorder.FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="gpu_branches_"))
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        os.environ[recorder.FOLDER] = str(folder)
    recorder.write_list(folder, spans)
    config.stash[_BRANCHES] = branches
    config.stash[_FOLDER] = folder
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(_STARTS_WITH_PYTHON), *([inherited] if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    recorder.start()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which tests ran, of all workers."""
    if report.when == "call" and not report.skipped:
        _RAN.add(report.nodeid.partition("[")[0])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was not taken, with the test that ought to have taken it."""
    branches = config.stash[_BRANCHES]
    noted = recorder.noted(config.stash[_FOLDER])
    left = [branch for branch in branches if branch.file_and_key not in noted]
    recorder.note_tests(config.stash[_FOLDER], _RAN)
    ran = recorder.tests_noted(config.stash[_FOLDER])
    terminalreporter.section("branches that only a GPU takes")
    for line in _lines(branches, left, ran):
        terminalreporter.line(line)


def _lines(branches: list[Branch], left: list[Branch], ran: set[str]) -> Iterator[str]:
    """The report. left: those of the branches that were not taken. ran: names of tests."""
    tests = read_list()
    waiting = 0
    for branch in left:
        test = tests.get((branch.file, branch.key), "no test")
        if test in ran or test == "no test":
            yield f"not taken: {branch.place}: {branch.key} ({test})"
        else:
            waiting += 1
            yield f"left to a test that did not run: {branch.place}: {branch.key} ({test})"
    taken = len(branches) - len(left)
    yield f"{taken} of {len(branches)} branches taken; {waiting} are left to tests that did not run"
    if sys.version_info < (3, 12):
        yield "On Python 3.11 the threads of autograd are not seen: some may have been taken there."
