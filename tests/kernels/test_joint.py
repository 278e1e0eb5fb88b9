"""The kernels of budget = "joint", which sort no verticals, against their plain-torch twin."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash.joint import incidence, smallest_union
from titan_sparse.kernels import joint
from titan_sparse.kernels.budget import Segments
from titan_sparse.kernels.joint import Incidence
from titan_sparse.kernels.joint import kernel as joint_kernel
from titan_sparse.kernels.joint import walk as joint_walk
from titan_sparse.kernels.probe import blocks_back

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 8


class Case(NamedTuple):
    """Rows of masses of a mask's sequences, and VerticalSlash's parameters."""

    mask: Mask
    batch: int
    seq_len: int
    parameters: dict
    masses: str = "heavy"


CASES = {
    "one span": Case(Causal(), 1, 56, dict(recall=0.9)),
    "one block back": Case(Causal(valid=(45,)), 1, 48, dict(recall=0.8, probe=1)),
    "three blocks back": Case(Causal(), 1, 64, dict(recall=0.9, probe=12)),
    "documents": Case(Documents([[19, 3, 27], [20, 20, 9]]), 2, 56, dict(recall=0.9)),
    "padded": Case(Causal(valid=(64, 33)), 2, 64, dict(recall=0.95)),
    "window": Case(Causal() & SlidingWindow(30), 1, 72, dict(recall=0.9), "window"),
    "caps": Case(Causal(), 1, 72, dict(recall=0.9, max_columns=4, max_slashes=2, sinks=1)),
    "no verticals": Case(Causal(), 1, 64, dict(recall=0.7, max_columns=0)),
    "floors": Case(
        Causal(valid=(40,)),
        1,
        48,
        dict(recall=0.25, sinks=3, min_columns=4, min_slashes=4, local_diagonals=2),
        "equal diagonals",
    ),
    "equal diagonals": Case(Causal(), 1, 64, dict(recall=0.5, probe=1, sinks=0), "equal diagonals"),
    "floors, documents": Case(
        Documents([[19, 3, 27]]),
        1,
        56,
        dict(recall=0.1, min_columns=30, max_columns=40, min_slashes=4),
    ),
    "everything": Case(Causal(), 1, 64, dict(recall=1.0)),
    "ties": Case(Causal(), 1, 72, dict(recall=0.6, sinks=0), "ties"),
    "ties, caps": Case(
        Documents([[40, 29]]), 1, 72, dict(recall=0.8, max_columns=9, max_slashes=2), "ties"
    ),
    "all alike": Case(Causal(), 1, 48, dict(recall=0.5, probe=1), "alike"),
    "no mass": Case(Causal(), 1, 48, dict(recall=0.9, min_columns=5, min_slashes=2), "none"),
    "one block": Case(Causal(valid=(5,)), 1, 8, dict(recall=0.9, sinks=0)),
    "in parts of rows": Case(Causal(), 1, 560, dict(recall=0.95), "slashes"),
}
SLOW = {
    "padded",
    "window",
    "ties",
    "no verticals",
    "floors, documents",
    "everything",
    "ties, caps",
    "all alike",
    "no mass",
    "in parts of rows",
}


def _geometry(
    case: Case, rows: int, block_size: int = BLOCK, device: str = DEVICE
) -> tuple[Segments, Incidence, int]:
    """And the number of the probe's queries."""
    defaults = dict(sinks=2, local_diagonals=1, dense_below=2 * block_size, budget="joint")
    pattern = VerticalSlash(**defaults | case.parameters)
    mask_rows, queries = case.mask.rows(case.seq_len, device), pattern.probe_queries(block_size)
    spans = pattern._spans(mask_rows, case.batch, block_size)
    diagonals = case.seq_len // block_size + spans.start.shape[1] - 1
    segments = pattern._segments(
        spans, case.seq_len, diagonals, torch.arange(rows, device=device) * case.batch // rows
    )
    return (
        segments,
        incidence(spans, segments, case.seq_len, blocks_back(queries, block_size), block_size),
        queries,
    )


def _masses(kind: str, of: Incidence, rows: int, queries: int) -> Tensor:
    """fp32 [N, K, U, b], only where a vertical lies in a span and meets a diagonal."""
    shape = (rows, of.diagonal.shape[1], of.diagonal.shape[3], of.slot.shape[2])
    generator = torch.Generator().manual_seed(rows + shape[1])
    random, slashes = (
        torch.rand(size, generator=generator).to(of.slot.device)
        for size in (shape, (*shape[:3], 1))
    )
    if kind == "ties":
        mass = (random * 4).floor() / 256
    elif kind == "equal diagonals":
        mass = (slashes * 3).floor() * torch.where(random < 0.1, 4, 1) / 256
    elif kind in ("alike", "none"):
        mass = torch.full_like(random, 1 / 256 if kind == "alike" else 0)
    else:
        mass = random**12
    if kind == "window":
        mass[:, : shape[1] * 2 // 3] = 0
    if kind == "slashes":
        mass *= slashes**4 + 1e-4
    return mass * queries / max(mass.sum((1, 2, 3)).max().item(), queries)


def _real(mass: Tensor, of: Incidence, sequence: Tensor) -> Tensor:
    of = of.of_rows(sequence.long())
    verticals, diagonals = of.split(torch.ones_like(of.segment, dtype=torch.float32))
    inside = of.split(of.segment)[0].view_as(of.slot) < of.free_verticals.shape[1]
    return mass * of.of_verticals(diagonals) * inside[:, :, None]


def _chosen(case: Case, rows: int, block_size: int = BLOCK) -> list[tuple[Tensor, Tensor]]:
    """By kernels, and by the twin."""
    segments, of, queries = _geometry(case, rows, block_size)
    mass = _real(_masses(case.masses, of, rows, queries), of, segments.sequence)
    return [
        f(mass, segments, of, case.parameters["recall"], queries)
        for f in (joint.smallest_union, joint.smallest_union_naive)
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_unions_are_those_of_the_twin(name, monkeypatch):
    case = CASES[name]
    if name == "in parts of rows":
        monkeypatch.setattr(joint_walk, "_CHUNK", 16)
        monkeypatch.setattr(joint_kernel, "_CHUNK", 16)
    got, want = _chosen(case, 2)
    assert all(a.dtype == torch.bool and torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert want[0].any() and (name in ("one block", "everything") or not want[0].all())


def test_a_vertical_comes_before_a_diagonal_of_its_price():
    """Five verticals of 8, worth 8 / 0.25 each, and a diagonal of 32 for 1.

    Half of the 72 is reached by the verticals, which come first, and so no diagonal counts. The
    other way round it would be the diagonal and a vertical.
    """
    segments, of, _ = _geometry(Case(Causal(), 1, 64, dict(probe=1, sinks=0)), 1)
    mass = torch.zeros(1, 8, 1, BLOCK, device=DEVICE)
    mass[0, [0, 1, 2, 4, 5], 0, 3], mass[0, 3] = 8 / 128, 4 / 128
    for choose in (joint.smallest_union, joint.smallest_union_naive):
        selected, _ = choose(mass, segments, of, 0.5, 1)
        assert selected[0].nonzero().flatten().tolist() == [3, 11, 19, 35, 43, 64]


LONG = {
    "one span": Case(
        Causal(), 1, 131072, dict(recall=0.95, sinks=30, local_diagonals=2), "slashes"
    ),
    "a cap": Case(
        Causal(valid=(130001,)),
        1,
        131072,
        dict(recall=0.95, max_columns=100, max_slashes=20),
        "slashes",
    ),
    "more diagonals than a walk's step": Case(Causal(), 1, 262144, dict(recall=0.9), "slashes"),
    "documents": Case(
        Documents([[40000, 50, 60000, 20000]] * 2), 2, 131072, dict(recall=0.9, dense_below=4096)
    ),
    "ties": Case(Causal(), 1, 65536, dict(recall=0.6, sinks=0), "ties"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", LONG)
def test_long_rows_on_a_gpu(name):
    got, want = _chosen(LONG[name], 16, block_size=128)
    assert (
        all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        and want[0].any()
        and not want[0].all()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_choice_waits_for_nothing_on_a_gpu():
    """And is few launches."""
    segments, of, queries = _geometry(LONG["one span"], 16, 128)
    mass = _real(_masses("slashes", of, 16, queries), of, segments.sequence)

    def choose() -> tuple[Tensor, Tensor]:
        return smallest_union(mass, segments, of, 0.95, queries)

    want = joint.smallest_union(mass, segments, of, 0.95, queries)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = choose()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with torch.profiler.profile() as profile:
        choose()
        torch.cuda.synchronize()
    launched = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert 0 < len(launched) <= 40
