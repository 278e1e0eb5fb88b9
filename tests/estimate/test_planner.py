"""Plans of a layer, against runs that were measured and by hand, and the
constants that they read."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.refusals import refused
from titan_sparse.attention.context_parallel.layouts import Costs, block_ids
from titan_sparse.attention.context_parallel.schedules import SCHEDULES
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.masks.visibility import seen_blocks
from titan_sparse.attention.patterns import Dense
from titan_sparse.commands.plan import DEFAULT_CONSTANTS
from titan_sparse.config import Config
from titan_sparse.estimate.constants import (
    Constants,
    KVShape,
    costs_of,
    costs_of_run,
    load_constants,
    shape_of,
)
from titan_sparse.estimate.indexes import load_indexes, random_index, save_indexes
from titan_sparse.estimate.planner import Setting, count, plan_layer
from titan_sparse.models.flavours import FLAVOURS

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

ROUND = Constants(
    forward_tflops=1,
    backward_tflops=1,
    launch_ms=0,
    inside_gb_s=1,
    across_gb_s=0.1,
    inside_latency_ms=0,
    across_latency_ms=0,
)
CHUNK = 2 * 2 * (512 // 4) * 16 * 2
"""K and V, KV heads, tokens of one of four ranks, D, bytes."""


def _plan(schedule: str, inter: int, intra: int, **constants):
    """A dense causal layer of 64 blocks of 8 tokens, four heads, two KV heads."""
    ranges = Causal().rows(64 * 8)
    index = Dense().index([], ranges, 1, 4, 8)
    setting = Setting("striped", SCHEDULES[schedule], inter, intra)
    rates = dataclasses.replace(ROUND, **constants)
    return plan_layer(count(index, ranges, KVShape(2, 16, 2, 4), setting), setting, rates)


@pytest.fixture(scope="module")
def half_a_million():
    """The layer of scripts.benchmarks.context_parallel, 5 % of 524,288 tokens' causal pairs."""
    ranges = Causal().rows(524288)
    pattern, tensors = random_index(16, 524288, 128, 0.05)
    index = pattern.index(tensors, ranges, 1, 16, 128)
    setting = Setting("striped", SCHEDULES["ring"], 1, 4)
    return count(index, ranges, KVShape(2, 128, 2, 4), setting)


@pytest.mark.parametrize(
    "name, constants, schedules, tolerance",
    [
        ("context_parallel_4xh200", DEFAULT_CONSTANTS, ("ring", "all_gather", "double_ring"), 0.08),
        (
            "context_parallel_nodes_2x2_512k_h200",
            RESULTS / "constants_pretended_nodes_h200.json",
            ("double_ring",),
            0.06,
        ),
    ],
)
def test_measured_runs_are_predicted(half_a_million, name, constants, schedules, tolerance):
    """Every row but a ring across two nodes on one host, whose whole link it has to itself."""
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    rates = load_constants(constants)
    ranks = measured["ranks"]
    compared = 0
    for row in measured["rows"]:
        if row.get("schedule") not in schedules or "forward_ms" not in row:
            continue
        gradient_bytes = {"float32": 4, "bfloat16": 2}[row["gradient_dtype"]]
        sent = half_a_million._replace(shape=KVShape(2, 128, 2, gradient_bytes))
        nodes = 2 if row["schedule"] == "double_ring" else 1
        setting = Setting("striped", SCHEDULES[row["schedule"]], nodes, ranks // nodes)
        p = plan_layer(sent, setting, rates)
        assert p.forward.seconds * 1e3 == pytest.approx(row["forward_ms"], rel=tolerance)
        assert p.backward.seconds * 1e3 == pytest.approx(row["backward_ms"], rel=tolerance)
        compared += 1
    assert compared == 2 * len(schedules)


@pytest.mark.parametrize(
    "schedule, inter, intra, forward, backward",
    # In hops of a chunk over the slow link, if kernels take no time. Gradients are twice as large.
    [
        ("ring", 2, 2, 3, 1 + 3 * 2),  # the first chunk, then three gradients
        ("double_ring", 2, 2, 1, 1 + 2),
        ("double_ring", 4, 1, 3, 1 + 3 * 2),
        ("all_gather", 2, 2, 2, 2 + 2 * 2 / 2 + 2 / 2 * 2),  # the first of two heads comes alone
        # Of two KV heads each rank has one, of twice as many tokens.
        ("ulysses", 2, 2, 1, 1 + 2),
        # Every KV head is on two ranks.
        ("ulysses", 2, 4, 1, 1 + 2),
    ],
)
def test_slow_links_by_hand(schedule, inter, intra, forward, backward):
    p = _plan(schedule, inter, intra, inside_gb_s=1e6, forward_tflops=1e6, backward_tflops=1e6)
    hop = CHUNK / 1e8
    assert p.forward.seconds / hop == pytest.approx(forward, rel=0.01)
    assert p.backward.seconds / hop == pytest.approx(backward, rel=0.01)


def test_ulysses_trades_all_but_its_own_share():
    """Inside one node, in which nothing else travels, and whose heads may differ in density."""
    p = _plan("ulysses", 1, 4)
    # q and out of four heads, K and V of two that two ranks have each, of a quarter of 512 tokens.
    traded = 3 / 4 * 128 * 16 * 2 * (2 * 4 + 2 * 2 * 2)
    assert p.forward.sent.inside.tolist() == p.backward.sent.inside.tolist() == [traded] * 4
    assert p.forward.sent.across.sum() == 0
    assert p.forward.exposed() == pytest.approx(traded / 1e9)
    assert p.work.tolist() == [[512 * 513 / 2]] * 4

    ranges = Causal().rows(64 * 8)
    pattern, (slashes, *rest) = random_index(4, 512, 8, 0.3, vertical_share=0, sinks=0)
    slashes[0, 0, 1:] = True
    index = pattern.index([slashes, *rest], ranges, 1, 4, 8)
    setting = Setting("striped", SCHEDULES["ulysses"], 1, 2)
    p = plan_layer(count(index, ranges, KVShape(2, 16, 2, 4), setting), setting, ROUND)
    seen = index.dense(Causal())[0].sum((1, 2))
    assert p.work.flatten().tolist() == [seen[:2].sum(), seen[2:].sum()]


def test_group_cast_sends_what_is_needed():
    p = _plan("group_cast", 2, 4)
    table = block_ids("striped", 8, 512, 8)
    needed = seen_blocks(Causal().rows(64 * 8), table, 8)
    across = 0
    for node in range(2):
        needed_by_node = needed[node * 4 : node * 4 + 4].any(0)
        for block in range(64):
            owner_node = block % 8 // 4
            across += owner_node != node and bool(needed_by_node[block])
    block_bytes = CHUNK // 2 // 8
    assert p.forward.sent.across.sum() == across * block_bytes

    inside = 0
    for rank in range(8):
        handed_on_to_itself = table[(rank + 4) % 8]
        inside += needed[rank].sum() - needed[rank, table[rank]].sum()
        inside -= needed[rank, handed_on_to_itself].sum()
    assert p.forward.sent.inside.sum() == inside * block_bytes
    assert p.backward.sent.inside.sum() == inside * block_bytes * (1 + 2)
    assert p.work.shape == (8, 3)
    assert p.work.sum() == pytest.approx(4 * 512 * 513 / 2)


@pytest.mark.parametrize("name", ["text", "other", "missing"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / "text").write_text("no index")
    torch.save({"x": 1}, tmp_path / "other")
    with refused(f"--index .*{name}: "):
        load_indexes(tmp_path / name)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"parameters": {"reach": 2}}, "unexpected keyword argument 'reach'"),
        ({"parameters": {"sinks": -1}}, "vertical_slash.sinks = -1 is out of range"),
        ({"layers": [[]]}, "not enough values to unpack"),
        ({"heads": None}, ""),
        ({"pattern": "other"}, "pattern other is not one of dense, vertical_slash"),
        ({"pattern": None}, "pattern None is not one of"),
    ],
    ids=str,
)
def test_indexes_of_another_version_are_refused(tmp_path, changed, said):
    ranges = Causal().rows(64 * 8)
    pattern, tensors = random_index(4, 512, 8, 0.3)
    path = tmp_path / "index.pt"
    save_indexes(path, pattern, ranges, [pattern.index(tensors, ranges, 1, 4, 8)])
    data = torch.load(path) | changed
    for key in [key for key, value in changed.items() if value is None]:
        del data[key]
    torch.save(data, path)
    with refused(f"--index {path}: .*{said}"):
        load_indexes(path)


BUILT_IN = load_constants(DEFAULT_CONSTANTS)
MODEL = FLAVOURS["debug"]
# 14 TFLOP of a tile's 14 x 64 x 64 pairs take a second; 1 GB travels in one.
ROUND_RATES = dataclasses.replace(BUILT_IN, dense_tflops=14.0, partial_tile=1.5, inside_gb_s=1.0)


def _constants(**changes: float | None) -> str:
    """The content of a file of constants. None: this one is missing."""
    values = vars(ROUND_RATES) | changes
    entries = {name: {"value": x} for name, x in values.items() if x is not None}
    return json.dumps({"constants": entries})


def _config_with(folder: Path, constants: str) -> Config:
    """A configuration that reads these constants from a file."""
    path = folder / "constants.json"
    path.write_text(constants)
    config = Config()
    config.attention.balance_costs = str(path)
    return config


@pytest.mark.parametrize(
    "change, shape, block_size, transfer",
    [
        # Blocks of 64, head_dim 8, 4 query heads to a KV head: a tile is 4 x 64 x 64 x 8 x 14 FLOP,
        # 131 ns. A block in bf16 is 2 x 64 x 8 x (2 + 2 + 4) bytes, 8.192 us.
        ({}, (2, 8, 2, 4), 64, 6250),
        # Faster kernels make transfers dear.
        ({"dense_tflops": 28.0}, (2, 8, 2, 4), 64, 12500),
        ({"inside_gb_s": 2.0}, (2, 8, 2, 4), 64, 3125),
        ({}, (8, 8, 2, 4), 64, 25000),
        ({}, (2, 8, 2, 4), 128, 3125),
        ({}, (2, 8, 2, 2), 64, 4688),
    ],
)
def test_costs_by_hand(change, shape, block_size, transfer):
    constants = dataclasses.replace(ROUND_RATES, **change)
    assert costs_of(constants, KVShape(*shape), 8, block_size) == Costs(150, transfer)


def test_a_run_reads_its_file(tmp_path):
    assert costs_of_run(Config(), MODEL) is None
    config = _config_with(tmp_path, _constants())
    shape = shape_of(config, MODEL)
    wanted = costs_of(ROUND_RATES, shape, MODEL.heads, config.attention.block_size)
    assert costs_of_run(config, MODEL) == wanted


@pytest.mark.parametrize(
    "constants, words",
    [
        (
            _constants(dense_tflops=None),
            "dense_tflops or partial_tile is missing.*scripts.calibrate",
        ),
        (_constants(inside_gb_s=float("inf")), "inside_gb_s = inf"),
        (_constants(launch_ms=-1.0), "launch_ms = -1.0"),
        (_constants(x=1.0), "argument 'x'"),
        ('{"traceEvents": []}', r'write \{"constants"'),
    ],
)
def test_a_file_without_costs_is_refused_by_the_key(tmp_path, constants, words):
    with refused(f'^attention.balance_costs = ".*{words}'):
        costs_of_run(_config_with(tmp_path, constants), MODEL)
