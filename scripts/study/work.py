"""The study's work: train a run, and evaluate weights.

Imported only when there is work: it loads torch, which --help does without, and before which the
allocator has to be set.
"""

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from scripts.study.settings import (
    DENSE,
    QUESTIONS,
    START,
    Evaluation,
    OutOfTime,
    Run,
    Study,
    check_time,
    evaluation_configuration,
    folder_of,
    is_done,
    missing_answers,
    training_configuration,
)
from scripts.study.text import read_prompts
from titan_sparse.attention.observe import recording
from titan_sparse.commands.choose import TIMED_STEPS, fresh_trainer, seconds_of_steps
from titan_sparse.data.documents import open_documents
from titan_sparse.data.shards import write_json
from titan_sparse.data.tokenizer import Tokenizer, open_tokenizer
from titan_sparse.evaluation import needle, position
from titan_sparse.evaluation.answers import score_samples
from titan_sparse.evaluation.scorer import Scorer, Sequence
from titan_sparse.loss import IGNORE_INDEX
from titan_sparse.training.load import build_scorer, find_checkpoint
from titan_sparse.training.metrics import attention_averages, json_ready
from titan_sparse.training.trainer import Trainer

BUCKETS = 16
"""Ranges of positions whose held-out losses are told apart."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_SEVERAL_WORDS = re.compile(r"[A-Za-z0-9]_[A-Za-z]|[a-z][A-Z]")
NEW, NEAR, MIDDLE, FAR = range(4)
DISTANCES = ("new", "near", "middle", "far")
"""How far back a name was seen last. What was seen long ago, such as a name that another file
defines, is what only a long context can say."""


def train(study: Study, run: Run, deadline: float) -> None:
    """A run to its last step, as train.py does it, from where it was stopped. Raises OutOfTime.

    First the steps of its method, and at equal time those of DENSE, are timed.
    """
    for method in (DENSE, run.method) if study.size.equal_time else (run.method,):
        if not study.seconds_file(method).is_file():
            check_time(study.size, deadline)
            time_steps(study, method)
    if is_done(study, run):
        return
    check_time(study.size, deadline)
    config = training_configuration(study, run, study.steps(run.method))
    with fresh_trainer(config) as trainer:
        if study.size.equal_time:
            trainer.validation = HeldOut(study, run)
        with stopped_in_time(trainer, deadline):
            trainer.train()
    if not is_done(study, run):
        raise OutOfTime


def time_steps(study: Study, method: str) -> None:
    """Write the seconds of a step, the median of some steps that are neither logged nor saved.

    Parts that run at the same time may time the same method. The first to end writes its seconds.
    """
    run = Run(f"steps/{method}-{os.getpid()}", method, 0)
    config = training_configuration(study, run, steps=2)
    config.checkpoint.enable = False
    with fresh_trainer(config) as trainer:
        # The two steps compile. The second of the others may capture a CUDA graph.
        trainer.train()
        seconds = median(seconds_of_steps(trainer, TIMED_STEPS))
    shutil.rmtree(study.folder / run.name)
    if not study.seconds_file(method).is_file():
        write_json(study.seconds_file(method), seconds)
    print(f"{method}: {seconds:.3f} s a step", flush=True)


class HeldOut:
    """Held-out loss on the way, in place of the trainer's validation, which reads a single source.

    Appends {"step", "loss" by kind of text} to OUT/NAME/held_out.jsonl.
    """

    def __init__(self, study: Study, run: Run) -> None:
        self.path = study.held_out(run.name)
        self.length = study.size.context
        self.windows = {kind: read_windows(study, kind) for kind in study.size.text}
        steps, points = study.steps(run.method), study.size.points
        self.steps = {-(-steps * number // points) for number in range(1, points + 1)}

    def is_due(self, step: int) -> bool:
        return step in self.steps

    def run(self, scorer: Scorer, step: int, metrics: Any) -> None:
        losses = {}
        for kind, windows in self.windows.items():
            losses[kind] = position.position_loss(scorer, windows, self.length, 1)["loss"]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": losses}) + "\n")
        print(f"{self.path.parent.name}, step {step}: held out {losses}", flush=True)


@contextlib.contextmanager
def stopped_in_time(trainer: Trainer, deadline: float) -> Iterator[None]:
    """Stop the run when the time is over: it finishes its step and saves, as after a signal."""
    seconds = min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, trainer.signals.ask)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def evaluate(study: Study, evaluation: Evaluation, deadline: float) -> None:
    """Weights in an attention, over text that is held out: each of QUESTIONS.

    Each writes OUT/evaluation/WEIGHTS--MODE/QUESTION.json when it is answered. Raises OutOfTime.
    """
    out = folder_of(study, evaluation)
    missing = missing_answers(study, evaluation)
    if not missing:
        return
    check_time(study.size, deadline)
    config = evaluation_configuration(study, evaluation.mode)
    checkpoint = None
    if evaluation.weights != START:
        checkpoint = find_checkpoint(str(study.folder / evaluation.weights))
    scorer = build_scorer(config, checkpoint, open_tokenizer(config))
    try:
        for name in missing:
            check_time(study.size, deadline)
            began = time.perf_counter()
            answers = ANSWERS[name](study, scorer)
            seconds = time.perf_counter() - began
            found = json_ready({**evaluation._asdict(), "seconds": seconds, "answers": answers})
            write_json(out / f"{name}.json", found)
            print(f"{out.name}: {name} in {seconds:.0f} s", flush=True)
    finally:
        dist.destroy_process_group()


def position_losses(study: Study, scorer: Scorer) -> dict[str, Any]:
    """Loss by position in held-out windows, by kind of text.

    Also density and recall of the attention, on the first window of each kind.
    """
    losses = {}
    seen = {}
    for kind in study.size.text:
        windows = read_windows(study, kind)
        losses[kind] = position.position_loss(scorer, windows, study.size.context, BUCKETS)
        with recording(recall_rows=64) as recorded:
            scorer.token_losses(windows[0], study.size.context)
        seen[kind] = attention_averages(recorded)
    return {"losses": losses, "attention": seen}


def forced_needles(study: Study, scorer: Scorer) -> dict[str, Any]:
    """Answers to the prompts, each token after the right ones before it, and their averages."""
    records = score_samples(scorer, read_prompts(study.text), generate=False)
    return {"cells": needle.by_cell(records), "records": records}


def names_in_code(study: Study, scorer: Scorer) -> dict[str, Any]:
    """Losses of names in held-out code, by how far back they were seen last.

    Names are those of several words, as fetch_gguf or RealModel: single words may also be guessed.
    """
    windows = read_windows(study, "code", study.size.code_windows)
    return name_losses(scorer, windows, study.size.context, study.size.far_names)


def name_losses(scorer: Scorer, windows: list[Sequence], length: int, far: int) -> dict[str, Any]:
    """For each of DISTANCES: tokens of such names, how many names they are, and their mean loss.

    new: not seen before in the window. far: last seen more than `far` tokens back. near: at most
    far / 16. Collective, as position_loss().
    """
    totals = torch.zeros(2, len(DISTANCES), dtype=torch.float64, device=scorer.device)
    names = np.zeros(len(DISTANCES), dtype=np.int64)
    for sequence in windows:
        distances = np.full(len(sequence.tokens) + 1, -1)
        for start, stop, distance in distances_of_names(sequence.tokens, scorer.tokenizer, far):
            distances[start:stop] = distance
            names[distance] += 1
        # The label at a position is the token after it.
        labels = np.where(distances[1:] >= 0, sequence.labels, IGNORE_INDEX)
        losses, positions = scorer.token_losses(Sequence(sequence.tokens, labels), length)
        kinds = torch.from_numpy(distances[1:]).to(scorer.device)[positions]
        totals[0].index_add_(0, kinds, losses.double())
        totals[1].index_add_(0, kinds, torch.ones_like(losses, dtype=torch.float64))
    scorer.release()
    found = {}
    for name, count, total, tokens in zip(DISTANCES, names.tolist(), *totals.tolist(), strict=True):
        loss = total / tokens if tokens else None
        found[name] = {"names": count, "tokens": int(tokens), "loss": loss}
    return {"far": far, "windows": len(windows), "distances": found}


def distances_of_names(
    tokens: NDArray[np.int64], tokenizer: Tokenizer, far: int
) -> Iterator[tuple[int, int, int]]:
    """The tokens [start, stop) of each name of several words, and NEW, NEAR, MIDDLE or FAR."""
    ids, places = np.unique(tokens, return_inverse=True)
    spelled = [tokenizer.spell([token]) for token in ids]
    pieces = [spelled[place] for place in places]
    # Where each token's letters end in the text.
    ends = np.cumsum([len(piece) for piece in pieces])
    last_seen: dict[str, int] = {}
    for match in _NAME.finditer("".join(pieces)):
        name = match.group()
        if not _OF_SEVERAL_WORDS.search(name):
            continue
        start = int(np.searchsorted(ends, match.start(), side="right"))
        stop = int(np.searchsorted(ends, match.end() - 1, side="right")) + 1
        distance = NEW
        if name in last_seen:
            back = start - last_seen[name]
            distance = FAR if back > far else NEAR if back <= far // 16 else MIDDLE
        last_seen[name] = start
        yield start, stop, distance


ANSWERS = dict(zip(QUESTIONS, (position_losses, forced_needles, names_in_code), strict=True))


def read_windows(study: Study, kind: str, most: int | None = None) -> list[Sequence]:
    """The first context of each of the first held-out documents, as many as the size says."""
    context = study.size.context
    config = evaluation_configuration(study, DENSE)
    config.data.source = str(study.text / kind)
    tokenizer = open_tokenizer(config)
    documents = open_documents(config.data, tokenizer)
    windows = []
    for document in position.long_documents(documents, context):
        windows.append(next(position.windows([document], context, context)))
        if len(windows) == (most or study.size.windows):
            break
    return windows
