"""Evaluate a checkpoint: loss by position, Needle In A Haystack.

    titan-sparse evaluate --config outputs/run/config.toml --checkpoint outputs/run \\
        --tasks position,needle --lengths 4096
    torchrun --nproc-per-node 8 -m titan_sparse evaluate --config C --hf FOLDER \\
        --tasks needle --lengths 131072 --parallelism.cp 8

Attention is dense, or as it was trained. Other words are options of the configuration, as train.py
takes them: --data.source is the text that is read and that hides needles. Writes OUT/results.json
(everything), OUT/*.csv (tables) and OUT/*.png (needs pip install -e ".[eval]"). See
docs/huggingface.md.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from titan_sparse.commands import add_weights, parser_of
from titan_sparse.config import Config, check, world_from_environment
from titan_sparse.config.reading import lengths_of, require, tokens
from titan_sparse.data import Tokenizer, load_tokenizer
from titan_sparse.data.documents import open_documents
from titan_sparse.evaluation import needle, position
from titan_sparse.evaluation.answers import Sample, score_samples
from titan_sparse.evaluation.haystack import Haystack
from titan_sparse.evaluation.load import build_scorer, find_checkpoint
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.evaluation.settings import load_for_evaluation
from titan_sparse.training import pictures
from titan_sparse.training.metrics import json_ready

TASKS = ("position", "needle")
LM_EVAL = "python -m titan_sparse.integrations.lm_eval --model titan_sparse"
"""The command that evaluates with published tasks."""


def main(words: list[str]) -> int:
    try:
        args, config = parse(words)
        checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.split_special_tokens)
        # Texts are read before any process group: what cannot be used is reported at once.
        work = read(args, config, tokenizer)
        Path(args.out).mkdir(parents=True, exist_ok=True)
        scorer = build_scorer(config, checkpoint, tokenizer)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = evaluate(work, scorer, args.buckets, args.answers == "generated")
    if dist.get_rank() == 0:
        about = {
            **vars(args),
            "checkpoint": checkpoint,
            "pattern": config.attention.pattern,
            "source": config.data.source,
        }
        files = write(results, about, args.out)
        print(summary(results))
        print(f"wrote {', '.join(files)} in {args.out}")
    return 0


def parse(words: list[str]) -> tuple[argparse.Namespace, Config]:
    """Options, and the checked configuration to evaluate with. Raises ConfigError, one line."""
    parser = parser_of(__doc__)
    add_weights(parser)
    add = parser.add_argument
    add(
        "--tasks",
        default="position,needle",
        help=f"of {', '.join(TASKS)}; RULER and other published tasks run through {LM_EVAL}",
    )
    add("--lengths", default="", help="tokens, separated by commas; default: training.seq_len")
    add("--depths", type=int, default=11, help="number of needle depths, evenly from 0 to 100 %%")
    add(
        "--samples", type=int, default=10, help="windows of a length; needles of a length and depth"
    )
    add("--stride", type=tokens, default=0, help="tokens between windows; 0: no overlap")
    add("--buckets", type=int, default=16, help="ranges of positions")
    add("--attention", choices=["dense", "as_trained"], default="as_trained")
    add(
        "--answers",
        choices=["forced", "generated"],
        default="forced",
        help="teacher-forced (one forward a prompt) or by greedy decoding",
    )
    add("--seed", type=int, default=0, help="of needles and prompts")
    add("--out", default="evaluation", help="folder to write")
    args, rest = parser.parse_known_args(words)
    config = load_for_evaluation(
        ["--config", args.config, *rest], args.hf, args.attention == "dense"
    )
    args.tasks = [name.strip() for name in args.tasks.split(",")]
    for name in args.tasks:
        require(
            name in TASKS,
            f"--tasks {name} is not one of {', '.join(TASKS)}. RULER and other published tasks run "
            f"through {LM_EVAL} --tasks {name} --model_args checkpoint=RUN,tokenizer=FOLDER",
        )
    args.lengths = lengths_of(args.lengths or str(config.training.seq_len), "--lengths")
    for name in ("samples", "depths", "buckets"):
        value = getattr(args, name)
        require(value >= 1, f"--{name} {value} is too small; write 1 or more")
    shortest = min(args.lengths)
    require(
        0 <= args.stride <= shortest,
        f"--stride {args.stride} is not in [0, {shortest}], the shortest of --lengths",
    )
    require(
        "position" not in args.tasks or args.buckets <= shortest,
        f"--buckets {args.buckets} is above {shortest}, the shortest of --lengths; write fewer",
    )
    of_tasks = {"position": ("stride", "buckets"), "needle": ("depths", "answers", "seed")}
    for task, names in of_tasks.items():
        for name in names:
            is_default = getattr(args, name) == parser.get_default(name)
            require(
                is_default or task in args.tasks,
                f"--{name} would be ignored with --tasks {','.join(args.tasks)}; leave it out",
            )
    check(config, *world_from_environment())
    return args, config


class Work(NamedTuple):
    """What goes through the model; empty where --tasks does not ask for it. windows: by length."""

    windows: dict[int, list[Sequence]]
    needles: list[Sample]


def read(args: argparse.Namespace, config: Config, tokenizer: Tokenizer) -> Work:
    """Windows and prompts. Raises ValueError for a text or length that cannot be used."""
    documents = open_documents(config.data, tokenizer, config.model.initial_hf)
    haystack = Haystack(documents, tokenizer)
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
        needles = needle.needle_samples(haystack, args.lengths, depths, args.samples, args.seed)
    return Work(windows, needles)


def evaluate(work: Work, scorer: Scorer, buckets: int, generate: bool) -> dict[str, Any]:
    """Results by task, the same on all ranks."""
    results: dict[str, Any] = {}
    if work.windows:
        results["position"] = [
            position.position_loss(scorer, windows, length, buckets)
            for length, windows in work.windows.items()
        ]
    if work.needles:
        records = score_samples(scorer, work.needles, generate)
        results["needle"] = {"cells": needle.by_cell(records), "records": records}
    return results


def write(results: dict[str, Any], about: dict[str, Any], out: str) -> list[str]:
    """Write results.json, a CSV for each table and a PNG for each picture into the folder `out`.

    Returns the names of the files.
    """
    folder = Path(out)
    text = json.dumps(json_ready({"about": about, **results}), indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    files = ["results.json"]

    tables: dict[str, list[dict]] = {}
    for of_length in results.get("position", []):
        for bucket in of_length["buckets"]:
            row = {"length": of_length["length"], **bucket}
            tables.setdefault("position", []).append(row)
    if "needle" in results:
        tables["needle"] = results["needle"]["cells"]
    for task, rows in tables.items():
        with open(folder / f"{task}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        files.append(f"{task}.csv")
    if pictures.has_matplotlib():
        for task in tables:
            if task == "position":
                figure = pictures.position_figure(results["position"])
            else:
                figure = pictures.needle_figure(tables["needle"])
            figure.savefig(folder / f"{task}.png", dpi=120)
            files.append(f"{task}.png")
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
