"""What does sparse training cost in quality? MTraining's Figure 6a and Table 1 in small (docs/study.md).

From the project's root, on one GPU:

  python -m scripts.study --out outputs/study            about an hour; --short: 20 minutes; --toy: a minute on a CPU
  python -m scripts.study --out outputs/study --list     the parts, and the FLOPs of each
  python -m scripts.study --out outputs/study --part 3   one part; with --minutes 9 as much as fits into nine minutes

Parts from 2 on can run at the same time, each on a GPU of its own by CUDA_VISIBLE_DEVICES.

A model of 0.1 B parameters is trained at 4K tokens on the Python files installed here, then extended to 64K with YaRN
by each method: same weights, data and order. What is there already is not done again; a run that was stopped goes on.
OUT/report has the results. Status 0: all parts that were asked for are done; 3: stopped before the end, the same
command goes on.
"""

import argparse
import contextlib
import functools
import gc
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import evaluate as evaluation
from scripts.study.report import report
from scripts.study.runs import PRETRAIN, SIZES, Size, configuration, cost, is_done, methods
from titan_sparse.config import ConfigError, save
from titan_sparse.config.reading import require
from titan_sparse.train import set_allocator

if TYPE_CHECKING:
    from titan_sparse.data import Tokenizer
    from titan_sparse.trainer import Trainer

MORE_TO_DO = 3


class Clock:
    """The time that a call may take; minutes: infinite for no limit."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


class OutOfTime(Exception):
    """The clock has run out, or a signal has come; what was begun is saved."""


def train(size: Size, folder: Path, name: str, clock: Clock) -> None:
    """A run to its last step, as train.py does it, from where it was stopped. Raises OutOfTime."""
    if is_done(size, folder, name):
        return
    check_time(size, clock)
    import torch
    import torch.distributed as dist

    from titan_sparse.trainer import Trainer
    from titan_sparse.training.parallelize import leave_distributed

    torch.compiler.reset()  # torch compiles the same code only so many times, and each run is another configuration
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer = Trainer(configuration(size, folder, name))
        with stopped_in_time(trainer, clock):
            trainer.train()
    except ValueError as error:
        if dist.is_initialized():
            raise
        raise ConfigError(str(error)) from error
    finally:
        if dist.is_initialized():
            leave_distributed()
    del trainer
    gc.collect()
    if not is_done(size, folder, name):
        raise OutOfTime


@contextlib.contextmanager
def stopped_in_time(trainer: "Trainer", clock: Clock) -> Iterator[None]:
    """When the time is over the run ends its step and saves, as after a signal."""
    timer = threading.Timer(
        min(max(clock.left(), 0), threading.TIMEOUT_MAX), setattr, [trainer, "stop_signals", 1]
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_time(size: Size, clock: Clock) -> None:
    """Raises OutOfTime if too little is left to begin anything."""
    if clock.left() <= size.reserve_seconds:
        raise OutOfTime


def evaluate(size: Size, folder: Path, weights: str, mode: str, clock: Clock) -> None:
    """A run's weights in the attention of method `mode`, over text that is held out, as scripts.evaluate does it:
    OUT/evaluation/WEIGHTS--MODE/results.json. Raises OutOfTime."""
    out = folder / "evaluation" / f"{weights}--{mode}"
    if (out / "results.json").is_file():
        return
    check_time(size, clock)
    from titan_sparse.evaluation.load import build_scorer, find_checkpoint
    from titan_sparse.training.metrics import json_ready
    from titan_sparse.training.parallelize import leave_distributed

    save(configuration(size, folder, mode), out)
    words = [
        "--config",
        str(out / "config.toml"),
        "--checkpoint",
        str(folder / weights),
        "--out",
        str(out),
        *held_out(size, folder),
    ]
    args, config = evaluation.parse(words)
    work, tokenizer = read_held_out(size.name, folder)
    began, scorer = (
        time.perf_counter(),
        build_scorer(config, find_checkpoint(args.checkpoint), tokenizer),
    )
    try:
        results = evaluation.evaluate(work, scorer, args.buckets, generate=False)
    finally:
        leave_distributed()
    about = {
        "weights": weights,
        "mode": mode,
        "options": words,
        "windows": size.windows,
        "seconds": time.perf_counter() - began,
    }
    text = json.dumps(json_ready({"about": about, **results}), indent=1)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    print(f"{weights}, inference {mode}:\n{evaluation.summary(results)}", flush=True)


def held_out(size: Size, folder: Path) -> list[str]:
    """What is asked, as options of scripts.evaluate: the same of all weights, in any attention."""
    options = {
        "tasks": f"position,{size.tasks}",
        "lengths": ",".join(map(str, size.lengths)),
        "depths": size.depths,
        "samples": size.samples,
        "data.source": folder / "text/validation",
        "data.min_document_length": size.context,
    }
    return [f"--{key}={value}" for key, value in options.items()]


@functools.cache
def read_held_out(name: str, folder: Path) -> tuple[evaluation.Work, "Tokenizer"]:
    """Windows and prompts, and the tokenizer; once in a call, as prompts of 64K tokens take their time to build.

    name: the size's."""
    from titan_sparse.data import load_tokenizer

    size = SIZES[name]
    config_file, tokenizer = folder / "evaluation/config.toml", load_tokenizer(str(folder / "text"))
    save(configuration(size, folder, "dense"), config_file.parent)
    args, config = evaluation.parse(
        ["--config", str(config_file), "--checkpoint", "", *held_out(size, folder)]
    )
    prompts = evaluation.read(args, config, tokenizer)
    args.tasks, args.samples = ["position"], size.windows
    return prompts._replace(windows=evaluation.read(args, config, tokenizer).windows), tokenizer


def evaluations(size: Size) -> dict[str, list[str]]:
    """The attentions to evaluate with, by weights: dense and as trained, and for two minference's fixed budgets as in
    MTraining's Table 1. What the extensions start from is evaluated densely."""
    found = {PRETRAIN: ["dense"]} | {
        name: list(dict.fromkeys(["dense", name])) for name in methods(size)
    }
    for name in ("dense", "vertical_slash_95"):
        found[name].append("minference")
    return found


def parts(size: Size) -> list[str]:
    """Their names in order."""
    return ["text", PRETRAIN, *methods(size)]


def do_part(size: Size, folder: Path, name: str, clock: Clock) -> None:
    """What is missing of a part. Raises OutOfTime; ConfigError for parts that have to be done before."""
    if name == "text":
        from scripts.study.text import prepare_text

        try:
            prepare_text(
                folder / "text", size.model["vocab_size"], size.context, size.most_characters
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return
    ready = (folder / "text/text.json").is_file()
    require(ready, f"{name} needs part 0 in {folder}; leave --part out, or write --part 0 first")
    ready = name == PRETRAIN or is_done(size, folder, PRETRAIN)
    require(ready, f"{name} needs part 1 in {folder}; leave --part out, or write --part 1 first")
    train(size, folder, name, clock)
    for mode in evaluations(size)[name]:
        evaluate(size, folder, name, mode, clock)


@contextlib.contextmanager
def noted(folder: Path, name: str) -> Iterator[None]:
    """Add the seconds that a part took to OUT/seconds.json, those of earlier calls too."""
    began, path = time.perf_counter(), folder / "seconds.json"
    try:
        yield
    finally:
        seconds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        seconds[name] = seconds.get(name, 0) + time.perf_counter() - began
        write_json(path, seconds)
        print(f"part {name}: {seconds[name] / 60:.1f} minutes so far", flush=True)


def listing(size: Size) -> str:
    """Each part with what it costs at most: attention as if it were dense."""
    lines = [
        f"{'part':>4} {'name':<26} {'tokens':>12} {'PFLOP linear':>13} {'PFLOP attention, dense':>23}"
    ]
    for number, name in enumerate(parts(size)):
        spent = None if name == "text" else cost(size, name)
        numbers = (
            ""
            if spent is None
            else (
                f"{spent.tokens:>12,} {spent.linear / 1e15:>13.4g} {spent.attention / 1e15:>23.4g}"
            )
        )
        lines.append(f"{number:>4} {name:<26} {numbers}".rstrip())
    return "\n".join(lines)


def parse(words: list[str]) -> argparse.Namespace:
    """The options; exits with status 2 on a mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        default="outputs/study",
        help="folder of all that is written; 12 GB, up to twice that if it is stopped on the way",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--short",
        dest="size",
        action="store_const",
        const="short",
        help="about 20 minutes on an H200",
    )
    sizes.add_argument(
        "--toy",
        dest="size",
        action="store_const",
        const="toy",
        help="a minute on a CPU; says nothing",
    )
    parser.add_argument("--part", type=int, help="do this part only; --list names them")
    parser.add_argument(
        "--methods", default="", help="of the extensions only these, with commas between"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after that many: the step ends and is "
        "saved; what would not get far is not begun",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.set_defaults(size="full")
    args = parser.parse_args(words)
    names, least = parts(SIZES[args.size]), SIZES[args.size].reserve_seconds / 60
    if not args.minutes > 2 * least:
        parser.error(
            f"--minutes {args.minutes:g} is too little for anything; write more than {2 * least:g}"
        )
    if args.part is not None and not 0 <= args.part < len(names):
        parser.error(f"--part {args.part} is none; write 0 to {len(names) - 1}")
    args.methods = [name.strip() for name in args.methods.split(",")] if args.methods else names[2:]
    for name in args.methods:
        if name not in names[2:]:
            parser.error(f"--methods {name} is unknown; write some of {','.join(names[2:])}")
    asked = names if args.part is None else [names[args.part]]
    args.parts = [name for name in asked if name in (*names[:2], *args.methods)]
    if not args.parts:
        parser.error(
            f"--part {args.part} is {names[args.part]}, which --methods leaves out; write one of them only"
        )
    return args


def claim(size: Size, folder: Path) -> None:
    """Say in OUT/study.json what it holds. Raises ConfigError if that is a study of another size, or something else."""
    path = folder / "study.json"
    require(
        path.is_file() or not folder.exists() or folder.is_dir() and not any(folder.iterdir()),
        f"--out {folder} holds something else; write a new or empty folder",
    )
    found = json.loads(path.read_text(encoding="utf-8"))["size"] if path.is_file() else size.name
    require(
        found == size.name,
        f"--out {folder} holds a study of the size {found}, not {size.name}; write another folder",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"size": size.name})


def write_json(path: Path, value: dict) -> None:
    """All at once: another process may read the file at the same time."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def main(words: list[str]) -> int:
    args = parse(words)
    size, folder, clock = SIZES[args.size], Path(args.out), Clock(args.minutes)
    if args.list:
        print(listing(size))
        return 0
    # As train.py: told before torch is loaded, and what a run logs goes to the terminal.
    set_allocator()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("titan_sparse").setLevel(logging.INFO)
    status = 0
    try:
        claim(size, folder)
        for name in args.parts:
            with noted(folder, name):
                do_part(size, folder, name, clock)
    except OutOfTime:
        print("stopped before the end; the same command goes on", flush=True)
        status = MORE_TO_DO
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(size, folder)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
