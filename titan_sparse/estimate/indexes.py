"""The inputs of titan-sparse plan: indexes of a run in a file, random ones, and document
lengths."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.patterns import PATTERNS, BlockIndex, Pattern, VerticalSlash
from titan_sparse.options.values import one_line

_FORMAT = 1


def save_indexes(
    path: str | Path, pattern: Pattern, ranges: MaskRanges, indexes: list[BlockIndex]
) -> None:
    """Write the indexes of one batch, one for each layer, that `pattern` chose under a mask.

    All ranks hold the same index (attend(..., return_aux=True) returns it), so one of them writes.
    Raises ValueError for a mask of Slices, a pattern of your own, and indexes that are not of this
    pattern and mask.
    """
    if not isinstance(ranges, MaskRanges):
        raise ValueError(f"save_indexes() got {type(ranges).__name__}; write mask.rows(seq_len)")
    if ranges.slices is not None:
        raise ValueError("save_indexes() keeps masks of one range of keys a query, not Slices")
    if PATTERNS.get(pattern.name) is not type(pattern):
        raise ValueError(
            f"save_indexes() keeps indexes of {', '.join(PATTERNS)}, not of {type(pattern).__name__}"
        )
    on_cpu = MaskRanges._make(x.cpu() if isinstance(x, Tensor) else x for x in ranges)
    if not indexes or not all(_is_chosen(x, pattern, on_cpu, indexes[0]) for x in indexes):
        raise ValueError(
            "save_indexes(): an index is not of this pattern, mask, or number of heads; write "
            "[aux.index] of attend(q, k, v, mask, pattern, return_aux=True), with mask.rows(seq_len)"
        )
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


def _is_chosen(index: BlockIndex, pattern: Pattern, ranges: MaskRanges, first: BlockIndex) -> bool:
    """True if the pattern chose the index under this mask, with as many heads
    as the first one has."""
    of_batch = (len(first.verticals), first.heads, first.block_size)
    if (index.batch, index.heads, index.block_size) != of_batch:
        return False
    try:
        again = pattern.index([tensor.cpu() for tensor in index.tensors()], ranges, *of_batch)
    except (ValueError, RuntimeError):  # by other tensors than this pattern has
        return False
    return type(again) is type(index) and _is_same(vars(again), vars(index))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b.cpu())
    if isinstance(a, dict):
        a, b = tuple(a.values()), tuple(b.values())
    return all(map(_is_same, a, b)) if isinstance(a, tuple) else a == b


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
    if data.get("pattern") not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise ValueError(f"--index {path}: pattern {data.get('pattern')} is not one of {known}")
    try:
        pattern = PATTERNS[data["pattern"]](**data["parameters"])
        ranges = MaskRanges(data["start"], data["stop"], data["document_start"], data["causal"])
        of_batch = (ranges, data["batch"], data["heads"], data["block_size"])
        return ranges, [pattern.index(tensors, *of_batch) for tensors in data["layers"]]
    except Exception as error:  # other versions may have other options and tensors
        raise ValueError(
            f"--index {path}: not as this version of save_indexes() writes it ({one_line(error)}); "
            "save it again with this version"
        ) from error


def random_index(
    heads: int,
    seq_len: int,
    block_size: int,
    density: float,
    vertical_share: float = 0.005,
    sinks: int = 30,
    seed: int = 0,
) -> tuple[VerticalSlash, list[Tensor]]:
    """A pattern whose caps hold the index, and the index as VerticalSlashIndex.tensors().

    density: share of the causal pairs, reached per head by random slashes in addition to the two
    local ones. vertical_share: verticals per token of the sequence, the `sinks` first tokens
    included.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = seq_len // block_size
    all_tiles = blocks * (blocks + 1) / 2
    sinks = min(sinks, seq_len)
    verticals = max(sinks, round(vertical_share * seq_len))

    slashes = torch.zeros(heads, blocks, dtype=torch.bool)
    picked = []  # verticals of each head
    for head in range(heads):
        shuffled = torch.randperm(seq_len - sinks, generator=generator)
        random_verticals = shuffled[: verticals - sinks] + sinks
        picked.append(torch.cat([torch.arange(sinks), random_verticals.sort().values]))
        slashes[head, :2] = True
        tiles = 2 * blocks - 1
        for delta in (torch.randperm(max(blocks - 2, 0), generator=generator) + 2).tolist():
            # Verticals add their share of what the slashes leave out.
            covered = tiles / all_tiles
            if covered + (1 - covered) * verticals / seq_len >= density:
                break
            slashes[head, delta] = True
            tiles += blocks - delta

    pattern = VerticalSlash(
        sinks=sinks, max_verticals=verticals, max_slashes=int(slashes.sum(-1).max())
    )
    # Unused places hold seq_len, which is beyond the last token.
    capacity = pattern.vertical_capacity(seq_len, block_size, False)
    padded = torch.full((heads, capacity), seq_len, dtype=torch.int32)
    padded[:, :verticals] = torch.stack(picked)
    capped = torch.zeros(heads, 2, dtype=torch.bool)
    return pattern, [tensor[None] for tensor in (slashes, padded, capped)]


def ragged_lengths(seq_len: int, seed: int) -> list[int]:
    """Lengths of the documents of a packed sequence, with the distribution of
    MagiAttention's benchmarks.

    71 % have at most 1K tokens, 87 % 2K, 97.4 % 8K, and the longest 196,608 or a quarter of the
    sequence.
    """
    generator = np.random.default_rng(seed)
    limits = np.array([16, 1024, 2048, 8192, 196_608])
    shares = np.array([0.71, 0.16, 0.104, 0.026])
    lengths: list[int] = []
    room = seq_len
    while room > 0:
        # Even on a log scale between the bucket's limits.
        bucket = generator.choice(4, p=shares)
        shortest, longest = np.log(limits[bucket : bucket + 2])
        log_length = generator.uniform(shortest, longest)
        length = min(int(np.exp(log_length)), max(seq_len // 4, 1), room)
        lengths.append(length)
        room -= length
    return lengths
