"""Tokens traded for heads, over 2, 3 and 4 processes against one: values,
gradients, and what is sent."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.attention.collectives import collectives, counts
from tests.attention.context_parallel.against_one import (
    MASKS,
    check_dense_kernels,
    check_everything,
    check_groups_beside_each_other,
    mesh_of,
)
from tests.attention.problems import PATTERNS, SEQ_LEN, problem
from tests.distributed import run_processes
from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS
from titan_sparse.attention.context_parallel.schedules import kv_copies
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe import recording
from titan_sparse.attention.ops import SAVED_OPS
from titan_sparse.attention.patterns import Dense

VERTICAL = PATTERNS["vertical_slash"]
PACKED = MASKS[2]
WAYS = [(layout, "ulysses", "auto") for layout in ALL_LAYOUTS]
BETWEEN_NODES = [*WAYS, ("zigzag", "ulysses", "q")]
"""Queries go round the ring between nodes."""


def _check_values(axes: tuple[int, ...], heads: tuple[int, int]) -> None:
    of = BETWEEN_NODES if len(axes) == 2 else WAYS
    check_everything(axes, MASKS, PATTERNS.values(), heads, every=4, of=of)


def _check_rectangles(axes: tuple[int, ...]) -> None:
    """Kernels without tables of tiles compute all of one node at once, and
    rectangles between nodes."""
    mesh = mesh_of(axes)
    for layout in ("contiguous", "zigzag", "striped"):
        cp = ContextParallel(mesh, layout, "ulysses", SEQ_LEN // (2 * mesh.size()))
        by_layout = {"contiguous": cp.rank // cp.intra + 1, "zigzag": cp.inter, "striped": 0}
        pieces = check_dense_kernels(cp, (8, 4))
        assert pieces == (1 if cp.inter == 1 else by_layout[layout]), cp.key


def _check_what_is_sent(axes: tuple[int, ...], heads: tuple[int, int]) -> None:
    """The formulas of docs/context_parallel.md. Inside a node only the trades communicate."""
    cp = ContextParallel(mesh_of(axes), "striped", "ulysses", 16)
    qkv = problem(heads).inputs
    leaves = [cp.shard(x, 2).clone().requires_grad_() for x in qkv]
    batch, _, length, dim = leaves[0].shape
    copies = kv_copies(*heads, cp.intra)
    token = (cp.intra - 1) / cp.intra * batch * length * dim * 8
    traded = token * (2 * heads[0] + 2 * copies * heads[1])
    with collectives() as said:
        attend(*leaves, Causal(), VERTICAL, cp, "eager")
    first = cp.rank // cp.intra * cp.intra
    of_node = [call for call in said if call.ranks == tuple(cp.ranks[first : first + cp.intra])]
    assert counts(of_node) == {"all_to_all": 2}
    if cp.inter == 1:
        # Selection and verticals, too, are those of one rank.
        assert said == of_node and set(cp.sent) == {"inner"}
    cp.sent.clear()
    with recording(thumbnail_cells=4) as seen:
        out = attend(*leaves, Causal(), VERTICAL, cp, "eager")
        forward = cp.sent["inner"]
        out.sum().backward()
    if cp.inter == 1:
        assert seen.bytes_sent == 2 * forward
        assert seen.bytes_of_selection == seen.bytes_of_verticals == 0
    # Keys and values of a node's tokens go once round, for the heads of a rank.
    chunk = 2 * batch * length * dim * 8 * copies * heads[1]
    assert forward == traded + (cp.inter - 1) * chunk
    whole_chunk = 2 * batch * length * dim * 8 * heads[1]
    assert seen.plain_ring_bytes == whole_chunk * (cp.size - 1) * 3
    assert len(seen.thumbnails[0]) == heads[0]
    # Trades count as time that is not computing.
    by_rank = seen.by_rank()
    assert (by_rank.elapsed > by_rank.compute).all()
    [timed] = seen.calls
    assert len(timed.trades) == 2


def _check_compiled(axes: tuple[int, ...]) -> None:
    """In one graph, with and without checkpointing, which keeps attention's results."""
    cp = ContextParallel(mesh_of(axes), "striped", "ulysses", 16)
    qkv = problem((4, 2)).inputs

    def policy(_, op, *args, **kwargs) -> Policy:
        return Policy.MUST_SAVE if op in SAVED_OPS else Policy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    whole_graph = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    for pattern, mask in ((Dense(), Causal()), (VERTICAL, PACKED)):

        def block(*qkv, mask=mask, pattern=pattern):
            q, k, v = (x.sin() for x in qkv)
            return attend(q, k, v, mask, pattern, cp, "eager").cos()

        def kept(*qkv, block=block):
            return checkpoint(block, *qkv, use_reentrant=False, context_fn=contexts)

        results = []
        for call in (block, kept, whole_graph(block), whole_graph(kept)):
            leaves = [cp.shard(x, 2).clone().requires_grad_() for x in qkv]
            with recording() as seen:
                out = call(*leaves)
                gradients = torch.autograd.grad(out.square().sum(), leaves)
            # What checkpointing repeats is not counted again.
            assert len(seen.visited) == len(seen.calls) == 1
            results.append([out.detach(), *gradients])
        for got in results[1:]:
            torch.testing.assert_close(got, results[0], rtol=1e-12, atol=1e-12)


def _check_index(axes: tuple[int, ...]) -> None:
    """return_aux gives the index of all heads, on every rank."""
    cp = ContextParallel(mesh_of(axes), "striped", "ulysses", 16)
    local = [cp.shard(x, 2) for x in problem((4, 2)).inputs]
    for pattern in PATTERNS.values():
        aux = attend(*local, PACKED, pattern, cp, return_aux=True)[1]
        assert not pattern.dynamic or aux.index.heads == 4
    assert attend(*(x[:0] for x in local), Causal(), Dense(), cp).shape == local[0][:0].shape
    half = [x.half() for x in local]
    with torch.autocast("cpu", torch.bfloat16):
        whole = cp.unshard(attend(*half, Causal(), Dense(), cp), -2)
    assert torch.equal(whole, cp.unshard(attend(*half, Causal(), Dense(), cp), 2))


def _check_two() -> None:
    # Three query heads a rank, of two KV heads.
    _check_values((2,), (6, 3))
    _check_rectangles((2,))
    _check_what_is_sent((2,), (6, 3))
    _check_compiled((2,))
    _check_index((2,))


def _check_three() -> None:
    _check_values((3,), (6, 2))
    _check_what_is_sent((3,), (6, 2))


def _check_four() -> None:
    _check_values((2, 2), (4, 2))
    # Every KV head on two ranks, and a ring alone.
    _check_values((4,), (8, 2))
    _check_values((4, 1), (3, 1))
    _check_rectangles((2, 2))
    _check_what_is_sent((2, 2), (8, 2))
    _check_index((2, 2))
    check_groups_beside_each_other("ulysses")


@pytest.mark.parametrize("check", [_check_two, _check_three, _check_four])
def test_equals_one_rank(check):
    run_processes({_check_two: 2, _check_three: 3, _check_four: 4}[check], check)


@pytest.mark.parametrize(
    "heads, kv_heads, ranks, copies",
    [(16, 8, 2, 1), (16, 2, 4, 2), (14, 2, 7, 7), (12, 4, 6, 3), (9, 3, 3, 1), (8, 1, 4, 4)],
)
def test_kv_heads_are_repeated_no_more_than_needed(heads, kv_heads, ranks, copies):
    assert kv_copies(heads, kv_heads, ranks) == copies
    # By hand: the KV heads that each rank's query heads need, in runs.
    group = heads // kv_heads
    own = heads // ranks
    needed = 0
    for rank in range(ranks):
        of_rank = [head // group for head in range(rank * own, (rank + 1) * own)]
        needed = max(needed, len(set(of_rank)))
    assert needed * ranks <= copies * kv_heads


def test_refusals():
    with fake_world(4):
        qkv = problem((6, 2)).inputs
        cp = ContextParallel(mesh_of((4,)), "striped", "ulysses", 16)
        local = [cp.shard(x, 2) for x in qkv]
        with pytest.raises(ValueError, match=r"6 query heads .* \[1, 2\].*all_gather"):
            attend(*local, cp=cp)
        # As advised.
        for axes in ((4, 1), (2, 2)):
            mesh = mesh_of(axes)
            attend(*local, cp=ContextParallel(mesh, "striped", "ulysses", 16))
        attend(*local, cp=ContextParallel(mesh_of((4,)), "striped", "all_gather", 16))
        with pytest.raises(ValueError, match='recomputed=0.5 .* "ulysses" between nodes'):
            attend(*local, cp=ContextParallel(mesh, "striped", "ulysses", 16), recomputed=0.5)
        attend(*local, cp=ContextParallel(mesh, "striped", "double_ring", 16), recomputed=0.5)
