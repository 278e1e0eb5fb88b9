"""All kernels compile, and fit into shared memory, which the interpreter cannot show.

A program compiles them for a GPU that is not there: python -m tests.kernels.test_compile_only H200
128 (the head_dim). Attention runs as on a GPU, in bf16 and with blocks of 128. But kernels are not
launched, so that all results are garbage.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import titan_sparse.kernels

KERNELS = Path(titan_sparse.kernels.__path__[0])


class GPU(NamedTuple):
    """H200 or another GPU. capability: in Triton's notation. shared_memory: bytes
    available to a program."""

    capability: int
    shared_memory: int


GPUS = {
    "H200": GPU(90, 232448),
    "A100": GPU(80, 166912),
    "RTX 4090": GPU(89, 101376),
}


class Driver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, gpu: GPU):
        self.gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(gpu: GPU) -> dict[tuple[str, str], int]:
    """From now on compile kernels without launching them, and let CPU tensors appear to be on a
    GPU.

    Returns the most shared memory by module and name, which grows with each kernel.
    """
    shared_memory = {}
    run = JITFunction.run

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        name = (self.fn.__module__, self.fn.__name__)
        shared_memory[name] = max(shared_memory.get(name, 0), kernel.metadata.shared)
        return kernel

    properties = SimpleNamespace(
        shared_memory_per_block_optin=gpu.shared_memory,
        multi_processor_count=132,
    )
    driver.set_active(Driver(gpu))
    JITFunction.run = compiled
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda device=None: properties
    return shared_memory


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
    program = [sys.executable, "-m", "tests.kernels.test_compile_only", gpu, str(head_dim)]
    run = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = {(module, name): shared for module, name, shared in json.loads(run.stdout)}
    wanted = launched_kernels()
    assert len(wanted) > 30
    assert wanted <= compiled.keys(), wanted - compiled.keys()
    most = GPUS[gpu].shared_memory
    assert not {name: shared for name, shared in compiled.items() if shared > most}


def main() -> None:
    name, head_dim = sys.argv[1:]
    dim = int(head_dim)
    shared_memory = compile_only(GPUS[name])
    # Kernels read at import whether they are interpreted, which depends on the environment alone.
    from titan_sparse.attention import attend
    from titan_sparse.attention.backends import BACKENDS
    from titan_sparse.attention.masks.ranges import Causal, Documents
    from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention
    from titan_sparse.kernels import compact, cross_entropy, decode, merge, sinks

    triton = BACKENDS["triton"]

    triton.refusal = lambda *case: None
    documents = Documents([[300, 600]])
    independent = VerticalSlash(budget="independent", probe_rows="last", count_sinks=True)

    def heads(count: int) -> Tensor:
        return torch.randn(1, count, 1024, dim, dtype=torch.bfloat16).requires_grad_()

    for pattern, mask in ((VerticalSlash(dense_below=256), documents), (MoBA(128, 3), Causal())):
        out = attend(heads(4), heads(2), heads(2), mask, pattern, backend="triton")
        out.sum().backward()
    # Their attention is that of others; what they choose by is their own.
    for pattern in (independent, XAttention()):
        pattern.select(heads(4), heads(2), Causal())
    # Blocks that the eager backend alone takes, and no kernel.
    for pattern in (VerticalSlash(dense_below=256), independent):
        pattern.select(heads(4), heads(2), documents, block_size=24)

    out = heads(4).detach()
    lse = torch.zeros(out.shape[:3])
    merge.merge(out, lse, out, lse, torch.float32)
    merge.add(out, out, torch.float32)
    sinks.sinks_gradient(out, out, lse, torch.zeros(4))
    seen = torch.ones(1, 1024, dtype=torch.bool)
    decode.attend_in_parts(out[:, :, :1], out[:, :2], out[:, :2], seen, 0.1)
    wide = torch.randn(1, 2, 1024, 512)
    decode.attend_in_parts(wide[:, :, :1], wide, wide, seen, 0.1)
    compact.compact(torch.ones(2, 2000, dtype=torch.bool), 2000, 0)
    logits = torch.zeros(64, 1000)
    cross_entropy.cross_entropy(logits, torch.zeros(64).long(), None, 1e-4, torch.bfloat16)
    rows = [[*name, shared] for name, shared in sorted(shared_memory.items())]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
