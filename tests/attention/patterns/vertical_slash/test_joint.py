"""budget = "joint": verticals and diagonals against brute force over all sets of diagonals.

Masses are those of a dense softmax.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import run_processes
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.estimate import synthetic
from titan_sparse.kernels.joint import VERTICAL_COST

BLOCK = 16


class Head(NamedTuple):
    """One span of one head.

    verticals: [m, U], probe mass of each vertical on each of its diagonals.
    met: int64 [m, U], which diagonals these are, -1 for none.
    diagonals: how many there are.
    """

    verticals: Tensor
    met: Tensor
    diagonals: int

    def held(self, verticals: Tensor, diagonals: Tensor) -> float:
        """Mass of a union, pair by pair."""
        held = verticals[:, None] | self.in_diagonals(diagonals)
        return self.verticals[held].sum().item()

    def in_diagonals(self, diagonals: Tensor) -> Tensor:
        """bool [m, U]: the mass lies on one of these diagonals, bool."""
        # The last entry stands for no diagonal.
        diagonals = torch.cat([diagonals, torch.tensor([False])])
        return (self.met >= 0) & diagonals[self.met]

    def cost(self, verticals: Tensor, diagonals: Tensor) -> float:
        """To a block of queries; a diagonal costs 1."""
        vertical_cost = verticals.sum().item() * VERTICAL_COST / BLOCK
        return vertical_cost + diagonals.sum().item()


def _head(q: Tensor, k: Tensor, seen: Tensor, start: int, stop: int, probe: int) -> Head:
    """From q [S, D], k [S, D] and bool [S, S], in plain loops over the probe's rows."""
    first = start // BLOCK
    last = (stop - 1) // BLOCK
    rows = range(max(start, stop - probe), stop)
    backs = last - rows[0] // BLOCK + 1
    verticals = torch.zeros(stop - start, backs, dtype=torch.float64)
    for i in rows:
        scores = (k @ q[i] * q.shape[-1] ** -0.5).masked_fill(~seen[i], -math.inf)
        verticals[:, last - i // BLOCK] += scores.softmax(0)[start:stop]
    # [m], then [m, U]
    block = torch.arange(start, stop) // BLOCK
    met = last - block[:, None] - torch.arange(backs)
    return Head(verticals, met.where(met >= 0, -1), last - first + 1)


def _bound(head: Head, verticals: Tensor, diagonals: Tensor, target: float) -> float:
    """A bound on the cost of all unions that hold these verticals and diagonals and reach the
    target.

    It is the cost of the best of all sets of diagonals, with verticals in parts. verticals,
    diagonals: bool, those that are always on.
    """
    free = (~diagonals).nonzero().flatten().tolist()
    least = math.inf
    for size in range(len(free) + 1):
        for added in itertools.combinations(free, size):
            on = diagonals.clone()
            on[list(added)] = True
            least = min(least, _cost_with_parts(head, verticals, on, target))
    return least


def _cost_with_parts(head: Head, verticals: Tensor, on: Tensor, target: float) -> float:
    """Cost of these diagonals and the best verticals beside them, the last one in part."""
    missing = target - head.held(verticals, on)
    # What each vertical would add, the most first.
    held = head.in_diagonals(on) | verticals[:, None]
    rest = head.verticals.masked_fill(held, 0).sum(1)
    rest = rest.sort(descending=True).values
    if rest.sum() < missing - 1e-9:
        return math.inf
    before = rest.cumsum(0) - rest
    share = ((missing - before) / rest.clamp(min=1e-300)).clamp(0, 1)
    return head.cost(verticals, on) + share.sum().item() * VERTICAL_COST / BLOCK


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
    """(cost, least possible cost) of each head and span.

    Each is checked to reach the recall, as the last query block sees it.
    """
    q, k, _ = structured_qkv(1, 4, 2, seq_len, 8, seed=seed)
    index = pattern.select(q * 0.6, k, mask, block_size=BLOCK)
    seen = mask.dense(seq_len)[0]
    gaps = []
    assert not index.capped.any()
    for h in range(4):
        offset = 0
        for start, stop in spans:
            head = _head(q[0, h] * 0.6, k[0, h // 2], seen, start, stop, pattern.probe or BLOCK)
            verticals, diagonals = _chosen(index, 0, h, start, stop, offset)
            offset += head.diagonals
            target = pattern.recall * head.verticals.sum().item()
            assert head.held(verticals, diagonals) >= target * (1 - 1e-9)
            sinks = torch.arange(stop - start) < pattern.sinks
            local = torch.arange(head.diagonals) < pattern.local_diagonals
            assert (verticals | ~sinks).all() and (diagonals | ~local).all()
            least = _bound(head, sinks, local, target) if bound else 0
            gaps.append((head.cost(verticals, diagonals), least))
    return gaps


def _joint(**parameters) -> VerticalSlash:
    defaults = {"sinks": 2, "local_diagonals": 1, "dense_below": 48, "budget": "joint"}
    return VerticalSlash(**defaults | parameters)


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
    """Over 3 seeds and recalls of 0.5 to 0.95 the mean was 1.004 to 1.035 of the bound.

    The worst head was at 1.07 with one probe block, at 1.25 else.
    """
    mask, spans, seq_len, probe = CASES[name]
    gaps = _gaps(mask, _joint(recall=0.9, probe=probe), spans, seq_len, seed=1)
    assert len(gaps) == 4 * len(spans)
    worst = 1.07 if name == "one probe block" else 1.25
    for cost, least in gaps:
        assert least * (1 - 1e-9) <= cost < worst * least
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
    ends = list(itertools.accumulate(lengths))
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    pattern = _joint(recall=recall, probe=probe, sinks=sinks, local_diagonals=local)
    checked = _gaps(Documents([lengths]), pattern, spans, sum(lengths) + tail, bound=False)
    # In each of them that the recall is reached.
    assert len(checked) == 4 * len(spans)


def test_structured_heads_need_less_than_independent_budgets_take():
    heads = synthetic.draw_heads(2048, heads=4, kv_heads=1, head_dim=32, seed=1)
    q = synthetic.queries(heads, 0, 2048)
    k = synthetic.keys(heads, 0, 2048)
    mask = Causal()
    seen = mask.dense(2048)
    probability = (q @ k.mT * 32**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    densities = []
    recalls = []
    for budget in ("independent", "joint"):
        pattern = _joint(recall=0.9, budget=budget, dense_below=64)
        pairs = pattern.select(q, k, mask, block_size=64).dense(mask)[0]
        densities.append(pairs.sum((1, 2)) / seen.sum())
        recalls.append((probability[0] * pairs).sum(-1).mean(-1))
        assert ((probability[0, :, -64:] * pairs[:, -64:]).sum(-1).mean(-1) >= 0.9 - 1e-5).all()
    assert (densities[1] <= densities[0]).all() and densities[1].mean() < 0.7 * densities[0].mean()
    # Over all rows of the sequence, of which the probe is only an example.
    assert recalls[1].mean() > 0.6


def test_bounds_on_what_comes_besides_sinks_and_local_diagonals():
    q, k, _ = structured_qkv(1, 4, 2, 256, 8)

    def choose(mask: Mask, **bounds) -> tuple[Tensor, Tensor, Tensor]:
        """How many verticals and how many slashes each head has, and what was capped."""
        index = _joint(dense_below=16, **bounds).select(q, k, mask, block_size=BLOCK)
        return (index.verticals < 256).sum(-1), index.slashes.sum(-1), index.capped

    free_verticals, free_slashes, _ = choose(Causal(), recall=0.9)
    assert (free_verticals > 2).all() and (free_slashes > 2).any()
    verticals, slashes, capped = choose(Causal(), recall=0.9, max_columns=1, max_slashes=1)
    assert (verticals <= 3).all() and (slashes <= 2).all() and capped.any(-1).all()
    # Without verticals diagonals have to do it all; they can.
    verticals, slashes, capped = choose(Causal(), recall=0.9, max_columns=0)
    assert (verticals == 2).all() and (slashes > free_slashes).all() and not capped.any()
    verticals, slashes, _ = choose(Causal(), recall=0.9, max_slashes=1)
    assert (verticals > free_verticals)[free_slashes > 2].all() and (slashes <= 2).all()
    verticals, slashes, _ = choose(Causal(), recall=0.01, min_columns=40, min_slashes=3)
    assert (verticals == 42).all() and (slashes == 4).all()
    # Floors take nothing from the padding.
    padded = Causal(valid=(30,))
    verticals, slashes, _ = choose(padded, recall=0.01, min_columns=40, min_slashes=3)
    assert (verticals == 30).all() and (slashes == 2).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_world_size_chooses_the_same(ranks):
    run_processes(ranks, _compare_ranks)


def _compare_ranks() -> None:
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
    """The probe's kernels, in bf16, and the choice on a GPU.

    The recall is reached there, and deterministic algorithms choose the same.
    """
    heads = synthetic.draw_heads(4096, heads=4, kv_heads=2, head_dim=64)
    q = synthetic.queries(heads, 0, 4096, torch.bfloat16).cuda()
    k = synthetic.keys(heads, 0, 4096, torch.bfloat16).cuda()
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
