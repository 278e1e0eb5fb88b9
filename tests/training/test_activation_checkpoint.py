"""What a block computes again under each mode of activation checkpointing."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_sparse.training.build_model import checkpointed
from titan_sparse.training.setup import choose_recompute

LAYERS = 4


class _Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _block() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(8, 8, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def _gradients(block: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in block.parameters()]


# Of each layer the forward has one matmul and the backward two.
@pytest.mark.parametrize(
    "mode, recomputed", [("none", 0), ("selective", LAYERS // 2), ("full", LAYERS)]
)
def test_matmuls_computed_again(mode, recomputed):
    plain, block = _block(), _block()
    wrapped = checkpointed(block, mode)
    inputs = torch.randn(3, 8)
    plain(inputs.clone().requires_grad_()).sum().backward()
    with _Matmuls() as matmuls:
        wrapped(inputs.clone().requires_grad_()).sum().backward()
    assert matmuls.count == 3 * LAYERS + recomputed
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    for gradient, wanted in zip(_gradients(block), _gradients(plain), strict=True):
        assert torch.equal(gradient, wanted)


def test_recomputes_no_more_than_the_memory_requires():
    shares = []

    def peak_gib(share: float) -> float:
        shares.append(share)
        return 10 - 8 * share

    assert choose_recompute(peak_gib, 10) == 0
    assert choose_recompute(peak_gib, 6) == 0.5
    assert choose_recompute(peak_gib, 5.9) == 0.5625
    assert choose_recompute(peak_gib, 1) == 1
    assert max(shares) == 15 / 16  # 1 is the last resort, whatever it needs
