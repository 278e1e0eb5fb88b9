"""What TensorBoard shows of a logged step: the fields of metrics.jsonl in sections, and pictures.

TensorBoard sorts sections and what is in them by their letters, capitals first, and opens the first
two. So the loss is in a section with a capital.
"""

from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from titan_sparse.attention.observe.statistics import Recording
from titan_sparse.training.recall import Capped

_TRAIN = "Train"
_NOT_SHOWN = ("step", "time")
"""What TensorBoard itself has of each value."""

_ATTENTION = (
    "density",
    "recall",
    "recall_asked",
    "heads_capped",
    "capped",
    "blocks_per_query",
    "columns",
    "columns_p95",
    "columns_at_cap",
)
_SPEED = (
    "tokens_per_second_per_device",
    "step_seconds",
    "save_seconds",
    "mfu",
    "dense_equivalent_tflops",
)
_COMMUNICATION = ("cp_", "exposed_communication", "computation_ratio")
"""How names of context parallelism begin, besides its degrees of imbalance."""


def tag(field: str) -> str:
    """The tag of a field of metrics.jsonl. A field of no other section is one of training."""
    if field == "memory_gib":
        return "memory/memory_gib"
    if field in _ATTENTION:
        return f"attention/{field}"
    if field in _SPEED:
        return f"speed/{field}"
    if field.startswith(_COMMUNICATION) or "_imbalance" in field:
        return f"comm/{field}"
    return f"{_TRAIN}/{field}"


def write_board(
    board: SummaryWriter, record: dict[str, Any], recorded: Recording, capped: Capped | None
) -> None:
    """Write a line of metrics.jsonl, what was recorded by layers, and pictures where there are
    thumbnails.

    capped: of the selections since the logged step before; None for patterns without budgets.
    """
    step = record["step"]
    for field, value in record.items():
        if field not in _NOT_SHOWN and value is not None:
            board.add_scalar(tag(field), value, step)
    # [layers, Hq], and [layers] of what caps cut
    by_layer = {
        "density": recorded.density(),
        "recall": recorded.recall,
        "capped": [] if capped is None else capped.of_budgets(),
    }
    for name, layers in by_layer.items():
        for number, shares in enumerate(layers):
            board.add_scalar(f"attention_{name}_by_layer/{number}", shares.mean().item(), step)
    if recorded.thumbnails:
        _draw(board, recorded, step)


def _draw(board: SummaryWriter, recorded: Recording, step: int) -> None:
    # Only where asked for: it loads matplotlib.
    from titan_sparse.training.heat_maps import contact_sheet, heat_map

    figures = {
        "density_heat_map": heat_map(recorded.density(), "share of allowed pairs that are visited"),
        "selection": contact_sheet(torch.stack(recorded.thumbnails)),
    }
    if recorded.recall:
        recall = torch.stack(recorded.recall)
        figures["recall_heat_map"] = heat_map(recall, "share of the softmax's mass that is kept")
    for name, figure in figures.items():
        board.add_figure(f"attention/{name}", figure, step)
