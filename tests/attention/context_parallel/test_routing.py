"""Routes of chunks and of their gradients, walked hop by hop."""

import pytest
import torch

from titan_sparse.attention.context_parallel.routing import (
    Hops,
    all_gather_traffic,
    gradient_hops,
    hops_needed,
    traffic,
    visited_ranks,
)
from titan_sparse.attention.context_parallel.schedule import DOUBLE_RING

WORLDS = [(1, 1), (1, 2), (1, 5), (2, 2), (2, 3), (3, 2), (4, 1)]


def all_hops(inter: int, intra: int) -> Hops:
    """Hops of the KV chunks in a schedule that skips nothing: every chunk visits every rank."""
    return hops_needed(torch.ones(inter * intra, inter * intra, dtype=torch.bool), inter, intra)


def sends(hop_from: torch.Tensor, hop_to: torch.Tensor) -> torch.Tensor:
    """bool [n, n]: whether, in a ring of n ranks, place p sends to p + 1 after step t.

    What it would send is what started at place p - t. hop_from, hop_to: int64 [n], of what started
    at each place. What p receives before step t + 1 is sends[p - 1, t].
    """
    place, step = torch.arange(len(hop_to))[:, None], torch.arange(len(hop_to))
    source = (place - step) % len(hop_to)
    return (hop_from[source] <= step) & (step < hop_to[source])


def _needed(size: int, density: float, seed: int) -> torch.Tensor:
    return (
        torch.rand(size, size, generator=torch.Generator().manual_seed(seed)) < density
    ) | torch.eye(size, dtype=torch.bool)


@pytest.mark.parametrize("inter, intra", WORLDS)
def test_visited_ranks_are_the_inverse_of_the_schedule(inter, intra):
    visited = visited_ranks(inter, intra)
    for rank in range(inter * intra):
        for window, steps in enumerate(DOUBLE_RING.windows(inter, intra, rank)):
            assert [visited[source, window, step].item() for step, source in enumerate(steps)] == [
                rank
            ] * intra


def test_hops_of_a_ring_by_hand():
    needed = torch.eye(4, dtype=torch.bool)
    needed[1, 0] = needed[3, 0] = needed[0, 3] = True
    assert hops_needed(needed, 1, 4).inner_to.flatten().tolist() == [3, 0, 0, 1]
    gradient = gradient_hops(needed, 1, 4)
    assert (gradient.inner_to - gradient.inner_from).flatten().tolist() == [3, 0, 0, 3]


def _walk_keys(hops, inter: int, intra: int) -> tuple[set, int]:
    """The pairs (rank, source) that occur when every rank follows sends(), and the number of messages."""
    size, met, messages = inter * intra, set(), 0
    holds = {rank: rank for rank in range(size)}  # rank -> chunk that it got from the node before
    outer = [
        sends(hops.outer_from[place::intra], hops.outer_to[place::intra]) for place in range(intra)
    ]
    for window in range(inter):
        for node in range(inter):
            began = torch.tensor(
                [(node - window) % inter * intra + place for place in range(intra)]
            )
            passes = sends(hops.inner_from[began, window], hops.inner_to[began, window])
            at = {place: holds.get(node * intra + place) for place in range(intra)}
            for step in range(intra):
                met |= {
                    (node * intra + place, chunk)
                    for place, chunk in at.items()
                    if chunk is not None
                }
                sent = {
                    (place + 1) % intra: at[place] for place in range(intra) if passes[place, step]
                }
                assert None not in sent.values()  # a rank cannot send what it did not receive
                messages += len(sent)
                at = {place: sent.get(place) for place in range(intra)}
        moved = {}
        for rank in range(size):
            if outer[rank % intra][rank // intra, window]:
                moved[(rank + intra) % size] = holds[rank]
                messages += 1
        holds = moved
    return met, messages


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
            last = hops.inner_to[source, window]
            assert last == 0 or needed[visited[source, window, last], source]
        last = hops.outer_to[source]
        assert last == 0 or needed[visited[source, last], source].any()
    if density == 1.0:
        assert (
            torch.equal(hops.inner_to, all_hops(inter, intra).inner_to)
            and (hops.outer_to == inter - 1).all()
        )
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
                made = hops.inner_from[source, window] <= step < hops.inner_to[source, window]
                assert made == (
                    inner is not None
                )  # a hop is made exactly when there is something to carry
            collected = (inner or set()) | ({entered} & users)
            if window and (travelling is not None or collected):
                travelling = (travelling or set()) | collected
            elif not window:
                home |= collected
            assert (hops.outer_from[source] <= window < hops.outer_to[source]) == (
                travelling is not None
            )
        assert home | (travelling or set()) == users


def test_traffic_of_whole_schedules():
    ring, double = traffic(all_hops(1, 6), 3), traffic(all_hops(2, 3), 3)
    assert ring.inside.tolist() == [5, 5, 0, 5, 5, 0] and ring.across.tolist() == [0, 0, 5, 0, 0, 5]
    assert double.inside.tolist() == [4] * 6 and double.across.tolist() == [1] * 6
    gather = all_gather_traffic(6, 3)
    assert gather.across.tolist() == [2] * 6 and (gather.inside + gather.across).tolist() == [5] * 6
    assert all_gather_traffic(4, 4).across.tolist() == [0] * 4
    assert traffic(all_hops(1, 4), 4).across.sum() == 0


def test_a_local_pattern_saves_most_hops():
    needed = torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(1, 0)
    sent = traffic(hops_needed(needed, 1, 8), 8)
    assert sent.inside.tolist() == [1] * 8
    assert traffic(gradient_hops(needed, 1, 8), 8).inside.tolist() == [7] * 8
