"""Predict work, bytes, and time of attention over many ranks, without any of them.

    titan-sparse plan train_configs/demo_gpu.toml --ranks 32 --nodes 4 --seq-len 524288 \\
        --layout striped zigzag --schedule ring double_ring --out plan.png plan.json

Several layouts and schedules are compared. Further words are options of the configuration that a
plan depends on (--attention.gradient_dtype bfloat16). The index is one that a run saved (--index,
titan_sparse/estimate/indexes.py), or a random one of --density for one long document, or, with
pattern dense, the mask of packed documents (--documents). All times are of one attention layer,
without selection. docs/context_parallel.md explains the numbers.
"""

import argparse
import dataclasses
import json
from collections import Counter
from pathlib import Path

import torch

from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS, DEFAULT_COSTS
from titan_sparse.attention.context_parallel.schedules import SCHEDULES
from titan_sparse.attention.masks.ranges import MaskRanges
from titan_sparse.attention.observe import worker_imbalance
from titan_sparse.attention.patterns import BlockIndex
from titan_sparse.commands import in_tokens, parser_of, positive, refuses
from titan_sparse.config import Config, check, padding_multiple, resolve_overlap_stages
from titan_sparse.config.reading import KINDS, load_config, refuse_ignored, require
from titan_sparse.estimate.constants import costs_of, costs_of_run, load_constants, shape_of
from titan_sparse.estimate.indexes import load_indexes, ragged_lengths, random_index
from titan_sparse.estimate.planner import LayerPlan, LayerWork, Setting, count, plan_layer
from titan_sparse.evaluation.pictures import new_figure
from titan_sparse.models.flavours import DecoderConfig, resolve
from titan_sparse.training.attention import build_mask, build_pattern, schedule_named

DEFAULT_CONSTANTS = Path(__file__).parents[1] / "estimate/constants_h200.json"

_READ = (
    *("attention.backward_circulates", "attention.balance_costs", "attention.block_size"),
    *("attention.gradient_dtype", "attention.overlap_stages", "attention.pattern"),
    *("attention.sliding_window", "attention.window_sinks", "model.", "training.dtype"),
    # float64 needs the CPU.
    "training.device",
)
"""Beginnings of the keys that a plan depends on, beside those that its own options may decide."""


@refuses
def main(words: list[str]) -> int:
    args, config, pairs = parse(words)
    constants = load_constants(args.constants)
    model = resolve(**vars(config.model))
    shape = shape_of(config, model)
    block_size = config.attention.block_size
    # The costs that the run would read, else those of --constants, else the built-in ones.
    costs = (
        costs_of_run(config, model)
        or costs_of(constants, shape, model.heads, block_size)
        or DEFAULT_COSTS
    )
    ranges, indexes = read_indexes(args, config, model)
    ranks_of_a_node = args.ranks // args.nodes
    stages = resolve_overlap_stages(config.attention, args.nodes)
    settings = [
        Setting(layout, SCHEDULES[schedule], args.nodes, ranks_of_a_node, stages, costs)
        for layout, schedule in pairs
    ]
    plans: list[list[LayerPlan]] = [[] for _ in settings]
    for index in indexes:
        counted: dict[str, LayerWork] = {}  # by layout
        for setting, layers in zip(settings, plans):
            if setting.layout not in counted:
                counted[setting.layout] = count(index, ranges, shape, setting)
            layers.append(plan_layer(counted[setting.layout], setting, constants))
    summaries = [summary(layers) for layers in plans]
    about = {
        "config": args.config,
        "index": args.index or f"random, seed {args.seed}",
        "layers": len(indexes),
        "nodes": args.nodes,
        "ranks_of_a_node": ranks_of_a_node,
        "seq_len": ranges.start.shape[1],
        "heads": indexes[0].heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "block_size": block_size,
        "density": summaries[0]["density"],
        "constants": vars(constants),
        "balance_costs": costs._asdict(),
    }
    for key, value in about.items():
        print(f"{key:>16}  {value}")
    print(table(summaries))
    # [ranks, steps]: pairs, a mean over layers.
    works = [torch.stack([plan.work for plan in layers]).mean(0) for layers in plans]
    for path in args.out:
        if path.endswith(".png"):
            draw(path, summaries, works)
        else:
            found = [
                numbers | {"pairs_of_rank": work.sum(-1).tolist()}
                for numbers, work in zip(summaries, works)
            ]
            Path(path).write_text(json.dumps(about | {"plans": found}, indent=1) + "\n")
        print(f"wrote {path}")
    return 0


def parse(words: list[str]) -> tuple[argparse.Namespace, Config, list[tuple[str, str]]]:
    """Options, the configuration with them put in, and the (layout, schedule) pairs to compare.

    All pairs are checked. Raises ConfigError, one line.
    """
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("config", nargs="?", help="a TOML file of train_configs/")
    add("--ranks", type=positive, help="context-parallel ranks; default: parallelism.cp")
    add("--nodes", type=positive, help="default: by parallelism.cp_intra, or 8 ranks a node")
    add("--seed", type=int, default=0, help="of the random index and of ragged documents")
    add_one = parser.add_mutually_exclusive_group().add_argument
    add_one("--index", help="file of titan_sparse.estimate.indexes.save_indexes()")
    add_one(
        "--density", type=float, help="share of causal pairs in the random index; default: 0.05"
    )
    add_one(
        "--documents",
        nargs="+",
        metavar="TOKENS",
        help="lengths of packed documents, or: ragged, most under 1K tokens, the longest a quarter "
        "of the sequence; default: one long document",
    )
    add("--seq-len", type=in_tokens, help="tokens; default: training.seq_len, or the index's")
    add("--layout", nargs="+", choices=ALL_LAYOUTS, help="default: attention.layout")
    schedules = ["auto", *SCHEDULES]
    add("--schedule", nargs="+", choices=schedules, help="default: attention.schedule")
    add("--constants", default=DEFAULT_CONSTANTS, help="JSON of scripts.calibrate")
    files = "files to write: .png for a picture, others for numbers as JSON"
    add("--out", nargs="+", default=[], help=files)
    args, rest = parser.parse_known_args(words)
    named = [word for word in rest if word.partition("=")[0] == "--config"]
    require(not named, "--config is not an option here; write titan-sparse plan FILE")
    require(args.config is not None, "the file is missing; write titan-sparse plan FILE")
    config = load_config(["--config", args.config, *rest])
    refuse_ignored(rest, _reasons(args))
    args.ranks = args.ranks or config.parallelism.cp
    args.nodes = args.nodes or -(-args.ranks // min(config.parallelism.cp_intra or 8, args.ranks))
    require(
        args.ranks % args.nodes == 0,
        f"--ranks {args.ranks} do not divide evenly over {args.nodes} nodes; write another --nodes",
    )
    require(
        args.density is None or 0 < args.density <= 1,
        f"--density {args.density} is not in (0, 1]. Write a share such as 0.05",
    )
    # Lengths of documents, or an index.
    draws = args.documents == ["ragged"] or config.attention.pattern != "dense"
    require(
        not args.seed or (draws and not args.index),
        "--seed would be ignored, as nothing is drawn; leave it out",
    )
    ranks_of_node = args.ranks // args.nodes
    mesh = {"cp": args.ranks, "cp_intra": ranks_of_node, "dp_replicate": 1, "dp_shard": 1}
    config.parallelism = dataclasses.replace(config.parallelism, **mesh)
    config.training.seq_len = args.seq_len or config.training.seq_len
    if not args.index:  # "auto" depends on the mask that is planned
        config.attention.mask = "documents" if args.documents else "causal"
        config.data.sequences = "packed" if args.documents else "fixed"

    pairs = []
    for layout in args.layout or [config.attention.layout]:
        for schedule in args.schedule or [config.attention.schedule]:
            asked = dataclasses.replace(config.attention, layout=layout, schedule=schedule)
            pairs.append((layout, schedule_named(asked, args.nodes, ranks_of_node)))
    layouts = [layout for layout, _ in pairs]
    for layout, schedule in pairs:
        attention = dataclasses.replace(config.attention, layout=layout, schedule=schedule)
        # An option that only one of the compared settings uses must not refuse the others.
        if schedule != "group_cast" and any(other == "group_cast" for _, other in pairs):
            attention.overlap_stages = 0
            attention.overlap_stages_backward = 0
        if layout != "balanced" and "balanced" in layouts:
            attention.balance_costs = ""
        check(dataclasses.replace(config, attention=attention), args.ranks, ranks_of_node)
    # The sequence is padded once, for all layouts. zigzag's multiple suits the others too.
    config.attention.layout = "zigzag" if "zigzag" in layouts else layouts[0]
    return args, config, list(dict.fromkeys(pairs))


def _reasons(args: argparse.Namespace) -> dict[str, str]:
    """The keys that the plan does not depend on, or that another option decides, and why."""
    decided = {
        "parallelism.cp": args.ranks and "--ranks",
        "parallelism.cp_intra": args.nodes and "--nodes",
        "training.seq_len": (args.seq_len and "--seq-len") or (args.index and "--index"),
        "attention.layout": args.layout and "--layout",
        "attention.schedule": args.schedule and "--schedule",
        "attention.mask": not args.index and "--documents, or one document without it,",
    }
    reasons = {key: f"as {by} decides over it" for key, by in decided.items() if by}
    for key in KINDS:
        if key not in decided and not key.startswith(_READ):
            reasons[key] = "as no plan depends on it"
    return reasons


def read_indexes(
    args: argparse.Namespace, config: Config, model: DecoderConfig
) -> tuple[MaskRanges, list[BlockIndex]]:
    """The mask, and an index for each layer."""
    if args.index:
        ranges, indexes = load_indexes(args.index)
        saved = ranges.start.shape[1]
        require(
            args.seq_len in (None, saved),
            f"--seq-len {args.seq_len} is not that of --index, {saved}; leave it out",
        )
        size = indexes[0].block_size
        require(
            config.attention.block_size == size,
            f"attention.block_size = {config.attention.block_size} is not that of --index; write "
            f"--attention.block_size {size}",
        )
        heads = indexes[0].heads
        require(
            model.heads == heads,
            f"--index is of a model with {heads} heads, not {model.heads}; write the file or --model "
            "of that run",
        )
        return ranges, indexes
    attention = config.attention
    multiple = padding_multiple(config)
    seq_len = -(-config.training.seq_len // multiple) * multiple
    lengths = [config.training.seq_len]
    if args.documents:
        lengths = _lengths(args.documents, config, args.seed)
    ranges = build_mask(attention, [lengths]).rows(seq_len)
    pattern = build_pattern(attention)
    tensors: list[torch.Tensor] = []
    if attention.pattern == "vertical_slash":
        density = 0.05 if args.density is None else args.density
        pattern, tensors = random_index(
            model.heads, seq_len, attention.block_size, density, seed=args.seed
        )
    else:
        require(
            not pattern.dynamic and args.density is None,
            f"a random index of a --density is one of vertical_slash, not of {pattern.name}; write "
            "--attention.pattern vertical_slash, or --index FILE with what a run chose",
        )
    return ranges, [pattern.index(tensors, ranges, 1, model.heads, attention.block_size)]


def _lengths(words: list[str], config: Config, seed: int) -> list[int]:
    whole = config.training.seq_len
    require(
        config.attention.pattern == "dense" and not config.attention.window_sinks,
        "--documents needs pattern dense and no window_sinks, because a random index is of one "
        "document; write --attention.pattern dense, or --index FILE of a run on packed documents",
    )
    if words == ["ragged"]:
        return ragged_lengths(whole, seed)
    lengths = [int(word) if word.isdigit() else 0 for word in words]
    require(
        all(lengths) and sum(lengths) <= whole,
        f"--documents {' '.join(words)}: write ragged, or lengths that add up to {whole} tokens or "
        "less",
    )
    return lengths


def summary(plans: list[LayerPlan]) -> dict:
    """Numbers of one setting, means over layers.

    Times are in ms, and sent bytes of the busiest rank in MB (1e6 bytes).
    """
    totals: Counter[str] = Counter()
    for plan in plans:
        computing = plan.forward.compute.sum(-1).mean().item()
        numbers = {
            "density": plan.density,
            "worker_imbalance": worker_imbalance(plan.work.sum(-1)).item(),
            # What it costs if ranks wait for each other at every step (MTraining, figure 12).
            "worker_imbalance_per_step": worker_imbalance(plan.work.T).mean().item(),
            "computation_ratio": computing / plan.forward.seconds,
        }
        for name, of_pass in (("forward", plan.forward), ("backward", plan.backward)):
            numbers[f"{name}_ms"] = of_pass.seconds * 1e3
            numbers[f"{name}_exposed_ms"] = of_pass.exposed() * 1e3
            numbers[f"{name}_inside_mb"] = of_pass.sent.inside.max().item() / 1e6
            numbers[f"{name}_across_mb"] = of_pass.sent.across.max().item() / 1e6
        totals.update(numbers)
    setting = plans[0].setting
    means = {key: total / len(plans) for key, total in totals.items()}
    return {"layout": setting.layout, "schedule": setting.schedule.name} | means


def table(summaries: list[dict]) -> str:
    """A line of numbers for each setting."""
    lines = ["| " + " | ".join(summaries[0]) + " |", "|" + "---|" * len(summaries[0])]
    for numbers in summaries:
        cells = [x if isinstance(x, str) else f"{x:.2f}" for x in numbers.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: str, summaries: list[dict], works: list[torch.Tensor]) -> None:
    """Draw the work of each rank and step, relative to the mean of all, a
    panel for each setting."""
    figure, panels = new_figure((4.2 * len(works), 4), len(works))
    for axes, numbers, work in zip(figure.axes, summaries, works):
        relative = (work / work.mean()).numpy()
        image = axes.imshow(relative, aspect="auto", vmin=0, vmax=3, interpolation="nearest")
        # In each panel, 1 is the mean.
        axes.set(
            title=f"{numbers['layout']}, {numbers['schedule']}\n"
            f"worker {numbers['worker_imbalance']:.2f}, "
            f"per step {numbers['worker_imbalance_per_step']:.2f}",
            xlabel="step",
            ylabel="rank",
        )
    figure.colorbar(image, ax=panels, label="work / mean")
    figure.savefig(path, dpi=110)
