"""budget = "joint": verticals and diagonals against brute force over all sets of diagonals, masses from a dense softmax."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed import run_processes
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash.joint import VERTICAL_COST
from titan_sparse.estimate import synthetic

BLOCK = 16


class Head(NamedTuple):
    """One span of one head. verticals: [m, U], probe mass of each vertical on each of its diagonals. met: int64 [m, U], which
    diagonals these are, -1 for none. diagonals: how many there are."""

    verticals: Tensor
    met: Tensor
    diagonals: int

    def held(self, verticals: Tensor, diagonals: Tensor) -> float:
        """Mass of a union, pair by pair."""
        in_diagonal = (self.met >= 0) & torch.cat([diagonals, torch.tensor([False])])[self.met]
        return self.verticals[verticals[:, None] | in_diagonal].sum().item()

    def cost(self, verticals: Tensor, diagonals: Tensor) -> float:
        return verticals.sum().item() * VERTICAL_COST / BLOCK + diagonals.sum().item()


def _head(q: Tensor, k: Tensor, seen: Tensor, start: int, stop: int, probe: int) -> Head:
    """From q [S, D], k [S, D] and bool [S, S], in plain loops over the probe's rows."""
    last, first = (stop - 1) // BLOCK, start // BLOCK
    rows = range(max(start, stop - probe), stop)
    backs = last - rows[0] // BLOCK + 1
    verticals = torch.zeros(stop - start, backs, dtype=torch.float64)
    for i in rows:
        verticals[:, last - i // BLOCK] += (
            (k @ q[i] * q.shape[-1] ** -0.5).masked_fill(~seen[i], -math.inf).softmax(0)[start:stop]
        )
    block = torch.arange(start, stop) // BLOCK
    met = last - block[:, None] - torch.arange(backs)
    return Head(verticals, met.where(met >= 0, -1), last - first + 1)


def _bound(head: Head, verticals: Tensor, diagonals: Tensor, target: float) -> float:
    """No union that holds these always-on verticals and diagonals and reaches the target costs less: the best of all sets of
    diagonals, with verticals in parts."""
    free, least = (~diagonals).nonzero().flatten().tolist(), math.inf
    for size in range(len(free) + 1):
        for some in itertools.combinations(free, size):
            on = diagonals.clone()
            on[list(some)] = True
            least = min(least, _cost_with_parts(head, verticals, on, target))
    return least


def _cost_with_parts(head: Head, verticals: Tensor, on: Tensor, target: float) -> float:
    cost, missing = head.cost(verticals, on), target - head.held(verticals, on)
    in_diagonal = (head.met >= 0) & torch.cat([on, torch.tensor([False])])[head.met]
    rest = head.verticals.masked_fill(in_diagonal | verticals[:, None], 0).sum(1)
    rest = rest.sort(descending=True).values
    part = ((missing - (rest.cumsum(0) - rest)) / rest.clamp(min=1e-300)).clamp(0, 1)
    return (
        cost + part.sum().item() * VERTICAL_COST / BLOCK
        if rest.sum() >= missing - 1e-9
        else math.inf
    )


def _chosen(index, b: int, h: int, start: int, stop: int, offset: int) -> tuple[Tensor, Tensor]:
    verticals = torch.zeros(index.seq_len + 1, dtype=torch.bool)
    verticals[index.verticals[b, h].long().clamp(max=index.seq_len)] = True
    count = (stop - 1) // BLOCK - start // BLOCK + 1
    return verticals[start:stop], index.slashes[b, h, offset : offset + count]


def _gaps(
    mask: Mask,
    pattern: VerticalSlash,
    spans: list[tuple[int, int]],
    seq_len: int,
    seed: int = 0,
    bound: bool = True,
) -> list[tuple[float, float]]:
    """(cost, least possible cost) of each head and span; each is checked to reach the recall, as the last query block sees it."""
    q, k, _ = structured_qkv(1, 4, 2, seq_len, 8, seed=seed)
    index, seen, gaps = (
        pattern.select(q * 0.6, k, mask, block_size=BLOCK),
        mask.dense(seq_len)[0],
        [],
    )
    assert not index.capped.any()
    for h in range(4):
        offset = 0
        for start, stop in spans:
            head = _head(q[0, h] * 0.6, k[0, h // 2], seen, start, stop, pattern.probe or BLOCK)
            chosen = _chosen(index, 0, h, start, stop, offset)
            offset += head.diagonals
            target = pattern.recall * head.verticals.sum().item()
            assert head.held(*chosen) >= target * (1 - 1e-9)
            always = (
                torch.arange(stop - start) < pattern.sinks,
                torch.arange(head.diagonals) < pattern.local_diagonals,
            )
            assert (chosen[0] | ~always[0]).all() and (chosen[1] | ~always[1]).all()
            gaps.append((head.cost(*chosen), _bound(head, *always, target) if bound else 0))
    return gaps


def _joint(**parameters) -> VerticalSlash:
    return VerticalSlash(
        **{"sinks": 2, "local_diagonals": 1, "dense_below": 48, "budget": "joint", **parameters}
    )


CASES = {
    "one probe block": (Causal(), [(0, 112)], 112, 0),
    "ragged": (Causal(), [(0, 103)], 103, 0),
    "padded": (Causal(valid=(90,)), [(0, 90)], 112, 0),
    "two probe blocks": (Causal(), [(0, 112)], 112, 32),
    "documents": (Documents([[90, 20, 60]]), [(0, 90), (110, 170)], 180, 0),
    "window": (SlidingWindow(70), [(0, 128)], 128, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_union_reaches_the_recall_at_nearly_the_least_cost(name):
    """Over 3 seeds and recalls of 0.5 to 0.95 the mean was 1.004 to 1.035 of the bound; the worst head 1.07 with one probe
    block, 1.25 else."""
    mask, spans, seq_len, probe = CASES[name]
    gaps = _gaps(mask, _joint(recall=0.9, probe=probe), spans, seq_len, seed=1)
    assert len(gaps) == 4 * len(spans)
    assert all(
        least * (1 - 1e-9) <= cost < (1.07 if name == "one probe block" else 1.25) * least
        for cost, least in gaps
    )
    assert sum(cost / least for cost, least in gaps) / len(gaps) < 1.05


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(48, 90), min_size=1, max_size=3),
    tail=st.integers(0, 20),
    probe=st.integers(0, 40),
    recall=st.sampled_from([0.3, 0.8, 0.97, 1.0]),
    sinks=st.integers(0, 40),
    local=st.integers(1, 3),
)
def test_the_recall_is_reached_for_any_lengths(lengths, tail, probe, recall, sinks, local):
    spans = [(sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))]
    pattern = _joint(recall=recall, probe=probe, sinks=sinks, local_diagonals=local)
    checked = _gaps(Documents([lengths]), pattern, spans, sum(lengths) + tail, bound=False)
    assert len(checked) == 4 * len(spans)  # in each, that the recall is reached


def test_structured_heads_need_less_than_independent_budgets_take():
    heads = synthetic.draw_heads(2048, heads=4, kv_heads=1, head_dim=32, seed=1)
    q, k, mask = synthetic.queries(heads, 0, 2048), synthetic.keys(heads, 0, 2048), Causal()
    seen = mask.dense(2048)
    probability = (q @ k.mT * 32**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    densities, recalls = [], []
    for budget in ("independent", "joint"):
        pairs = (
            _joint(recall=0.9, budget=budget, dense_below=64)
            .select(q, k, mask, block_size=64)
            .dense(mask)[0]
        )
        densities.append(pairs.sum((1, 2)) / seen.sum())
        recalls.append((probability[0] * pairs).sum(-1).mean(-1))
        assert ((probability[0, :, -64:] * pairs[:, -64:]).sum(-1).mean(-1) >= 0.9 - 1e-5).all()
    assert (densities[1] <= densities[0]).all() and densities[1].mean() < 0.7 * densities[0].mean()
    # MaskRanges all over the sequence, of which the probe is an example only.
    assert recalls[1].mean() > 0.6


def test_bounds_on_what_comes_besides_sinks_and_local_diagonals():
    q, k, _ = structured_qkv(1, 4, 2, 256, 8)
    chosen = lambda **bounds: _joint(dense_below=16, **bounds).select(
        q, k, Causal(), block_size=BLOCK
    )
    counts = lambda index: ((index.verticals < 256).sum(-1), index.slashes.sum(-1))
    free_verticals, free_slashes = counts(chosen(recall=0.9))
    assert (free_verticals > 2).all() and (free_slashes > 2).any()
    capped = chosen(recall=0.9, max_columns=1, max_slashes=1)
    assert (
        (counts(capped)[0] <= 3).all()
        and (counts(capped)[1] <= 2).all()
        and capped.capped.any(-1).all()
    )
    # Without verticals diagonals have to do it all; they can.
    alone = chosen(recall=0.9, max_columns=0)
    assert (
        (counts(alone)[0] == 2).all()
        and (counts(alone)[1] > free_slashes).all()
        and not alone.capped.any()
    )
    verticals, slashes = counts(chosen(recall=0.9, max_slashes=1))
    assert (verticals > free_verticals)[free_slashes > 2].all() and (slashes <= 2).all()
    verticals, slashes = counts(chosen(recall=0.01, min_columns=40, min_slashes=3))
    assert (verticals == 42).all() and (slashes == 4).all()
    # Floors take nothing from the padding.
    index = _joint(recall=0.01, min_columns=40, min_slashes=3, dense_below=16).select(
        q, k, Causal(valid=(30,)), block_size=BLOCK
    )
    assert (counts(index)[0] == 30).all() and (counts(index)[1] == 2).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_world_size_chooses_the_same(ranks):
    run_processes(ranks, _compare_ranks)


def _compare_ranks() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, layout="striped", schedule="ring", block_size=BLOCK)
    q, k, _ = structured_qkv(1, 4, 2, 288, 8)
    for mask in (Causal(valid=(270,)), Documents([[110, 60, 100]])):
        pattern = _joint(recall=0.9, max_columns=90)
        whole = pattern.select(q, k, mask, block_size=BLOCK)
        shared = pattern.select(cp.shard(q, dim=2), cp.shard(k, dim=2), mask, cp)
        assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), shared.tensors()))


def test_unknown_budget_is_refused():
    with pytest.raises(ValueError, match="independent"):
        VerticalSlash(budget="shared")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """The probe's kernels, in bf16, and the choice on a GPU: the recall is reached there, also with deterministic algorithms."""
    heads = synthetic.draw_heads(4096, heads=4, kv_heads=2, head_dim=64)
    q, k = (
        make(heads, 0, 4096, torch.bfloat16).cuda() for make in (synthetic.queries, synthetic.keys)
    )
    for mask, last in ((Causal(), 4096), (Documents([[1000, 2900]]), 3900)):
        index = _joint(recall=0.9, dense_below=64).select(q, k, mask, block_size=64)
        seen = mask.dense(4096, "cuda")[0, last - 64 : last]
        scores = q[0, :, last - 64 : last].float() @ k[0].repeat_interleave(2, 0).float().mT / 8
        probability = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        kept = (probability * index.dense(mask)[0, :, last - 64 : last]).sum(-1).mean(-1)
        assert (kept > 0.899).all() and (index.slashes.sum(-1) < index.slashes.shape[-1] // 2).all()
        torch.use_deterministic_algorithms(True)
        try:
            again = _joint(recall=0.9, dense_below=64).select(q, k, mask, block_size=64)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(a, b) for a, b in zip(index.tensors(), again.tensors()))
