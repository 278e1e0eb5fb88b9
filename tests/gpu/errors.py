"""Errors of attention on a GPU: against fp64, next to those of torch's dense flash attention."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.reference import attention_with_sinks, dense_attention, gradients, relative_error
from titan_sparse.attention.backends import cudnn, flex

LIMIT = 5e-3
LSE_LIMIT = 1e-3


def skip_without(backend: str) -> None:
    """Skip the test, with the reason, where the backend's kernels are not installed."""
    missing = {"cudnn": cudnn.missing, "flex": flex.missing}
    reason = missing[backend]() if backend in missing else None
    if reason is not None:
        pytest.skip(reason)


def problem(
    heads: tuple[int, int],
    dim: int,
    q_len: int,
    k_len: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Tensor], Tensor]:
    """q, k and v, and the gradient of out; rounded to bf16 whatever the dtype."""
    generator = torch.Generator().manual_seed(dim)
    of_queries, of_keys = (heads[0], q_len), (heads[1], k_len or q_len)
    *qkv, d_out = (
        torch.randn(batch, *shape, dim, generator=generator).cuda().bfloat16().to(dtype)
        for shape in (of_queries, of_keys, of_keys, of_queries)
    )
    return qkv, d_out


def causal_pairs(q: Tensor, k: Tensor) -> Tensor:
    """bool [B, Hq, Sq, Sk]; the queries are the last ones of the keys' positions."""
    seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool, device=q.device)
    return seen.tril(k.shape[2] - q.shape[2])


def with_gradients(function: Callable, inputs: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    out, grads = gradients(function, d_out, *inputs)
    return [out, *grads]


def exact(inputs: Sequence[Tensor], d_out: Tensor, seen: Tensor) -> tuple[list[Tensor], Tensor]:
    """out and all gradients, and lse, in fp64 over the pairs `seen`. inputs: q, k, v, and sinks."""
    truth = dense_attention if len(inputs) == 3 else attention_with_sinks
    wide = [x.double() for x in inputs]
    results = with_gradients(lambda *x: truth(*x, seen)[0], wide, d_out.double())
    return results, truth(*wide, seen)[1]


def flash_errors(qkv: Sequence[Tensor], d_out: Tensor) -> list[float]:
    """Those of torch's flash attention, causal over as many keys as queries."""
    length = min(x.shape[2] for x in qkv)
    qkv = [x[:, :, :length].contiguous() for x in qkv]
    d_out = d_out[:, :, :length].contiguous()
    want, _ = exact(qkv, d_out, causal_pairs(*qkv[:2]))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        run = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return errors(with_gradients(run, qkv, d_out), want)


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    return [relative_error(a, b) for a, b in zip(got, want, strict=True)]


def check(got: Sequence[Tensor], want: Sequence[Tensor], bounds: Sequence[float]) -> None:
    """Twice the errors of torch's flash attention are allowed, and LIMIT at most."""
    found = errors(got, want)
    allowed = [min(LIMIT, 2 * bound) for bound in bounds]
    print(*(f"{error:.1e}" for error in found))
    assert all(e <= a for e, a in zip(found, allowed, strict=True)), (found, allowed)


def check_lse(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == torch.float32
    assert torch.equal(got.isneginf(), want.isneginf())
    assert (got - want).nan_to_num(0).abs().max() < LSE_LIMIT


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """A wait of the host for the device raises RuntimeError inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
