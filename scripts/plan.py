"""Plans attention over many ranks without any: work, bytes and predicted time of layouts and schedules.

    python -m scripts.plan train_configs/demo_gpu.toml --ranks 32 --nodes 4 --seq-len 524288 \\
        --layout striped zigzag --schedule ring double_ring --out plan.png plan.json

Further options of the configuration are taken as train.py takes them (--attention.vertical_slash.recall 0.9). The index is
one that a run saved (--index, titan_sparse/estimate/index_file.py) or a synthetic one (titan_sparse/estimate/synthetic.py) for one long
document, or, with pattern dense, for packed ones (--documents). All times are of one attention layer, selection not
included. docs/planning.md explains the numbers.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from titan_sparse.attention.context_parallel import schedule as schedules
from titan_sparse.attention.context_parallel.layouts import ALL_LAYOUTS
from titan_sparse.attention.masks.packed import sliding_window
from titan_sparse.attention.masks.ranges import Causal, Documents, MaskRanges, SlidingWindow
from titan_sparse.attention.observe import visits as balance
from titan_sparse.attention.patterns import BlockIndex, VerticalSlash
from titan_sparse.config import (
    Config,
    ConfigError,
    check,
    load,
    padding_multiple,
    resolve_overlap_stages,
)
from titan_sparse.estimate.index_file import load_indexes
from titan_sparse.estimate.planner import Constants, Plan, Shape, count, load_constants, plan
from titan_sparse.estimate.synthetic import draw_heads, expected_selection, ragged_lengths
from titan_sparse.from_config import build_pattern, schedule_named
from titan_sparse.models.flavours import DecoderConfig, resolve

DEFAULT_CONSTANTS = Path(__file__).parents[1] / "benchmarks/results/constants_h200.json"


def arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's options, and the words that are left for the configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="a TOML file of train_configs/")
    parser.add_argument("--ranks", type=int, help="context-parallel ranks; default: parallelism.cp")
    parser.add_argument(
        "--nodes", type=int, help="default: by parallelism.cp_intra, or 8 ranks a node"
    )
    parser.add_argument(
        "--index",
        help="file of titan_sparse.estimate.index_file.save_indexes(); default: a synthetic index",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=1,
        help="layers of the synthetic index; results are means over layers",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic index")
    parser.add_argument(
        "--documents",
        nargs="+",
        metavar="TOKENS",
        help="lengths of packed documents, or: ragged, most under 1K "
        "tokens, the longest a quarter of the sequence; default: one long document",
    )
    parser.add_argument(
        "--seq-len", type=int, help="tokens; default: training.seq_len, or the index's"
    )
    parser.add_argument(
        "--layout",
        nargs="+",
        choices=ALL_LAYOUTS,
        help="default: attention.layout; several are compared",
    )
    parser.add_argument(
        "--schedule",
        nargs="+",
        choices=["auto", *schedules.SCHEDULES],
        help="default: attention.schedule",
    )
    parser.add_argument("--constants", default=DEFAULT_CONSTANTS, help="JSON of scripts.calibrate")
    parser.add_argument(
        "--out",
        nargs="+",
        default=[],
        help="files to write: .json for the numbers, .png for a picture",
    )
    return parser.parse_known_args(words)


def settings(
    args: argparse.Namespace, words: list[str]
) -> tuple[Config, int, int, list[tuple[str, str]]]:
    """The configuration with this script's options put in and checked, nodes, ranks of a node, (layout, schedule) pairs."""
    config, _ = load(["--config", args.config, *words])
    ranks = args.ranks or config.parallelism.cp
    nodes = args.nodes or -(-ranks // min(config.parallelism.cp_intra or 8, max(ranks, 1)))
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(
            f"--ranks {ranks} do not divide evenly over {nodes} nodes; write another --nodes"
        )
    intra = ranks // nodes
    config.parallelism.cp, config.parallelism.cp_intra = ranks, intra
    config.parallelism.dp_replicate, config.parallelism.dp_shard = 1, 1
    config.training.seq_len = args.seq_len or config.training.seq_len
    if args.index and args.documents:
        raise ConfigError(
            "--documents would be ignored: --index has the mask of its run; write one of them"
        )
    if not args.index:  # what is planned, whatever the configuration says: "auto" goes by it
        config.attention.mask = "documents" if args.documents else "causal"
    named = lambda layout, schedule: schedule_named(
        dataclasses.replace(config.attention, layout=layout, schedule=schedule), nodes, intra
    )
    pairs = [
        (layout, named(layout, schedule))
        for layout in args.layout or [config.attention.layout]
        for schedule in args.schedule or [config.attention.schedule]
    ]
    casts = any(schedule == "group_cast" for _, schedule in pairs)
    for layout, schedule in pairs:
        # Stages are group_cast's alone, which is no reason to refuse to compare it with others.
        stages = (
            {"overlap_stages": 0, "overlap_stages_backward": 0}
            if casts and schedule != "group_cast"
            else {}
        )
        attention = dataclasses.replace(
            config.attention, layout=layout, schedule=schedule, **stages
        )
        check(dataclasses.replace(config, attention=attention), ranks, intra)
    # The sequence is padded once, for all layouts.
    config.attention.layout = (
        "zigzag" if any(layout == "zigzag" for layout, _ in pairs) else pairs[0][0]
    )
    unknown = [path for path in args.out if Path(path).suffix not in (".json", ".png")]
    if unknown:
        raise ConfigError(f"--out {unknown[0]}: write a name that ends in .json or .png")
    return config, nodes, intra, list(dict.fromkeys(pairs))


def get_indexes(
    args: argparse.Namespace, config: Config, model: DecoderConfig
) -> tuple[MaskRanges, list[BlockIndex]]:
    """The mask, and an index for each layer."""
    if args.index:
        rows, indexes = load_indexes(args.index)
        if args.seq_len and args.seq_len != rows.start.shape[1]:
            raise ConfigError(
                f"--seq-len {args.seq_len} is not that of --index, {rows.start.shape[1]}; leave it out"
            )
        return rows, indexes
    attention, multiple = config.attention, padding_multiple(config)
    seq_len = -(-config.training.seq_len // multiple) * multiple
    mask = Documents(_lengths(args, config)) if args.documents else Causal()
    mask = mask & SlidingWindow(attention.sliding_window) if attention.sliding_window else mask
    if attention.window_sinks:
        mask = sliding_window(
            [config.training.seq_len], attention.sliding_window, attention.window_sinks
        )
    rows = mask.rows(seq_len)
    pattern = build_pattern(attention)
    if not pattern.dynamic:
        return rows, [pattern.index([], rows, 1, model.heads, attention.block_size)]
    if not isinstance(pattern, VerticalSlash):
        raise ConfigError(
            f"a synthetic index is one of vertical_slash, not of {pattern.name}; write --index FILE with what "
            "a run chose (titan_sparse/estimate/index_file.py), or --attention.pattern vertical_slash"
        )
    heads = [
        draw_heads(seq_len, model.heads, model.kv_heads, model.head_dim, args.seed + layer)
        for layer in range(args.layers)
    ]
    chosen = [expected_selection(layer, pattern, attention.block_size) for layer in heads]
    return rows, [
        pattern.index(tensors, rows, 1, model.heads, attention.block_size) for tensors in chosen
    ]


def _lengths(args: argparse.Namespace, config: Config) -> list[int]:
    """Of the packed documents. Raises ConfigError for what is no such list, and for what cannot be planned with it."""
    whole = config.training.seq_len
    if config.attention.pattern != "dense" or config.attention.window_sinks:
        raise ConfigError(
            "--documents goes with pattern dense and no window_sinks: a synthetic index is of one document; write "
            "--attention.pattern dense, or --index FILE of a run on packed documents"
        )
    if args.documents == ["ragged"]:
        return ragged_lengths(whole, args.seed)
    if (
        not all(word.isdigit() and int(word) for word in args.documents)
        or sum(map(int, args.documents)) > whole
    ):
        raise ConfigError(
            f"--documents {' '.join(args.documents)}: write ragged, or lengths that add up to {whole} tokens or less"
        )
    return [int(word) for word in args.documents]


def make_plans(
    rows: MaskRanges,
    indexes: list[BlockIndex],
    pairs: list[tuple[str, str]],
    inter: int,
    intra: int,
    shape: Shape,
    constants: Constants,
    overlap_stages: tuple[int, int] = (2, 2),
) -> list[list[Plan]]:
    """For each (layout, schedule) the plans of all layers. Work is counted once a layout."""
    plans: dict[tuple[str, str], list[Plan]] = {pair: [] for pair in pairs}
    for index in indexes:
        for layout in dict.fromkeys(layout for layout, _ in pairs):
            visits = count(index, rows, layout, inter * intra)
            for pair in pairs:
                if pair[0] == layout:
                    plans[pair].append(
                        plan(
                            visits,
                            index,
                            rows,
                            *pair,
                            inter,
                            intra,
                            shape,
                            constants,
                            overlap_stages,
                        )
                    )
    return list(plans.values())


def summary(p: Plan) -> dict[str, float]:
    """The numbers of one plan: ms, MB (1e6 bytes) of the busiest rank, and imbalance degrees (balance.py)."""
    elapsed = p.forward.compute + p.forward.waiting
    numbers = {
        "density": p.density,
        "worker_imbalance": balance.worker_imbalance(p.work).item(),
        "worker_imbalance_per_step": balance.worker_imbalance_per_step(p.work).item(),
        "step_imbalance": balance.step_imbalance(p.work).item(),
        "computation_ratio": balance.computation_ratio(p.forward.compute, elapsed).item(),
        "needed_chunks": p.needed,
        "columns_forward_ms": p.verticals[0] * 1e3,
        "columns_backward_ms": p.verticals[1] * 1e3,
    }
    for name, line in (
        ("forward", p.forward),
        ("backward", p.backward),
        ("skipping_forward", p.skipping_forward),
        ("skipping_backward", p.skipping_backward),
    ):
        numbers |= {f"{name}_ms": line.seconds() * 1e3, f"{name}_exposed_ms": line.exposed() * 1e3}
    for prefix, traffic in (("", p.traffic), ("skipping_", p.skipping_traffic)):
        numbers |= {f"{prefix}{name}_mb": sent.max().item() / 1e6 for name, sent in traffic.items()}
    return numbers


def mean_summary(plans: list[Plan]) -> dict[str, float]:
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
    "inside MB": ("forward_inside_mb", ".1f"),
    "across MB": ("forward_across_mb", ".1f"),
    "skipping: inside": ("skipping_forward_inside_mb", ".1f"),
    "across": ("skipping_forward_across_mb", ".1f"),
    "fwd ms ": ("skipping_forward_ms", ".2f"),
}


def table(plans: list[list[Plan]]) -> str:
    """A line of numbers for each setting; bytes are those of the forward."""
    lines = [
        "| layout | schedule | " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * (len(COLUMNS) + 2),
    ]
    for layers in plans:
        numbers = mean_summary(layers)
        cells = [
            layers[0].layout,
            layers[0].schedule,
            *(format(numbers[key], form) for key, form in COLUMNS.values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def work_lines(plans: list[Plan]) -> str:
    """Work of each rank, or of the extreme ones where there are many, and of the steps; in million pairs of a layer."""
    work = torch.stack([p.work for p in plans]).mean(0) / 1e6
    ranks, steps = work.sum(-1), work.amax(0) / work.mean(0).clamp(min=1e-9)
    lines = [
        f"{plans[0].layout}, {plans[0].schedule}: million pairs a rank: "
        f"min {ranks.min():,.1f} (rank {ranks.argmin()}), "
        f"mean {ranks.mean():,.1f}, max {ranks.max():,.1f} (rank {ranks.argmax()}); worst step {steps.argmax()}: "
        f"max / mean over ranks {steps.max():.2f}"
    ]
    if len(work) <= 16:
        lines += [
            f"  rank {rank:2}: {total:10,.1f} = " + " ".join(f"{x:,.1f}" for x in row)
            for rank, (total, row) in enumerate(zip(ranks.tolist(), work.tolist()))
        ]
    return "\n".join(lines)


def write_json(path: str, plans: list[list[Plan]], about: dict) -> None:
    """All numbers; work per rank, and up to 64 ranks per rank and step, averaged over layers."""
    found = []
    for layers in plans:
        work = torch.stack([p.work for p in layers]).mean(0)
        found.append(
            {
                "layout": layers[0].layout,
                "schedule": layers[0].schedule,
                **mean_summary(layers),
                "pairs_of_rank": work.sum(-1).tolist(),
                "pairs_of_rank_and_step": work.tolist() if len(work) <= 64 else None,
            }
        )
    Path(path).write_text(json.dumps(about | {"plans": found}, indent=1) + "\n", encoding="utf-8")


def draw(path: str, plans: list[list[Plan]]) -> None:
    """A picture: work of each rank and step, relative to the mean of all, a panel for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(plans), 4), layout="constrained")
    for axes, layers in zip(figure.subplots(1, len(plans), squeeze=False)[0], plans):
        work = torch.stack([p.work for p in layers]).mean(0)
        image = axes.imshow(
            (work / work.mean()).numpy(), aspect="auto", vmin=0, vmax=3, interpolation="nearest"
        )
        numbers = mean_summary(layers)
        axes.set(
            title=f"{layers[0].layout}, {layers[0].schedule}\nworker {numbers['worker_imbalance']:.2f}, per step "
            f"{numbers['worker_imbalance_per_step']:.2f}",
            xlabel="step",
            ylabel="rank",
        )
    figure.colorbar(image, ax=axes, label="work / mean")
    figure.savefig(path, dpi=110)


def main(words: list[str]) -> int:
    started = time.perf_counter()
    args, others = arguments(words)
    try:
        config, inter, intra, pairs = settings(args, others)
        if any(Path(path).suffix == ".png" for path in args.out):
            import matplotlib  # noqa: F401  asked for here, before minutes of work
        constants, model = load_constants(args.constants), resolve(**vars(config.model))
        rows, indexes = get_indexes(args, config, model)
        bytes_of = {"bfloat16": (2, 4), "float32": (4, 4), "float64": (8, 8)}[config.training.dtype]
        shape = Shape(model.kv_heads, model.head_dim, *bytes_of)
        plans = make_plans(
            rows,
            indexes,
            pairs,
            inter,
            intra,
            shape,
            constants,
            resolve_overlap_stages(config.attention, inter),
        )
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
        "index": args.index or f"synthetic, seed {args.seed}",
        "layers": len(indexes),
        "nodes": inter,
        "ranks_of_a_node": intra,
        "seq_len": rows.start.shape[1],
        "heads": indexes[0].heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "block_size": indexes[0].block_size,
        "density": mean_summary(plans[0])["density"],
        "constants": vars(constants),
    }
    print("\n".join(f"{key:>16}  {value}" for key, value in about.items()))
    print("\n".join(work_lines(layers) for layers in plans))
    print(table(plans))
    for path in args.out:
        draw(path, plans) if path.endswith(".png") else write_json(path, plans, about)
        print(f"wrote {path}")
    print(f"planned in {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
