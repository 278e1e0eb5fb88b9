"""XAttention's selection on a GPU: kernels against twins in bf16, and the memory it takes."""

import pytest
import torch
from torch import Tensor

from scripts.benchmarks import synthetic
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import XAttention, xattention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SEQ_LEN = 8192
MASKS = {
    "causal": Causal(),
    "window": Causal(valid=(SEQ_LEN - 100,)) & SlidingWindow(3000),
    "documents": Documents([SEQ_LEN // 2 + 5, 100, 2000, 1900]),
}


def _generated(head_dim: int, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    drawn = synthetic.draw_heads(SEQ_LEN, heads=heads, kv_heads=2, head_dim=head_dim)
    q = synthetic.queries(drawn, dtype)
    k = synthetic.keys(drawn, dtype)
    return [q.cuda(), k.cuda()]


def _chosen(q: Tensor, k: Tensor, pattern: XAttention, mask: Mask, by_kernels: bool) -> Tensor:
    if not by_kernels:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xattention, "_by_kernels", lambda q, cp, stride: False)
            return _chosen(q, k, pattern, mask, by_kernels=True)
    block = torch.arange(SEQ_LEN // 128, device="cuda")
    return pattern.select(q, k, mask.rows(SEQ_LEN, "cuda")).selects(block, block)


@pytest.mark.parametrize(
    "mask, heads, head_dim, stride, threshold, dtype",
    [
        ("causal", 16, 128, 16, 0.5, torch.bfloat16),
        ("window", 16, 128, 16, 0.9, torch.bfloat16),
        ("documents", 16, 128, 16, 0.99, torch.bfloat16),
        ("documents", 4, 64, 8, 0.9, torch.bfloat16),
        ("documents", 4, 96, 4, 0.9, torch.bfloat16),
        ("documents", 4, 256, 32, 0.9, torch.bfloat16),
        ("documents", 4, 128, 16, 0.9, torch.float16),
    ],
)
def test_kernels_choose_what_the_twins_do(mask, heads, head_dim, stride, threshold, dtype):
    """They match except for blocks that rounding moves over the limit, which are worth about as much as others."""
    q, k = _generated(head_dim, heads, dtype)
    pattern = XAttention(stride, threshold, dense_below=256)
    got, want = (_chosen(q, k, pattern, MASKS[mask], by_kernels) for by_kernels in (True, False))
    share = want.double().mean()
    assert 0.02 < share < 0.45
    assert (got != want).double().mean() < 0.002 * share
    # As many of a query block, but where the one more or less is what rounding moved.
    assert ((got.sum(-1) - want.sum(-1)).abs() <= 1).all()


@pytest.mark.parametrize("mask", ["window", "documents"])
def test_it_is_the_same_each_time_and_waits_for_nothing(mask):
    q, k = _generated(128)
    ranges = MASKS[mask].rows(SEQ_LEN, "cuda")
    pattern = XAttention(dense_below=256)
    first = pattern.select(q, k, ranges).words
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [pattern.select(q, k, ranges).words for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(words, first) for words in again)


def test_memory_at_524288_tokens():
    seq_len = 524288
    q = torch.randn(1, 16, seq_len, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 2, seq_len, 128, dtype=torch.bfloat16, device="cuda")
    ranges = Causal().rows(seq_len, "cuda")
    XAttention().select(q, k, ranges)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    XAttention().select(q, k, ranges)
    # Two KV heads' keys, a part's sums by block and queries, twice these; and the choice.
    assert torch.cuda.max_memory_allocated() - before < 768 * 2**20
