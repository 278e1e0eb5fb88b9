"""Draw one head of SmolLM2 on real text: its attention, and what vertical_slash selects of it.

    python -m scripts.study.real_model --out outputs/smollm2
    python -m scripts.docs.draw_head --model outputs/smollm2 --layer 1 --head 2 --out docs/pictures/attention.png

The text is Python's own argparse.py. The selection is that of the default, recall 0.95.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from scripts.study.quality import RealModel, text_of
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.commands import parser_of, positive
from titan_sparse.config.reading import require
from titan_sparse.data.tokenizer import load_tokenizer

BLOCK = 128
SINK, VERTICAL, SLASH = "tab:red", "tab:blue", "tab:green"
POINTS = 256
"""Cells of the picture per side."""


class Head(NamedTuple):
    """Attention of one head, and the selection.

    mass: fp32 [P, P], the largest mass of a pair in each cell. verticals, slashes: int64, positions
    of keys and numbers of blocks. sinks: the first keys. density, recall: shares of the causal
    pairs and of their mass that are computed.
    """

    mass: Tensor
    verticals: Tensor
    slashes: Tensor
    sinks: int
    density: float
    recall: float


def main(words: list[str]) -> None:
    parser = parser_of(__doc__, "scripts.docs.draw_head")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of scripts.study.real_model")
    add("--layer", type=int, default=1)
    add("--head", type=int, default=2, help="a query head")
    add("--tokens", type=positive, default=8192, help=f"a multiple of {POINTS}")
    add("--out", type=Path, required=True, help="the picture, .png")
    args = parser.parse_args(words)
    q, k = queries_and_keys(args.model, args.layer, args.tokens)
    head = look(q, k, args.head)
    figure = draw(head, args.tokens, f"SmolLM2-135M, layer {args.layer}, head {args.head}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=100)
    print(f"wrote {args.out}")


def queries_and_keys(folder: Path, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The queries and keys of a layer on the text, under dense attention: [1, H, S, D] each."""
    model = RealModel(folder, torch.device("cpu"), torch.float32)
    layers = model.config.layers
    require(layer < layers, f"--layer {layer}: the model has {layers} layers, numbered from 0")
    text = text_of("code", 0).tokens(load_tokenizer(str(folder)), tokens)
    q, k = model.queries_and_keys(text)
    return q[layer, None], k[layer, None]


def look(q: Tensor, k: Tensor, head: int) -> Head:
    """The attention of one query head, and what the default selects. q, k: [1, H, S, D]."""
    tokens = q.shape[2]
    pattern = VerticalSlash(dense_below=BLOCK)
    index = pattern.select(q, k, Causal(), block_size=BLOCK)
    chosen = index.dense(Causal())[0, head]
    keys = k[0, head // (q.shape[1] // k.shape[1])]
    cell = tokens // POINTS
    mass, held = [], 0.0
    for first in range(0, tokens, cell):
        rows = torch.arange(first, first + cell)
        logits = q[0, head, rows] @ keys.T * q.shape[-1] ** -0.5
        weights = logits.masked_fill(torch.arange(tokens) > rows[:, None], -torch.inf).softmax(-1)
        held += weights[chosen[rows]].double().sum().item()
        mass.append(F.max_pool2d(weights[None], cell)[0])
    verticals = index.verticals[0, head]
    return Head(
        mass=torch.cat(mass),
        verticals=verticals[(verticals >= pattern.sinks) & (verticals < tokens)],
        slashes=index.slashes[0, head].nonzero().flatten(),
        sinks=pattern.sinks,
        density=2 * chosen.sum().item() / (tokens * (tokens + 1)),
        recall=held / tokens,
    )


def draw(head: Head, tokens: int, name: str) -> Figure:
    """The attention on the left, and the selection with its three parts marked on the right."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    mass = head.mass.masked_fill(head.mass == 0, torch.nan)
    extent = (0, tokens, tokens, 0)
    left.imshow(mass, norm=LogNorm(1e-5, 1, clip=True), cmap="Greys", extent=extent)
    left.set_title("Attention of all pairs\n(darker: more mass)", fontsize=10)
    _draw_selection(right, head, tokens)
    right.set_title(
        f"Selected: {head.density:.1%} of the pairs,\nwhich hold {head.recall:.1%} of the mass",
        fontsize=10,
    )
    for axes in (left, right):
        axes.set(xlim=(-0.01 * tokens, tokens), ylim=(tokens, 0), xlabel="position of the key")
        axes.set_ylabel("position of the query")
        ticks = [part * tokens // 4 for part in range(5)]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.set_aspect("equal")
    figure.suptitle(
        f"{name}, {tokens:,} tokens: density {head.density:.1%}, recall {head.recall:.1%}",
        fontsize=11,
    )
    return figure


def _draw_selection(axes: Axes, head: Head, tokens: int) -> None:
    for slash in head.slashes.tolist():
        # A query sees BLOCK keys of a slash, whose distance is slash * BLOCK on average.
        near = max(slash * BLOCK - BLOCK // 2, 0)
        far = slash * BLOCK + BLOCK // 2
        corners = [(0, near), (0, far), (tokens - far, tokens), (tokens - near, tokens)]
        axes.fill(*zip(*corners), color=SLASH, linewidth=0)
    axes.vlines(head.verticals.tolist(), head.verticals.tolist(), tokens, VERTICAL, linewidth=0.5)
    axes.vlines(0, 0, tokens, SINK, linewidth=3)
    _point_at(axes, head, tokens)


def _point_at(axes: Axes, head: Head, tokens: int) -> None:
    """Arrows at the sinks, at a vertical, and at the slash that is farthest from the diagonal."""
    slash = head.slashes.max().item() * BLOCK
    query = 0.42 * tokens
    # The vertical with the widest gap before it is the easiest one to see.
    gaps = head.verticals.diff(prepend=head.verticals.new_zeros(1))
    vertical = head.verticals[gaps.argmax()].item()
    row = max(0.93 * tokens, vertical)
    style = {"fontsize": 9, "ha": "center"}
    for text, color, target, place in (
        (f"slash, {slash:,} tokens\nbefore the query", SLASH, (query - slash, query), (0.75, 0.13)),
        ("vertical: one key\nfor all later queries", VERTICAL, (vertical, row), (0.75, 0.34)),
        (f"sinks: the first\n{head.sinks} keys", SINK, (0, 0.2 * tokens), (0.3, 0.13)),
    ):
        arrow = {"arrowstyle": "->", "color": color, "linewidth": 1.3}
        position = (place[0] * tokens, place[1] * tokens)
        axes.annotate(text, target, position, color=color, arrowprops=arrow, **style)


if __name__ == "__main__":
    main(sys.argv[1:])
