"""MoBA with gathered queries on a GPU: bf16 against fp32, what the host waits for, memory."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.reference import gradients, relative_error
from titan_sparse.attention import attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask
from titan_sparse.attention.patterns import MoBA
from titan_sparse.kernels.chunks import ChosenChunks, chosen_keys

triton = BACKENDS["triton"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS = 1024
DIM = 128
Seen = Callable[[int, Tensor], Tensor]
"""Of a head and of rows int [n]: bool [n, S], what they see."""


class Case(NamedTuple):
    pattern: MoBA
    seq_len: int
    heads: tuple[int, int] = (2, 1)
    mask: Mask = Causal()


CASES = {
    "8K": Case(MoBA(512, 4), 8192, (5, 1)),
    "8K, packed": Case(MoBA(700, 3), 8192, (4, 2), Documents([5000, 300, 2800])),
    "64K": Case(MoBA(512, 12), 65536),
}


def _draw(heads: tuple[int, int], seq_len: int) -> list[Tensor]:
    torch.manual_seed(0)
    counts = (heads[0], heads[0], heads[1], heads[1])
    return [
        torch.randn(1, seq_len, count, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for count in counts
    ]


def _exact(tensors: list[Tensor], seen: Seen) -> list[Tensor]:
    """out, dq, dk, dv in fp32, some rows of a head at a time."""
    d_out, q, k, v = (x[0].float() for x in tensors)
    scale = DIM**-0.5
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    group = len(q) // len(k)
    for head in range(len(q)):
        keys, values = k[head // group], v[head // group]
        for rows in torch.arange(q.shape[1], device="cuda").split(ROWS):
            scores = (q[head, rows] @ keys.mT * scale).masked_fill(~seen(head, rows), -torch.inf)
            # Rows that see nothing, such as padding, have weight 0.
            p = scores.softmax(-1).nan_to_num(0)
            out[head, rows] = p @ values
            dp = d_out[head, rows] @ values.mT
            delta = (d_out[head, rows] * out[head, rows]).sum(-1, keepdim=True)
            ds = p * (dp - delta) * scale
            dq[head, rows] = ds @ keys
            dk[head // group] += ds.mT @ q[head, rows]
            dv[head // group] += p.mT @ d_out[head, rows]
    return [x[None] for x in (out, dq, dk, dv)]


def _visible(mask: Mask, seq_len: int) -> Seen:
    ranges = mask.rows(seq_len, "cuda")
    keys = torch.arange(seq_len, device="cuda")

    def seen(head: int, rows: Tensor) -> Tensor:
        start = ranges.start[0, rows, None]
        stop = ranges.stop[0, rows, None]
        return (keys >= start) & (keys < stop)

    return seen


def _chosen(case: Case, q: Tensor, k: Tensor) -> Seen:
    index = case.pattern.select(q, k, case.mask)
    visible = _visible(case.mask, case.seq_len)
    keys = torch.arange(case.seq_len, device="cuda").view(1, 1, -1)

    def seen(head: int, rows: Tensor) -> Tensor:
        words = index.words[:, head : head + 1, rows]
        chosen = ChosenChunks(words, index.origin[:, rows], case.pattern.chunk_size)
        return chosen_keys(chosen, keys)[0, 0] & visible(head, rows)

    return seen


def _errors(got: tuple[Tensor, list[Tensor]], want: list[Tensor]) -> list[float]:
    out, grads = got
    errors = []
    for found, wanted in zip((out, *grads), want, strict=True):
        errors.append(relative_error(found, wanted))
    return errors


def _run(case: Case, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return gradients(
        lambda *qkv: attend(*qkv, mask=case.mask, pattern=case.pattern, backend="triton"), *tensors
    )


@pytest.mark.parametrize("name", CASES)
def test_bf16(name):
    """Errors against fp32 are at most twice those of torch's dense flash attention."""
    case = CASES[name]
    tensors = _draw(case.heads, case.seq_len)
    errors = _errors(_run(case, tensors), _exact(tensors, _chosen(case, *tensors[1:3])))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = gradients(
            lambda *qkv: torch.nn.functional.scaled_dot_product_attention(
                *qkv, is_causal=True, enable_gqa=True
            ),
            *tensors,
        )
    allowed = _errors(flash, _exact(tensors, _visible(Causal(), case.seq_len)))
    assert max(errors) <= 2 * max(allowed), (errors, allowed)


@pytest.mark.parametrize("name", ["8K", "8K, packed"])
def test_by_blocks_is_the_same(monkeypatch, name):
    """The way without gathered queries gives the same, and the bits of gathered ones are fixed."""
    case = CASES[name]
    tensors = _draw(case.heads, case.seq_len)
    out, grads = _run(case, tensors)
    again, grads_again = _run(case, tensors)
    for a, b in zip((out, *grads), (again, *grads_again), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(triton, "GATHERS_QUERIES", False)
    by_blocks, by_blocks_grads = _run(case, tensors)
    assert not torch.equal(out, by_blocks)
    for a, b in zip((out, *grads), (by_blocks, *by_blocks_grads), strict=True):
        assert relative_error(a, b) < 5e-3


def test_the_host_waits_for_nothing():
    case = CASES["8K"]
    tensors = _draw(case.heads, case.seq_len)
    case = case._replace(mask=case.mask.rows(case.seq_len, "cuda"))
    _run(case, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(case, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_follow_top_k():
    """A partial result of every chosen pair would take eleven times the memory of q."""
    case = CASES["64K"]._replace(heads=(16, 2))
    tensors = _draw(case.heads, case.seq_len)
    _run(case, tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, grads = _run(case, tensors)
    torch.cuda.synchronize()
    q, k, v = tensors[1:]
    # `gradients` copies q, k and v.
    held = 2 * (q.nbytes + k.nbytes + v.nbytes) + out.nbytes
    extra = torch.cuda.max_memory_allocated() - before - held
    assert extra < 1.25 * (q.nbytes + k.nbytes + v.nbytes + out.nbytes)
    assert len(grads) == 3
