"""Draw when four ranks compute and when keys and values travel, for three schedules.

    python -m scripts.docs.draw_timeline --out docs/pictures/timeline.png

The times are predictions of the planner (titan-sparse plan) with the constants measured on H200
GPUs: the forward of one attention layer with the heads of Qwen2.5-3B, on two nodes of two GPUs.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from titan_sparse.attention.context_parallel.schedules import SCHEDULES
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.commands import parser_of, positive
from titan_sparse.commands.plan import DEFAULT_CONSTANTS
from titan_sparse.estimate.constants import KVShape, load_constants
from titan_sparse.estimate.indexes import random_index
from titan_sparse.estimate.planner import LayerPlan, Setting, count, plan_layer

NODES, RANKS_OF_A_NODE = 2, 2
HEADS, BLOCK_SIZE = 16, 128
SHAPE = KVShape(kv_heads=2, head_dim=128, element_bytes=2, gradient_bytes=4)
SCHEDULE_NAMES = ("ring", "double_ring", "all_gather")
COMPUTE, INSIDE, ACROSS = "tab:blue", "tab:green", "tab:orange"
CONSTANTS = load_constants(str(DEFAULT_CONSTANTS))


def main(words: list[str]) -> None:
    parser = parser_of(__doc__, "scripts.docs.draw_timeline")
    parser.add_argument("--tokens", type=positive, default=524288)
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--out", type=Path, required=True, help="the picture, .png")
    args = parser.parse_args(words)
    plans = plans_of(args.tokens, args.density)
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    panels = figure.subplots(len(plans), 1, sharex=True)
    for axes, (name, plan) in zip(panels, plans.items()):
        draw(axes, name, plan)
    panels[-1].set_xlabel("milliseconds")
    handles = [
        Patch(color=COMPUTE, label="attention kernels"),
        Patch(color=INSIDE, label="transfer inside a node"),
        Patch(color=ACROSS, label="transfer limited by the link between nodes"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"Predicted forward of one layer: {args.tokens:,} tokens, density {args.density:.0%}, "
        "2 nodes of 2 GPUs"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=100)
    print(f"wrote {args.out}")


def plans_of(tokens: int, density: float) -> dict[str, LayerPlan]:
    """Plans of one layer by schedule, for the same random selection."""
    pattern, tensors = random_index(HEADS, tokens, BLOCK_SIZE, density)
    mask = Causal().rows(tokens)
    index = pattern.index(tensors, mask, 1, HEADS, BLOCK_SIZE)
    plans = {}
    for name in SCHEDULE_NAMES:
        setting = Setting("striped", SCHEDULES[name], NODES, RANKS_OF_A_NODE)
        plans[name] = plan_layer(count(index, mask, SHAPE, setting), setting, CONSTANTS)
    return plans


def draw(axes: Axes, name: str, plan: LayerPlan) -> None:
    """Each rank's computing as a bar above, and the transfers at the same time below it."""
    forward = plan.forward
    windows, steps = plan.setting.schedule.rings(NODES, RANKS_OF_A_NODE)
    color = INSIDE if windows > 1 else ACROSS
    seconds = forward.compute.sum(-1)
    for rank, compute in enumerate(forward.compute.tolist()):
        now = forward.ends if name == "all_gather" else 0.0
        if now:
            bar(axes, rank, 0, now, ACROSS, below=True)
        for step, (computing, transfer) in enumerate(zip(compute, forward.transfers.tolist())):
            if windows > 1 and step == steps:
                # Keys of the other node have to be there.
                now = max(now, forward.seconds - sum(compute[step:]))
            bar(axes, rank, now, computing, COMPUTE)
            bar(axes, rank, now, transfer, color, below=True)
            now += max(computing, transfer)
        if windows > 1:
            crossing = forward.sent.across[rank].item() / (CONSTANTS.across_gb_s * 1e9)
            bar(axes, rank, 0, crossing, ACROSS, below=True, lane=1)
    axes.set_title(
        f"{name}: {1e3 * forward.seconds:.1f} ms, of which the kernels of the busiest rank "
        f"take {1e3 * seconds.max():.1f} ms",
        fontsize=10,
    )
    axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def bar(
    axes: Axes,
    rank: int,
    start: float,
    length: float,
    color: str,
    below: bool = False,
    lane: int = 0,
) -> None:
    """One span of time, in seconds. lane: two transfers at the same time lie next to each other."""
    height = 0.18 if below else 0.34
    top = rank + (0.03 + lane * height if below else -0.36)
    axes.barh(
        top, 1e3 * length, height, 1e3 * start, align="edge", color=color, edgecolor="white", lw=0.5
    )


if __name__ == "__main__":
    main(sys.argv[1:])
