"""Selection on a GPU: kernels against twins, that nothing waits, and the memory it takes."""

import pytest
import torch
from torch import Tensor

from scripts.benchmarks import synthetic
from tests.attention.patterns.helpers import published
from tests.gpu.errors import no_waits
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import Pattern, VerticalSlash, XAttention, xattention
from titan_sparse.attention.patterns.vertical_slash import independent, joint, probe

USUAL = dict(recall=0.9, sinks=4, count_sinks=True, local_slashes=1, dense_below=256)
PATTERNS = {
    "default": VerticalSlash(dense_below=256),
    "spread": VerticalSlash(**USUAL, probe_rows="spread"),
    "joint, last rows": VerticalSlash(**USUAL, budget="joint", probe_rows="last"),
    "capped": VerticalSlash(
        **USUAL,
        probe_rows="spread",
        min_verticals=8,
        max_verticals=100,
        min_slashes=2,
        max_slashes=6,
    ),
    "published": published(recall=0.9, dense_below=256),
    "independent, spread": published(recall=0.9, dense_below=256, probe_rows="spread"),
}
MASKS = {
    "causal": lambda seq_len: Causal(),
    "documents": lambda seq_len: Documents([seq_len // 2 + 5, 100, seq_len // 4, 300]),
}


def _generated(
    seq_len: int, dtype: torch.dtype = torch.bfloat16, heads: int = 4, head_dim: int = 64
) -> tuple[Tensor, Tensor]:
    drawn = synthetic.draw_heads(seq_len, heads=heads, kv_heads=2, head_dim=head_dim)
    return drawn.q.to(dtype).cuda(), drawn.k.to(dtype).cuda()


def _by_twins(q: Tensor, k: Tensor, pattern: Pattern, mask: Mask):
    """The selection in plain torch, on the same device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (probe, joint, independent):
            patch.setattr(module, "by_kernels", lambda keys, block_size: False)
        patch.setattr(xattention, "_by_kernels", lambda q, cp, stride: False)
        return pattern.select(q, k, mask)


@pytest.mark.parametrize(
    "pattern, mask, dtype, seq_len",
    [
        *((name, "documents", torch.bfloat16, 16384) for name in PATTERNS),
        *((name, "causal", torch.float32, 4096) for name in ("default", "published")),
    ],
    ids=str,
)
def test_kernels_choose_what_the_twins_do(pattern, mask, dtype, seq_len):
    """They match except for candidates of about equal score that rounding
    moves over a threshold."""
    q, k = _generated(seq_len, dtype)
    of_length = MASKS[mask](seq_len)
    got = PATTERNS[pattern].select(q, k, of_length)
    want = _by_twins(q, k, PATTERNS[pattern], of_length)
    assert torch.equal(got.capped, want.capped)
    different = got.slashes != want.slashes
    assert different.double().mean() < 0.01
    assert want.slashes.any() and not want.slashes.all()

    chosen = torch.zeros(2, 4, seq_len + 1, dtype=torch.bool, device="cuda")
    for number, index in enumerate((got, want)):
        chosen[number].scatter_(1, index.verticals[0].long().clamp(max=seq_len), True)
    chosen = chosen[..., :-1]
    assert 0 < chosen[1].sum() < 4 * seq_len
    assert (chosen[0] != chosen[1]).sum() <= 0.03 * chosen[1].sum() + 4


@pytest.mark.parametrize("pattern", ["default", "capped", "published"])
def test_it_is_the_same_each_time_and_waits_for_nothing(pattern):
    """Whatever the order of additions, with deterministic algorithms, and with rows that are drawn
    anew for another step."""
    q, k = _generated(8192)
    ranges = MASKS["documents"](8192).rows(8192, "cuda")
    ranges = ranges._replace(probe_seed=torch.zeros((), dtype=torch.int64, device="cuda"))

    def select(seed: int) -> list[Tensor]:
        ranges.probe_seed.fill_(seed)
        return PATTERNS[pattern].select(q, k, ranges).tensors()

    torch.use_deterministic_algorithms(True)
    first = [select(seed) for seed in (1, 2)]
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    with no_waits():
        again = [select(seed) for seed in (1, 2)]
    for got, want in zip(again, first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# XAttention

X_LEN = 8192
X_MASKS = {
    "causal": Causal(),
    "window": Causal(valid=(X_LEN - 100,)) & SlidingWindow(3000),
    "documents": Documents([X_LEN // 2 + 5, 100, 2000, 1900]),
}


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
def test_xattentions_kernels_choose_what_the_twins_do(
    mask, heads, head_dim, stride, threshold, dtype
):
    """They match except for blocks that rounding moves over the limit, which are worth
    about as much as others."""
    q, k = _generated(X_LEN, dtype, heads, head_dim)
    pattern = XAttention(stride, threshold, dense_below=256)
    blocks = torch.arange(X_LEN // 128, device="cuda")
    got = pattern.select(q, k, X_MASKS[mask]).selects(blocks, blocks)
    want = _by_twins(q, k, pattern, X_MASKS[mask]).selects(blocks, blocks)
    share = want.double().mean()
    assert 0.02 < share < 0.45
    assert (got != want).double().mean() < 0.002 * share
    # As many of a query block, but where the one more or less is what rounding moved.
    assert ((got.sum(-1) - want.sum(-1)).abs() <= 1).all()


@pytest.mark.parametrize("mask", ["window", "documents"])
def test_xattention_is_the_same_each_time_and_waits_for_nothing(mask):
    q, k = _generated(X_LEN, heads=4, head_dim=128)
    ranges = X_MASKS[mask].rows(X_LEN, "cuda")
    pattern = XAttention(dense_below=256)
    first = pattern.select(q, k, ranges).words
    torch.cuda.synchronize()
    with no_waits():
        again = [pattern.select(q, k, ranges).words for _ in range(3)]
    assert all(torch.equal(words, first) for words in again)


def test_memory_of_xattention_at_524288_tokens():
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
