"""Indexes of a run in one file, so that scripts/plan.py can plan with what real attention chose."""

import dataclasses
from pathlib import Path

import torch

from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import (
    BlockIndex,
    Dense,
    MoBA,
    Pattern,
    VerticalSlash,
    XAttention,
)

_FORMAT = 1
_PATTERNS = {pattern.name: pattern for pattern in (Dense, VerticalSlash, XAttention, MoBA)}


def save_indexes(
    path: str | Path, pattern: Pattern, rows: MaskRanges, indexes: list[BlockIndex]
) -> None:
    """Writes the indexes of one sequence batch, one a layer, that `pattern` chose under the mask `rows`.

    All ranks hold the same index (attend(..., return_aux=True) gives it): let one of them write.
    """
    if rows.slices is not None:
        raise ValueError("save_indexes() keeps masks of one range of keys a query, not Slices")
    torch.save(
        {
            "format": _FORMAT,
            "pattern": pattern.name,
            "parameters": dataclasses.asdict(pattern),
            "block_size": indexes[0].block_size,
            "batch": len(indexes[0].verticals),
            "heads": indexes[0].heads,
            "start": rows.start.cpu(),
            "stop": rows.stop.cpu(),
            "causal": rows.causal,
            "document_start": None if rows.document_start is None else rows.document_start.cpu(),
            "layers": [[x.cpu() for x in index.tensors()] for index in indexes],
        },
        path,
    )


def load_indexes(path: str | Path) -> tuple[MaskRanges, list[BlockIndex]]:
    """The mask and the indexes of save_indexes(), on the CPU. Runs no code from the file. Raises ValueError for others."""
    try:
        data = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise ValueError(f"--index {path}: cannot read it: {error.strerror}") from error
    except Exception as error:  # torch.load raises whatever the broken part of the file leads to
        raise ValueError(f"--index {path}: not a file of save_indexes()") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"--index {path}: not a file of save_indexes(), format {_FORMAT}")
    pattern = _PATTERNS[data["pattern"]](**data["parameters"])
    rows = MaskRanges(data["start"], data["stop"], data["document_start"], data["causal"])
    shape = (data["batch"], data["heads"], data["block_size"])
    return rows, [pattern.index(tensors, rows, *shape) for tensors in data["layers"]]
