"""torch.compile of a decoder's layers."""

from torch import nn
from torch._inductor import config as inductor


def compile_layer(layer: nn.Module, backend: str) -> None:
    """layer.compile() as one graph, in place, with gradients that are right.

    torch 2.10 to 2.13 fuse reductions over rows with reductions over columns, as the backward of a
    norm has them, and may then leave one of the results unwritten (pytorch/pytorch#193061). It is
    silent: a layer of Gemma 3 had gradients that were off by half, or NaN. So that is turned off, for
    the whole process.
    """
    inductor.triton.mix_order_reduction = False
    layer.compile(backend=backend, fullgraph=True)
