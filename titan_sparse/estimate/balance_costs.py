"""The costs by which the layout "balanced" deals out blocks, from what scripts.calibrate measured."""

from titan_sparse.attention.context_parallel.balanced import Costs
from titan_sparse.config import Config
from titan_sparse.config.reading import show
from titan_sparse.estimate.constants import Constants, load_constants
from titan_sparse.estimate.planner_costs import BACKWARD_FLOPS, FORWARD_FLOPS, Shape
from titan_sparse.models.config import DecoderConfig

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def shape_of(config: Config, model: DecoderConfig) -> Shape:
    """Keys, values and their gradients as the run sends them between ranks."""
    element_bytes = _ELEMENT_BYTES[config.training.dtype]
    if config.attention.gradient_dtype == "bfloat16":
        gradient_bytes = 2
    else:
        # As they are summed: fp32, and fp64 for fp64.
        gradient_bytes = max(4, element_bytes)
    return Shape(model.kv_heads, model.head_dim, element_bytes, gradient_bytes)


def costs_of(constants: Constants, shape: Shape, heads: int, block_size: int) -> Costs | None:
    """Costs of this machine for attention of `heads` query heads; None where no tile was timed.

    Transfers are those inside a node.
    """
    if constants.dense_tflops is None or constants.partial_tile is None:
        return None
    # All query heads of one KV head wait for its block.
    query_heads = heads / shape.kv_heads
    flops_per_pair = (FORWARD_FLOPS + BACKWARD_FLOPS) * shape.head_dim
    tile_flops = query_heads * block_size**2 * flops_per_pair
    tile_seconds = tile_flops / (constants.dense_tflops * 1e12)
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
    constants = load_constants(path, key)
    shape = shape_of(config, model)
    costs = costs_of(constants, shape, model.heads, config.attention.block_size)
    if costs is None:
        raise ValueError(
            f"{key}: dense_tflops or partial_tile is missing; measure them with "
            "python -m scripts.calibrate"
        )
    return costs
