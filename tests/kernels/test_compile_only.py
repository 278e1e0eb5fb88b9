"""All kernels compile, and fit into shared memory, which the interpreter cannot show."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import titan_sparse.kernels
from tests.kernels.compile_only import GPUS

KERNELS = Path(titan_sparse.kernels.__path__[0])


def launched_kernels() -> set[tuple[str, str]]:
    """Modules and names of the functions that are launched somewhere: `_kernel[grid](...)`."""
    found = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            if is_launch and ast.unparse(node.func.value).endswith("_kernel"):
                parts = path.relative_to(KERNELS).with_suffix("").parts
                module = ".".join(["titan_sparse.kernels", *parts])
                found.add((module, ast.unparse(node.func.value)))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="other tests run the kernels on the GPU")
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton here")
@pytest.mark.parametrize(
    "gpu, head_dim",
    [
        ("H200", 128),
        pytest.param("H200", 256, marks=pytest.mark.slow),
        pytest.param("A100", 256, marks=pytest.mark.slow),
        pytest.param("RTX 4090", 128, marks=pytest.mark.slow),
        pytest.param("RTX 4090", 256, marks=pytest.mark.slow),
    ],
)
def test_all_kernels_compile(gpu, head_dim, cache):
    # Kernels that have not changed since another run are not compiled again.
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, "-m", "tests.kernels.compile_only", gpu, str(head_dim)]
    run = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = {(module, name): shared for module, name, shared in json.loads(run.stdout)}
    wanted = launched_kernels()
    assert len(wanted) > 30
    assert wanted <= compiled.keys(), wanted - compiled.keys()
    most = GPUS[gpu].shared_memory
    assert not {name: shared for name, shared in compiled.items() if shared > most}
