"""XAttention and MoBA: the selection against plain loops over documents, heads and tokens; attention over what they select."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.context_parallel.test_group import SEQ_LEN, check_everything
from tests.distributed import run_processes
from tests.reference import dense_attention, gradients, structured_qkv
from titan_sparse.attention import attend
from titan_sparse.attention.backends import eager, triton
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.context_parallel.layouts import LAYOUTS
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, Mask, SlidingWindow
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.attention.observe.visits import count_visits, count_visits_of_all_heads
from titan_sparse.attention.patterns import MoBA, Pattern, XAttention, moba, xattention
from titan_sparse.attention.patterns.moba import _largest
from titan_sparse.attention.patterns.xattention import _fewest
from titan_sparse.attention.tiles.blocks import block_tiles
from titan_sparse.estimate.index_file import load_indexes, save_indexes
from titan_sparse.kernels.block_sparse import Lists, Piece, naive

BLOCK = 16


class Case(NamedTuple):
    """A selection problem of two sequences. documents: their lengths if packed, else `valid` tokens of each."""

    pattern: Pattern
    mask: Mask
    documents: list[list[int]] | None = None
    valid: tuple[int, int] | None = None
    seq_len: int = 157
    heads: tuple[int, int] = (4, 2)

    def spans(self, sequence: int) -> list[tuple[int, int]]:
        """(start, stop) of the documents; an unpacked sequence is one."""
        if self.documents is None:
            return [(0, self.valid[sequence] if self.valid else self.seq_len)]
        lengths = self.documents[sequence % len(self.documents)]
        return [(sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))]

    def inputs(self) -> list[Tensor]:
        """q, k, v in fp64."""
        q, k, v = structured_qkv(2, *self.heads, self.seq_len, 8, seed=len(repr(self.pattern)))
        return [q * 0.5, k, v]


MIXED = [[70, 9, 61, 17], [5, 48, 47, 49]]
X = XAttention(stride=4, threshold=0.6, dense_below=48)
M = MoBA(chunk_size=32, top_k=2)


def _masks(pattern: Pattern) -> dict[str, Case]:
    return {
        "causal": Case(pattern, Causal()),
        "mha": Case(pattern, Causal(), heads=(3, 3), seq_len=144),
        "padding": Case(pattern, Causal(valid=(101, 0)), valid=(101, 0)),
        "window": Case(pattern, Causal() & SlidingWindow(45)),
        "packed": Case(pattern, Documents(MIXED), MIXED),
        "packed, window": Case(pattern, Documents(MIXED) & SlidingWindow(37), MIXED),
        "packed, two long in one block": Case(pattern, Documents([55, 50, 52]), [[55, 50, 52]]),
        "a tail in a block of its own": Case(pattern, Documents([66, 83]), [[66, 83]]),
        "shorter than a block": Case(pattern, Causal(), seq_len=9),
    }


XATTENTION = _masks(X) | {
    "all of the score": Case(XAttention(4, 1.0, 48), Causal()),
    "little of the score": Case(XAttention(4, 0.05, 48), Documents(MIXED), MIXED),
    "cells of one": Case(XAttention(1, 0.7, 48), Documents(MIXED), MIXED),
    "cells of a block": Case(
        XAttention(16, 0.7, 16), Documents([17, 16, 33, 15, 19]), [[17, 16, 33, 15, 19]]
    ),
}
MOBA = _masks(M) | {
    "own chunk alone": Case(MoBA(32, 1), Causal()),
    "everything": Case(MoBA(16, 99), Documents(MIXED), MIXED),
    "chunks beside blocks": Case(MoBA(19, 3), Documents(MIXED), MIXED),
    "chunks of a block": Case(
        MoBA(16, 3), Documents([50, 17, 16, 33, 15, 19]), [[50, 17, 16, 33, 15, 19]]
    ),
    "more than a word of chunks": Case(MoBA(16, 4), Causal(), seq_len=16 * 35, heads=(2, 1)),
}


# The specifications, in plain loops ---------------------------------------------------------------------------------


def _cell_scores(
    q: Tensor, k: Tensor, start: Tensor, span: tuple[int, int], stride: int
) -> dict[int, dict[int, float]]:
    """Softmax over key cells of the antidiagonal sums, for the query cells of a document."""
    mine = range(*span)
    shares = {}
    for i in range(len(q) // stride + 1):
        if i * stride not in mine:
            continue
        scores = {}
        for j in range(i + 1):
            if j * stride + stride - 1 not in mine or (j + 1) * stride <= start[i * stride]:
                continue
            pairs = ((i * stride + stride - 1 - t, j * stride + t) for t in range(stride))
            dots = [float(q[a] @ k[b]) for a, b in pairs if a in mine and b in mine]
            scores[j] = sum(dots) * q.shape[1] ** -0.5 / stride
        total = sum(math.exp(s) for s in scores.values())
        shares[i] = {j: math.exp(s) / total for j, s in scores.items()}
    return shares


def _xattention(
    q: Tensor, k: Tensor, start: Tensor, case: Case, span: tuple[int, int]
) -> set[tuple[int, int]]:
    """Pairs of blocks of one document and head."""
    pattern, (first, stop) = case.pattern, span
    blocks = range(first // BLOCK, (stop - 1) // BLOCK + 1)
    if case.documents is not None and stop - first < pattern.dense_below:
        return {(a, c) for a in blocks for c in blocks if c <= a}
    # A sequence ends with a whole block: what is missing belongs to no document.
    shares, per_block = _cell_scores(q, k, start, span, pattern.stride), BLOCK // pattern.stride
    chosen = set()
    for a in blocks:
        mass = dict.fromkeys(blocks, 0.0)
        for i in range(a * per_block, (a + 1) * per_block):
            for j, share in shares.get(i, {}).items():
                mass[j // per_block] += share
        picked = {blocks[0], a}
        for c in sorted(set(blocks) - picked, key=lambda c: -mass[c]):
            if sum(mass[x] for x in picked) < pattern.threshold * sum(mass.values()) - 1e-12:
                picked.add(c)
        chosen |= {(a, c) for c in picked if c <= a}
    return chosen


def _xattention_dense(case: Case, q: Tensor, k: Tensor, sequence: int, seen: Tensor) -> Tensor:
    padding = -case.seq_len % BLOCK
    q, k = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (q, k))
    start = torch.nn.functional.pad(
        case.mask.rows(case.seq_len).start, (0, padding), value=case.seq_len
    )
    chosen = torch.zeros_like(seen)
    for span in case.spans(sequence):
        if span[0] < span[1]:
            for a, c in _xattention(q, k, start[sequence % len(start)], case, span):
                chosen[a * BLOCK : (a + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK] = True
    return chosen & seen


def _moba_dense(case: Case, q: Tensor, k: Tensor, sequence: int, seen: Tensor) -> Tensor:
    size, top_k = case.pattern.chunk_size, case.pattern.top_k
    chosen = torch.zeros_like(seen)
    for first, stop in case.spans(sequence):
        for i in range(first, stop):
            own = (i - first) // size
            means = [k[first + c * size : first + (c + 1) * size].mean(0) for c in range(own)]
            best = sorted(range(own), key=lambda c: -float(q[i] @ means[c]))[: top_k - 1]
            for c in [*best, own]:
                chosen[i, first + c * size : min(first + (c + 1) * size, stop)] = True
    return chosen & seen


def _check_selection(case: Case, reference) -> None:
    q, k, _ = case.inputs()
    index = case.pattern.select(q, k, case.mask, block_size=BLOCK)
    seen, dense = case.mask.dense(case.seq_len).expand(2, -1, -1), index.dense(case.mask)
    group = case.heads[0] // case.heads[1]
    for b in range(2):
        for h in range(case.heads[0]):
            assert torch.equal(
                dense[b, h], reference(case, q[b, h], k[b, h // group], b, seen[b])
            ), (b, h)


@pytest.mark.parametrize("name", XATTENTION)
def test_xattention_is_the_specification(name):
    _check_selection(XATTENTION[name], _xattention_dense)


@pytest.mark.parametrize("name", MOBA)
def test_moba_is_the_specification(name):
    _check_selection(MOBA[name], _moba_dense)


def test_equal_scores_are_taken_in_order_of_position():
    mass = torch.tensor([[1.0, 3, 1, 1, 1, 1]])
    forced = torch.tensor([[False, False, False, False, False, True]])
    assert _fewest(mass, forced, 0.7).tolist() == [[True, True, True, False, False, True]]
    gate = torch.tensor(
        [[2.0, 1, 2, 2, -math.inf], [1, -math.inf, -math.inf, -math.inf, -math.inf]]
    )
    assert _largest(gate, 2).tolist() == [[True, False, True, False, False], [True] + [False] * 4]


@pytest.mark.parametrize("pattern", [X, M], ids=str)
def test_pieces_of_a_selection_are_the_whole(pattern, monkeypatch):
    """Long sequences are selected for a few query blocks at a time."""
    case = _masks(pattern)["packed"]
    q, k, _ = case.inputs()
    whole = pattern.select(q, k, case.mask, block_size=BLOCK).tensors()
    for module in (moba, xattention):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    for a, b in zip(
        pattern.select(q, k, case.mask, block_size=BLOCK).tensors(), whole, strict=True
    ):
        assert torch.equal(a, b)


def test_a_packed_document_selects_as_it_does_alone():
    """Documents that begin with a block: chunks and cells fall alike."""
    q, k, _ = structured_qkv(1, 2, 1, 176, 8, seed=5)
    for pattern in (X, M):
        packed = pattern.select(q, k, Documents([80, 96]), block_size=BLOCK).dense(
            Documents([80, 96])
        )
        alone = pattern.select(q[:, :, 80:], k[:, :, 80:], Causal(), block_size=BLOCK).dense(
            Causal()
        )
        assert torch.equal(packed[:, :, 80:, 80:], alone) and not alone.all()


# Attention over what is selected ------------------------------------------------------------------------------------


BOTH = [(X, name) for name in ("causal", "padding", "packed, window")] + [
    (M, name) for name in ("mha", "padding", "packed")
]


@pytest.mark.parametrize("pattern, name", [*BOTH, (MoBA(19, 3), "packed, window")], ids=str)
def test_attention_is_dense_attention_over_what_was_selected(pattern, name):
    torch.set_num_threads(1)
    case = _masks(pattern)[name]
    q, k, v = case.inputs()
    d_out = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with recording(recall_rows=50) as record:
        aux = attend(q, k, v, case.mask, pattern, block_size=BLOCK, return_aux=True)[1]
    seen = aux.index.dense(case.mask)
    want = gradients(lambda *x: dense_attention(*x, seen)[0], d_out, q, k, v)
    got = gradients(lambda *x: attend(*x, case.mask, pattern, block_size=BLOCK), d_out, q, k, v)
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert (a - b).abs().max() < 1e-9
    assert torch.equal(aux.lse.isneginf(), ~seen.any(-1))
    assert (record.visited[0] * 2 == seen.sum((0, 2, 3))).all() and record.density().max() < 1
    assert 0 < record.recall[0].min() < 1


@pytest.mark.parametrize(
    "block, blocks, last, pattern, documents",
    [
        (16, 34, 2, MoBA(16, 4), None),
        (32, 8, 5, MoBA(40, 2), [120, 9, 117]),
    ],
    ids=["more than a word of chunks", "chunks beside blocks"],
)
def test_kernels_keep_to_the_choice(block, blocks, last, pattern, documents):
    """The last query blocks against all keys: Triton kernels (without a GPU in the interpreter, which takes smaller blocks)
    and eager against the twin, the twin against dense attention."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        pattern, documents, block = (
            MoBA(64 // block * pattern.chunk_size, pattern.top_k),
            documents and [240, 18, 234],
            64,
        )
    seq_len, mask = block * blocks, Documents(documents) if documents else Causal()
    q, k, v = (x.to(device, torch.float32) for x in structured_qkv(1, 2, 1, seq_len, 16, seed=2))
    index, every = pattern.select(q, k, mask, block_size=block), torch.arange(blocks, device=device)
    tiles = block_tiles(mask.rows(seq_len, device), index, every[-last:], every, 1, True)
    q = q[:, :, -last * block :]
    piece = Piece(
        k.double(),
        v.double(),
        Lists(*tiles.by_query),
        Lists(*tiles.by_key),
        tiles.k_positions,
        None,
        tiles.chosen,
    )
    common, d_out = (tiles.start, tiles.stop, block, 0.25), torch.randn_like(q)
    out, lse = naive.forward(q.double(), [piece], *common)
    dq, [(dk, dv)] = naive.backward(d_out.double(), q.double(), out, lse, [piece], *common)
    for backend in (triton, eager):
        got_out, got_lse = backend.forward(q, k, v, tiles, 0.25)
        gradient = backend.backward(d_out, q, k, v, got_out, got_lse, tiles, 0.25)
        for a, b in zip((got_out, got_lse, *gradient), (out, lse, dq, dk, dv), strict=True):
            assert (
                torch.equal(a.isfinite(), b.isfinite()) and (a - b).abs().nan_to_num(0).max() < 1e-4
            )
    seen = index.dense(mask)[:, :, -last * block :].to(device)
    assert (
        dense_attention(q.double(), k.double(), v.double(), seen, 0.25)[0] - out
    ).abs().max() < 1e-9
    assert (tiles.by_query.partial_count > 1).any() and (
        seen != mask.dense(seq_len, device)[:, None, -last * block :]
    ).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("pattern", [XAttention(16, 0.7, 256), MoBA(300, 3)], ids=str)
@pytest.mark.parametrize(
    "mask", [Causal(), Documents([700, 100, 1000])], ids=["causal", "documents"]
)
def test_on_a_gpu_in_bf16(pattern, mask):
    """Exact over what was selected, which is nearly what a CPU selects, and the host waits for nothing."""
    q, k, v = (x.to("cuda", torch.bfloat16) for x in structured_qkv(1, 4, 2, 2048, 64, seed=3))
    rows, d_out = mask.rows(2048, "cuda"), torch.randn_like(q)
    run = lambda: gradients(lambda *x: attend(*x, rows, pattern), d_out, q, k, v)
    got = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seen = pattern.select(q, k, rows).dense(mask)
    want = gradients(
        lambda *x: dense_attention(*x, seen)[0], d_out.double(), *(x.double() for x in (q, k, v))
    )
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert (a.double() - b).norm() / b.norm() < 2e-2
    on_cpu = pattern.select(q.cpu(), k.cpu(), mask).dense(mask)
    assert (seen.cpu() == on_cpu).double().mean() > 0.99 and (
        seen != mask.dense(2048, "cuda")[:, None]
    ).any()


@pytest.mark.parametrize("axes", [(2,), (3,), (2, 2)], ids=str)
def test_ranks_select_and_compute_as_one_does(axes):
    masks = [
        Causal(valid=(SEQ_LEN - 5, SEQ_LEN - 70)),
        Documents([[201, 7, 1, 130], [3, 200, 60, 17, 40]]),
    ]
    patterns = [XAttention(stride=4, threshold=0.6, dense_below=48), MoBA(chunk_size=40, top_k=3)]
    run_processes(torch.Size(axes).numel(), check_everything, axes, masks, patterns, (4, 2))


# Around it ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [X, M], ids=str)
def test_opcheck(pattern):
    """Shapes for torch.compile, ragged and packed."""
    q, k, _ = structured_qkv(2, 4, 2, 125, 8)
    for mask in (Causal(), Documents(MIXED[1][:3])):
        names = (pattern.key, one_rank(BLOCK).key)
        arguments = (q, k, *mask.rows(125)[:3], *names, 0.3)
        torch.library.opcheck(torch.ops.titan_sparse.select.default, arguments)


@pytest.mark.parametrize("pattern", [X, MoBA(19, 3)], ids=str)
def test_work_is_counted_tile_by_tile(pattern):
    case = Case(pattern, Documents(MIXED), MIXED, seq_len=192)
    q, k, _ = case.inputs()
    index, rows = pattern.select(q, k, case.mask, block_size=BLOCK), case.mask.rows(192)
    table = LAYOUTS["striped"](3, 12)
    tiles = index.dense(case.mask).unflatten(3, (12, BLOCK)).unflatten(2, (12, BLOCK))
    by_rank = lambda x: x[:, :, table][..., table].sum((3, 5))
    visits = count_visits(index, rows, table)
    assert torch.equal(visits.pairs, by_rank(tiles.sum((3, 5))))
    assert torch.equal(visits.full, by_rank(tiles.all(5).all(3).long()))
    assert (visits.full + visits.partial >= by_rank(tiles.any(5).any(3).long())).all()
    for got, want in zip(count_visits_of_all_heads(index, rows, table), visits, strict=True):
        assert torch.equal(got, want.sum(1, keepdim=True))


@pytest.mark.parametrize("pattern", [X, M], ids=str)
def test_indexes_in_a_file(tmp_path, pattern):
    case = _masks(pattern)["packed"]
    q, k, _ = case.inputs()
    index = pattern.select(q, k, case.mask, block_size=BLOCK)
    save_indexes(tmp_path / "index.pt", pattern, case.mask.rows(157), [index])
    _, [read] = load_indexes(tmp_path / "index.pt")
    assert torch.equal(read.dense(case.mask), index.dense(case.mask))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: XAttention(threshold=0.0), "threshold"),
        (lambda: XAttention(threshold=1.5), "threshold"),
        (lambda: XAttention(stride=0), "stride"),
        (lambda: MoBA(chunk_size=0), "chunk_size"),
        (lambda: MoBA(top_k=0), "top_k"),
        (lambda: XAttention(stride=12).check_block_size(128), "stride = 12"),
        (lambda: XAttention(dense_below=100).check_block_size(128), "dense_below = 128 or more"),
        (lambda: MoBA(chunk_size=64).check_block_size(128), "chunk_size = 128 or more"),
        (
            lambda: attend(
                *[torch.zeros(1, 1, 16, 8)] * 3, mask=Full(), pattern=MoBA(), block_size=16
            ),
            "causal",
        ),
    ],
)
def test_parameters_that_do_not_fit(make, words):
    with pytest.raises(ValueError, match=words):
        make()
