"""Branches that only a GPU takes: found in the source, each with a test, and told when not taken."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_branches.__main__ import ROOT
from scripts.gpu_branches.finding import find
from tests.gpu.untaken import read_list

SOURCE = """
import threading

import torch

from kernels import _kernel


def kind(x):
    if x.is_cuda:
        return "gpu"
    return "cpu"


def by_name(x):
    has_kernel = x.is_cuda and x.dtype == torch.float32
    function = fast if has_kernel else slow
    return function(x)


def refused(device):
    if device.type != "cuda":
        raise ValueError(device)
    stream(device)
    if device.index:
        return 1


def stream(device):
    return torch.cuda.Stream(device)


def serves(x):
    return x.is_cuda and x.ndim == 2


def through_a_function(x):
    if serves(x):
        _kernel[8](x)


class Copier:
    def __init__(self, device, pinned: bool):
        self.event: "torch.cuda.Event | None" = None
        self.pinned = pinned

    def copy(self, x):
        if self.pinned:
            x.pin()
        if self.event is not None:
            self.event.synchronize()


def make(device):
    return Copier(device, device.type == "cuda")


def of_a_user(name, x):
    if name == "cpu" or x.ndim == 2:
        return x
    return torch.cuda.is_available()
"""
KEYS = [
    "kind: if x.is_cuda",
    "by_name: fast if has_kernel",
    "refused: after device.type != 'cuda'",
    "refused: if device.index",
    "stream: torch.cuda.Stream",
    "through_a_function: if serves(x)",
    "through_a_function: kernel _kernel",
    "Copier.copy: if self.pinned",
    "Copier.copy: if self.event is not None",
]
TEST = """
import threading
from types import SimpleNamespace

from package.module import kind


def test_on_a_thread():
    thread = threading.Thread(target=kind, args=(SimpleNamespace(is_cuda={taken}),))
    thread.start()
    thread.join()
"""


def _plant(folder: Path, source: str) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(source)
    (folder / "kernels.py").touch()


def test_what_is_found(tmp_path):
    _plant(tmp_path, SOURCE)
    kernels = "import triton\n\n\n@triton.jit\ndef _kernel(x):\n    if x:\n        return\n"
    (tmp_path / "package/kernels.py").write_text(kernels)
    found = find(tmp_path, "package")
    assert [branch.key for branch in found] == KEYS
    assert found[0].place == "package/module.py:11"


def test_two_alike_have_two_keys(tmp_path):
    lines = "    if x.is_cuda:\n        f()\n"
    _plant(tmp_path, f"def f(x):\n{lines}{lines}")
    assert [b.key for b in find(tmp_path, "package")] == ["f: if x.is_cuda", "f: if x.is_cuda (2)"]


def test_each_branch_has_a_test():
    """A new branch: run python -m scripts.gpu_branches, and name a test in tests/gpu/branches.toml."""
    found = {(branch.file, branch.key) for branch in find(ROOT)}
    listed = read_list()
    assert not found - listed.keys(), "branches without a test"
    assert not listed.keys() - found, "branches that are gone"
    assert len(found) > 100


def test_the_tests_exist():
    for name in sorted(set(read_list().values())):
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert function in defined, name


@pytest.mark.parametrize("taken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_no_test_took_is_printed(tmp_path, taken):
    """A planted branch in a project of its own: taken, and not taken, on a thread of another process."""
    _plant(
        tmp_path, SOURCE.replace("from kernels import _kernel\n", "").replace("import torch\n", "")
    )
    (tmp_path / "test_kind.py").write_text(TEST.format(taken=taken))
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.untaken", "-n", "2", "-q"]
    result = subprocess.run(
        [*command, "--untaken-package", "package", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    line = "not taken: package/module.py:9: kind: if x.is_cuda (no test)"
    assert (line in result.stdout.splitlines()) != taken
    count = len(KEYS) - 1
    assert f"{int(taken)} of {count} branches taken; 0 are left" in result.stdout
