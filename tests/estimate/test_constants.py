"""Rates of a machine from JSON, and the costs of the layout "balanced" that follow from them."""

import dataclasses
import json

import pytest

from titan_sparse.attention.context_parallel.balanced import Costs
from titan_sparse.commands import plan as script
from titan_sparse.config import Config
from titan_sparse.estimate.constants import (
    Shape,
    costs_of,
    costs_of_run,
    load_constants,
    shape_of,
)
from titan_sparse.models.flavours import FLAVOURS

BUILT_IN = load_constants(script.DEFAULT_CONSTANTS)
# 14 TFLOP of a tile's 14 x 64 x 64 pairs take a second; 1 GB travels in one.
ROUND = dataclasses.replace(BUILT_IN, dense_tflops=14.0, partial_tile=1.5, inside_gb_s=1.0)


def _write(folder, constants) -> str:
    entries = {
        name: {"value": value, "source": "planted"}
        for name, value in constants.items()
        if value is not None
    }
    path = folder / "constants.json"
    path.write_text(json.dumps({"constants": entries}))
    return str(path)


def test_costs_by_hand():
    """Blocks of 64, head_dim 8, 4 query heads to a KV head: a tile is 4 x 64 x 64 x 8 x 14 FLOP,
    131 ns. A block in bf16 is 2 x 64 x 8 x (2 + 2 + 4) bytes, 8.192 us."""
    costs = costs_of(ROUND, Shape(2, 8, 2, 4), heads=8, block_size=64)
    assert costs == Costs(partial=150, transfer=6250)


@pytest.mark.parametrize(
    "change, factor",
    [
        ({"dense_tflops": 28.0}, 2),  # faster kernels make transfers dear
        ({"inside_gb_s": 2.0}, 1 / 2),
        ({"across_gb_s": 1.0}, 1),
        ({"forward_tflops": 1.0}, 1),
    ],
)
def test_costs_follow_the_machine(change, factor):
    constants = dataclasses.replace(ROUND, **change)
    costs = costs_of(constants, Shape(2, 8, 2, 4), heads=8, block_size=64)
    assert costs.transfer == 6250 * factor


def test_costs_follow_the_run():
    for shape, heads, block_size, transfer in (
        (Shape(2, 64, 2, 4), 8, 64, 6250),  # work and bytes grow alike with head_dim
        (Shape(8, 8, 2, 4), 8, 64, 25000),
        (Shape(2, 8, 2, 4), 8, 128, 3125),
        (Shape(2, 8, 2, 2), 8, 64, 4688),
        (Shape(2, 8, 8, 8), 8, 64, 18750),
    ):
        assert costs_of(ROUND, shape, heads, block_size).transfer == transfer


def test_the_built_in_costs_are_those_of_the_built_in_constants():
    """Its sparse kernels ran at 14 / (4 / 445 + 10 / 374) = 393 TFLOP/s."""
    constants = dataclasses.replace(BUILT_IN, dense_tflops=392.6, partial_tile=1.2)
    costs = costs_of(constants, Shape(2, 128, 2, 4), heads=16, block_size=128)
    assert costs.partial == Costs().partial
    assert costs.transfer == pytest.approx(Costs().transfer, rel=0.05)


def test_shape_of_a_run():
    config = Config()
    model = FLAVOURS["debug"]
    assert shape_of(config, model) == Shape(model.kv_heads, model.head_dim, 2, 4)
    config.attention.gradient_dtype = "bfloat16"
    assert shape_of(config, model)[2:] == (2, 2)
    config.attention.gradient_dtype = "float32"
    config.training.dtype = "float64"
    assert shape_of(config, model)[2:] == (8, 8)


def test_a_run_reads_its_file(tmp_path):
    config = Config()
    model = FLAVOURS["debug"]
    assert costs_of_run(config, model) is None
    config.attention.balance_costs = _write(tmp_path, vars(ROUND))
    wanted = costs_of(ROUND, shape_of(config, model), model.heads, config.attention.block_size)
    assert costs_of_run(config, model) == wanted


def test_the_built_in_file_names_its_sources():
    data = json.loads(script.DEFAULT_CONSTANTS.read_text())
    assert all(entry["source"] for entry in data["constants"].values())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dense_tflops": None}, "dense_tflops or partial_tile is missing.*scripts.calibrate"),
        ({"partial_tile": None}, "dense_tflops or partial_tile is missing.*scripts.calibrate"),
        ({"partial_tile": 0.0}, "partial_tile = 0.0"),
        ({"inside_gb_s": float("inf")}, "inside_gb_s = inf"),
        ({"launch_ms": None}, "launch_ms is missing"),
        ({"x": 1.0}, "x is unknown"),
        ('{"traceEvents": []}', r'write \{"constants"'),
        ("[1]", r'write \{"constants"'),
        ("steps = 5", r'write \{"constants"'),
        ('{"constants": {"launch_ms": {}}}', r'write \{"constants"'),
    ],
)
def test_a_file_without_costs_is_refused_by_the_key(tmp_path, change, words):
    config = Config()
    if isinstance(change, str):
        path = tmp_path / "constants.json"
        path.write_text(change)
    else:
        path = _write(tmp_path, vars(ROUND) | change)
    config.attention.balance_costs = str(path)
    with pytest.raises(ValueError, match=words) as error:
        costs_of_run(config, FLAVOURS["debug"])
    assert str(error.value).startswith('attention.balance_costs = "')
    assert "\n" not in str(error.value)
