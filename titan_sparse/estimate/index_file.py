"""Indexes of a run in one file, so that titan-sparse plan can plan with what real attention chose."""

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
    path: str | Path, pattern: Pattern, ranges: MaskRanges, indexes: list[BlockIndex]
) -> None:
    """Write the indexes of one batch, one for each layer, that `pattern` chose under a mask.

    All ranks hold the same index (attend(..., return_aux=True) returns it), so one of them writes.
    Raises ValueError for a mask of Slices.
    """
    if ranges.slices is not None:
        raise ValueError("save_indexes() keeps masks of one range of keys a query, not Slices")
    document_start = ranges.document_start
    data = {
        "format": _FORMAT,
        "pattern": pattern.name,
        "parameters": dataclasses.asdict(pattern),
        "block_size": indexes[0].block_size,
        "batch": len(indexes[0].verticals),
        "heads": indexes[0].heads,
        "start": ranges.start.cpu(),
        "stop": ranges.stop.cpu(),
        "causal": ranges.causal,
        "document_start": None if document_start is None else document_start.cpu(),
        "layers": [[tensor.cpu() for tensor in index.tensors()] for index in indexes],
    }
    torch.save(data, path)


def load_indexes(path: str | Path) -> tuple[MaskRanges, list[BlockIndex]]:
    """The mask and the indexes of save_indexes(), on the CPU.

    Runs no code from the file. Raises ValueError for any other file.
    """
    try:
        data = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise ValueError(f"--index {path}: cannot read it: {error.strerror}") from error
    except Exception:  # torch.load raises whatever the broken part of the file leads to
        data = None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"--index {path}: not a file of save_indexes(), format {_FORMAT}")
    pattern = _PATTERNS[data["pattern"]](**data["parameters"])
    ranges = MaskRanges(data["start"], data["stop"], data["document_start"], data["causal"])
    of_batch = (ranges, data["batch"], data["heads"], data["block_size"])
    return ranges, [pattern.index(tensors, *of_batch) for tensors in data["layers"]]
