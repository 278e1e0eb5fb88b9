"""What a rank sends: how many collectives, over which ranks, and by which communicators."""

import itertools
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.collectives import collectives, counts
from tests.attention.context_parallel.against_one import mesh_of
from tests.attention.patterns.helpers import published
from tests.fake_step import fake_world
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import MoBA, Pattern, VerticalSlash, XAttention

BLOCK = 16
SEQ_LEN = 16 * BLOCK
KV_HEADS = 2
VERTICAL = VerticalSlash(recall=0.8, sinks=2, max_verticals=16, min_slashes=16, dense_below=16)
"""All slashes are selected, so that every rank needs every chunk."""
PACKED = Documents([150, 106])


def _context(axes: tuple[int, int], schedule: str, **options) -> ContextParallel:
    return ContextParallel(mesh_of(axes), "striped", schedule, BLOCK, **options)


def _inputs(cp: ContextParallel) -> list[Tensor]:
    whole = structured_qkv(1, 4, KV_HEADS, SEQ_LEN, 8, dtype=torch.float32)
    return [cp.shard(x, 2).requires_grad_() for x in whole]


SELECTION = {
    # The probe's queries and the gains of slashes; normalizers, and the codes of verticals.
    "joint": {"all_reduce": 2, "all_gather": 2},
    # The probe's queries, its normalizers, the masses and the choices.
    "independent": {"all_reduce": 1, "all_gather": 2, "all_to_all": 1},
    # The keys of one KV head after the other, and the choices.
    "xattention": {"all_gather": KV_HEADS + 1},
    # Sums over blocks of keys, and what queries, some query and every query of a block chose.
    "moba": {"all_gather": 4},
}
"""Collectives of a selection by its budget or its name, by hand."""


PATTERNS = [
    VERTICAL,
    published(recall=0.8, max_verticals=16, dense_below=16),
    XAttention(stride=4, dense_below=16),
    MoBA(chunk_size=32, top_k=2),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_collectives_of_a_selection(pattern: Pattern):
    """As many for the first layer of a batch as for the others."""
    with fake_world(4):
        cp = _context((1, 4), "ring")
        q, k, _ = _inputs(cp)
        ranges = PACKED.rows(SEQ_LEN)
        for _ in range(2):
            with collectives() as said:
                pattern.select(q, k, ranges, cp)
            assert counts(said) == SELECTION[getattr(pattern, "budget", pattern.name)]


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "group_cast"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_nobody_outside_the_group_is_spoken_to(schedule, pattern):
    """Ranks 0 and 1 of four share a sequence. The others have data of their own."""
    with fake_world(4):
        axes = ("cp_inter", "cp_intra")
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", *axes))
        cp = ContextParallel(mesh[axes], "striped", schedule, BLOCK)
        q, k, v = _inputs(cp)
        with collectives() as said:
            attend(q, k, v, Causal(), pattern, cp, "eager").sum().backward()
    assert said and {call.ranks for call in said} == {(0, 1)}


def test_every_kind_of_transfer_has_a_communicator():
    """On a shared one a fast hop queues behind a slow one (docs/context_parallel.md)."""
    with fake_world(4):
        cp = _context((2, 2), "double_ring")
        groups = cp.groups
        kinds = ["inner", "outer", "inner_gradient", "outer_gradient", "verticals", "collectives"]
        assert sorted(groups) == sorted(kinds)
        for one, other in itertools.combinations(kinds, 2):
            assert groups[one] is not groups[other], (one, other)


def test_bytes_are_counted_by_hand():
    """A rank of four sends a sum's bytes 2 * 3 / 4 times, and a gather's to three others."""
    with fake_world(4):
        cp = _context((1, 4), "ring")
        x = torch.zeros(4, 6)  # 96 bytes, 24 for each rank
        for collective in (cp.all_reduce, cp.all_gather, cp.all_to_all):
            cp.sent.clear()
            collective(x)
            expected = {"all_reduce": 144, "all_gather": 288, "all_to_all": 72}
            assert cp.sent == Counter(collectives=expected[collective.__name__])
        cp.sent.clear()
        cp.start_all_reduce(x).wait()
        cp.start_all_gather(x, "slot").wait()
        cp.start_reduce_scatter(x).wait()
        assert cp.sent == Counter(verticals=144, inner=288, inner_gradient=72)
        assert cp.bytes_sent == 288 + 72
        cp.sent.clear()
        cp.shift([x, x[0]], "inner", "slot").wait()
        cp.shift([x], "inner", "slot", sends=False).wait()
        assert cp.sent == Counter(inner=120)
        cp.sent.clear()
        # The first row is its own, and stays.
        pending = cp.start_exchange(x, [1, 1, 1, 1], [1, 1, 1, 1], "inner_gradient", x.clone())
        pending.wait()
        assert cp.sent == Counter(inner_gradient=72)


def test_what_is_sent_lives_until_it_is_there():
    """It must not live longer, since it is as large as a chunk."""
    with fake_world(4):
        cp = _context((1, 4), "ring")
        for start in (
            cp.start_reduce_scatter,
            lambda x: cp.start_exchange(x, [1] * 4, [1] * 4, "inner", torch.zeros(4, 6)),
            lambda x: cp.shift([x], "inner", "slot"),
        ):
            x = torch.zeros(4, 6)
            alive = weakref.ref(x)
            pending = start(x)
            del x
            assert alive() is not None
            pending.wait()
            pending.wait()  # A second time it has nothing to wait for.
            assert alive() is None


# A quarter of the tokens in bf16. A KV head's keys are 4 * 16 * 8 * 2 = 1,024 bytes, a chunk of two
# heads' keys and values is 4,096. Gradients are twice as wide.
CHUNK = 4096
BYTES = {
    # Three hops of the chunk, there and in the backward; three of its gradient.
    "ring": (3 * CHUNK, 3 * CHUNK, 3 * 2 * CHUNK),
    # The same to three others.
    "all_gather": (3 * CHUNK, 3 * CHUNK, 3 * 2 * CHUNK),
    # Rank 0 sees three of the four blocks of each other rank.
    "group_cast": (3 * CHUNK, 3 * CHUNK, 3 * 2 * CHUNK * 3 // 4),
}
# Keys and values of 48 verticals (16 and two sinks, in whole blocks: 32) for four heads.
VERTICALS = 2 * 4 * 32 * 8
# Of four heads 16 queries of the probe, summed, and their fp32 normalizers. Summed in fp32, the
# gains of 16 slashes at 16 levels. A byte for each of 64 keys that a rank has, and by code the
# fp32 masses and counts.
PROBE = 4 * 16 * 8 * 2 * 3 // 2
NORMALIZERS = 4 * 16 * 4 * 3
GAINS = 4 * 16 * 16 * 4 * 3 // 2
CODES = 4 * (64 + 256 * (4 + 4)) * 3


@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("schedule", BYTES)
def test_bytes_of_a_bf16_layer_by_hand(schedule, gradient_dtype):
    """Nothing is wider on the wire than necessary, and sums are in fp32."""
    with fake_world(4):
        cp = _context((1, 4), schedule, gradient_dtype=gradient_dtype)
        q, k, v = [x.detach().bfloat16().requires_grad_() for x in _inputs(cp)]
        out = attend(q, k, v, Causal(), VERTICAL, cp, "eager")
        forward, backward, gradients = BYTES[schedule]
        assert cp.sent["inner"] == forward
        assert cp.sent["verticals"] == VERTICALS * 2 * 3 // 2
        assert cp.sent["collectives"] == PROBE + NORMALIZERS + GAINS + CODES
        cp.sent.clear()
        out.sum().backward()
        assert cp.sent["inner"] == backward
        narrower = 2 if gradient_dtype else 1
        assert cp.sent["inner_gradient"] == gradients // narrower
        # A ring that skips nothing, in both passes.
        ring_forward, ring_backward, ring_gradients = BYTES["ring"]
        assert cp.plain_ring_bytes == ring_forward + ring_backward + ring_gradients // narrower
        assert cp.sent["verticals"] == VERTICALS * 4 * 3 // 2
