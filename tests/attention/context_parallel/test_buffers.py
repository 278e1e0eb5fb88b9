"""Memory for what other ranks send: one piece a slot, which the longest sequence decides."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.comm import Buffers
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import Dense

CPU = torch.device("cpu")


def test_a_slot_is_one_piece_of_memory():
    buffers = Buffers()
    [large] = buffers.take("a", [((4, 100), torch.float32)], CPU)
    first, second = buffers.take("a", [((3, 5), torch.bfloat16), ((7,), torch.float64)], CPU)
    assert (first.shape, first.dtype) == ((3, 5), torch.bfloat16)
    assert (second.shape, second.dtype) == ((7,), torch.float64)
    assert first.data_ptr() == large.data_ptr()
    # The two do not lie on each other.
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()
    assert second.data_ptr() % second.itemsize == 0
    [other] = buffers.take("b", [((2,), torch.float32)], CPU)
    other.fill_(3)
    assert (first == 1).all() and (second == 2).all()


def test_a_slot_grows_and_never_shrinks():
    buffers = Buffers()
    buffers.take("a", [((1000,), torch.float32)], CPU)
    small = buffers.nbytes
    buffers.take("a", [((2000,), torch.float32)], CPU)
    large = buffers.nbytes
    addresses = buffers.addresses
    buffers.take("a", [((0, 3), torch.float32)], CPU)
    buffers.take("a", [((1500,), torch.float32)], CPU)
    assert small < large == buffers.nbytes
    assert buffers.addresses == addresses


def _keep(cp: ContextParallel, tokens: int) -> int:
    """Bytes that are kept after a forward and backward on so many tokens a rank."""
    q = torch.randn(1, 4, tokens, 8, requires_grad=True)
    k = torch.randn(1, 2, tokens, 8, requires_grad=True)
    v = torch.randn(1, 2, tokens, 8, requires_grad=True)
    attend(q, k, v, Causal(), Dense(), cp).sum().backward()
    return cp.buffers.nbytes


@pytest.mark.parametrize("circulates", ["kv", "q"])
@pytest.mark.parametrize(
    "schedule, axes",
    [("ring", (1, 3)), ("all_gather", (1, 3)), ("double_ring", (2, 2)), ("group_cast", (3, 1))],
)
def test_many_lengths_keep_room_for_the_longest(schedule, axes, circulates):
    """As in an evaluation over many lengths."""
    with fake_world(axes[0] * axes[1]):
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
        options = {"block_size": 16, "backward_circulates": circulates}
        alone = _keep(ContextParallel(mesh, "striped", schedule, **options), 96)
        cp = ContextParallel(mesh, "striped", schedule, **options)
        kept = [_keep(cp, tokens) for tokens in (32, 64, 96, 48, 80)]
    assert kept[0] < kept[2]
    assert kept[2:] == [alone] * 3
