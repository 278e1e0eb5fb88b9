"""Gathering verticals and adding their gradients, against loops over single verticals."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.reference import DEVICE
from titan_sparse.kernels.verticals import (
    add_verticals,
    add_verticals_naive,
    gather_verticals,
    gather_verticals_naive,
)

SHAPES = [((4, 2), 16, 16), ((3, 3), 24, 32), ((5, 1), 32, 16), ((6, 2), 80, 32)]
"""(query heads, KV heads), head_dim, block size."""
BLOCKS = [6, 1, 2]
"""Of seven global blocks those that a rank holds, in the order of its memory."""


def ascending_verticals(heads: int, size: int, g: torch.Generator) -> Tensor:
    """int32 [2, heads, 2 size + 3]: positions in seven blocks, the last of them no position."""
    count = 2 * size + 3
    order = torch.rand(2 * heads, 7 * size, generator=g)
    # Many heads of a group share some verticals, as they share sinks.
    order[:, size : size + 2] = -1
    picked = order.argsort(-1)[:, :count].sort(-1).values
    # The filling behind the last vertical: the length, or beyond.
    picked[:, -7:] = 7 * size
    picked[-1, -2:] = 8 * size
    return picked.view(2, heads, count).int()


def held_row(position: int, size: int) -> int | None:
    """Where the rank holds a position; None where it does not."""
    block, in_block = divmod(position, size)
    if block not in BLOCKS:
        return None
    return BLOCKS.index(block) * size + in_block


@pytest.mark.parametrize("dtype, shape", zip([torch.float32, torch.float16] * 2, SHAPES))
def test_verticals_are_gathered_and_go_home(dtype, shape):
    """Each row is a copy of the key or value that the rank holds, or zeros. Its gradient is added
    where its key is, if the rank holds it, also for several heads of a group."""
    (q_heads, kv_heads), dim, size = shape
    g = torch.Generator().manual_seed(dim)
    verticals = ascending_verticals(q_heads, size, g)
    keys = len(BLOCKS) * size
    # [2, S_local, Hkv, D], as a projection leaves them.
    k, v = torch.randn(2, 2, keys, kv_heads, dim, generator=g).to(DEVICE, dtype)
    # What is not held must not be read: a NaN times 0 would not be 0.
    k[:, 0] = torch.nan
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # Views, as the two halves of what was reduced are.
    parts = torch.randn(2, *verticals.shape, dim, generator=g).to(DEVICE)
    totals = torch.randn(2, 2, kv_heads, keys, dim, generator=g).to(DEVICE, dtype)

    local = torch.full((7 * size + 1,), -1)
    for position in range(7 * size):
        row = held_row(position, size)
        if row is not None:
            local[position] = row
    want = torch.zeros(2, *verticals.shape, dim, dtype=dtype, device=DEVICE)
    want_totals = totals.double()
    for b, h, c in itertools.product(*map(range, verticals.shape)):
        row = held_row(int(verticals[b, h, c]), size)
        if row is not None:
            kv_head = h // (q_heads // kv_heads)
            want[0, b, h, c] = k[b, kv_head, row]
            want[1, b, h, c] = v[b, kv_head, row]
            want_totals[:, b, kv_head, row] += parts[:, b, h, c].double()

    for gather in (gather_verticals, gather_verticals_naive):
        got = gather(k, v, verticals.to(DEVICE), local.to(DEVICE))
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)

    blocks = torch.tensor(BLOCKS, device=DEVICE)
    rounding = 4e-6 if dtype == torch.float32 else 4e-3
    for add in (add_verticals, add_verticals_naive):
        got = [total.clone() for total in totals]
        add(got, parts, verticals.to(DEVICE), blocks, size)
        for one, wanted in zip(got, want_totals):
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), wanted, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_few_verticals(count):
    """Tiles are found among any number of verticals, with the first and the last key among them."""
    verticals = torch.arange(count)
    verticals[-1] = 63
    verticals = verticals.view(1, 1, count).int().to(DEVICE)
    parts = torch.ones(2, 1, 1, count, 16, device=DEVICE)
    totals = [torch.zeros(1, 1, 64, 16, device=DEVICE) for _ in range(2)]
    add_verticals(totals, parts, verticals, torch.arange(4, device=DEVICE), 16)
    want = torch.zeros(64)
    want[verticals.flatten().long().cpu()] = 1
    for total in totals:
        assert torch.equal(total[0, 0, :, 3].cpu(), want)
