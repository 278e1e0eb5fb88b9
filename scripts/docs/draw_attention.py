"""Draws one attention: what is seen, what is selected, who computes it, how much each rank does.

    python -m scripts.docs.draw_attention --mask prefix_lm --layout zigzag --ranks 4 --out picture.png
    python -m scripts.docs.draw_attention --mask documents --pattern vertical_slash --out picture.png
    python -m scripts.docs.draw_attention --gallery docs/pictures/masks.png

The masks are examples over documents of ragged lengths; for others call picture(). vertical_slash
selects on queries and keys made to look like real ones.
"""

import os
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from scripts.benchmarks import synthetic
from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.masks.slices import (
    Slices,
    block_causal,
    dilated,
    documents,
    prefix_lm,
    shared_question,
    sliding_window,
)
from titan_sparse.attention.patterns import BlockIndex, Dense, VerticalSlash
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.commands import parser_of
from titan_sparse.estimate.planner import table_of
from titan_sparse.estimate.visits import count_visits

SHARES = (0.34, 0.06, 0.4, 0.16)
"""Documents of the examples, as shares of the sequence; what is left is padding."""


def _lengths(tokens: int) -> list[int]:
    return [int(tokens * share) for share in SHARES]


def _four_kinds(tokens: int) -> Slices:
    """One slice of each type, with more keys than queries, and with more queries than keys."""
    quarter = tokens // 4
    few_queries = tokens // 6
    slices = []  # (first query, end of queries, first key, end of keys, type)
    kinds = ("full", "causal", "inv_causal", "bi_causal")
    for number, kind in enumerate(kinds):
        start = number * quarter
        slices.append((start, start + few_queries, 0, tokens // 2 - quarter, kind))
    for number, kind in enumerate(kinds):
        start = number * quarter
        slices.append((start, start + quarter - 8, tokens * 5 // 8, tokens * 3 // 4, kind))
    return Slices.of(slices)


EXAMPLES: dict[str, Callable[[int], Mask]] = {
    "causal": lambda s: Causal(),
    "documents": lambda s: Documents(_lengths(s)),
    "full_documents": lambda s: documents(_lengths(s), causal=False),
    "window": lambda s: Documents(_lengths(s)) & SlidingWindow(s // 12),
    "sinks": lambda s: sliding_window(_lengths(s), s // 12, sinks=s // 50),
    "dilated": lambda s: dilated(_lengths(s), s // 4, max(2, s // 64)),
    "prefix_lm": lambda s: prefix_lm(_lengths(s), [n // 3 for n in _lengths(s)]),
    "block_causal": lambda s: block_causal([[n // 4] * 4 for n in _lengths(s)]),
    "shared_question": lambda s: shared_question(
        [(n // 3, [n // 4, n // 6, n // 5]) for n in _lengths(s)]
    ),
    "slices": _four_kinds,
}


def select(pattern: str, mask: Mask, tokens: int, block_size: int) -> BlockIndex:
    """The selection of one head of a pattern under the mask."""
    if pattern == "dense":
        return Dense().index([], mask.rows(tokens), 1, 1, block_size)
    heads = synthetic.draw_heads(tokens, heads=1, kv_heads=1, head_dim=64)
    chosen = VerticalSlash(
        recall=0.9,
        sinks=4,
        max_verticals=tokens // 32,
        max_slashes=4,
        dense_below=max(block_size, tokens // 8),
    )
    return chosen.select(heads.q, heads.k, mask, block_size=block_size)


def picture(mask: Mask, index: BlockIndex, layout: str, ranks: int, title: str, out: str) -> Tensor:
    """Write the picture of the first sequence and head to `out`.

    Returns the pairs of tokens that each rank computes, [W].
    """
    ranges = mask.rows(index.seq_len)
    table = table_of(ranges, layout, ranks, index.block_size)
    work = count_visits(index, ranges, table).total()
    figure = Figure(figsize=(19, 5.4), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=(1, 1, 1, 0.7))
    # [S, S] each
    seen = mask.dense(index.seq_len)[0]
    computed = index.dense(mask)[0, 0]
    _draw_pairs(panels[0], seen, index.block_size, f"1. Mask: a query may see\n{_share(seen)}")
    _draw_pairs(
        panels[1], computed, index.block_size, f"2. Pattern: one head selects\n{_share(computed)}"
    )
    if isinstance(index, VerticalSlashIndex):
        _label_selection(panels[1], computed)
    _draw_owners(
        panels[2],
        computed,
        table,
        index.block_size,
        f"3. Layout {layout}: color shows the rank\nthat owns the block of queries",
    )
    palette = colormaps["tab10"]
    colors = [palette(rank % 10) for rank in range(ranks)]
    panels[3].bar(range(ranks), work.tolist(), color=colors)
    panels[3].set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    mean = work.double().mean().clamp(min=1)
    imbalance = work.max() / mean
    panels[3].set_title(f"4. Work: pairs of each rank\nbusiest / mean = {imbalance:.2f}")
    figure.suptitle(title, fontsize=12)
    _write(figure, out)
    return work


def gallery(out: str) -> None:
    """All examples in one picture."""
    tokens = 240
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    panels = figure.subplots(2, 5)
    for axes, (name, example) in zip(panels.flat, EXAMPLES.items(), strict=True):
        _draw_pairs(axes, example(tokens).dense(tokens)[0], tokens, name)
    _write(figure, out)


def _share(pairs: Tensor) -> str:
    return f"{pairs.double().mean():.1%} of all pairs"


def _draw_pairs(axes, pairs: Tensor, block_size: int, title: str) -> None:
    """bool [S, S] with a grid of blocks; queries go down, keys to the right."""
    _show(axes, pairs.float(), cmap="Blues", vmin=0, vmax=1.4)
    _grid(axes, len(pairs), block_size, title)


def _label_selection(axes, pairs: Tensor) -> None:
    """Point at the longest vertical, and at a slash to the right of it."""
    queries, keys = pairs.nonzero(as_tuple=True)
    farthest = (queries - keys).argmax()
    query, key = int(queries[farthest]), int(keys[farthest])
    middle = (query + key) // 2
    row = pairs[middle, : middle + 1]
    # The keys from the last gap of the row on belong to its slashes.
    slash = int((~row).nonzero().max()) + 1
    size = len(pairs)
    arrow = {"arrowstyle": "->", "color": "tab:red"}
    style = {"arrowprops": arrow, "color": "tab:red", "fontsize": 10, "ha": "center"}
    axes.annotate("verticals:\nsingle keys", (key, middle), (0.16 * size, 0.72 * size), **style)
    axes.annotate(
        "slashes:\ndiagonals of blocks", (slash, middle), (0.74 * size, 0.2 * size), **style
    )


def _draw_owners(axes, pairs: Tensor, table: Tensor, block_size: int, title: str) -> None:
    """The same in the colors of the ranks that own the queries."""
    owner = torch.empty(table.numel(), dtype=torch.int64)
    owner[table] = torch.arange(len(table))[:, None]
    ranks = owner.repeat_interleave(block_size)[: len(pairs), None] % 10
    _show(axes, torch.where(pairs, ranks, -1).float(), cmap="tab10", vmin=-0.5, vmax=9.5)
    _grid(axes, len(pairs), block_size, title)


def _show(axes, values: Tensor, **colors) -> None:
    """[S, S] at 256 points a side or a little more. The largest value of a point wins, so that a
    single key stays visible. Negative values are left white."""
    size = len(values)
    points = F.max_pool2d(values[None], max(1, size // 256))[0]
    points = points.masked_fill(points < 0, torch.nan)
    extent = (-0.5, size - 0.5, size - 0.5, -0.5)
    axes.imshow(points, extent=extent, interpolation="nearest", **colors)


def _grid(axes, tokens: int, block_size: int, title: str) -> None:
    for edge in range(block_size, tokens, block_size):
        axes.axhline(edge - 0.5, color="0.85", linewidth=0.4)
        axes.axvline(edge - 0.5, color="0.85", linewidth=0.4)
    axes.set_title(title)
    axes.set_xlabel("position of the key")
    axes.set_ylabel("position of the query")
    axes.tick_params(labelsize=8)


def _write(figure: Figure, out: str) -> None:
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    figure.savefig(out, dpi=80)


def main(words: list[str]) -> None:
    parser = parser_of(__doc__, "scripts.docs.draw_attention")
    parser.add_argument("--mask", choices=EXAMPLES, default="causal")
    parser.add_argument("--pattern", choices=("dense", "vertical_slash"), default="dense")
    parser.add_argument("--layout", choices=ALL_LAYOUTS, default="striped")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        help="a multiple of block size x ranks, for zigzag of twice that",
    )
    parser.add_argument("--block-size", type=int, default=128)
    out = parser.add_mutually_exclusive_group(required=True)
    out.add_argument("--out", help="the picture, .png")
    out.add_argument("--gallery", help="draw all masks into this file instead")
    args = parser.parse_args(words)
    if args.gallery:
        return gallery(args.gallery)
    mask = EXAMPLES[args.mask](args.tokens)
    index = select(args.pattern, mask, args.tokens, args.block_size)
    title = (
        f"{args.mask}, {args.pattern}, {args.tokens:,} tokens, "
        f"blocks of {args.block_size}, {args.ranks} ranks"
    )
    picture(mask, index, args.layout, args.ranks, title, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
