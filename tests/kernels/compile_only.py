"""Compiles our kernels for an H200, where there is none: python -m tests.kernels.compile_only.

Attention runs as on a GPU, in bf16 and with blocks of 128, which Triton's interpreter cannot do. But
kernels are compiled and not launched, so that all results are garbage. Prints JSON: for each kernel
its module, its name, and the most shared memory that it wants, in bytes.
"""

import json
from types import SimpleNamespace

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024
"""Bytes that a program can have on Hopper."""


class Hopper:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only() -> dict[tuple[str, str], int]:
    """From now on kernels are compiled instead of launched, and CPU tensors say they are on a GPU.

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
        shared_memory_per_block_optin=SHARED_MEMORY,
        multi_processor_count=132,
    )
    driver.set_active(Hopper())
    JITFunction.run = compiled
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.get_device_properties = lambda device=None: properties
    return shared_memory


def main() -> None:
    shared_memory = compile_only()
    # Kernels read at import whether they are interpreted, which depends on the environment alone.
    from titan_sparse.attention import attend
    from titan_sparse.attention.backends import triton
    from titan_sparse.attention.masks.ranges import Causal, Documents
    from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention
    from titan_sparse.kernels import cross_entropy, merge, sinks

    triton.refusal = lambda *case: None
    documents = Documents([[300, 600]])
    independent = VerticalSlash(budget="independent", probe_rows="last", count_sinks=True)

    def heads(count: int) -> Tensor:
        return torch.randn(1, count, 1024, 128, dtype=torch.bfloat16).requires_grad_()

    for pattern, mask in (
        (VerticalSlash(dense_below=256), documents),
        (independent, Causal()),
        (MoBA(128, 3), Causal()),
        (XAttention(), Causal()),
    ):
        out = attend(heads(4), heads(2), heads(2), mask, pattern, backend="triton")
        out.sum().backward()

    out = heads(4).detach()
    lse = torch.zeros(out.shape[:3])
    merge.merge(out, lse, out, lse, torch.float32)
    merge.add(out, out, torch.float32)
    sinks.sinks_gradient(out, out, lse, torch.zeros(4))
    logits = torch.zeros(64, 1000)
    cross_entropy.cross_entropy(logits, torch.zeros(64).long(), None, 1e-4, torch.bfloat16)
    rows = [[*name, shared] for name, shared in sorted(shared_memory.items())]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
