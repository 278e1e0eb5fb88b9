"""Kernels over gathered queries against their twins in plain torch.

Without a GPU they run in Triton's interpreter (tests/conftest.py), where bf16 is wrong.
"""

import sys

import pytest
import torch
from torch import Tensor

from tests.kernels import gathered_twin as naive
from tests.reference import relative_error
from titan_sparse.kernels import block_sparse
from titan_sparse.kernels.bits import pack
from titan_sparse.kernels.gathered import (
    Choices,
    chosen_pairs,
    gather_queries,
    tile_table,
)
from titan_sparse.kernels.gathered.backward import add_key_gradient, add_query_gradient
from titan_sparse.kernels.gathered.forward import add_attention
from titan_sparse.kernels.gathered.launch import Share, list_shares, row_tile, total_shares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw_choices(
    documents: list[list[int]], chunk: int, slots: int, heads: int, padding: int = 0
) -> Choices:
    """Every query chooses some of the earlier chunks of its document, up to `slots`; the sequences'
    last `padding` tokens none."""
    g = torch.Generator().manual_seed(chunk)
    batch = len(documents)
    seq_len = sum(documents[0])
    room = seq_len // chunk
    earlier = torch.zeros(batch, seq_len, dtype=torch.int32)
    offset = torch.zeros_like(earlier)
    begin = torch.full((batch, room), seq_len, dtype=torch.int32)
    # Bits that do not count are set as well: a query's own chunk, and later ones.
    width = -(-seq_len // chunk // 32) * 32
    chosen = torch.ones(batch, heads, seq_len, width, dtype=torch.bool)
    for sequence, lengths in enumerate(documents):
        start = 0
        chunks = 0
        for length in lengths:
            own = torch.arange(length) // chunk
            whole = length // chunk
            earlier[sequence, start : start + length] = own
            offset[sequence, start : start + length] = chunks
            first = start + torch.arange(whole) * chunk
            begin[sequence, chunks : chunks + whole] = first
            for head in range(heads):
                for i, count in enumerate(own.tolist()):
                    some = torch.randperm(count, generator=g)[: slots - i % 2]
                    chosen[sequence, head, start + i, :count] = False
                    chosen[sequence, head, start + i, some] = True
            start += length
            chunks += whole
    earlier[:, seq_len - padding :] = 0
    tensors = (pack(chosen), earlier, offset, begin)
    return Choices(*(x.to(DEVICE) for x in tensors), tokens=chunk, slots=slots)


LISTS = {
    "one document": dict(documents=[[330]], chunk=32, slots=3, heads=3),
    "packed": dict(documents=[[200, 30, 100], [15, 315]], chunk=20, slots=4, heads=2, padding=40),
    "more than a word of chunks": dict(documents=[[600]], chunk=16, slots=5, heads=1),
    "one slot": dict(documents=[[64, 64]], chunk=32, slots=1, heads=2),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(name):
    choices = draw_choices(**LISTS[name])
    chunks = choices.begin.shape[1]
    pairs = chosen_pairs(choices)
    assert torch.equal(pairs, naive.chosen_pairs(choices))
    got = gather_queries(pairs, chunks)
    want = naive.gather_queries(pairs, chunks)
    assert torch.equal(got.queries, want.queries)
    assert torch.equal(got.begin, want.begin)
    # Something was chosen, and not everything.
    used = want.begin[..., chunks * choices.slots]
    assert (used > 0).all() and (used < want.queries.shape[-1]).any()


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_hold_every_pair_once_a_slot(rows):
    choices = draw_choices(**LISTS["packed"])
    chunks = choices.begin.shape[1]
    pairs = naive.chosen_pairs(choices)
    gathered = naive.gather_queries(pairs, chunks)
    chunk, first, count = (field.tolist() for field in tile_table(gathered, rows)[:3])
    batch, heads, slots, _ = pairs.shape
    for b in range(batch):
        for h in range(heads):
            listed = gathered.queries[b, h].tolist()
            for slot in range(slots):
                found = []
                for number in range(len(count[b][h][slot])):
                    begin = first[b][h][slot][number]
                    length = count[b][h][slot][number]
                    assert 0 <= length <= rows
                    c = chunk[b][h][slot][number]
                    found += [(query, c) for query in listed[begin : begin + length]]
                queries = [query for query, _ in found]
                assert len(set(queries)) == len(queries)
                wanted = []
                for query, pair in enumerate(pairs[b, h, slot].tolist()):
                    if pair // slots < chunks:
                        wanted.append((query, pair // slots))
                assert sorted(found) == wanted


class Case:
    """Inputs with sums that some queries have met keys for, and others not."""

    def __init__(self, lists: dict, kv_heads: int, dim: int, size: int, dtype=torch.float32):
        self.choices = draw_choices(**lists)
        batch, heads, seq_len, _ = self.choices.words.shape
        g = torch.Generator().manual_seed(dim)

        def draw(heads: int) -> Tensor:
            # [B, S, H, D] in memory, as models have it.
            x = torch.randn(batch, seq_len, heads, dim, generator=g)
            return x.transpose(1, 2).to(DEVICE, dtype)

        self.q, self.d_out = draw(heads), draw(heads)
        self.k, self.v = draw(kv_heads), draw(kv_heads)
        self.out = draw(heads).float().contiguous()
        self.lse = torch.randn(batch, heads, seq_len, generator=g).to(DEVICE) + 3
        self.out[:, :, ::7] = 0
        self.lse[:, :, ::7] = -torch.inf
        self.size = size
        self.scale = dim**-0.5

    def lists(self):
        chunks = self.choices.begin.shape[1]
        gathered = naive.gather_queries(naive.chosen_pairs(self.choices), chunks)
        chunk = self.choices.tokens
        rows, _ = row_tile(self.q.shape[-1], self.size, self.q.element_size(), chunk)
        return gathered, tile_table(gathered, rows)

    def kernels(self) -> list[Tensor]:
        lists = self.lists()
        out, lse = self.out.clone(), self.lse.clone()
        add_attention(
            self.q, self.k, self.v, self.choices, lists, self.scale, self.size, (out, lse)
        )
        nobody = torch.zeros_like(self.choices.earlier)
        tiles = block_sparse.Tiles(None, None, nobody, nobody, nobody, None, self.size)
        side = block_sparse.query_side(self.d_out, self.q, out, lse, tiles, self.scale)
        # What is there already stays: the gradient is added.
        dq = torch.ones_like(self.out)
        dk = torch.ones(self.k.shape, dtype=torch.float32, device=DEVICE)
        dv = torch.ones_like(dk)
        add_query_gradient(side, self.k, self.v, self.choices, lists, dq)
        add_key_gradient(side, self.k, self.v, self.choices, lists[0], (dk, dv))
        return [out, lse, dq - 1, dk - 1, dv - 1]

    def twin(self) -> list[Tensor]:
        gathered, _ = self.lists()
        tensors = [x.double() for x in (self.q, self.k, self.v)]
        total = (self.out.double(), self.lse.double())
        out, lse = naive.forward(*tensors, self.choices, gathered, self.scale, total)
        gradients = naive.backward(
            self.d_out.double(),
            tensors[0],
            out,
            lse,
            *tensors[1:],
            self.choices,
            gathered,
            self.scale,
        )
        return [out, lse, *gradients]


CASES = {
    "causal": Case(dict(documents=[[320]], chunk=64, slots=3, heads=4), 2, 32, 64),
    "packed, a chunk of no tile": Case(
        dict(documents=[[190, 40, 90], [20, 300]], chunk=72, slots=2, heads=3, padding=20),
        1,
        16,
        64,
    ),
    "head_dim 96": Case(dict(documents=[[256]], chunk=64, slots=2, heads=2), 2, 96, 64),
    "fp16": Case(dict(documents=[[256]], chunk=64, slots=2, heads=2), 1, 64, 64, torch.float16),
}


def _check(case: Case) -> None:
    got = case.kernels()
    want = case.twin()
    tolerance = 2e-3 if case.q.dtype == torch.float16 else 3e-6
    assert torch.equal(got[1].isinf(), want[1].isinf())
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 0
        assert relative_error(a.clamp(min=-1e9), b.clamp(min=-1e9)) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_their_twins(name):
    _check(CASES[name])


def test_lists_cut_into_parts(monkeypatch):
    """The queries of a chunk are split over several programs, whose sums are added."""
    module = sys.modules["titan_sparse.kernels.gathered.backward"]
    monkeypatch.setattr(module, "list_splits", lambda programs: 3)
    _check(CASES["packed, a chunk of no tile"])


def test_logits_far_below_zero():
    """Keys behind a chunk's end have logit 0, far above all others, and must not cause infinities."""
    case = Case(dict(documents=[[144]], chunk=72, slots=1, heads=2), 1, 16, 64)
    case.q = 10 + case.q
    case.k = -30 + case.k
    # Every row's normalizer is far below 0.
    case.lse.fill_(-torch.inf)
    case.out.zero_()
    got, want = case.kernels(), case.twin()
    assert want[1][:, :, 72:].max() < -200
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[:, :, 72:].double(), b[:, :, 72:], rtol=1e-3, atol=1e-3)
        assert not a.isnan().any()


def test_nobody_chose():
    case = Case(dict(documents=[[128]], chunk=64, slots=1, heads=1), 1, 16, 64)
    case.choices.earlier.zero_()
    out, lse, *gradients = case.kernels()
    assert torch.equal(out, case.out) and torch.equal(lse, case.lse)
    assert all((x == 0).all() for x in gradients)


def _covered(shares: list[Share], batch: int, heads: int, kv_heads: int) -> None:
    """Every head is in one share, together with its KV head, and a share is contiguous."""
    seen = torch.zeros(batch, heads)
    for share in shares:
        some = torch.arange(heads)[share.heads]
        seen[share.batches, share.heads] += 1
        group = heads // kv_heads
        assert (some // group).unique().tolist() == list(range(kv_heads))[share.kv_heads]
        # Kernels find a KV head by equal groups.
        kv_count = share.kv_heads.stop - share.kv_heads.start
        assert len(some) % kv_count == 0
        assert torch.zeros(batch, heads, 4, 4)[share.batches, share.heads].is_contiguous()
    assert (seen == 1).all()


@pytest.mark.parametrize("heads", [(16, 2), (15, 5), (9, 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq_len", [128, 1 << 16, 1 << 20])
def test_shares(heads, batch, seq_len):
    heads, kv_heads = heads
    _covered(total_shares((batch, heads, seq_len, 128), kv_heads), batch, heads, kv_heads)
    _covered(list_shares((batch, heads, seq_len), kv_heads, 128, 11), batch, heads, kv_heads)
