"""Plans attention over many ranks without any: work, bytes and predicted time.

    titan-sparse plan train_configs/demo_gpu.toml --ranks 32 --nodes 4 --seq-len 524288 \\
        --layout striped zigzag --schedule ring double_ring --out plan.png plan.json

Several layouts and schedules are compared. Further options of the configuration are taken as
train.py takes them (--attention.gradient_dtype bfloat16). The index is one that a run saved
(--index, titan_sparse/estimate/index_file.py), a random one of --density for one long document, or,
with pattern dense, the mask of packed documents (--documents). All times are of one attention layer,
selection not included. docs/context_parallel.md explains the numbers.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from titan_sparse.attention.context_parallel import schedule as schedules
from titan_sparse.attention.context_parallel.balanced import DEFAULT_COSTS, Costs
from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS
from titan_sparse.attention.masks.packed import sliding_window
from titan_sparse.attention.masks.ranges import Causal, Documents, MaskRanges, SlidingWindow
from titan_sparse.attention.observe.visits import (
    step_imbalance,
    worker_imbalance,
    worker_imbalance_per_step,
)
from titan_sparse.attention.patterns import BlockIndex, VerticalSlash
from titan_sparse.config import (
    Config,
    ConfigError,
    check,
    load,
    padding_multiple,
    resolve_overlap_stages,
)
from titan_sparse.config.reading import tokens
from titan_sparse.estimate import planner
from titan_sparse.estimate.constants import (
    Constants,
    costs_of,
    costs_of_run,
    load_constants,
    shape_of,
)
from titan_sparse.estimate.index_file import load_indexes
from titan_sparse.estimate.planner import Layer, LayerPlan, count, plan_layer
from titan_sparse.estimate.synthetic import ragged_lengths, random_index
from titan_sparse.from_config import build_pattern, schedule_named
from titan_sparse.models.flavours import DecoderConfig, resolve

DEFAULT_CONSTANTS = Path(__file__).parents[1] / "estimate/constants_h200.json"


def main(words: list[str]) -> int:
    started = time.perf_counter()
    args, others = arguments(words)
    try:
        setting = settings(args, others)
        if any(Path(path).suffix == ".png" for path in args.out):
            import matplotlib  # noqa: F401  asked for here, before minutes of work
        config = setting.config
        constants = load_constants(args.constants)
        model = resolve(**vars(config.model))
        costs = balance_costs(config, model, constants)
        ranges, indexes = get_indexes(args, config, model)
        plans = make_plans(ranges, indexes, setting, model, constants, costs)
    except ModuleNotFoundError as error:
        print(
            f'error: a picture needs {error.name}: write pip install -e ".[eval]", or no .png',
            file=sys.stderr,
        )
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = {
        "config": args.config,
        "index": args.index or f"random, seed {args.seed}",
        "layers": len(indexes),
        "nodes": setting.nodes,
        "ranks_of_a_node": setting.ranks_of_node,
        "seq_len": ranges.start.shape[1],
        "heads": indexes[0].heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "block_size": indexes[0].block_size,
        "density": mean_summary(plans[0])["density"],
        "constants": vars(constants),
        "balance_costs": costs._asdict(),
    }
    for key, value in about.items():
        print(f"{key:>16}  {value}")
    for layers in plans:
        print(work_lines(layers))
    print(table(plans))
    for path in args.out:
        if path.endswith(".png"):
            draw(path, plans)
        else:
            write_json(path, plans, about)
        print(f"wrote {path}")
    print(f"planned in {time.perf_counter() - started:.1f} s")
    return 0


def arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's options, and the words that are left for the configuration."""
    parser = argparse.ArgumentParser(
        prog="titan-sparse plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", help="a TOML file of train_configs/")
    add("--ranks", type=int, help="context-parallel ranks; default: parallelism.cp")
    add("--nodes", type=int, help="default: by parallelism.cp_intra, or 8 ranks a node")
    add(
        "--index", help="file of titan_sparse.estimate.index_file.save_indexes(), one index a layer"
    )
    add(
        "--density", type=float, help="share of the causal pairs in the random index; default: 0.05"
    )
    add("--seed", type=int, default=0, help="of the random index and of ragged documents")
    add(
        "--documents",
        nargs="+",
        metavar="TOKENS",
        help="lengths of packed documents, or: ragged, most under 1K "
        "tokens, the longest a quarter of the sequence; default: one long document",
    )
    add("--seq-len", type=tokens, help="tokens; default: training.seq_len, or the index's")
    add(
        "--layout",
        nargs="+",
        choices=ALL_LAYOUTS,
        help="default: attention.layout; several are compared",
    )
    add(
        "--schedule",
        nargs="+",
        choices=["auto", *schedules.SCHEDULES],
        help="default: attention.schedule",
    )
    add("--constants", default=DEFAULT_CONSTANTS, help="JSON of scripts.calibrate")
    add(
        "--out", nargs="+", default=[], help="files to write: .json for numbers, .png for a picture"
    )
    return parser.parse_known_args(words)


class Setting(NamedTuple):
    """What is planned: the checked configuration, the machines, (layout, schedule) pairs."""

    config: Config
    nodes: int
    ranks_of_node: int
    pairs: list[tuple[str, str]]


def settings(args: argparse.Namespace, words: list[str]) -> Setting:
    """The configuration of `words` with this program's options put in, checked for every pair."""
    config, _ = load(["--config", args.config, *words])
    ranks = args.ranks or config.parallelism.cp
    nodes = args.nodes
    if not nodes:
        ranks_of_node = min(config.parallelism.cp_intra or 8, max(ranks, 1))
        nodes = -(-ranks // ranks_of_node)
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(
            f"--ranks {ranks} do not divide evenly over {nodes} nodes; write another --nodes"
        )
    ranks_of_node = ranks // nodes
    config.parallelism.cp = ranks
    config.parallelism.cp_intra = ranks_of_node
    config.parallelism.dp_replicate = 1
    config.parallelism.dp_shard = 1
    config.training.seq_len = args.seq_len or config.training.seq_len
    if args.index and args.documents:
        raise ConfigError(
            "--documents would be ignored: --index has the mask of its run; write one of them"
        )
    if args.index and args.density is not None:
        raise ConfigError("--density would be ignored with --index; leave it out")
    if args.density is not None and not 0 < args.density <= 1:
        raise ConfigError(f"--density {args.density} is not in (0, 1]. Write a share such as 0.05")
    if not args.index:  # what is planned, whatever the configuration says: "auto" goes by it
        config.attention.mask = "documents" if args.documents else "causal"
        config.data.sequences = "packed" if args.documents else "fixed"

    pairs = []
    for layout in args.layout or [config.attention.layout]:
        for schedule in args.schedule or [config.attention.schedule]:
            asked = dataclasses.replace(config.attention, layout=layout, schedule=schedule)
            pairs.append((layout, schedule_named(asked, nodes, ranks_of_node)))
    casts = any(schedule == "group_cast" for _, schedule in pairs)
    compares_balanced = any(layout == "balanced" for layout, _ in pairs)
    for layout, schedule in pairs:
        attention = dataclasses.replace(config.attention, layout=layout, schedule=schedule)
        if casts and schedule != "group_cast":
            # Stages are group_cast's alone, which is no reason to refuse to compare it with others.
            attention.overlap_stages = 0
            attention.overlap_stages_backward = 0
        if layout != "balanced" and compares_balanced:
            attention.balance_costs = ""
        check(dataclasses.replace(config, attention=attention), ranks, ranks_of_node)

    # The sequence is padded once, for all layouts; zigzag's multiple suits the others too.
    layouts = [layout for layout, _ in pairs]
    config.attention.layout = "zigzag" if "zigzag" in layouts else layouts[0]
    for path in args.out:
        if Path(path).suffix not in (".json", ".png"):
            raise ConfigError(f"--out {path}: write a name that ends in .json or .png")
    return Setting(config, nodes, ranks_of_node, list(dict.fromkeys(pairs)))


def get_indexes(
    args: argparse.Namespace, config: Config, model: DecoderConfig
) -> tuple[MaskRanges, list[BlockIndex]]:
    """The mask, and an index for each layer."""
    if args.index:
        ranges, indexes = load_indexes(args.index)
        saved = ranges.start.shape[1]
        if args.seq_len and args.seq_len != saved:
            raise ConfigError(
                f"--seq-len {args.seq_len} is not that of --index, {saved}; leave it out"
            )
        return ranges, indexes
    attention = config.attention
    multiple = padding_multiple(config)
    seq_len = -(-config.training.seq_len // multiple) * multiple
    mask = Documents(_lengths(args, config)) if args.documents else Causal()
    if attention.sliding_window:
        mask = mask & SlidingWindow(attention.sliding_window)
    if attention.window_sinks:
        mask = sliding_window(
            [config.training.seq_len], attention.sliding_window, attention.window_sinks
        )
    ranges = mask.rows(seq_len)
    pattern = build_pattern(attention)
    tensors: list[torch.Tensor] = []
    if pattern.dynamic:
        if not isinstance(pattern, VerticalSlash):
            raise ConfigError(
                f"a random index is one of vertical_slash, not of {pattern.name}; "
                "write --index FILE with what a run chose (titan_sparse/estimate/index_file.py), "
                "or --attention.pattern vertical_slash"
            )
        density = 0.05 if args.density is None else args.density
        pattern, tensors = random_index(
            model.heads, seq_len, attention.block_size, density, seed=args.seed
        )
    elif args.density is not None:
        raise ConfigError("--density would be ignored with pattern dense; leave it out")
    return ranges, [pattern.index(tensors, ranges, 1, model.heads, attention.block_size)]


def _lengths(args: argparse.Namespace, config: Config) -> list[int]:
    """Of the packed documents. Raises ConfigError for a list that cannot be planned with."""
    whole = config.training.seq_len
    if config.attention.pattern != "dense" or config.attention.window_sinks:
        raise ConfigError(
            "--documents goes with pattern dense and no window_sinks: a random index is of one "
            "document; write --attention.pattern dense, or --index FILE of a run on packed documents"
        )
    if args.documents == ["ragged"]:
        return ragged_lengths(whole, args.seed)
    are_numbers = all(word.isdigit() and int(word) for word in args.documents)
    if not are_numbers or sum(int(word) for word in args.documents) > whole:
        raise ConfigError(
            f"--documents {' '.join(args.documents)}: "
            f"write ragged, or lengths that add up to {whole} tokens or less"
        )
    return [int(word) for word in args.documents]


def balance_costs(config: Config, model: DecoderConfig, constants: Constants) -> Costs:
    """By which the layout "balanced" deals out blocks: those that the run would take from
    attention.balance_costs, else those of --constants, else the built-in ones."""
    costs = costs_of_run(config, model)
    if costs is None:
        shape = shape_of(config, model)
        costs = costs_of(constants, shape, model.heads, config.attention.block_size)
    return costs or DEFAULT_COSTS


def make_plans(
    ranges: MaskRanges,
    indexes: list[BlockIndex],
    setting: Setting,
    model: DecoderConfig,
    constants: Constants,
    costs: Costs,
) -> list[list[LayerPlan]]:
    """For each (layout, schedule) the plans of all layers. Work is counted once a layout."""
    shape = shape_of(setting.config, model)
    overlap_stages = resolve_overlap_stages(setting.config.attention, setting.nodes)
    ranks = setting.nodes * setting.ranks_of_node
    plans: dict[tuple[str, str], list[LayerPlan]] = {pair: [] for pair in setting.pairs}
    for index in indexes:
        layer = Layer(index, ranges, shape)
        visits = {}  # by layout
        for layout, schedule in setting.pairs:
            if layout not in visits:
                visits[layout] = count(index, ranges, layout, ranks, costs)
            spread = planner.Setting(
                layout,
                schedules.SCHEDULES[schedule],
                setting.nodes,
                setting.ranks_of_node,
                overlap_stages,
                costs,
            )
            plans[layout, schedule].append(plan_layer(visits[layout], layer, spread, constants))
    return list(plans.values())


def summary(p: LayerPlan) -> dict[str, float]:
    """The numbers of one plan: ms, MB (1e6 bytes) of the busiest rank, and imbalance degrees."""
    computing = p.forward.compute.sum(-1).mean().item()
    numbers = {
        "density": p.density,
        "worker_imbalance": worker_imbalance(p.work.sum(-1)).item(),
        "worker_imbalance_per_step": worker_imbalance_per_step(p.work).item(),
        "step_imbalance": step_imbalance(p.work).item(),
        "computation_ratio": computing / p.forward.seconds(),
    }
    for name, of_pass in (("forward", p.forward), ("backward", p.backward)):
        numbers[f"{name}_ms"] = of_pass.seconds() * 1e3
        numbers[f"{name}_exposed_ms"] = of_pass.exposed() * 1e3
        numbers[f"{name}_inside_mb"] = of_pass.sent.inside.max().item() / 1e6
        numbers[f"{name}_across_mb"] = of_pass.sent.across.max().item() / 1e6
    return numbers


def mean_summary(plans: list[LayerPlan]) -> dict[str, float]:
    """summary(), averaged over layers."""
    each = [summary(p) for p in plans]
    return {key: sum(numbers[key] for numbers in each) / len(each) for key in each[0]}


COLUMNS = {
    "worker imb.": ("worker_imbalance", ".2f"),
    "per step": ("worker_imbalance_per_step", ".2f"),
    "step imb.": ("step_imbalance", ".2f"),
    "comp. ratio": ("computation_ratio", ".2f"),
    "fwd ms": ("forward_ms", ".2f"),
    "exposed": ("forward_exposed_ms", ".2f"),
    "bwd ms": ("backward_ms", ".2f"),
    "exposed ": ("backward_exposed_ms", ".2f"),
    "fwd inside MB": ("forward_inside_mb", ".1f"),
    "across MB": ("forward_across_mb", ".1f"),
    "bwd inside MB": ("backward_inside_mb", ".1f"),
    "across MB ": ("backward_across_mb", ".1f"),
}


def table(plans: list[list[LayerPlan]]) -> str:
    """A line of numbers for each setting."""
    lines = [
        "| layout | schedule | " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * (len(COLUMNS) + 2),
    ]
    for layers in plans:
        numbers = mean_summary(layers)
        cells = [*_names(layers), *(format(numbers[key], form) for key, form in COLUMNS.values())]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _names(layers: list[LayerPlan]) -> tuple[str, str]:
    """Of the layout and the schedule."""
    setting = layers[0].setting
    return setting.layout, setting.schedule.name


def work_lines(plans: list[LayerPlan]) -> str:
    """Work of each rank and of the steps, in million pairs of a layer.

    Where there are many ranks, only of the extreme ones.
    """
    work = torch.stack([p.work for p in plans]).mean(0) / 1e6  # [ranks, steps]
    ranks = work.sum(-1)
    steps = work.amax(0) / work.mean(0).clamp(min=1e-9)
    first = (
        f"{', '.join(_names(plans))}: million pairs a rank: "
        f"min {ranks.min():,.1f} (rank {ranks.argmin()}), mean {ranks.mean():,.1f}, "
        f"max {ranks.max():,.1f} (rank {ranks.argmax()}); "
        f"worst step {steps.argmax()}: max / mean over ranks {steps.max():.2f}"
    )
    lines = [first]
    if len(work) <= 16:
        for rank, of_rank in enumerate(work.tolist()):
            by_step = " ".join(f"{pairs:,.1f}" for pairs in of_rank)
            lines.append(f"  rank {rank:2}: {ranks[rank].item():10,.1f} = {by_step}")
    return "\n".join(lines)


def write_json(path: str, plans: list[list[LayerPlan]], about: dict) -> None:
    """All numbers; work per rank, and up to 64 ranks per rank and step, averaged over layers."""
    found = []
    for layers in plans:
        work = torch.stack([p.work for p in layers]).mean(0)
        layout, schedule = _names(layers)
        found.append(
            {
                "layout": layout,
                "schedule": schedule,
                **mean_summary(layers),
                "pairs_of_rank": work.sum(-1).tolist(),
                "pairs_of_rank_and_step": work.tolist() if len(work) <= 64 else None,
            }
        )
    Path(path).write_text(json.dumps(about | {"plans": found}, indent=1) + "\n", encoding="utf-8")


def draw(path: str, plans: list[list[LayerPlan]]) -> None:
    """A picture: work of each rank and step, relative to the mean of all, a panel for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(plans), 4), layout="constrained")
    panels = figure.subplots(1, len(plans), squeeze=False)[0]
    for axes, layers in zip(panels, plans):
        work = torch.stack([p.work for p in layers]).mean(0)
        relative = (work / work.mean()).numpy()
        image = axes.imshow(relative, aspect="auto", vmin=0, vmax=3, interpolation="nearest")
        numbers = mean_summary(layers)
        axes.set(
            title=f"{', '.join(_names(layers))}\n"
            f"worker {numbers['worker_imbalance']:.2f}, "
            f"per step {numbers['worker_imbalance_per_step']:.2f}",
            xlabel="step",
            ylabel="rank",
        )
    figure.colorbar(image, ax=axes, label="work / mean")
    figure.savefig(path, dpi=110)
