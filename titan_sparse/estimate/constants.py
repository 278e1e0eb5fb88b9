"""Rates of a machine, measured by scripts/calibrate.py, and the costs that follow from them.

The planner uses the rates. The layout "balanced" assigns blocks by the costs.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import NamedTuple

from titan_sparse.attention.context_parallel.layouts import Costs
from titan_sparse.config import Config
from titan_sparse.models.config import DecoderConfig
from titan_sparse.options.values import show

FORWARD_FLOPS = 4
"""Per visited pair of tokens, query head and element of D: 2 products, as in the benchmark."""
BACKWARD_FLOPS = 10
"""The same in the backward: 5 products."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Rates of a machine.

    forward_tflops, backward_tflops: TFLOP/s of visited pairs. launch_ms: ms a step for tables and
    kernels. inside_gb_s, across_gb_s: what a rank sends in a ring, inside a node and across nodes,
    1e9 bytes/s. inside_latency_ms, across_latency_ms: ms until a transfer's first byte.

    None where the file does not say:
    dense_tflops: TFLOP/s of dense attention in whole tiles, forward and backward together.
    partial_tile: time of a tile that the mask cuts through, in whole tiles.
    """

    forward_tflops: float
    backward_tflops: float
    launch_ms: float
    inside_gb_s: float
    across_gb_s: float
    inside_latency_ms: float
    across_latency_ms: float
    dense_tflops: float | None = None
    partial_tile: float | None = None


def load_constants(path: str | Path, named: str = "") -> Constants:
    """Read JSON that has for each field of Constants its "value" and "source".

    named: how the user wrote the file's name, by default --constants. Raises ValueError that names
    the file, and the wrong constant in it.
    """
    named = named or f"--constants {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        values = {name: float(entry["value"]) for name, entry in data["constants"].items()}
        constants = Constants(**values)
    except OSError as error:
        raise ValueError(f"{named}: cannot read it: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{named}: {error}; write {{"constants": {{NAME: {{"value": NUMBER, "source": TEXT}}, '
            f"...}}}}, as scripts.calibrate does"
        ) from error
    for name, value in values.items():
        # Latencies and launches may take no time, but a rate of 0 would never end.
        is_rate = value > 0 or (value == 0 and "_ms" in name)
        # nan is refused too: it compares as false.
        if not is_rate or math.isinf(value):
            raise ValueError(f"{named}: {name} = {value} is not a rate. Write a number above 0")
    return constants


class KVShape(NamedTuple):
    """Shape of K and V.

    element_bytes: of an element of K and V as they are sent. gradient_bytes: of dK and dV.
    """

    kv_heads: int
    head_dim: int
    element_bytes: int
    gradient_bytes: int


def shape_of(config: Config, model: DecoderConfig) -> KVShape:
    """Keys, values and their gradients as the run sends them between ranks."""
    element_bytes = {"bfloat16": 2, "float32": 4, "float64": 8}[config.training.dtype]
    # As they are summed: fp32, and fp64 for fp64.
    gradient_bytes = max(4, element_bytes)
    if config.attention.gradient_dtype == "bfloat16":
        gradient_bytes = 2
    return KVShape(model.kv_heads, model.head_dim, element_bytes, gradient_bytes)


def costs_of(constants: Constants, shape: KVShape, heads: int, block_size: int) -> Costs | None:
    """Costs of this machine for attention of `heads` query heads; None where no tile was timed.

    Transfers are those inside a node.
    """
    if constants.dense_tflops is None or constants.partial_tile is None:
        return None
    # All query heads of one KV head wait for its block.
    query_heads = heads / shape.kv_heads
    flops_per_pair = (FORWARD_FLOPS + BACKWARD_FLOPS) * shape.head_dim
    tile_seconds = query_heads * block_size**2 * flops_per_pair / (constants.dense_tflops * 1e12)
    # K and V come in the forward and again in the backward. Their gradients leave once.
    bytes_per_element = 2 * (2 * shape.element_bytes + shape.gradient_bytes)
    block_bytes = block_size * shape.head_dim * bytes_per_element
    transfer_seconds = block_bytes / (constants.inside_gb_s * 1e9)
    return Costs(
        partial=round(100 * constants.partial_tile),
        transfer=round(100 * transfer_seconds / tile_seconds),
    )


def costs_of_run(config: Config, model: DecoderConfig) -> Costs | None:
    """The costs of attention.balance_costs; None where the key is empty.

    Raises ValueError for a file that does not hold them.
    """
    path = config.attention.balance_costs
    if not path:
        return None
    key = f"attention.balance_costs = {show(path)}"
    shape = shape_of(config, model)
    constants = load_constants(path, key)
    costs = costs_of(constants, shape, model.heads, config.attention.block_size)
    if costs is None:
        raise ValueError(
            f"{key}: dense_tflops or partial_tile is missing; measure them with "
            "python -m scripts.calibrate"
        )
    return costs
