"""Evaluate a checkpoint: loss by position, Needle In A Haystack.

    titan-sparse evaluate --config outputs/run/config.toml --checkpoint outputs/run \\
        --tasks position,needle --lengths 4096
    torchrun --nproc-per-node 8 -m titan_sparse evaluate --config C --hf FOLDER \\
        --tasks needle --lengths 131072 --parallelism.cp 8

Attention is dense, or as it was trained. Other words are options of the configuration, as train.py
takes them, but for those that only training reads: --data.source is the text that is read and that
hides needles. Writes OUT/results.json (everything), OUT/*.csv (tables) and OUT/*.png. See
docs/huggingface.md.
"""

import argparse
import csv
import itertools
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_sparse.commands import in_tokens, parser_of, positive, refuses
from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.config.ignored import of_other_patterns
from titan_sparse.config.reading import lengths_of, refuse_ignored, require
from titan_sparse.data import Tokenizer, open_tokenizer
from titan_sparse.data.documents import open_documents
from titan_sparse.evaluation import needle, pictures, position
from titan_sparse.evaluation.answers import Sample, score_samples
from titan_sparse.evaluation.scorer import Sequence
from titan_sparse.options.values import full_disk_at
from titan_sparse.training.attention import sparse_from
from titan_sparse.training.load import (
    build_scorer,
    find_checkpoint,
    load_for_evaluation,
)
from titan_sparse.training.metrics import json_ready

TASKS = ("position", "needle")
OPTIONS = {"position": ("stride", "buckets"), "needle": ("depths", "answers", "seed")}
"""Options that only one task reads."""
LM_EVAL = "python -m titan_sparse.integrations.lm_eval --model titan_sparse"
"""The command that evaluates with published tasks."""


@refuses
def main(words: list[str]) -> int:
    args, config = parse(words)
    checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
    tokenizer = open_tokenizer(config)
    # Texts are read before any process group: what cannot be used is reported at once.
    windows, needles = read(args, config, tokenizer)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    scorer = build_scorer(config, checkpoint, tokenizer)
    results: dict[str, Any] = {}
    if windows:
        results["position"] = [
            position.position_loss(scorer, of_length, length, args.buckets)
            for length, of_length in windows.items()
        ]
    if needles:
        records = score_samples(scorer, needles, args.answers == "generated")
        results["needle"] = {"cells": needle.by_cell(records), "records": records}
    if dist.get_rank() == 0:
        for line in dense_lengths(args, config, windows, needles):
            print(line)
        with full_disk_at(args.out):
            files = write(results, origin_of(args, config, checkpoint), args.out)
        print(summary(results))
        print(f"wrote {', '.join(files)} in {args.out}")
    return 0


def parse_with_weights(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[argparse.Namespace, Config]:
    """The options of a command on a trained model, and the configuration to evaluate with, which is
    not checked yet. Raises ConfigError.

    Adds --config, --checkpoint or --hf, and --attention. Other words are keys of the configuration.
    """
    parser.add_argument("--config", required=True, help="the run's config.toml")
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--checkpoint",
        help="output_dir of the run, for its newest checkpoint, or its checkpoint/step-N",
    )
    weights.add_argument("--hf", help="Hugging Face folder, instead of a checkpoint")
    parser.add_argument("--attention", choices=["dense", "as_trained"], default="as_trained")
    args, rest = parser.parse_known_args(words)
    of_run = ["--config", args.config, *rest]
    is_dense = args.attention == "dense"
    return args, load_for_evaluation(of_run, args.hf, is_dense, args.checkpoint)


def parse(words: list[str]) -> tuple[argparse.Namespace, Config]:
    """Options, and the checked configuration to evaluate with. Raises ConfigError, one line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "--tasks",
        default="position,needle",
        help=f"of {', '.join(TASKS)}; RULER and other published tasks run through {LM_EVAL}",
    )
    add("--lengths", default="", help="tokens, separated by commas; default: training.seq_len")
    add(
        "--depths",
        type=positive,
        default=11,
        help="number of needle depths, evenly from 0 to 100 %%",
    )
    of_samples = "windows of a length; needles of a length and depth"
    add("--samples", type=positive, default=10, help=of_samples)
    add("--stride", type=in_tokens, default=0, help="tokens between windows; 0: no overlap")
    add("--buckets", type=positive, default=16, help="ranges of positions")
    add(
        "--answers",
        choices=["forced", "generated"],
        default="forced",
        help="teacher-forced (one forward a prompt) or by greedy decoding",
    )
    add("--seed", type=int, default=0, help="of needles and prompts")
    add("--out", default="evaluation", help="folder to write")
    args, config = parse_with_weights(parser, words)
    args.tasks = [name.strip() for name in args.tasks.split(",")]
    for name in args.tasks:
        require(
            name in TASKS,
            f"--tasks {name} is not one of {', '.join(TASKS)}. RULER and other published tasks run "
            f"through {LM_EVAL} --tasks {name} --model_args checkpoint=RUN,tokenizer=FOLDER",
        )
    for task, names in OPTIONS.items():
        for name in names:
            require(
                task in args.tasks or getattr(args, name) == parser.get_default(name),
                f"--{name} would be ignored with --tasks {','.join(args.tasks)}; leave it out",
            )
    refuse_ignored(
        words,
        {
            **of_other_patterns(config),
            "training.seq_len": "with --lengths" if args.lengths else "",
            "data.min_document_length": "" if "position" in args.tasks else "with --tasks needle",
        },
    )
    args.lengths = lengths_of(args.lengths or str(config.training.seq_len), "--lengths")
    config.training.seq_len = max(args.lengths)
    shortest = min(args.lengths)
    require(
        "position" not in args.tasks or args.buckets <= shortest,
        f"--buckets {args.buckets} is above {shortest}, the shortest of --lengths; write fewer",
    )
    check(config, *world_from_environment())
    return args, config


def origin_of(args: argparse.Namespace, config: Config, checkpoint: str | None) -> dict[str, Any]:
    """The origin that the file of results records."""
    read = {"pattern": config.attention.pattern, "source": config.data.source}
    return {**vars(args), "checkpoint": checkpoint, **read}


def read(
    args: argparse.Namespace, config: Config, tokenizer: Tokenizer
) -> tuple[dict[int, list[Sequence]], list[Sample]]:
    """Windows by length, and prompts: what goes through the model, empty where --tasks does not ask
    for it. Raises ValueError for a text or length that cannot be used."""
    documents = open_documents(config.data, tokenizer, config.model.initial_hf)
    windows = {}
    if "position" in args.tasks:
        for length in args.lengths:
            windows[length] = position.first_windows(
                documents,
                config.data.min_document_length,
                length,
                args.stride or length,
                args.samples,
            )
    needles = []
    if "needle" in args.tasks:
        depths = needle.depths(args.depths)
        needles = needle.needle_samples(documents, args.lengths, depths, args.samples, args.seed)
    return windows, needles


def dense_lengths(
    args: argparse.Namespace,
    config: Config,
    windows: dict[int, list[Sequence]],
    needles: list[Sample],
) -> list[str]:
    """A line for each task and length at which a pattern left out nothing."""
    pattern = config.attention.pattern
    if pattern == "dense":
        return []
    least = sparse_from(config.attention)
    lines = []
    for task, length in itertools.product(args.tasks, args.lengths):
        at_once = length
        if task == "position":
            # Of documents that are shorter than a window, all is in one.
            at_once = max(len(sequence.tokens) for sequence in windows[length])
        elif args.answers == "generated":
            # A generated answer is not read with the prompt.
            at_once -= max(sample.new_tokens for sample in needles)
        if at_once < least:
            lines.append(
                f"{task}, --lengths {length}: attention was dense, as {pattern} leaves out "
                f"pairs only in documents of {least} tokens or more"
            )
    return lines


def write(results: dict[str, Any], about: dict[str, Any], out: str) -> list[str]:
    """Write results.json, a CSV for each table and a PNG for each picture into the folder `out`.

    Returns the names of the files.
    """
    folder = Path(out)
    text = json.dumps(json_ready({"about": about, **results}), indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    files = ["results.json"]

    tables: dict[str, tuple[list[dict], Any]] = {}
    if "position" in results:
        rows = []
        for of_length in results["position"]:
            rows += [{"length": of_length["length"], **bucket} for bucket in of_length["buckets"]]
        tables["position"] = (rows, pictures.position_figure(results["position"]))
    if "needle" in results:
        cells = results["needle"]["cells"]
        tables["needle"] = (cells, pictures.needle_figure(cells))
    for task, (rows, figure) in tables.items():
        with open(folder / f"{task}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        figure.savefig(folder / f"{task}.png", dpi=120)
        files += [f"{task}.csv", f"{task}.png"]
    return files


def summary(results: dict[str, Any]) -> str:
    """A line a result, for people."""
    lines = []
    for result in results.get("position", []):
        if result["tokens"]:
            lines.append(
                f"position {result['length']:>9,}: loss {result['loss']:.4f}, "
                f"perplexity {result['perplexity']:.3f}, over {result['tokens']:,} tokens"
            )
    for cell in results.get("needle", {}).get("cells", []):
        lines.append(
            f"needle   {cell['length']:>9,}, depth {100 * cell['depth']:3.0f} %: "
            f"score {100 * cell['score']:.1f} %"
        )
    return "\n".join(lines)
