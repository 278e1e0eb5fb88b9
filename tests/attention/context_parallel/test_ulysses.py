"""Tokens traded for heads, over 2, 3 and 4 processes against one: values, gradients, and what is sent."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.attention.collectives import collectives, counts
from tests.attention.context_parallel.test_group import (
    MASKS,
    NAMES,
    PATTERNS,
    SEQ_LEN,
    _everything,
    _inputs,
    _parallel,
)
from tests.attention.dense_twin import let_eager_serve_dense
from tests.distributed import on_one_rank, run_processes
from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel import dense
from titan_sparse.attention.context_parallel.schedules import kv_copies
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices
from titan_sparse.attention.observe import recording
from titan_sparse.attention.ops import SAVED_OPS
from titan_sparse.attention.patterns import Dense, MoBA, XAttention

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
BY_BLOCKS = [
    MoBA(chunk_size=24, top_k=3),
    XAttention(threshold=0.7, stride=4, dense_below=24),
]
PACKED = Documents([[101, 7, 1, 60], [45, 45, 45, 45]]) & SlidingWindow(50)


def _mesh(axes: tuple[int, ...]) -> DeviceMesh:
    names = ("cp_inter", "cp_intra") if len(axes) == 2 else ("cp",)
    return init_device_mesh("cpu", axes, mesh_dim_names=names)


def _check_values(axes: tuple[int, ...], heads: tuple[int, int], every: int) -> None:
    mesh = _mesh(axes)
    block = SEQ_LEN // mesh.size() // (4 if mesh.size() < 4 else 2)
    full, d_out = _inputs(heads)
    contexts = [ContextParallel(mesh, layout, "ulysses", block) for layout in LAYOUTS]
    if len(axes) == 2:
        # Queries go round the ring between nodes.
        contexts.append(ContextParallel(mesh, "zigzag", "ulysses", block, "q"))
    cases = itertools.product(MASKS, [*PATTERNS, *BY_BLOCKS])
    for number, (mask, pattern) in enumerate(cases):
        if isinstance(mask, Slices) and pattern.dynamic:
            continue
        inputs = full if number % 2 else full[:3]
        wanted = on_one_rank(_everything, inputs, d_out, mask, pattern, None, block)
        for cp in contexts[number % every :: every]:
            shares = (0.0, 0.4) if len(axes) == 1 and mask.rows(SEQ_LEN).causal else (0.0,)
            for recomputed in shares:
                got = _parallel(cp, inputs, d_out, mask, pattern, recomputed)
                for name, x, want in zip(NAMES, got, wanted):
                    gap = (x - want).abs().nan_to_num(0).max().item()
                    case = (name, gap, cp.key, mask, pattern.key, recomputed)
                    assert torch.equal(x.isfinite(), want.isfinite()) and gap < 1e-9, case
                assert len(got) == len(wanted)


def _check_rectangles(axes: tuple[int, ...]) -> None:
    """Kernels without tables of tiles compute all of one node at once, and rectangles between nodes."""
    mesh = _mesh(axes)
    block = SEQ_LEN // (2 * mesh.size())
    (*full, _), d_out = _inputs((8, 4))
    wanted = on_one_rank(_everything, full, d_out, Causal(), Dense(), None, block)
    for layout in ("contiguous", "zigzag", "striped"):
        cp = ContextParallel(mesh, layout, "ulysses", block)
        used = []

        def noted(*args, run=dense.backward, used=used):
            used.append(args[1])
            return run(*args)

        with pytest.MonkeyPatch.context() as patch:
            let_eager_serve_dense(patch)
            patch.setattr(dense, "backward", noted)
            got = _parallel(cp, full, d_out, Causal(), Dense())
        for name, x, want in zip(NAMES, got, wanted):
            assert (x - want).abs().max() < 1e-9, (name, cp.key)
        nodes = axes[0] if len(axes) == 2 else 1
        by_layout = {"contiguous": cp.rank // cp.intra + 1, "zigzag": nodes, "striped": 0}
        assert len(used) == (1 if nodes == 1 else by_layout[layout]), cp.key


def _check_what_is_sent(axes: tuple[int, ...], heads: tuple[int, int]) -> None:
    """The formulas of docs/context_parallel.md. Inside a node only the trades communicate."""
    cp = ContextParallel(_mesh(axes), "striped", "ulysses", 16)
    *qkv, _ = _inputs(heads)[0]
    leaves = [cp.shard(x, 2).clone().requires_grad_() for x in qkv]
    batch, _, length, dim = leaves[0].shape
    copies = kv_copies(*heads, cp.intra)
    token = (cp.intra - 1) / cp.intra * batch * length * dim * 8
    traded = token * (2 * heads[0] + 2 * copies * heads[1])
    with collectives() as said:
        attend(*leaves, Causal(), PATTERNS[1], cp, "eager")
    first = cp.rank // cp.intra * cp.intra
    of_node = [call for call in said if call.ranks == tuple(cp.ranks[first : first + cp.intra])]
    assert counts(of_node) == {"all_to_all": 2}
    if cp.inter == 1:
        # Selection and verticals, too, are those of one rank.
        assert said == of_node and set(cp.sent) == {"inner"}
    cp.sent.clear()
    with recording(thumbnail_cells=4) as seen:
        out = attend(*leaves, Causal(), PATTERNS[1], cp, "eager")
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
    cp = ContextParallel(_mesh(axes), "striped", "ulysses", 16)
    *qkv, _ = _inputs((4, 2))[0]

    def policy(_, op, *args, **kwargs) -> Policy:
        return Policy.MUST_SAVE if op in SAVED_OPS else Policy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    whole_graph = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    for pattern, mask in ((Dense(), Causal()), (PATTERNS[1], PACKED)):

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
    cp = ContextParallel(_mesh(axes), "striped", "ulysses", 16)
    *qkv, _ = _inputs((4, 2))[0]
    local = [cp.shard(x, 2) for x in qkv]
    for pattern in (*PATTERNS[1:], *BY_BLOCKS):
        wanted = attend(*qkv, PACKED, pattern, block_size=16, return_aux=True)[1].index
        got = attend(*local, PACKED, pattern, cp, return_aux=True)[1].index
        assert got.heads == 4
        for x, y in zip(got.tensors(), wanted.tensors(), strict=True):
            assert torch.equal(x, y), pattern.key
    assert attend(*(x[:0] for x in local), Causal(), Dense(), cp).shape == local[0][:0].shape


def _check_two() -> None:
    # Three query heads a rank, of two KV heads.
    _check_values((2,), (6, 3), every=4)
    _check_rectangles((2,))
    _check_what_is_sent((2,), (6, 3))
    _check_compiled((2,))
    _check_index((2,))


def _check_three() -> None:
    _check_values((3,), (6, 2), every=4)
    _check_what_is_sent((3,), (6, 2))


def _check_four() -> None:
    _check_values((2, 2), (4, 2), every=4)
    # Every KV head on two ranks, and a ring alone.
    _check_values((4,), (8, 2), every=4)
    _check_values((4, 1), (3, 1), every=4)
    _check_rectangles((2, 2))
    _check_what_is_sent((2, 2), (8, 2))
    _check_index((2, 2))
    # dp x cp: a group that does not begin at global rank 0.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    cp = ContextParallel(mesh, "striped", "ulysses", 16)
    *qkv, _ = _inputs((4, 2))[0]
    full = [x * (1 + dist.get_rank() // 2) for x in qkv]
    got = cp.unshard(attend(*[cp.shard(x, 2) for x in full], cp=cp), 2)
    assert (got - attend(*full, block_size=16)).abs().max() < 1e-12


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
        (*qkv, _), _ = _inputs((6, 2))
        cp = ContextParallel(_mesh((4,)), "striped", "ulysses", 16)
        local = [cp.shard(x, 2) for x in qkv]
        with pytest.raises(ValueError, match=r"6 query heads .* \[1, 2, 3, 6\].*all_gather"):
            attend(*local, cp=cp)
        # As advised.
        mesh = _mesh((2, 2))
        attend(*local, cp=ContextParallel(mesh, "striped", "ulysses", 16))
        attend(*local, cp=ContextParallel(_mesh((4,)), "striped", "all_gather", 16))
        with pytest.raises(ValueError, match='recomputed=0.5 .* "ulysses" between nodes'):
            attend(*local, cp=ContextParallel(mesh, "striped", "ulysses", 16), recomputed=0.5)
        attend(*local, cp=ContextParallel(mesh, "striped", "double_ring", 16), recomputed=0.5)
