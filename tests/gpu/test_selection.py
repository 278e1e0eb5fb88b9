"""VerticalSlash's selection on a GPU: kernels against twins, the recall, and that nothing waits."""

import pytest
import torch
from torch import Tensor

from scripts.benchmarks import synthetic
from tests.attention.patterns.helpers import published
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import independent, priced, probe
from titan_sparse.attention.patterns.vertical_slash.probe import set_probe_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
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


@pytest.fixture(autouse=True)
def seed_of_zero():
    yield
    set_probe_seed(0)


def _generated(seq_len: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    heads = synthetic.draw_heads(seq_len, heads=4, kv_heads=2, head_dim=64)
    q = synthetic.queries(heads, dtype)
    k = synthetic.keys(heads, dtype)
    return q.cuda(), k.cuda()


def _by_twins(q: Tensor, k: Tensor, pattern: VerticalSlash, mask: Mask):
    """The selection in plain torch, on the same device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (probe, priced, independent):
            patch.setattr(module, "by_kernels", lambda keys: False)
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
    """They match except for elements that rounding moves over a limit, which are worth about as much as others."""
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

    def select(seed: int) -> list[Tensor]:
        set_probe_seed(seed)
        return PATTERNS[pattern].select(q, k, ranges).tensors()

    torch.use_deterministic_algorithms(True)
    first = [select(seed) for seed in (1, 2)]
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [select(seed) for seed in (1, 2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(again, first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("pattern", ["default", "published"])
def test_compiled_attention_draws_other_rows_for_another_seed(pattern):
    """The graph reads the seed when it runs and not when it is traced."""
    q, k = _generated(4096)

    def function(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, k, pattern=PATTERNS[pattern], backend="triton")

    compiled = torch.compile(function, fullgraph=True)
    for seed in (1, 2):
        set_probe_seed(seed)
        assert torch.equal(compiled(q, k), function(q, k))
