"""What a probe sees of blocks of keys: the kernels against their plain-torch twins."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.patterns.helpers import probed
from tests.attention.problems import RANGES, SEQ_LEN
from tests.reference import DEVICE, by_token, structured_qkv
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.spans import Spans
from titan_sparse.attention.patterns.vertical_slash import probe as vertical_slash_probe
from titan_sparse.attention.patterns.vertical_slash.joint import make_plan
from titan_sparse.kernels import probe as kernels
from titan_sparse.kernels import selection
from titan_sparse.kernels.probe import KeyBlocks, Probe

SIZE = 16


class Seen(NamedTuple):
    spans: Spans
    geometry: vertical_slash_probe.ProbeGeometry
    probe: Probe
    keys: KeyBlocks


def look(mask: str, kind: str, queries: int) -> Seen:
    # Few heads where blocks have two spans: the interpreter takes a second for each.
    kv_heads = 2 if mask == "causal" else 1
    q, k, _ = structured_qkv(2, 2 * kv_heads, kv_heads, SEQ_LEN, 24, seed=6, dtype=torch.float32)
    q = q.to(DEVICE)
    k = k.to(DEVICE)
    cp = one_rank(SIZE)
    ranges = RANGES[mask].rows(SEQ_LEN, DEVICE)
    spans, geometry = probed(ranges, kind, queries, SIZE, 48, seed=3)
    probe = vertical_slash_probe._gather_probe(q, geometry, cp, 24**-0.5)
    return Seen(spans, geometry, probe, KeyBlocks(k, geometry.blocks, geometry.slot, SIZE))


CASES = pytest.mark.parametrize(
    "mask, kind, queries",
    [
        ("causal", "spread", 16),
        ("documents", "last", 24),
        pytest.param("documents", "spread", 13, marks=pytest.mark.slow),
        pytest.param("padded window", "last", 9, marks=pytest.mark.slow),
        pytest.param("padded window", "spread", 9, marks=pytest.mark.slow),
        pytest.param("long and short", "spread", 16, marks=pytest.mark.slow),
    ],
)


@CASES
def test_probe(mask, kind, queries):
    """The kernels and the twins, which are fp32 here, on the same probe."""
    _, geometry, probe, keys = look(mask, kind, queries)
    block_lse = kernels.naive.block_lse(probe, keys)
    torch.testing.assert_close(kernels.block_lse(probe, keys), block_lse, atol=1e-3, rtol=1e-3)
    span_lse = kernels.naive.span_lse(block_lse, geometry.slot, geometry.run)
    got_span_lse = kernels.span_lse(block_lse, geometry.slot, geometry.run)
    torch.testing.assert_close(got_span_lse, span_lse, atol=1e-5, rtol=1e-5)

    got = kernels.block_masses(probe, keys, span_lse)
    want = kernels.naive.block_masses(probe, keys, span_lse)
    for got_masses, want_masses in zip(got, want, strict=True):
        torch.testing.assert_close(got_masses, want_masses, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lies_by_token", [False, True])
def test_held_rows(dtype, lies_by_token):
    """Rows of q, which may be a view by token; zeros for rows that the rank does not hold."""
    q = torch.randn(2, 3, 50, 24).to(DEVICE, dtype)
    if lies_by_token:
        q = by_token(q)
    local = torch.randint(0, 50, (2, 19)).to(DEVICE)
    mine = torch.rand(2, 19).to(DEVICE) < 0.7
    q[:, :, 0] = torch.nan
    local[~mine] = 0
    local[mine] = local[mine].clamp(min=1)
    for take in (kernels.held_rows, kernels.naive.held_rows):
        held = take(q, local, mine)
        assert held.dtype == dtype and held.is_contiguous()
        for b, r in itertools.product(range(2), range(19)):
            wanted = q[b, :, local[b, r]] if mine[b, r] else torch.zeros_like(q[b, :, 0])
            assert torch.equal(held[b, :, r], wanted)


@pytest.mark.parametrize("groups, entries", [(33, 5), (70, 9)])
def test_gains_of_many_groups(groups, entries):
    """More groups of rows, and more slashes, than a program processes at a time."""
    # [B, Hq, n_local, T, U]
    tile_mass = torch.rand(2, 3, 4, 1, groups).to(DEVICE)
    # [B, Hq, n_local, T, L]
    remaining = torch.rand(2, 3, 4, 1, selection.LEVELS).to(DEVICE)
    savings = torch.rand(2, 3, 4, 1, selection.LEVELS).to(DEVICE)
    # [B, U, E]: about half of the slashes have no tile there.
    tile = torch.randint(-4 * groups, 4 * groups, (2, groups, entries))
    tile = tile.clamp(min=-1).int().to(DEVICE)
    rows = torch.randint(0, 5, tile.shape).int().to(DEVICE)
    table = (tile_mass, remaining, savings, tile, rows)
    got = selection.slash_gains(*table)
    torch.testing.assert_close(got, selection.naive.slash_gains(*table), atol=1e-3, rtol=1e-5)
    assert got.min() > 0


def test_a_slash_of_all_mass_has_the_highest_score():
    gains = torch.full((1, 1, 3, selection.LEVELS), 1e6, device=DEVICE)
    cost = torch.ones(1, 3, device=DEVICE)
    for twin in (selection, selection.naive):
        score, _ = twin.slash_scores(gains, cost, cost > 1)
        assert score.tolist() == [[[0.5] * 3]]


@CASES
def test_scores(mask, kind, queries):
    spans, geometry, probe, keys = look(mask, kind, queries)
    lse = kernels.naive.span_lse(kernels.naive.block_lse(probe, keys), geometry.slot, geometry.run)
    plan = make_plan(VerticalSlash(sinks=3, count_sinks=True), spans, geometry, SEQ_LEN, SIZE)

    free = probe._replace(start=plan.free_start, stop=plan.free_stop)

    first, *table = _check_first(free, keys, lse)

    gains = selection.naive.slash_gains(*table, plan.tile, plan.rows)
    got_gains = selection.slash_gains(*table, plan.tile, plan.rows)
    torch.testing.assert_close(got_gains, gains, atol=1e-4, rtol=1e-4)

    of_slashes, bins = selection.naive.slash_scores(gains, plan.cost, plan.is_local)
    got_slashes, got_bins = selection.slash_scores(gains, plan.cost, plan.is_local)
    # Scores differ by rounding, and with them a few bins by one.
    apart = (got_bins.int() - bins.int()).abs()
    assert got_bins.dtype == torch.uint8 and apart.max() <= 1 and apart.sum() <= 3
    torch.testing.assert_close(got_slashes, of_slashes, atol=1e-6, rtol=1e-3)
    assert (of_slashes > 0).double().mean() > 0.1

    final = selection.naive.final_scores(free, keys, lse, first, of_slashes, plan.offset)
    got_final = selection.final_scores(free, keys, lse, first, of_slashes, plan.offset)
    _check_final(got_final, final)

    masses = selection.naive.slash_masses(final.tile_mass, plan.tile)
    got_masses = selection.slash_masses(final.tile_mass, plan.tile)
    torch.testing.assert_close(got_masses, masses, atol=1e-4, rtol=1e-4)

    mass, count = selection.naive.mass_histogram(final, keys, plan.span_tokens)
    histogram = selection.mass_histogram(final, keys, plan.span_tokens)
    got_mass, got_count = histogram
    torch.testing.assert_close(got_mass, mass, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(got_count, count, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(mass.sum(), final.mass.sum())
    assert count.sum() == (final.bins > 0).sum() > 20


def _check_first(free: Probe, keys: KeyBlocks, lse: Tensor) -> tuple[Tensor, ...]:
    wanted = selection.naive.first_scores(free, keys, lse)
    first, tile_mass, remaining, savings = wanted
    got_first, got_tile_mass, got_remaining, got_savings = selection.first_scores(free, keys, lse)
    torch.testing.assert_close(got_first, first, atol=1e-4, rtol=2e-3)
    torch.testing.assert_close(got_tile_mass, tile_mass, atol=2e-3, rtol=2e-3)
    # A score beside a level may fall to either side.
    is_far = (got_remaining - remaining).abs() > 2e-3
    assert is_far.double().mean() < 5e-3
    is_close = torch.isclose(got_savings, savings, rtol=1e-4)
    assert is_close.double().mean() > 0.995
    assert 0 < first.max() < 1
    assert tile_mass.max() > 0.1
    return wanted


def _check_final(got: selection.FinalScores, want: selection.FinalScores) -> None:
    for name in ("bins", "mass_bins"):
        difference = getattr(got, name).int() - getattr(want, name).int()
        assert difference.abs().double().mean() < 0.02
        assert difference.abs().max() <= selection.BINS_PER_OCTAVE
    for name in ("mass", "tile_mass"):
        got_masses = getattr(got, name)
        want_masses = getattr(want, name)
        is_close = torch.isclose(got_masses, want_masses, atol=1e-5, rtol=5e-3)
        # Of those that are 0, and of the others.
        is_zero = want_masses == 0
        assert is_close[is_zero].double().mean() > 0.98
        assert is_close[~is_zero].double().mean() > 0.98
        assert want_masses.sum() > 0.5
