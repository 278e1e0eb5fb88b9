"""torch.compile of a decoder's layers."""

from torch import nn
from torch._inductor import config as inductor


def compile_layer(layer: nn.Module, backend: str) -> None:
    """layer.compile() as one graph, in place, without a fusion that can make gradients wrong.

    torch 2.10 to 2.13 fuse reductions over rows with reductions over columns, as the backward of a
    norm has them, and may then leave one of the results unwritten, silently
    (pytorch/pytorch#193061). That is turned off, for the whole process.
    """
    inductor.triton.mix_order_reduction = False
    layer.compile(backend=backend, fullgraph=True)
