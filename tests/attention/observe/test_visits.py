"""Work per rank and step counted from integers equals what the dense mask says; imbalance by its definitions; routes of
chunks and gradients walked hop by hop."""

import pytest
import torch

from tests.reference import structured_qkv
from titan_sparse.attention.context_parallel.layouts import LAYOUTS, block_ids, token_positions
from titan_sparse.attention.context_parallel.routing import (
    Hops,
    all_gather_traffic,
    gradient_hops,
    hops_needed,
    traffic,
    visited_ranks,
)
from titan_sparse.attention.context_parallel.windows import SCHEDULES
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, SlidingWindow
from titan_sparse.attention.observe.visits import (
    Visits,
    by_step,
    computation_ratio,
    count_visits,
    count_visits_of_all_heads,
    lockstep_imbalance,
    needed_chunks,
    step_imbalance,
    step_sources,
    worker_imbalance,
    worker_imbalance_per_step,
)
from titan_sparse.attention.patterns import Dense, VerticalSlash

BLOCK, SEQ_LEN = 8, 24 * 8
SPARSE = VerticalSlash(
    recall=0.5, sinks=3, local_diagonals=1, max_columns=20, max_slashes=6, dense_below=40
)
CASES = {
    "causal": (Causal(), SPARSE),
    "padding": (Causal(valid=(SEQ_LEN - 21, 50)), SPARSE),
    "window": (Causal() & SlidingWindow(70), SPARSE),
    "documents": (Documents([[45, 3, 20, 61, 5, 40], [7, 90, 9, 1, 41]]), SPARSE),
    "documents and window": (Documents([33, 50, 77, 20]) & SlidingWindow(30), SPARSE),
    "dense": (Documents([45, 3, 20, 61]), Dense()),
    "full": (Full(), Dense()),
}


def all_hops(inter: int, intra: int) -> Hops:
    """Hops of the KV chunks in a schedule that skips nothing: every chunk visits every rank."""
    return hops_needed(torch.ones(inter * intra, inter * intra, dtype=torch.bool), inter, intra)


def sends(hop_from: torch.Tensor, hop_to: torch.Tensor) -> torch.Tensor:
    """bool [n, n]: does the rank in place p of a ring of n ranks send to p + 1 after step t what started at place p - t?

    hop_from, hop_to: int64 [n], of what started at each place. What p receives before step t + 1 is sends[p - 1, t].
    """
    place, step = torch.arange(len(hop_to))[:, None], torch.arange(len(hop_to))
    source = (place - step) % len(hop_to)
    return (hop_from[source] <= step) & (step < hop_to[source])


def _index(case: str):
    mask, pattern = CASES[case]
    q, k, _ = structured_qkv(2, 4, 2, SEQ_LEN, 16)
    rows = mask.rows(SEQ_LEN)
    if pattern.dynamic:
        return mask, rows, pattern.select(q, k, mask, block_size=BLOCK)
    return mask, rows, pattern.index([], rows, 2, 4, BLOCK)


def _by_rank(seen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sums of [B, H, S, S] over the tokens of each pair of ranks: [B, H, W, W]."""
    of_rank = lambda own: torch.stack(
        [seen[:, :, own][..., other].sum((-1, -2)) for other in tokens], -1
    )
    return torch.stack([of_rank(own) for own in tokens], -2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_visits_are_what_the_dense_mask_says(case, layout, ranks):
    mask, rows, index = _index(case)
    table = block_ids(layout, ranks, SEQ_LEN, BLOCK)
    visits = count_visits(index, rows, table)
    tokens = torch.stack([token_positions(own, BLOCK) for own in table])
    whole = index.dense(mask)
    assert torch.equal(
        visits.total(), torch.stack([whole[:, :, own].sum((-1, -2)) for own in tokens], -1)
    )
    index.verticals = index.verticals[..., :0]
    in_tiles = index.dense(mask)
    assert torch.equal(visits.pairs, _by_rank(in_tiles, tokens))
    cut = lambda x: x.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-2, -3)
    allowed, computed = cut(mask.dense(SEQ_LEN)).all((-1, -2))[:, None], cut(in_tiles).any((-1, -2))
    assert torch.equal(visits.full, _by_rank(computed & allowed, table))
    assert torch.equal(visits.partial, _by_rank(computed & ~allowed, table))
    assert visits.partial.sum() > 0 or case == "full"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout, ranks", [("striped", 3), ("zigzag", 4)])
def test_the_sum_of_all_heads_is_the_sum_over_heads(case, layout, ranks):
    _, rows, index = _index(case)
    table = block_ids(layout, ranks, SEQ_LEN, BLOCK)
    for one, all_heads in zip(
        count_visits(index, rows, table), count_visits_of_all_heads(index, rows, table)
    ):
        assert torch.equal(one.sum(1, keepdim=True), all_heads)


def test_large_sequences_are_counted_in_pieces(monkeypatch):
    _, rows, index = _index("documents")
    table = block_ids("striped", 2, SEQ_LEN, BLOCK)
    whole = count_visits(index, rows, table)
    monkeypatch.setattr("titan_sparse.attention.observe.visits._ELEMENTS", 1000)
    assert all(torch.equal(a, b) for a, b in zip(whole, count_visits(index, rows, table)))


@pytest.mark.parametrize(
    "schedule, inter, intra",
    [
        ("local", 1, 1),
        ("ring", 1, 4),
        ("double_ring", 2, 2),
        ("all_gather", 1, 3),
    ],
)
def test_work_by_step_follows_the_schedule(schedule, inter, intra):
    _, rows, index = _index("causal")
    size = inter * intra
    visits = count_visits(index, rows, block_ids("striped", size, SEQ_LEN, BLOCK))
    work = by_step(visits, step_sources(schedule, inter, intra))
    assert torch.equal(work.sum(-1), visits.total())
    order = [0, 2, 3, 1] if schedule == "double_ring" else list(range(size))
    windows = inter if schedule == "double_ring" else 1
    backward = by_step(
        visits, step_sources(schedule, inter, intra), backward=True, windows=windows
    )[..., order]
    for rank in range(size):
        pairs = visits.pairs[:, :, rank][..., sum(SCHEDULES[schedule](inter, intra, rank), [])]
        pairs_backward = pairs[..., order]
        verticals = visits.vertical_pairs[:, :, rank]
        assert verticals.shape[-1] >= size - 1
        parts = torch.stack(
            [verticals[..., part :: size - 1].sum(-1) for part in range(size - 1)]
            or [verticals.sum(-1)],
            -1,
        )
        # Striped, so that every rank computes at every step.
        assert torch.equal(
            work[:, :, rank, -parts.shape[-1] :], pairs[..., -parts.shape[-1] :] + parts
        )
        assert torch.equal(
            backward[:, :, rank, : parts.shape[-1]], pairs_backward[..., : parts.shape[-1]] + parts
        )
        assert size == 1 or torch.equal(work[:, :, rank, 0], pairs[..., 0])
        assert size == 1 or torch.equal(backward[:, :, rank, -1], pairs_backward[..., -1])


def test_verticals_come_with_chunks_that_a_rank_computes_on():
    """Rank 0 computes at one step, rank 1 at two, rank 2 at three; three blocks of verticals."""
    pairs = torch.tensor([[[[4, 0, 0], [5, 6, 0], [1, 2, 7]]]])
    visits = Visits(pairs, pairs, pairs, torch.tensor([[[[10, 20, 40]] * 3]]))
    sources = step_sources("ring", 1, 3)
    assert by_step(visits, sources)[0, 0].tolist() == [[74, 0, 0], [6, 75, 0], [7, 52, 21]]
    assert by_step(visits, sources, backward=True)[0, 0].tolist() == [
        [74, 0, 0],
        [76, 5, 0],
        [57, 22, 1],
    ]


def test_a_chunk_is_needed_where_any_head_computes_a_tile_of_it():
    rows, ranks = Causal().rows(8 * BLOCK), 8
    slashes = torch.zeros(1, 2, 8, dtype=torch.bool)
    slashes[:, :, 0] = slashes[0, 1, 3] = True  # one head sees three blocks back
    verticals = torch.full((1, 2, BLOCK), 8 * BLOCK, dtype=torch.int32)
    verticals[..., 0] = 0  # a vertical needs no chunk
    index = VerticalSlash(dense_below=BLOCK).index(
        [slashes, verticals, torch.zeros(1, 2, 2)], rows, 1, 2, BLOCK
    )
    needed = needed_chunks(
        count_visits_of_all_heads(index, rows, block_ids("contiguous", ranks, 8 * BLOCK, BLOCK))
    )
    assert [[s for s in range(8) if needed[r, s]] for r in range(8)] == [
        [0],
        [1],
        [2],
        [0, 3],
        [1, 4],
        [2, 5],
        [3, 6],
        [4, 7],
    ]


# Imbalance ----------------------------------------------------------------------------------------------------------


def test_imbalance_degrees_by_hand():
    work = torch.tensor([[4.0, 0.0], [1.0, 3.0]])  # [ranks, steps]
    assert worker_imbalance(work) == 1.0  # both ranks do 4
    assert step_imbalance(work) == (4 / 2 + 3 / 2) / 2
    assert worker_imbalance_per_step(work) == (4 / 2.5 + 3 / 1.5) / 2
    assert lockstep_imbalance(work) == (4 + 3) / 4
    assert worker_imbalance(torch.tensor([[3, 3], [1, 1]])) == 1.5


def test_imbalance_of_no_work_and_of_many_layers():
    work = torch.stack([torch.zeros(3, 3), torch.ones(3, 3), torch.eye(3)])
    for degree in (worker_imbalance, step_imbalance, worker_imbalance_per_step, lockstep_imbalance):
        assert degree(work).shape == (3,) and degree(work)[:2].tolist() == [1.0, 1.0]
    assert worker_imbalance(work)[2] == 1.0 and step_imbalance(work)[2] == 3.0


def test_computation_ratio():
    compute, elapsed = (
        torch.tensor([[1.0, 2.0], [0.0, 4.0]]),
        torch.tensor([[2.0, 2.0], [0.0, 16.0]]),
    )
    assert computation_ratio(compute, elapsed) == pytest.approx((0.5 + 1 + 0.25) / 3)


def test_vertical_slash_balances_when_striped_but_not_in_zigzag():
    rows, blocks, ranks = Causal().rows(256 * BLOCK), 256, 8
    slashes = torch.zeros(1, 1, blocks, dtype=torch.bool)
    slashes[..., :5] = True
    slashes[..., [60, 61, 62, 120, 121]] = True
    verticals = torch.full((1, 1, 0), 0, dtype=torch.int32)
    index = VerticalSlash(dense_below=BLOCK).index(
        [slashes, verticals, torch.zeros(1, 1, 2)], rows, 1, 1, BLOCK
    )
    degrees = {}
    for layout in ("striped", "zigzag", "contiguous"):
        visits = count_visits(index, rows, block_ids(layout, ranks, 256 * BLOCK, BLOCK))
        degrees[layout] = step_imbalance(by_step(visits, step_sources("ring", 1, ranks))).item()
        if layout == "striped":
            assert worker_imbalance(by_step(visits, step_sources("ring", 1, ranks))).item() < 1.03
    assert degrees["striped"] < 2.0 < 3.0 < degrees["zigzag"]


# Routing ------------------------------------------------------------------------------------------------------------

WORLDS = [(1, 1), (1, 2), (1, 5), (2, 2), (2, 3), (3, 2), (4, 1)]


def _needed(size: int, density: float, seed: int) -> torch.Tensor:
    return (
        torch.rand(size, size, generator=torch.Generator().manual_seed(seed)) < density
    ) | torch.eye(size, dtype=torch.bool)


@pytest.mark.parametrize("inter, intra", WORLDS)
def test_visited_ranks_are_the_inverse_of_the_schedule(inter, intra):
    visited = visited_ranks(inter, intra)
    for rank in range(inter * intra):
        for window, steps in enumerate(SCHEDULES["double_ring"](inter, intra, rank)):
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
    """(rank, source) that meet when every rank sends what sends() tells it, and how many messages that takes."""
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
                assert None not in sent.values()  # nobody sends what did not come
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
