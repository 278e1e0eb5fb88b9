"""route_by = "index": each group of KV heads sends its keys only as far as its diagonals reach."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.attention.collectives import collectives, counts
from tests.attention.context_parallel.test_stress import _mesh
from tests.distributed import run_processes
from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash.rows import set_probe_seed
from titan_sparse.attention.schedules.needs import looks_at_index, needed_chunks_of

BLOCK = 16
SEQ_LEN = 192
KV_HEADS = 4
FAR = 3
"""How many blocks back the last KV head looks: 3 hops among 4 ranks, none among 3."""
PATTERN = VerticalSlash(
    recall=0.9,
    sinks=0,
    local_diagonals=1,
    max_columns=0,
    max_slashes=2,
    dense_below=BLOCK,
)
"""One diagonal, and those that the probe finds; no verticals."""
WITH_VERTICALS = VerticalSlash(recall=0.8, local_diagonals=1, max_columns=48, dense_below=BLOCK)


def _inputs() -> list[Tensor]:
    """q, k and v, fp64. Queries look at their own keys, those of the last KV head FAR blocks back."""
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.randn(1, KV_HEADS, SEQ_LEN, 32, dtype=torch.float64, generator=generator)

    k = 6 * random()
    q = k.clone()
    q[:, -1] = k[:, -1].roll(FAR * BLOCK, dims=1)
    return [q.repeat_interleave(2, dim=1), k, random()]


def _index(mask: Mask = Causal()):
    q, k, _ = _inputs()
    set_probe_seed(0)
    return PATTERN.select(q, k, mask, block_size=BLOCK)


def _circulant(ranks: int, residues: set[int]) -> Tensor:
    """bool [W, W]: rank r needs the chunks of the ranks that lie so many behind it."""
    needed = torch.zeros(ranks, ranks, dtype=torch.bool)
    for rank in range(ranks):
        for residue in residues:
            needed[rank, (rank - residue) % ranks] = True
    return needed


@pytest.mark.parametrize("ranks, far", [(2, {0, 1}), (3, {0}), (4, {0, 3}), (6, {0, 3})])
def test_under_stripes_a_diagonal_reaches_the_ranks_of_its_distance(ranks, far):
    ranges = Causal().rows(SEQ_LEN)
    index = _index()
    near = index.of_heads(slice(0, 6))
    assert torch.equal(
        needed_chunks_of(near, ranges, "striped", ranks, "index"), _circulant(ranks, {0})
    )
    assert torch.equal(
        needed_chunks_of(index, ranges, "striped", ranks, "index"), _circulant(ranks, far)
    )
    everything = torch.ones(ranks, ranks, dtype=torch.bool)
    for route_by in ("auto", "mask"):
        assert torch.equal(needed_chunks_of(index, ranges, "striped", ranks, route_by), everything)


def test_auto_looks_where_few_ranks_meet_on_a_diagonal():
    looking = [looks_at_index("auto", layout) for layout in ("contiguous", "zigzag", "striped")]
    assert looking == [True, True, False]
    assert looks_at_index("index", "striped")
    assert not looks_at_index("mask", "contiguous")


@pytest.mark.parametrize(
    "route_by, forward, backward",
    [
        # One group of all heads goes around: 3 hops, 3 more and 3 of gradients.
        ("mask", 3, 6),
        # Of four groups three stay at home. The last goes around; its gradient has one hop left
        # from the rank that used it, and rank 0 takes its share in that one way.
        ("index", 3, 4),
    ],
)
def test_hops_by_hand(route_by, forward, backward):
    with fake_world(4):
        cp = ContextParallel(_mesh((4,)), "striped", "ring", BLOCK, route_by=route_by)
        set_probe_seed(0)
        # Rank 0 alone is there: what others send is 0, so its index is the single process's.
        q, k, v = [cp.shard(x, 2).requires_grad_() for x in _inputs()]
        index = _index().tensors()
        with collectives() as said:
            out = _attend_with(q, k, v, index, cp)
        hops = counts(said)
        assert (hops["send"], hops["receive"]) == (forward, forward)
        sent = cp.bytes_sent
        share = 1 if route_by == "mask" else KV_HEADS
        assert sent == 3 * (k.nbytes + v.nbytes) // share
        with collectives() as said:
            out.sum().backward()
        hops = counts(said)
        assert (hops["send"], hops["receive"]) == (backward, backward)


def _attend_with(q, k, v, index: list[Tensor], cp: ContextParallel) -> Tensor:
    """attend() with an index that has been selected before."""
    select = VerticalSlash.select_tensors
    VerticalSlash.select_tensors = lambda *_: index
    try:
        return attend(q, k, v, Causal(), PATTERN, cp, "eager")
    finally:
        VerticalSlash.select_tensors = select


def _run(cp: ContextParallel | None, mask: Mask, pattern: VerticalSlash) -> list[Tensor]:
    """out, dq, dk and dv, whole."""
    inputs = _inputs()
    if cp is not None:
        inputs = [cp.shard(x, 2) for x in inputs]
    leaves = [x.clone().requires_grad_() for x in inputs]
    set_probe_seed(0)
    out = attend(*leaves, mask, pattern, cp, "eager", block_size=BLOCK)
    d_out = torch.cos(out.detach() * 3)
    gradients = torch.autograd.grad(out, leaves, d_out)
    whole = [out.detach(), *gradients]
    if cp is None:
        return whole
    return [cp.unshard(x, 2) for x in whole]


def _check_one_process(axes: tuple[int, ...], schedule: str) -> None:
    for circulates in ("kv", "q"):
        options = {"backward_circulates": circulates}
        by_index = ContextParallel(
            _mesh(axes), "striped", schedule, BLOCK, route_by="index", **options
        )
        by_mask = ContextParallel(
            _mesh(axes), "striped", schedule, BLOCK, route_by="mask", **options
        )
        for mask in (Causal(), Documents([100, 70, 22])):
            for pattern in (PATTERN, WITH_VERTICALS):
                got = _run(by_index, mask, pattern)
                _run(by_mask, mask, pattern)
                for x, y in zip(got, _run(None, mask, pattern), strict=True):
                    assert (x - y).abs().max() < 1e-9, (by_index.key, mask, pattern.key)
        # Three of four KV heads send nothing but where verticals ask for more diagonals.
        total = torch.tensor([by_index.bytes_sent, by_mask.bytes_sent])
        dist.all_reduce(total)
        assert total[0] < 0.8 * total[1]


@pytest.mark.parametrize(
    "axes, schedule", [((3,), "ring"), ((4,), "ring"), ((2, 2), "double_ring")], ids=str
)
def test_the_result_is_that_of_one_process(axes, schedule):
    run_processes(torch.Size(axes).numel(), _check_one_process, axes, schedule)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match='"near" is unknown; write "auto", "mask" or "index"'):
        ContextParallel(None, route_by="near")
    with pytest.raises(ValueError, match='write layout "striped" or route_by "auto"'):
        ContextParallel(None, "balanced", route_by="index")
