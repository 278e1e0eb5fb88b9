"""Block-sparse attention kernels and the triton backend against the eager backend in fp64.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py), where bf16 is wrong:
fp32 and fp16 there.
"""

import math
import sys

import pytest
import torch
from torch import Tensor

from tests.reference import DEVICE, by_token, relative_error
from tests.slice_cases import random_legal
from titan_sparse.attention.backends import BACKENDS, base
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.patterns.base import BlockIndex, DenseIndex
from titan_sparse.attention.tiles import block_tiles, vertical_tiles
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.block_sparse import ChosenChunks, Piece

triton, eager = BACKENDS["triton"], BACKENDS["eager"]


class RandomIndex(BlockIndex):
    """Every block pair is selected with some probability, the last query block selects
    none; random verticals."""

    def __init__(
        self, heads: int, blocks: int, block_size: int, batch: int, verticals: int, device: str
    ):
        g = torch.Generator().manual_seed(0)
        seq_len = blocks * block_size
        # Some places are left for the filling.
        count = max(1, verticals - 5)
        orders = [torch.randperm(seq_len, generator=g) for _ in range(batch * heads)]
        picked = torch.stack([order[:count] for order in orders]).sort(-1).values
        picked = torch.nn.functional.pad(picked, (0, verticals - count), value=seq_len)
        # [B, Hq, verticals]
        picked = picked.int().view(batch, heads, verticals)
        super().__init__(seq_len, block_size, picked.to(device))
        self.table = torch.rand(batch, heads, blocks, blocks, generator=g).to(device) < 0.4
        self.table[:, :, -1] = False

    def selects(self, q_blocks: Tensor, k_blocks: Tensor) -> Tensor:
        return self.table[:, :, q_blocks][..., k_blocks]

    def covers(self, q_blocks: Tensor, verticals: Tensor) -> Tensor:
        # [B, Hq, nq, blocks and one for no vertical] and [B, Hq, nq, C]
        computed = torch.nn.functional.pad(self.table[:, :, q_blocks], (0, 1))
        block = (verticals // self.block_size).long()[:, :, None]
        return computed.gather(3, block.expand(-1, -1, len(q_blocks), -1))


class Case:
    """Inputs of one rank: every second query block and the KV chunk of the other blocks, or
    everything if `whole`.
    """

    def __init__(
        self,
        mask,
        heads=(4, 2),
        dim=64,
        size=64,
        blocks=5,
        batch=2,
        verticals=1,
        whole=False,
        dtype=torch.float32,
        device=DEVICE,
    ):
        ranges = mask.rows(blocks * size, device)
        index = RandomIndex(heads[0], blocks, size, batch, verticals * size, device)
        numbers = torch.arange(blocks, device=device)
        q_blocks, k_blocks = (numbers, numbers) if whole else (numbers[::2], numbers[1::2])
        self.tiles = block_tiles(ranges, index, q_blocks, k_blocks, True)
        self.vertical_tiles = vertical_tiles(ranges, index, q_blocks, True)
        self.scale = 0.9 / math.sqrt(dim)
        g = torch.Generator().manual_seed(1)
        lengths = (len(q_blocks) * size, len(k_blocks) * size, verticals * size)
        shapes = (
            [(heads[0], lengths[0])] * 2
            + [(heads[1], lengths[1])] * 2
            + [(heads[0], lengths[2])] * 2
        )
        tensors = [
            torch.randn(batch, n, h, dim, generator=g).transpose(1, 2).to(device, dtype)
            for h, n in shapes
        ]
        self.q, self.d_out, self.k, self.v, self.k2, self.v2 = tensors

    def pieces(self) -> list[Piece]:
        """Blocks and verticals."""
        return [Piece(self.k, self.v, self.tiles), Piece(self.k2, self.v2, self.vertical_tiles)]

    def truth(self) -> list[Tensor]:
        return _exact(self.q, self.d_out, self.pieces(), self.scale)

    def fused(self) -> list[Tensor]:
        return _results(triton, self.q, self.d_out, self.pieces(), self.scale)


def _results(
    backend: base.Backend, q: Tensor, d_out: Tensor, pieces: list[Piece], scale: float
) -> list[Tensor]:
    """out, lse, dq, and dk and dv of each piece."""
    own = backend.forward(q, pieces, scale, base.Sum(q.dtype))
    dq, d_pieces = backend.backward(base.Queries(q, d_out, *own), pieces, scale, base.Sum(q.dtype))
    return [*own, dq, *(x for d_kv in d_pieces for x in d_kv)]


def _exact(q: Tensor, d_out: Tensor, pieces: list[Piece], scale: float) -> list[Tensor]:
    exact = [piece._replace(k=piece.k.double(), v=piece.v.double()) for piece in pieces]
    return _results(eager, q.double(), d_out.double(), exact, scale)


def _assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """out, lse and what follows. Rows that see nothing have an lse of -inf."""
    is_blind = want[1].isinf()
    assert torch.equal(got[1].isinf(), is_blind)
    assert (got[0][is_blind] == 0).all()
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert not a.isnan().any()
        assert relative_error(a.double().clamp(min=-1e9), b.clamp(min=-1e9)) < tolerance


DOCUMENTS = Documents([[130, 70, 3, 100], [20, 290]])
CASES = {
    "window": dict(mask=Causal(valid=(300, 170)) & SlidingWindow(90)),
    "documents": dict(mask=DOCUMENTS, whole=True),
    "group of 5": dict(mask=Causal(), heads=(5, 1), batch=1),
    "heads of their own": dict(mask=DOCUMENTS, heads=(3, 3), dim=32),
    "head_dim 96": dict(mask=Causal(), heads=(2, 1), dim=96, batch=1, verticals=2),
    "head_dim 256": dict(mask=Causal() & SlidingWindow(90), heads=(2, 1), dim=256, batch=1),
    "fp16": dict(mask=Causal(), heads=(2, 1), batch=1, dtype=torch.float16),
    "all blocks": dict(mask=Causal(), heads=(2, 1), blocks=6, batch=1, whole=True),
    "small blocks": dict(
        mask=Causal(valid=(160,)) & SlidingWindow(90),
        size=32,
        blocks=6,
        heads=(2, 1),
        batch=1,
        dim=16,
    ),
}


def _check(case: Case) -> None:
    want = case.truth()
    assert float(want[0].abs().max()) > 0
    _assert_close(case.fused(), want, 2e-3 if case.q.dtype == torch.float16 else 2e-5)


@pytest.mark.parametrize("name", CASES)
def test_blocks_and_verticals(name):
    if name == "small blocks" and not block_sparse.INTERPRETED:
        pytest.skip("small blocks are for the interpreter")
    _check(Case(**CASES[name]))


@pytest.mark.parametrize("name", ["head_dim 96", "fp16"])
def test_going_on_from_a_total(name):
    """Adding piece after piece to one total equals both pieces at once.

    out and dq of the total are fp32, and its memory is reused.
    """
    case = Case(**CASES[name])
    out, lse, dq, *rest = case.truth()
    tolerance = 2e-3 if case.q.dtype == torch.float16 else 2e-5
    blocks, verticals = case.pieces()

    def over_blocks() -> base.Partial:
        return triton.forward(case.q, [blocks], case.scale, base.Sum(torch.float32))

    total = over_blocks()
    got = triton.forward(case.q, [verticals], case.scale, base.Sum(torch.float32, total))
    assert got.out.data_ptr() == total.out.data_ptr()
    assert got.out.dtype == torch.float32
    _assert_close(list(got), [out, lse], tolerance)

    # The last piece may round the sum to the inputs' dtype. Dense kernels leave sums by token.
    so_far = over_blocks()
    so_far = so_far._replace(out=by_token(so_far.out))
    last = base.Sum(case.q.dtype, so_far)
    other = triton.forward(case.q, [verticals], case.scale, last)
    assert other.out.dtype == case.q.dtype
    _assert_close([other.out.float(), other.lse], [out, lse], 2 * tolerance)

    queries = base.Queries(case.q, case.d_out, out.to(case.q.dtype), lse.float())

    def backward(piece: Piece, d_total: Tensor | None):
        return triton.backward(queries, [piece], case.scale, base.Sum(torch.float32, d_total))

    d_total, [d_blocks] = backward(blocks, None)
    d_total, [d_verticals] = backward(verticals, by_token(d_total))
    gradients = [d_total, *d_blocks, *d_verticals]
    for gradient, want in zip(gradients, [dq, *rest], strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, want) < tolerance


@pytest.mark.parametrize(
    "name, choosing",
    [("random", False), ("strips", False), ("strips", True), ("blind", False)],
)
def test_slices(name, choosing):
    """The blocks of one rank and the chunk of another; also where each query has chosen chunks of
    keys as well."""
    size = 16 if block_sparse.INTERPRETED else 64
    seq_len = 4 * size
    written = {
        "random": random_legal(3, 9, seq_len),
        "strips": [
            (0, 5, 0, seq_len, "full"),
            (5, size + 3, 0, seq_len - 7, "inv_causal"),
            (size + 3, seq_len - 1, 0, seq_len, "causal"),
        ],
        "blind": [
            (3, seq_len // 2, 2 * size, seq_len, "bi_causal"),
            (seq_len - 9, seq_len, 0, 9, "full"),
        ],
    }
    g = torch.Generator().manual_seed(4)
    q_blocks, k_blocks = torch.tensor([3, 1], device=DEVICE), torch.tensor([0, 2, 3], device=DEVICE)
    index = DenseIndex(seq_len, size, torch.empty(1, 2, 0, dtype=torch.int32, device=DEVICE))
    rows = Slices.of(written[name]).rows(seq_len, DEVICE)
    tiles = block_tiles(rows, index, q_blocks, k_blocks, True)
    q, d_out = torch.randn(2, 1, 2, 2 * size, 16, generator=g).to(DEVICE)
    k, v = torch.randn(2, 1, 1, 3 * size, 16, generator=g).to(DEVICE)
    if choosing:
        words = torch.randint(8, (1, 2, 2 * size, 1), generator=g).int().to(DEVICE)
        chosen = ChosenChunks(words, torch.full_like(tiles.start, 3), size + 9)
        tiles = tiles._replace(chosen=chosen)
    pieces = [Piece(k, v, tiles)]
    want = _exact(q, d_out, pieces, 0.2)
    assert want[0].any()
    _assert_close(_results(triton, q, d_out, pieces, 0.2), want, 2e-5)


@pytest.mark.parametrize("parts", [(1, 3), (3, 2)], ids=str)
def test_splits_of_dk_and_dv(monkeypatch, parts):
    """Splitting a KV block's heads and their query lists changes only the order of the sum."""
    module = sys.modules["titan_sparse.kernels.block_sparse.backward"]
    monkeypatch.setattr(module, "key_splits", lambda *_: parts)
    case = Case(Causal(), heads=(3, 1), blocks=4, batch=1, whole=True)
    _assert_close(case.fused(), case.truth(), 2e-5)
