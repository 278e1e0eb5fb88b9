"""Pictures and counts of selections, and work per rank and step, against the mask of all pairs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.attention.masks.test_visibility import SLICES
from tests.attention.problems import RANGES, SEQ_LEN
from tests.reference import dense_attention, structured_qkv, tiles_of
from titan_sparse.attention import attend
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.context_parallel.schedules import SCHEDULES
from titan_sparse.attention.masks import Causal, Documents, Slices, SlidingWindow, visibility
from titan_sparse.attention.masks.ranges import token_positions
from titan_sparse.attention.masks.slices import sliding_window
from titan_sparse.attention.observe import recording, worker_imbalance
from titan_sparse.attention.patterns import Dense, MoBA, VerticalSlash, XAttention
from titan_sparse.estimate.visits import Visits, by_step, count_visits

BLOCK = 8
SPARSE = VerticalSlash(
    recall=0.5,
    sinks=3,
    local_slashes=1,
    min_verticals=15,
    max_verticals=20,
    min_slashes=6,
    max_slashes=6,
    dense_below=40,
)
CASES = {
    **{name: (RANGES[name], SPARSE) for name in ("causal", "padded", "documents")},
    "windowed documents": (RANGES["windowed documents"], SPARSE),
    "full": (RANGES["full"], Dense()),
    "dense documents": (RANGES["documents"], Dense()),
    "blocks": (Documents([[70, 9, 61, 17], [5, 48, 47, 49]]), XAttention(4, 0.6, 48)),
    "chunks": (Documents([[70, 9, 61, 17], [5, 48, 47, 49]]), MoBA(19, 3)),
}


def _index(case: str):
    """The mask of a case, its ranges, and the index that its pattern chooses."""
    mask, pattern = CASES[case]
    q, k, _ = structured_qkv(2, 4, 2, SEQ_LEN, 16)
    ranges = mask.rows(SEQ_LEN)
    if pattern.dynamic:
        return mask, ranges, pattern.select(q, k, mask, block_size=BLOCK)
    return mask, ranges, pattern.index([], ranges, 2, 4, BLOCK)


def _by_rank(seen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sums of [B, H, S, S] over the tokens of each pair of ranks: [W, W]."""
    seen = seen.sum((0, 1))
    return torch.stack([seen[own].sum(0)[tokens].sum(-1) for own in tokens])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout, ranks", [("contiguous", 3), ("zigzag", 2), ("striped", 4)])
@pytest.mark.parametrize("elements", [1, 500, 1 << 23])
def test_visits_are_what_the_dense_mask_says(monkeypatch, case, layout, ranks, elements):
    monkeypatch.setattr("titan_sparse.attention.observe._ELEMENTS", elements)
    mask, ranges, index = _index(case)
    table = block_ids(layout, ranks, SEQ_LEN, BLOCK)
    visits = count_visits(index, ranges, table)
    tokens = torch.stack([token_positions(blocks, BLOCK) for blocks in table])

    # [B, H, S, S]
    computed_pairs = index.dense(mask)
    by_rank = [computed_pairs[:, :, own].sum() for own in tokens]
    assert torch.equal(visits.total(), torch.stack(by_rank))

    index.verticals = index.verticals[..., :0]
    pairs_in_tiles = index.dense(mask)
    assert torch.equal(visits.pairs, _by_rank(pairs_in_tiles, tokens))

    # [B or 1, 1, blocks, blocks] and [B, H, blocks, blocks]
    allowed = tiles_of(mask.dense(SEQ_LEN), BLOCK).all((-1, -2))[:, None]
    computed = tiles_of(pairs_in_tiles, BLOCK).any((-1, -2))
    # [W, blocks]
    met = computed.any(0).any(0)[table].any(1)
    if case == "chunks":
        assert (visits.met >= met).all()
        # Of some tiles queries have chosen parts, or nothing.
        whole = tiles_of(pairs_in_tiles, BLOCK).all((-1, -2))
        assert torch.equal(visits.full, _by_rank(whole, table))
        assert (visits.full + visits.partial >= _by_rank(computed, table)).all()
    else:
        assert torch.equal(visits.met, met)
        assert torch.equal(visits.full, _by_rank(computed & allowed, table))
        assert torch.equal(visits.partial, _by_rank(computed & ~allowed, table))
    assert visits.partial.sum() > 0 or case == "full"


@pytest.mark.parametrize("elements", [1, 500, 1 << 23])
@pytest.mark.parametrize("name", SLICES)
def test_visits_of_slices(monkeypatch, name, elements):
    """Slices that share a cut tile are counted one by one. All else is what the dense mask says."""
    monkeypatch.setattr("titan_sparse.estimate.visits._ELEMENTS", elements)
    ranges = SLICES[name].rows(SEQ_LEN)
    index = Dense().index([], ranges, 2, 4, BLOCK)
    table = block_ids("striped", 4, SEQ_LEN, BLOCK)
    visits = count_visits(index, ranges, table)
    seen = SLICES[name].dense(SEQ_LEN)[:, None].expand(2, 4, -1, -1)
    tokens = torch.stack([token_positions(blocks, BLOCK) for blocks in table])
    assert torch.equal(visits.pairs, _by_rank(seen, tokens))
    tiles = tiles_of(seen, BLOCK)
    assert torch.equal(visits.full, _by_rank(tiles.all((-1, -2)), table))
    assert torch.equal(visits.met, tiles.any((-1, -2)).any(0).any(0)[table].any(1))
    cut = _by_rank(tiles.any((-1, -2)) & ~tiles.all((-1, -2)), table)
    assert (visits.partial >= cut).all() and torch.equal(visits.partial > 0, cut > 0)


def test_only_tiles_that_slices_touch_are_looked_at(monkeypatch):
    looked_at = []

    def tiles_between(ranges, q_blocks, k_blocks, size):
        looked_at.append(len(q_blocks) * len(k_blocks))
        return visibility.tiles_between(ranges, q_blocks, k_blocks, size)

    monkeypatch.setattr("titan_sparse.estimate.visits.tiles_between", tiles_between)
    seq_len, window = 1 << 20, 1 << 13
    ranges = Slices.batch([sliding_window([seq_len], window, 64)]).rows(seq_len)
    table = block_ids("striped", 8, seq_len, 128)
    visits = count_visits(Dense().index([], ranges, 1, 16, 128), ranges, table)
    # All rows see the window up to their own key, and the sinks before it.
    rows = torch.arange(seq_len)
    pairs = 16 * ((rows + 1).clamp(max=window) + (rows + 1 - window).clamp(0, 64)).sum()
    assert visits.pairs.sum() == pairs
    # Of the blocks of queries at once, some see a block of keys that the others do not.
    assert sum(looked_at) < 5 * (visits.full + visits.partial).sum() / 16


@pytest.mark.parametrize("case", ["causal", "full"])
def test_recall_is_that_of_rows_spread_over_the_sequence(case):
    """Of the first and the last row, of nine, and of all."""
    mask, pattern = CASES[case]
    q, k, v = structured_qkv(2, 4, 2, SEQ_LEN, 16)
    _, aux = attend(q, k, v, mask, pattern, block_size=BLOCK, return_aux=True)
    visible = mask.dense(SEQ_LEN)[:, None].expand(2, 4, -1, -1)
    kept = (aux.lse - dense_attention(q, k, v, visible)[1]).exp()
    # [2, 4, S] -> [4], over sequences and some rows
    by_hand = {
        2: kept[:, :, [0, SEQ_LEN - 1]].mean((0, 2)),
        SEQ_LEN: kept.mean((0, 2)),
    }
    for samples, wanted in by_hand.items():
        with recording(recall_rows=samples) as seen:
            attend(q, k, v, mask, pattern, block_size=BLOCK)
        (got,) = seen.recall
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=0)
    with recording(recall_rows=9) as seen:
        attend(q, k, v, mask, pattern, block_size=BLOCK)
    spread = kept[:, :, [191 * step // 8 for step in range(9)]].mean((0, 2))
    torch.testing.assert_close(seen.recall[0], spread, rtol=1e-9, atol=0)
    if case != "full":
        # The first rows are dense, and would say too much.
        assert (kept[:, :, :9].mean((0, 2)) - spread).abs().max() > 0.01


def test_large_sequences_are_counted_in_pieces(monkeypatch):
    mask, ranges, index = _index("documents")
    table = block_ids("striped", 2, SEQ_LEN, BLOCK)
    qkv = structured_qkv(2, 4, 2, SEQ_LEN, 16)

    def counts() -> list[torch.Tensor]:
        with recording(recall_rows=20) as seen:
            attend(*qkv, mask, SPARSE, block_size=BLOCK)
        return [*count_visits(index, ranges, table), seen.density(), *seen.recall]

    at_once = counts()
    for name, size in (("_ELEMENTS", 1000), ("_Q_BLOCKS_AT_ONCE", 5), ("_KEYS_AT_ONCE", 50)):
        monkeypatch.setattr(f"titan_sparse.attention.observe.{name}", size)
    torch.testing.assert_close(counts(), at_once, rtol=1e-12, atol=0)


def test_a_thread_records_its_own_calls():
    """Also while others attend or record."""
    q, k, v = structured_qkv(1, 4, 2, 256, 8)
    pattern = VerticalSlash(recall=0.6, dense_below=64)
    begun, ended = threading.Event(), threading.Event()

    def other() -> int:
        with recording() as seen:
            attend(q, k, v, Causal(), Dense(), block_size=16)
            begun.set()
            assert ended.wait(60)
            attend(q, k, v, Causal(), Dense(), block_size=16)
        return len(seen.visited)

    with ThreadPoolExecutor(1) as threads:
        calls = threads.submit(other)
        with recording() as seen:
            assert begun.wait(60)
            attend(q, k, v, Causal(), pattern, block_size=16)
        ended.set()
        assert calls.result() == 2
    density = pattern.select(q, k, Causal(), block_size=16).dense(Causal()).sum((0, 2, 3))
    assert torch.equal(seen.density(), density[None].double() / (256 * 257 / 2))


def test_a_recording_does_not_depend_on_the_default_dtype():
    """Of which programs make bfloat16. It has 8 bits for rows up to 639."""
    q, k, v = structured_qkv(1, 4, 2, 640, 8)
    pattern = VerticalSlash(recall=0.6, dense_below=64)
    recordings = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with recording(recall_rows=20, thumbnail_cells=3) as seen:
                attend(q, k, v, Causal(), pattern, block_size=16)
        finally:
            torch.set_default_dtype(torch.float32)
        recordings.append(seen)
    one, other = recordings
    assert torch.equal(one.recall[0], other.recall[0])
    assert torch.equal(one.thumbnails[0].nan_to_num(2), other.thumbnails[0].nan_to_num(2))


def test_verticals_come_with_chunks_that_a_rank_computes_on():
    """Rank 0 computes in one step, rank 1 in two, rank 2 in three."""
    pairs = torch.tensor([[4, 0, 0], [5, 6, 0], [1, 2, 7]])
    verticals = torch.tensor([70] * 3)
    visits = Visits(pairs, pairs, pairs, verticals, met=pairs > 0)
    sources = torch.tensor(SCHEDULES["ring"].step_sources(1, 3))
    needed = pairs > 0
    work = by_step(visits, sources, needed)
    assert work.tolist() == [[74, 0, 0], [6, 75, 0], [7, 37, 36]]


def test_imbalance_degrees_by_hand():
    work = torch.tensor([[4.0, 0.0], [1.0, 3.0]])  # [ranks, steps]
    assert worker_imbalance(work.sum(1)) == 1.0  # both ranks do 4
    assert worker_imbalance(work.T).tolist() == [4 / 2.5, 3 / 1.5]
    assert worker_imbalance(torch.tensor([[6, 2], [0, 0]])).tolist() == [1.5, 1.0]


SIZE = 16
CHOSEN = VerticalSlash(recall=0.8, sinks=3, local_slashes=1, max_verticals=12, dense_below=48)
PICTURES = {
    "dense": (Dense(), Causal() & SlidingWindow(50)),
    "xattention": (XAttention(stride=4, threshold=0.6, dense_below=48), Causal(valid=(170,))),
    "verticals": (CHOSEN, Documents([[100, 30, 55]])),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("cells", [5, 100])
def test_thumbnail_is_the_mask_pooled(name, cells):
    pattern, mask = PICTURES[name]
    q, k, v = structured_qkv(1, 2, 1, SEQ_LEN, 8)
    with recording(thumbnail_cells=cells) as seen:
        _, aux = attend(q, k, v, mask, pattern, block_size=SIZE, return_aux=True)
    (got,), size = seen.thumbnails, min(cells, SEQ_LEN // SIZE)
    cell = torch.arange(SEQ_LEN) // SIZE * size // (SEQ_LEN // SIZE)
    pool = torch.nn.functional.one_hot(cell, size).double()
    allowed = pool.T @ mask.dense(SEQ_LEN)[0].double() @ pool
    want = pool.T @ aux.index.dense(mask)[0].double() @ pool / allowed
    assert torch.equal(got.isnan(), (allowed == 0).expand_as(got)) and got.shape == (2, size, size)
    # In a block cut by the mask verticals are not where their average is.
    close = (got - want).abs().nan_to_num() < (0.25 if name == "verticals" else 1e-6)
    assert close.all() and (got - want).nanmean().abs() < 0.01


def test_counts_of_blocks_and_verticals():
    q, k, v = structured_qkv(1, 2, 1, SEQ_LEN, 8)
    mask = Documents([[100, 60]])
    with recording() as seen:
        _, aux = attend(q, k, v, mask, CHOSEN, block_size=SIZE, return_aux=True)
        attend(q, k, v, mask, Dense(), block_size=SIZE)
    verticals = [sorted(set(row.tolist()) - {SEQ_LEN}) for row in aux.index.verticals[0]]
    assert seen.verticals[0].tolist() == [len(row) for row in verticals]
    assert len(seen.verticals) == 1
    aux.index.verticals = aux.index.verticals[..., :0]
    in_blocks = aux.index.dense(mask)[0].sum((1, 2)) / 160 / SIZE
    torch.testing.assert_close(seen.blocks_per_query[0], in_blocks, check_dtype=False)
    assert (seen.blocks_per_query[1] == (100 * 101 + 60 * 61) / 2 / 160 / SIZE).all()
