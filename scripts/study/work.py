"""The study's work: train a run, and evaluate weights.

Imported only when there is work: it loads torch, which --list does without, and before which the
allocator has to be set.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.study.settings import (
    DENSE,
    HELD_OUT,
    PUBLISHED,
    START,
    Evaluation,
    OutOfTime,
    Run,
    Study,
    check_time,
    configuration,
    evaluation_configuration,
    folder_of,
    is_done,
    longest,
    timing_configuration,
    write_json,
)
from scripts.study.text import read_prompts
from titan_sparse.attention.observe.statistics import recording
from titan_sparse.config import Config, ConfigError
from titan_sparse.data.documents import open_documents
from titan_sparse.data.tokenizer import load_tokenizer
from titan_sparse.evaluation import needle, position
from titan_sparse.evaluation.answers import Sample, score_samples
from titan_sparse.evaluation.load import build_scorer, find_checkpoint
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.trainer import Trainer
from titan_sparse.training.distributed import leave_distributed
from titan_sparse.training.metrics import attention_averages, json_ready

BUCKETS = 16
"""Ranges of positions at the longest length."""
TIMED_STEPS = 8
EXTRA_TOKENS = 8
"""Generated beyond the answer's length."""


def train(study: Study, run: Run, deadline: float) -> None:
    """A run to its last step, as train.py does it, from where it was stopped. Raises OutOfTime.

    First the steps of its method, and at equal time those of DENSE, are timed.
    """
    for method in (DENSE, run.method) if study.size.equal_time else (run.method,):
        if not study.seconds_file(method).is_file():
            check_time(study.size, deadline)
            time_steps(study, method)
    if is_done(study, run.name):
        return
    check_time(study.size, deadline)
    with training(configuration(study, run)) as trainer:
        if study.size.equal_time:
            trainer.validation = HeldOut(study, run)
        with stopped_in_time(trainer, deadline):
            trainer.train()
    if not is_done(study, run.name):
        raise OutOfTime


@contextlib.contextmanager
def training(config: Config) -> Iterator[Trainer]:
    """A trainer on an empty GPU. Raises ConfigError for what it refuses."""
    # The trainer before it.
    gc.collect()
    # torch compiles the same code only so many times, and each run is another configuration.
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        yield Trainer(config)
    except ValueError as error:
        if dist.is_initialized():
            raise
        raise ConfigError(str(error)) from error
    finally:
        if dist.is_initialized():
            leave_distributed()


def time_steps(study: Study, method: str) -> None:
    """Write the seconds of a step, the mean of some steps that are neither logged nor saved."""
    with training(timing_configuration(study, method)) as trainer:
        # Two steps, which compile.
        trainer.train()
        trainer.metrics.section = dataclasses.replace(
            trainer.metrics.section, log_every=sys.maxsize, recall_every=0
        )
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
        synchronize()
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            trainer.step()
        synchronize()
        seconds = (time.perf_counter() - began) / TIMED_STEPS
    write_json(study.seconds_file(method), seconds)
    print(f"{method}: {seconds:.3f} s a step", flush=True)


class HeldOut:
    """Held-out loss on the way, in place of the trainer's validation, which reads a single source.

    Appends {"step", "loss" by kind of text} to OUT/NAME/held_out.jsonl.
    """

    def __init__(self, study: Study, run: Run) -> None:
        self.path = study.folder / run.name / HELD_OUT
        self.length = study.size.text.context
        self.windows = {kind: read_windows(study, kind) for kind in study.size.text.windows}
        steps, points = study.steps(run.method), study.size.points
        self.steps = {-(-steps * number // points) for number in range(1, points + 1)}

    def is_due(self, step: int) -> bool:
        return step in self.steps

    def run(self, scorer: Scorer, step: int, metrics: Any, writes: bool) -> None:
        losses = {}
        for kind, windows in self.windows.items():
            losses[kind] = position.position_loss(scorer, windows, self.length, 1)["loss"]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": losses}) + "\n")
        print(f"{self.path.parent.name}, step {step}: held out {losses}", flush=True)


@contextlib.contextmanager
def stopped_in_time(trainer: Trainer, deadline: float) -> Iterator[None]:
    """When the time is over, the run finishes its step and saves, as after a signal."""
    seconds = min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, trainer.signals.ask)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def evaluate(study: Study, evaluation: Evaluation, deadline: float) -> None:
    """Weights in an attention, over text that is held out: each question of questions().

    Each writes OUT/evaluation/WEIGHTS--MODE/QUESTION.json when it is answered. Raises OutOfTime.
    """
    out = folder_of(study, evaluation)
    missing = {}
    for name, question in questions(study, evaluation.mode).items():
        if not (out / f"{name}.json").is_file():
            missing[name] = question
    if not missing:
        return
    check_time(study.size, deadline)
    config = evaluation_configuration(study, evaluation.mode)
    checkpoint = None
    if evaluation.weights != START:
        checkpoint = find_checkpoint(str(study.folder / evaluation.weights))
    tokenizer = load_tokenizer(config.data.tokenizer)
    scorer = build_scorer(config, checkpoint, tokenizer)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, question in missing.items():
            check_time(study.size, deadline)
            began = time.perf_counter()
            answers = question(scorer)
            seconds = time.perf_counter() - began
            found = json_ready({**evaluation._asdict(), "seconds": seconds, "answers": answers})
            write_json(out / f"{name}.json", found)
            print(f"{out.name}: {name} in {seconds:.0f} s", flush=True)
    finally:
        leave_distributed()


def questions(study: Study, mode: str) -> dict[str, Callable[[Scorer], Any]]:
    """What is asked of weights in an attention, by name; the same of all, up to the mode's length."""
    size = study.size
    most = longest(size, mode)
    samples = [sample for sample in prompts(study.text) if sample.length <= most]
    needles = first_of_each(
        [sample for sample in samples if "depth" in sample.about], size.asked.needles
    )
    found: dict[str, Callable[[Scorer], Any]] = {
        "position": functools.partial(position_losses, study, most),
        "needle_forced": functools.partial(ask, needles, False, needle.by_cell),
    }
    if size.has_generation:
        found["needle_generated"] = functools.partial(ask, needles, True, needle.by_cell)
    return found


@functools.cache
def prompts(text: Path) -> list[Sample]:
    """All of part 0's prompts, read once in a call."""
    found = []
    for sample in read_prompts(text):
        new_tokens = min(sample.new_tokens, len(sample.answer) + EXTRA_TOKENS)
        found.append(dataclasses.replace(sample, new_tokens=new_tokens))
    return found


def first_of_each(samples: list[Sample], count: int) -> list[Sample]:
    """Of the samples that are about the same thing the first `count`."""
    seen: Counter[str] = Counter()
    chosen = []
    for sample in samples:
        about = str(sample.about)
        seen[about] += 1
        if seen[about] <= count:
            chosen.append(sample)
    return chosen


def ask(
    samples: list[Sample],
    generate: bool,
    averages: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    scorer: Scorer,
) -> dict[str, Any]:
    """Answers to prompts, and their averages."""
    records = score_samples(scorer, samples, generate)
    return {"cells": averages(records), "records": records}


def position_losses(study: Study, length: int, scorer: Scorer) -> dict[str, Any]:
    """Loss by position in the first `length` tokens of each window, by kind of text.

    Also density and recall of the attention, on the first window of each kind.
    """
    buckets = max(1, BUCKETS * length // study.size.text.context)
    losses = {}
    seen = {}
    for kind in study.size.text.windows:
        windows = []
        for window in read_windows(study, kind):
            windows.append(Sequence(window.tokens[:length], window.labels[:length]))
        losses[kind] = position.position_loss(scorer, windows, length, buckets)
        with recording(recall_rows=64) as recorded:
            scorer.token_losses(windows[0], length)
        seen[kind] = attention_averages(recorded)
    return {"losses": losses, "attention": seen}


def read_windows(study: Study, kind: str) -> list[Sequence]:
    """Held-out windows of a whole context each."""
    context = study.size.text.context
    config = evaluation_configuration(study, PUBLISHED)
    config.data.source = str(study.text / kind)
    tokenizer = load_tokenizer(config.data.tokenizer)
    documents = position.long_documents(open_documents(config.data, tokenizer), context)
    found = []
    # The first window of each document: as many documents as there are windows.
    for document in documents:
        if len(found) < study.size.windows:
            found.append(next(position.windows([document], context, context)))
    return found
