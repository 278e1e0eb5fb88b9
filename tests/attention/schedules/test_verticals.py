"""attend() with the kernels that gather verticals and return their gradients.

A GPU runs them in every call. Here Triton's interpreter runs them under an unchanged schedule.
"""

import pytest
import torch
from torch import Tensor

from tests.reference import dense_attention, gradients, relative_error, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash.probe import set_probe_seed
from titan_sparse.attention.schedules import verticals

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATTERN = VerticalSlash(recall=0.7, sinks=3, max_verticals=40, max_slashes=4, dense_below=16)
MASKS = {
    "causal": Causal(),
    "documents": Documents([[70, 1, 89], [160]]),
    "padding and a window": Causal(valid=(150, 0)) & SlidingWindow(90),
}


@pytest.mark.parametrize("mask, heads", zip(MASKS.values(), [(4, 2), (3, 1), (2, 2)]))
def test_attend_by_kernels_of_verticals(mask: Mask, heads: tuple[int, int], monkeypatch):
    """out and gradients are those of dense attention over the pairs that were selected."""
    monkeypatch.setattr(verticals, "_has_kernels", lambda x: True)
    drawn = structured_qkv(2, *heads, 160, 16, seed=3)
    qkv = [x.to(DEVICE, torch.float32) for x in drawn]
    d_out = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    indices = []

    def sparse(*qkv: Tensor) -> Tensor:
        set_probe_seed(0)
        out, aux = attend(*qkv, mask, PATTERN, block_size=16, backend="eager", return_aux=True)
        indices.append(aux.index)
        return out

    got, got_gradients = gradients(sparse, d_out, *qkv)
    index = indices[0]
    in_list = index.verticals < 160
    assert bool(in_list.any()) and not bool(in_list.all())
    seen = index.dense(mask)

    def dense(*qkv: Tensor) -> Tensor:
        return dense_attention(*qkv, seen)[0]

    qkv_64 = [x.double() for x in qkv]
    want, want_gradients = gradients(dense, d_out.double(), *qkv_64)
    assert relative_error(got, want) < 5e-6
    for one, wanted in zip(got_gradients, want_gradients, strict=True):
        assert relative_error(one, wanted) < 5e-6
