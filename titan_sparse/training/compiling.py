"""torch.compile of a decoder's layers."""

from torch import nn

from titan_sparse.attention.compiling import switch_wrong_fusions_off


def compile_layer(layer: nn.Module, backend: str) -> None:
    """layer.compile() as one graph, in place, without fusions that make gradients wrong. Only linear
    attention breaks the graph."""
    switch_wrong_fusions_off()
    is_linear = any(name.endswith("linear_attn") for name, _ in layer.named_modules())
    layer.compile(backend=backend, fullgraph=not is_linear)
