"""Kernels over gathered queries: lists against their twins, attention against dense attention.

Without a GPU they run in Triton's interpreter (tests/conftest.py), where bf16 is wrong.
"""

import functools
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels import gathered_twin as naive
from tests.reference import dense_attention, gradients, relative_error
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask
from titan_sparse.attention.patterns import MoBA
from titan_sparse.kernels.bits import pack
from titan_sparse.kernels.gathered import (
    Choices,
    chosen_pairs,
    gather_queries,
    tile_table,
)
from titan_sparse.kernels.gathered.launch import Share, list_shares, total_shares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_choices(
    documents: list[list[int]], chunk: int, slots: int, heads: int, padding: int = 0
) -> Choices:
    """Every query chooses some of the earlier chunks of its document, up to `slots`; the sequences'
    last `padding` tokens none."""
    g = drawn(chunk)
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


class Case(NamedTuple):
    """attend() with queries that are gathered by chunk."""

    pattern: MoBA
    mask: Mask
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    tokens: int = 256
    dtype: torch.dtype = torch.float32

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        *qkv, d_out = (
            torch.randn(2, self.tokens, heads, self.dim, generator=drawn(heads + place))
            # [B, S, H, D] in memory, as models have it.
            .transpose(1, 2)
            .to(DEVICE, self.dtype)
            for place, heads in enumerate((self.heads[0], *self.heads[1:] * 2, self.heads[0]))
        )
        return qkv, d_out


CASES = {
    "causal": Case(MoBA(64, 3), Causal(), dim=32),
    "packed, a chunk of no tile": Case(
        MoBA(72, 3), Documents([[146, 40, 50], [20, 236]]), heads=(3, 1)
    ),
    "head_dim 96": Case(MoBA(64, 3), Causal(), heads=(2, 2), dim=96),
    "fp16": Case(MoBA(64, 3), Causal(), heads=(2, 1), dim=64, dtype=torch.float16),
}


def _results(case: Case, qkv: list[Tensor], d_out: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """out, lse, dq, dk and dv, and the same by dense attention over the pairs that were chosen."""
    options = dict(mask=case.mask, pattern=case.pattern, block_size=64, backend="triton")
    _, aux = attend(*qkv, **options, return_aux=True)
    seen = aux.index.dense(case.mask)
    exact = [x.double() for x in qkv]
    want, want_grads = gradients(lambda *x: dense_attention(*x, seen)[0], d_out.double(), *exact)
    out, grads = gradients(functools.partial(attend, **options), d_out, *qkv)
    want_lse = dense_attention(*exact, seen)[1]
    return [out, aux.lse, *grads], [want, want_lse, *want_grads]


def _check(case: Case) -> None:
    got, want = _results(case, *case.inputs())
    tolerance = 2e-3 if case.dtype == torch.float16 else 3e-6
    assert torch.equal(got[1].isinf(), want[1].isinf())
    for a, b in zip(got, want, strict=True):
        assert relative_error(a.double().clamp(min=-1e9), b.clamp(min=-1e9)) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_attention_is_dense_attention_over_what_was_chosen(name):
    _check(CASES[name])


def test_lists_cut_into_parts(monkeypatch):
    """The queries of a chunk are split over several programs, whose sums are added."""
    module = sys.modules["titan_sparse.kernels.gathered.backward"]
    monkeypatch.setattr(module, "list_splits", lambda programs: 3)
    _check(CASES["packed, a chunk of no tile"])


def test_logits_far_below_zero():
    """Keys behind a chunk's end have logit 0, far above all others, and must not cause infinities."""
    case = Case(MoBA(72, 2), Causal(), heads=(2, 1), tokens=144)
    (q, k, v), d_out = case.inputs()
    got, want = _results(case, [10 + q, -30 + k, v], d_out)
    assert want[1].max() < -200
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-3


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
