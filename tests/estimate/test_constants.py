"""Rates of a machine from JSON, and the costs of the layout "balanced" that follow from them."""

import dataclasses
import json

import pytest

from titan_sparse.attention.context_parallel.balanced import Costs
from titan_sparse.commands.plan import DEFAULT_CONSTANTS
from titan_sparse.config import Config
from titan_sparse.estimate.constants import Shape, costs_of, costs_of_run, load_constants, shape_of
from titan_sparse.models.flavours import FLAVOURS

BUILT_IN = load_constants(DEFAULT_CONSTANTS)
MODEL = FLAVOURS["debug"]
# 14 TFLOP of a tile's 14 x 64 x 64 pairs take a second; 1 GB travels in one.
ROUND = dataclasses.replace(BUILT_IN, dense_tflops=14.0, partial_tile=1.5, inside_gb_s=1.0)


def _config_with(folder, constants: dict | str) -> Config:
    """A configuration that reads these constants from a file."""
    if isinstance(constants, dict):
        entries = {}
        for name, value in constants.items():
            if value is not None:
                entries[name] = {"value": value, "source": "planted"}
        constants = json.dumps({"constants": entries})
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
    constants = dataclasses.replace(ROUND, **change)
    assert costs_of(constants, Shape(*shape), 8, block_size) == Costs(150, transfer)


def test_the_built_in_costs_are_those_of_the_built_in_constants():
    """Its sparse kernels ran at 14 / (4 / 445 + 10 / 374) = 393 TFLOP/s."""
    constants = dataclasses.replace(BUILT_IN, dense_tflops=392.6, partial_tile=1.2)
    costs = costs_of(constants, Shape(2, 128, 2, 4), heads=16, block_size=128)
    assert costs.partial == Costs().partial
    assert costs.transfer == pytest.approx(Costs().transfer, rel=0.05)
    data = json.loads(DEFAULT_CONSTANTS.read_text())
    assert all(entry["source"] for entry in data["constants"].values())


@pytest.mark.parametrize(
    "dtype, gradient_dtype, widths",
    [
        ("bfloat16", "float32", (2, 4)),
        ("bfloat16", "bfloat16", (2, 2)),
        ("float32", "float32", (4, 4)),
        ("float64", "float32", (8, 8)),
    ],
)
def test_shape_of_a_run(dtype, gradient_dtype, widths):
    config = Config()
    config.training.dtype = dtype
    config.attention.gradient_dtype = gradient_dtype
    assert shape_of(config, MODEL) == (MODEL.kv_heads, MODEL.head_dim, *widths)


def test_a_run_reads_its_file(tmp_path):
    assert costs_of_run(Config(), MODEL) is None
    config = _config_with(tmp_path, vars(ROUND))
    wanted = costs_of(ROUND, shape_of(config, MODEL), MODEL.heads, config.attention.block_size)
    assert costs_of_run(config, MODEL) == wanted


@pytest.mark.parametrize(
    "constants, words",
    [
        ({"dense_tflops": None}, "dense_tflops or partial_tile is missing.*scripts.calibrate"),
        ({"inside_gb_s": float("inf")}, "inside_gb_s = inf"),
        ({"inside_gb_s": float("nan")}, "inside_gb_s = nan"),
        ({"launch_ms": -1.0}, "launch_ms = -1.0"),
        ({"launch_ms": None}, "launch_ms is missing"),
        ({"x": 1.0}, "x is unknown"),
        ('{"traceEvents": []}', r'write \{"constants"'),
        ("steps = 5", r'write \{"constants"'),
    ],
)
def test_a_file_without_costs_is_refused_by_the_key(tmp_path, constants, words):
    if isinstance(constants, dict):
        constants = vars(ROUND) | constants
    config = _config_with(tmp_path, constants)
    with pytest.raises(ValueError, match=words) as error:
        costs_of_run(config, MODEL)
    assert str(error.value).startswith('attention.balance_costs = "')
    assert "\n" not in str(error.value)
