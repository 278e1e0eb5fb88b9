"""What follows from a mask alone is worked out by the first layer, and by no other."""

from collections.abc import Callable

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.patterns.helpers import published
from tests.fake_step import fake_world
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import pattern as vertical_slash
from titan_sparse.attention.schedules import group_cast, needs, transport
from titan_sparse.attention.tiles import blocks

BLOCK = 16
SEQ_LEN = 16 * BLOCK
VERTICAL = VerticalSlash(recall=0.8, sinks=2, max_verticals=16, dense_below=16)
PAPER = published(recall=0.8, max_verticals=16, dense_below=16)


@pytest.mark.parametrize(
    "schedule, pattern, owner, name",
    [
        ("ring", Dense(), needs, "seen_chunks"),
        ("ring", Dense(), transport, "_own_hops"),
        ("ring", Dense(), blocks, "block_tiles"),
        ("all_gather", Dense(), blocks, "block_tiles"),
        ("group_cast", Dense(), needs, "seen_blocks"),
        ("group_cast", Dense(), group_cast, "plan"),
        ("group_cast", Dense(), blocks, "block_tiles"),
        ("ring", VERTICAL, vertical_slash, "probe_geometry"),
        ("ring", VERTICAL, vertical_slash, "spread_rows"),
        ("ring", VERTICAL, vertical_slash, "priced_geometry"),
        ("ring", VERTICAL, vertical_slash, "Limits"),
        ("ring", PAPER, vertical_slash, "last_rows"),
        ("ring", PAPER, VerticalSlash, "_segments"),
        ("ring", VERTICAL, ContextParallel, "local_lookup"),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", None),
)
def test_only_the_first_layer_works_it_out(monkeypatch, schedule, pattern, owner, name):
    calls = []

    def counted(function: Callable) -> Callable:
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    transport._route.cache_clear()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        # Forward and backward of group_cast differ, so that one does not profit from the other.
        cp = ContextParallel(mesh, "striped", schedule, BLOCK, overlap_stages=(1, 2))
        q, k, v = [cp.shard(x, 2).requires_grad_() for x in structured_qkv(1, 4, 2, SEQ_LEN, 8)]
        mask = Documents([150, 106]).rows(SEQ_LEN)
        attend(q, k, v, mask, pattern, cp, "eager").sum().backward()
        assert calls
        if name.startswith("seen"):
            # The mask itself is looked at once for both.
            assert len(calls) == 1
        calls.clear()
        attend(q, k, v, mask, pattern, cp, "eager").sum().backward()
        assert not calls
