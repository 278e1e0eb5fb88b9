"""Rings: routes of chunks and of their gradients, walked hop by hop, and what
travels with queries."""

import pytest
import torch

from titan_sparse.attention.context_parallel.ring import _out_with
from titan_sparse.attention.context_parallel.ring_routing import (
    Hops,
    all_gather_traffic,
    gradient_hops,
    hops_needed,
    route_of,
    traffic,
    visited_ranks,
)
from titan_sparse.attention.context_parallel.schedules import ring_windows

WORLDS = [(1, 1), (1, 2), (1, 5), (2, 2), (2, 3), (3, 2), (4, 1)]


def all_hops(inter: int, intra: int) -> Hops:
    """Hops of the KV chunks in a schedule that skips nothing: every chunk visits every rank."""
    return hops_needed(torch.ones(inter * intra, inter * intra, dtype=torch.bool), inter, intra)


def _needed(size: int, density: float, seed: int) -> torch.Tensor:
    return (
        torch.rand(size, size, generator=torch.Generator().manual_seed(seed)) < density
    ) | torch.eye(size, dtype=torch.bool)


@pytest.mark.parametrize("inter, intra", WORLDS)
def test_visited_ranks_are_the_inverse_of_the_schedule(inter, intra):
    visited = visited_ranks(inter, intra)
    for rank in range(inter * intra):
        for window, steps in enumerate(ring_windows(inter, intra, rank)):
            assert [visited[source, window, step].item() for step, source in enumerate(steps)] == [
                rank
            ] * intra


def test_hops_of_a_ring_by_hand():
    needed = torch.eye(4, dtype=torch.bool)
    needed[1, 0] = needed[3, 0] = needed[0, 3] = True
    assert hops_needed(needed, 1, 4).inner.sum(-1).flatten().tolist() == [3, 0, 0, 1]
    assert gradient_hops(needed, 1, 4).inner.sum(-1).flatten().tolist() == [3, 0, 0, 3]


def _walk_keys(hops: Hops, inter: int, intra: int) -> tuple[set, int]:
    """The pairs (rank, source) that occur where chunks make these hops, and the number of hops."""
    met = set()
    made = 0
    for source in range(inter * intra):
        node, place = divmod(source, intra)
        for window in range(inter):
            hops_here = int(hops.inner[source, window].sum())
            # No hop follows one that is not made.
            assert hops.inner[source, window, :hops_here].all()
            met |= {(node * intra + (place + hop) % intra, source) for hop in range(hops_here + 1)}
            made += hops_here
            if not hops.outer[source, window]:
                break
            node = (node + 1) % inter
            made += 1
        assert not hops.outer[source, window:].any()
    return met, made


@pytest.mark.parametrize("inter, intra", WORLDS)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.4, 1.0])
def test_chunks_reach_all_who_need_them_and_go_no_further(inter, intra, density):
    size = inter * intra
    needed = _needed(size, density, size)
    hops = hops_needed(needed, inter, intra)
    met, messages = _walk_keys(hops, inter, intra)
    wanted = {(r, s) for r in range(size) for s in range(size) if needed[r, s]}
    assert wanted <= met
    sent = traffic(hops, intra)
    assert messages == (sent.inside + sent.across).sum()
    visited = visited_ranks(inter, intra)
    for source in range(size):  # the last hop of each journey ends at a user
        for window in range(inter):
            last = hops.inner[source, window].sum()
            assert last == 0 or needed[visited[source, window, last], source]
        last = hops.outer[source].sum()
        assert last == 0 or needed[visited[source, last], source].any()
    if density == 1.0:
        assert len(met) == size * size


@pytest.mark.parametrize("inter, intra", WORLDS)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.4, 1.0])
def test_gradients_of_all_users_come_home(inter, intra, density):
    size = inter * intra
    needed = _needed(size, density, size)
    hops, visited = gradient_hops(needed, inter, intra), visited_ranks(inter, intra)
    for source in range(size):
        home, travelling, users = {source}, None, {r for r in range(size) if needed[r, source]}
        for window in range(inter):
            entered, inner = visited[source, window, 0].item(), None
            for step in range(intra):
                rank = visited[source, window, step].item()
                if step and (inner is not None or rank in users):
                    inner = (inner or set()) | ({rank} & users)
                # A hop is made exactly when there is something to carry.
                assert hops.inner[source, window, step] == (inner is not None)
            collected = (inner or set()) | ({entered} & users)
            if window and (travelling is not None or collected):
                travelling = (travelling or set()) | collected
            elif not window:
                home |= collected
            assert hops.outer[source, window] == (travelling is not None)
        assert home | (travelling or set()) == users


@pytest.mark.parametrize("inter, intra", WORLDS)
def test_neighbors_agree_on_every_hop(inter, intra):
    """What a rank sends is received by the next one, in the node or in the next node."""
    size = inter * intra
    needed = _needed(size, 0.3, size)
    routes = [route_of(inter, intra, rank, needed) for rank in range(size)]
    hops_of_keys = hops_needed(needed, inter, intra)
    for rank, route in enumerate(routes):
        node, local_rank = divmod(rank, intra)
        next_rank = routes[node * intra + (local_rank + 1) % intra]
        next_node = routes[(rank + intra) % size]
        for window, sources in enumerate(ring_windows(inter, intra, rank)):
            for ours, theirs in (
                (route.outer, next_node.outer),
                (route.gradient_outer, next_node.gradient_outer),
            ):
                assert ours[window][0] == theirs[window][1]
            for place, source in enumerate(sources):
                assert route.computes[window][place] == needed[rank, source]
                assert route.inner[window][place][0] == hops_of_keys.inner[source, window, place]
                for ours, theirs in (
                    (route.inner, next_rank.inner),
                    (route.gradient_inner, next_rank.gradient_inner),
                ):
                    assert ours[window][place][0] == theirs[window][place][1]


def test_traffic_of_whole_schedules():
    ring, double = traffic(all_hops(1, 6), 3), traffic(all_hops(2, 3), 3)
    assert ring.inside.tolist() == [5, 5, 0, 5, 5, 0] and ring.across.tolist() == [0, 0, 5, 0, 0, 5]
    assert double.inside.tolist() == [4] * 6 and double.across.tolist() == [1] * 6
    gather = all_gather_traffic(6, 3)
    assert gather.across.tolist() == [2] * 6 and (gather.inside + gather.across).tolist() == [5] * 6
    assert all_gather_traffic(4, 4).across.tolist() == [0] * 4
    assert traffic(all_hops(1, 4), 4).across.sum() == 0


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_that_travels_with_queries_is_right(dtype, size):
    """Only the product of out and d_out travels. Any out with that product works."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    d_out = (torch.randn(2, 3, 50, 24) * size).to(dtype)
    d_out[:, :, 7] = 0
    true = torch.randn(2, 3, 50, 24).to(dtype)
    # fp64 knows the product that fp32 sums.
    product = (d_out.double() * true.double()).sum(-1)
    out = _out_with(d_out, product.to(wide))
    assert out.dtype == dtype and out.isfinite().all()
    error = (d_out.double() * out.double()).sum(-1) - product
    # The rounding of the true out would cost as much.
    bound = torch.finfo(dtype).eps * d_out.double().norm(dim=-1) * true.double().norm(dim=-1)
    assert (error.abs() <= bound).all()
    assert (out.double().norm(dim=-1) <= 1.01 * true.double().norm(dim=-1)).all()
