"""flash-linear-attention's kernels in our linear attention: against plain torch, without leaks
between documents, and over two processes that share the GPU.
"""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.jit import KernelInterface

from tests.distributed import run_processes
from tests.reference import relative_error
from titan_sparse.attention import linear
from titan_sparse.attention.context_parallel.group import one_rank

pytest.importorskip("fla")
transformers = pytest.importorskip("transformers")

DEVICE = torch.device("cuda")
LENGTH = 4096
LENGTHS = [[1000, 1, 2500, 300], [LENGTH]]
# The kernels multiply in tf32.
LIMIT = 5e-3


class Pair:
    """Two processes that share one GPU: gloo gathers on the CPU."""

    size = 2

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(2)]
        dist.all_gather(parts, x.cpu())
        return torch.stack(parts).to(x.device)


def run(cp: object, changed: slice = slice(0)) -> list[Tensor]:
    """out and the gradient of the input, of this rank's tokens, and the gradients of all
    parameters, in fp32. States live for thousands of tokens. changed: tokens of the first row
    that differ."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    config = transformers.Qwen3_5TextConfig(
        hidden_size=256, linear_key_head_dim=128, linear_value_head_dim=128
    )
    torch.manual_seed(0)
    module = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        module.A_log.fill_(-7.0)
    module = module.to(DEVICE)
    module.forward = functools.partial(linear.gated_delta_net, module)
    _tune_nothing()
    x = torch.randn(2, LENGTH, 256)
    x[0, changed] += 1
    weights = torch.randn(2, LENGTH, 256)
    weights[0, sum(LENGTHS[0]) :] = 0
    own = slice(cp.rank * LENGTH // cp.size, (cp.rank + 1) * LENGTH // cp.size)
    x = x[:, own].to(DEVICE).requires_grad_()
    pieces = linear.split_documents(LENGTHS, LENGTH, 4, cp, DEVICE)
    out = module(x, attention_mask=pieces)
    (out * weights[:, own].to(DEVICE)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [tensor.cpu() for tensor in (out.detach(), x.grad, *gradients)]


def _tune_nothing() -> None:
    """Each kernel has one configuration: trying all of them takes minutes in fp32."""
    linear._import_kernels()
    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    for kernel in [found for module in modules for found in vars(module).values()]:
        while isinstance(kernel, KernelInterface):
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
            kernel = getattr(kernel, "fn", None)


def test_kernels_are_plain_torch(monkeypatch):
    found = run(one_rank(128))
    monkeypatch.setattr(linear, "_kernels", lambda x: None)
    wanted = run(one_rank(128))
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < LIMIT


def test_documents_do_not_meet():
    """To the bit."""
    before = run(one_rank(128))
    changed = slice(1001, 3501)
    after = run(one_rank(128), changed)
    for a, b in zip(before[:2], after[:2]):
        is_same = (a == b).all(-1)
        assert is_same[1].all()
        assert is_same[0, : changed.start].all()
        assert is_same[0, changed.stop :].all()
        assert not is_same[0, changed].any()


def test_two_processes_are_one():
    run_processes(2, _processes_agree)


def _processes_agree() -> None:
    cp = Pair()
    found = run(cp)
    for gradient in found[2:]:
        dist.all_reduce(gradient)
    wanted = run(one_rank(128))
    wanted[:2] = [tensor.chunk(2, 1)[cp.rank] for tensor in wanted[:2]]
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < LIMIT
