"""Plans of a layer: bytes, work and times."""

import pytest
import torch

from titan_sparse.attention.context_parallel import balanced
from titan_sparse.attention.context_parallel.group_cast_plan import blocks_before_others
from titan_sparse.attention.context_parallel.layouts import block_ids
from titan_sparse.attention.context_parallel.schedule import RING, SCHEDULES
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.masks.reach import seen_blocks
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.estimate.constants import Constants
from titan_sparse.estimate.planner import Layer, Setting, Shape, count, plan, plan_layer

DEFAULTS = Constants(
    forward_tflops=1,
    backward_tflops=1,
    launch_ms=0,
    inside_gb_s=1,
    across_gb_s=0.1,
    inside_latency_ms=0,
    across_latency_ms=0,
)


def _plan(
    schedule: str, inter: int, intra: int, layout: str = "striped", constants: Constants = DEFAULTS
):
    """A dense causal layer of 64 blocks of 8 tokens, four heads, two KV heads."""
    ranges = Causal().rows(64 * 8)
    index = Dense().index([], ranges, 1, 4, 8)
    layer = Layer(index, ranges, Shape(2, 16, 2, 4))
    setting = Setting(layout, SCHEDULES[schedule], inter, intra)
    return plan_layer(count(index, ranges, layout, setting.ranks), layer, setting, constants)


def test_bytes_and_times_of_a_plan_by_hand():
    p = _plan("ring", 2, 2)
    chunk = 2 * 2 * (512 // 4) * 16 * 2  # K and V, KV heads, local tokens, D, bytes
    assert p.chunk_bytes == chunk
    assert p.gradient_bytes == 2 * chunk
    assert p.density == 1.0
    assert p.needed == 1.0
    assert p.traffic["forward_inside"].tolist() == [3 * chunk, 0, 3 * chunk, 0]
    assert p.traffic["forward_across"].tolist() == [0, 3 * chunk, 0, 3 * chunk]
    assert p.traffic["backward_inside"].tolist() == [3 * chunk + 3 * 2 * chunk, 0] * 2
    assert p.work.sum() == 4 * 512 * 513 / 2
    assert p.verticals == (0.0, 0.0)
    torch.testing.assert_close(p.forward.compute, p.work * 4 * 16 / 1e12)
    # Nothing but the slow link counts.
    assert p.forward.seconds() == pytest.approx(3 * chunk / 1e8, rel=0.01)
    assert _plan("local", 1, 1).forward.waiting.sum() == 0


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "group_cast"])
def test_all_of_a_plan_is_of_the_table_of_its_costs(schedule, monkeypatch):
    """What is counted and what is played through."""
    costs = balanced.Costs(transfer=10**6)
    seen = []
    block_table = balanced.block_table

    def noted(*args):
        seen.append(args[-1])
        return block_table(*args)

    monkeypatch.setattr(balanced, "block_table", noted)
    ranges = Causal().rows(64 * 8)
    index = Dense().index([], ranges, 1, 4, 8)
    visits = count(index, ranges, "balanced", 4, costs)
    setting = Setting("balanced", SCHEDULES[schedule], 1, 4, balance=costs)
    plan_layer(visits, Layer(index, ranges, Shape(2, 16, 2, 4)), setting, DEFAULTS)
    assert seen == [costs] * 2


def test_the_schedule_may_be_given_by_its_name():
    ranges = Causal().rows(64 * 8)
    index = Dense().index([], ranges, 1, 4, 8)
    visits = count(index, ranges, "striped", 4)
    shape = Shape(2, 16, 2, 4)
    named = plan(visits, index, ranges, "striped", "ring", 2, 2, shape, DEFAULTS)
    recorded = plan_layer(
        visits, Layer(index, ranges, shape), Setting("striped", RING, 2, 2), DEFAULTS
    )
    assert named.schedule == recorded.schedule == "ring"
    assert torch.equal(named.work, recorded.work)
    assert torch.equal(named.backward.waiting, recorded.backward.waiting)


def test_a_double_ring_is_planned_in_groups():
    p = _plan("double_ring", 2, 1, constants=Constants(**vars(DEFAULTS) | {"launch_ms": 0.05}))
    group = p.work / 2 * 4 * 16 / 1e12 + 5e-5  # one of two KV heads, launched on its own
    torch.testing.assert_close(p.forward.compute, 2 * group)
    across = p.chunk_bytes / 1e8  # half of them twice, then one group is left to compute
    torch.testing.assert_close(p.forward.finish(), across + group[:, 1])
    assert p.backward.seconds() == pytest.approx(across + p.gradient_bytes / 1e8, rel=1e-6)


def test_the_hierarchy_and_the_links_matter():
    ring = _plan("ring", 2, 4)
    double = _plan("double_ring", 2, 4)
    gather = _plan("all_gather", 2, 4)
    assert double.traffic["forward_across"].tolist() == [double.chunk_bytes] * 8
    assert double.forward.seconds() < ring.forward.seconds() / 4
    assert double.backward.seconds() < ring.backward.seconds() / 2
    assert gather.traffic["forward_across"].tolist() == [2 * gather.chunk_bytes] * 8
    slow = _plan("ring", 1, 8, constants=Constants(**vars(DEFAULTS) | {"inside_gb_s": 0.5}))
    fast = _plan("ring", 1, 8)
    assert slow.forward.exposed() == pytest.approx(2 * fast.forward.exposed(), rel=0.1)


def test_group_cast_is_planned_by_stages():
    p = _plan("group_cast", 2, 4)
    chunk = p.chunk_bytes
    gradient = p.gradient_bytes
    # Between nodes its own chunk goes to the other node. Inside, that one and the one from the
    # other node go to three ranks.
    assert p.traffic["forward_across"].tolist() == [chunk] * 8
    assert p.traffic["forward_inside"].tolist() == [6 * chunk] * 8
    assert p.traffic["backward_inside"].tolist() == [6 * (chunk + gradient)] * 8
    assert p.work.shape == (8, 3)
    assert p.work.sum() == pytest.approx(4 * 512 * 513 / 2)
    for name, sent in p.skipping_traffic.items():  # the last blocks are seen by few
        assert (sent <= p.traffic[name]).all()
        assert sent.sum() < p.traffic[name].sum()

    table = block_ids("striped", 8, 512, 8)
    needed = seen_blocks(Causal().rows(64 * 8), table, 8)
    across = 0
    for node in range(2):
        needed_by_node = needed[node * 4 : node * 4 + 4].any(0)
        for block in range(64):
            owner_node = block % 8 // 4
            across += owner_node != node and bool(needed_by_node[block])
    assert p.skipping_traffic["forward_across"].sum() == across * chunk / 8

    inside = 0
    for rank in range(8):
        handed_on_to_itself = table[(rank + 4) % 8]
        inside += needed[rank].sum() - needed[rank, table[rank]].sum()
        inside -= needed[rank, handed_on_to_itself].sum()
    assert p.skipping_traffic["forward_inside"].sum() == inside * chunk / 8


def test_own_blocks_before_others():
    """Half and half between nodes, and where many gradients go home.

    All first where another pass over dq costs more.
    """
    assert blocks_before_others(65, 0, 64, 8, 2, nodes=2) == 33
    # 12 x 65 x 8 x 8 bytes against 64 x 64 x 12
    assert blocks_before_others(64, 65, 64, 8, 2, nodes=1) == 32
    assert blocks_before_others(64, 64, 64, 8, 2, nodes=1) == 64
    assert blocks_before_others(65, 0, 64, 8, 2, nodes=1) == 65
    assert blocks_before_others(64, 64, 16, 16, 2, nodes=1) == 32


@pytest.mark.parametrize("nodes", [1, 2])
def test_own_blocks_of_documents_that_need_no_others(nodes):
    """Every document is on a rank of its own."""
    ranges = Documents([64] * 8).rows(512)
    index = Dense().index([], ranges, 1, 16, 8)
    setting = Setting("contiguous", SCHEDULES["group_cast"], nodes, 8 // nodes)
    visits = count(index, ranges, "contiguous", 8)
    p = plan_layer(visits, Layer(index, ranges, Shape(1, 16, 2, 4)), setting, DEFAULTS)
    compute = p.skipping_backward.compute
    last_share = compute[:, -1] / compute.sum(1)
    if nodes == 1:  # all own blocks first
        assert (last_share < 0.1).all()
    else:  # half of them last
        assert (last_share > 0.4).all()


def test_skipping_saves_what_a_window_does_not_need():
    ranges = Causal().rows(64 * 8)
    slashes = torch.zeros(1, 2, 64, dtype=torch.bool)
    slashes[..., :3] = True
    verticals = torch.full((1, 2, 8), 512, dtype=torch.int32)
    capped = torch.zeros(1, 2, 2, dtype=torch.bool)
    pattern = VerticalSlash(dense_below=8)
    index = pattern.index([slashes, verticals, capped], ranges, 1, 2, 8)
    p = plan_layer(
        count(index, ranges, "contiguous", 8),
        Layer(index, ranges, Shape(1, 16, 2, 4)),
        Setting("contiguous", RING, 1, 8),
        DEFAULTS,
    )
    assert p.needed == (8 + 7) / 64
    assert p.skipping_traffic["forward_inside"].tolist() == [p.chunk_bytes] * 7 + [0]
    assert p.traffic["forward_inside"].tolist() == [7 * p.chunk_bytes] * 8
    assert p.skipping_forward.seconds() < p.forward.seconds() / 3
    assert p.verticals[0] > 0
