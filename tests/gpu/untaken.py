"""A plugin of pytest that prints at the end which branches of a GPU no test took (make test-gpu).

    python -m pytest -m gpu -p tests.gpu.untaken

Processes that tests start take part through GPU_BRANCHES_FOLDER and a sitecustomize.py in their
PYTHONPATH.
"""

import os
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


def tests_by_branch(path: Path = LIST) -> dict[tuple[str, str], str]:
    """{(file, key of a branch): the test that takes it}."""
    tables = tomli.loads(path.read_text())
    return {(file, key): test for file, table in tables.items() for key, test in table.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start to record: here, in the workers of pytest-xdist, and in what tests start."""
    if recorder.FOLDER in os.environ:
        # A worker, which has begun as it started.
        return
    root = config.rootpath
    folder = Path(tempfile.mkdtemp(prefix="gpu_branches_"))
    spans: dict[str, list] = {}
    for branch in gpu_branches.find(root):
        span = (branch.file_and_key, (*branch.first, *branch.last))
        spans.setdefault(str(root / branch.file), []).append(span)
    recorder.write_list(folder, spans)
    os.environ[recorder.FOLDER] = str(folder)
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(_STARTS_WITH_PYTHON), *([inherited] if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    recorder.start()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was not taken, with the test that ought to have taken it."""
    branches = gpu_branches.find(config.rootpath)
    noted = recorder.noted(Path(os.environ[recorder.FOLDER]))
    left = [branch for branch in branches if branch.file_and_key not in noted]
    terminalreporter.section("branches that only a GPU takes")
    for line in lines(branches, left, tests_by_branch()):
        terminalreporter.line(line)


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
