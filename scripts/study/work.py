"""The study's work on one run: train it, and evaluate its weights.

Imported only when there is work: it loads torch, which --list does without, and before which the
allocator has to be set.
"""

import contextlib
import functools
import gc
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from scripts import evaluate as evaluation
from scripts.study.clock import Clock, OutOfTime, check_time
from scripts.study.runs import SIZES, Size, configuration, is_done
from titan_sparse.config import ConfigError, save
from titan_sparse.data import Tokenizer, load_tokenizer
from titan_sparse.evaluation.load import build_scorer, find_checkpoint
from titan_sparse.trainer import Trainer
from titan_sparse.training.metrics import json_ready
from titan_sparse.training.parallelize import leave_distributed


def train(size: Size, folder: Path, name: str, clock: Clock) -> None:
    """A run to its last step, as train.py does it, from where it was stopped. Raises OutOfTime."""
    if is_done(size, folder, name):
        return
    check_time(size, clock)
    # torch compiles the same code only so many times, and each run is another configuration.
    torch.compiler.reset()
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
def stopped_in_time(trainer: Trainer, clock: Clock) -> Iterator[None]:
    """When the time is over the run ends its step and saves, as after a signal."""
    seconds = min(max(clock.left(), 0), threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, trainer.signals.ask)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def evaluate(size: Size, folder: Path, weights: str, mode: str, clock: Clock) -> None:
    """A run's weights in the attention of method `mode`, over text that is held out.

    As scripts.evaluate does it; writes OUT/evaluation/WEIGHTS--MODE/results.json. Raises OutOfTime.
    """
    out = folder / "evaluation" / f"{weights}--{mode}"
    if (out / "results.json").is_file():
        return
    check_time(size, clock)
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
    began = time.perf_counter()
    scorer = build_scorer(config, find_checkpoint(args.checkpoint), tokenizer)
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
def read_held_out(name: str, folder: Path) -> tuple[evaluation.Work, Tokenizer]:
    """Windows and prompts, and the tokenizer; name: the size's.

    Read once in a call, as prompts of 64K tokens take their time to build.
    """
    size = SIZES[name]
    tokenizer = load_tokenizer(str(folder / "text"))
    save(configuration(size, folder, "dense"), folder / "evaluation")
    config_file = folder / "evaluation/config.toml"
    words = ["--config", str(config_file), "--checkpoint", "", *held_out(size, folder)]
    args, config = evaluation.parse(words)
    prompts = evaluation.read(args, config, tokenizer)
    # There are more windows than prompts.
    args.tasks = ["position"]
    args.samples = size.windows
    windows = evaluation.read(args, config, tokenizer).windows
    return prompts._replace(windows=windows), tokenizer
