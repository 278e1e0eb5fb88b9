"""compile_layer() on the CPU: inductor takes our choices, and its caches still know their keys. What
they change is in kernels of GPUs: tests/gpu/test_compiling.py."""

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.virtualized import V

from titan_sparse.training.compiling import ChoicesWithoutRaces, compile_layer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_inductor_takes_our_choices_and_caches(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    layer = Layer()
    x = torch.randn(4, 32)
    expected = layer(x)

    counters.clear()
    compile_layer(layer, "inductor")
    torch.testing.assert_close(layer(x), expected)
    assert isinstance(V.choices, ChoicesWithoutRaces)
    assert not inductor.triton.mix_order_reduction
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
    assert counters["inductor"]["fxgraph_cache_miss"] > 0

    # Kernels made with inductor's own choices are others.
    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "inductor_choices_class", None)
    counters.clear()
    layer.compile(fullgraph=True)
    torch.testing.assert_close(layer(x), expected)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    torch._dynamo.reset()
