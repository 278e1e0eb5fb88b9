"""The study's settings: sizes, methods, runs, and the configuration of each. Imports no torch.

A study trains each run, then evaluates its weights. Add a method in methods(), a size in SIZES.
"""

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.config import Config, load_and_check
from titan_sparse.config.reading import show
from titan_sparse.estimate.flops import causal_pairs


@dataclass(frozen=True)
class Asked:
    """Prompts. lengths: tokens. depths: of needles, evenly spaced. needles: of each length and
    depth."""

    lengths: tuple[int, ...]
    depths: int
    needles: int


@dataclass(frozen=True)
class TextSize:
    """How much text part 0 prepares.

    context: tokens. windows: contexts to train on, at most, by kind. held_out: documents of each
    kind, at most. most_characters: of each installed package. has_sdists: False takes installed
    packages alone, which are code and prose.
    """

    context: int
    windows: dict[str, int]
    held_out: int
    most_characters: int
    has_sdists: bool
    asked: Asked


@dataclass(frozen=True)
class Size:
    """Of the whole study.

    original: the model's context in tokens, which is extended to text.context. A step is one
    sequence of that. common: keys that all runs share. asked: of text.asked the part that is asked.
    windows: held-out contexts of each kind, for the loss by position. reserve_seconds:
    with less time left than that nothing is begun. equal_time: each method has as many steps as fit
    into the seconds that `steps` dense steps take, and its held-out loss is measured `points` times
    on the way. has_generation: needles are also answered freely, which takes minutes.
    """

    name: str
    text: TextSize
    original: int
    steps: int
    compile: bool
    windows: int
    asked: Asked
    moba_chunk: int
    fixed_verticals: int
    fixed_slashes: int
    window: int
    window_sinks: int
    common: dict[str, Any] = field(default_factory=dict)
    reserve_seconds: float = 60
    equal_time: bool = False
    points: int = 6
    has_generation: bool = True

    @property
    def title(self) -> str:
        return f"{self.name}, equal time" if self.equal_time else self.name


REAL_TEXT = TextSize(
    context=65536,
    # 13 million tokens; less where packages hold less.
    windows={"code": 90, "prose": 80, "mixed": 50},
    held_out=16,
    most_characters=4_000_000,
    has_sdists=True,
    asked=Asked((4096, 8192, 16384, 32768, 65536), depths=5, needles=4),
)
FULL = Size(
    "full",
    REAL_TEXT,
    original=8192,
    steps=300,
    compile=True,
    windows=12,
    asked=REAL_TEXT.asked,
    # MoBA: chunks as large a share of the context as published (4096 of 524288). Fixed budgets as
    # published. The window visits an eighth of the pairs.
    moba_chunk=512,
    fixed_verticals=1000,
    fixed_slashes=48,
    window=4096,
    window_sinks=64,
    common={
        "training.dtype": "bfloat16",
        "training.device": "cuda",
        "training.loss_chunk_tokens": 8192,
        "attention.backend": "triton",
        "metrics.log_every": 1,
        "metrics.recall_every": 20,
    },
)
SHORT = dataclasses.replace(
    FULL,
    name="short",
    steps=30,
    compile=False,
    windows=3,
    asked=dataclasses.replace(
        REAL_TEXT.asked,
        needles=1,
    ),
    common=FULL.common | {"metrics.recall_every": 8},
    reserve_seconds=40,
)
LONG_TEXT = dataclasses.replace(
    REAL_TEXT,
    context=131072,
    # As much text as REAL_TEXT.
    windows={"code": 45, "prose": 40, "mixed": 25},
    asked=Asked((8192, 32768, 131072), depths=5, needles=2),
)
LONG = dataclasses.replace(
    FULL, name="long", text=LONG_TEXT, steps=100, windows=6, asked=LONG_TEXT.asked, window=8192
)
TOY_ASKED = Asked((512, 1024), depths=2, needles=1)
TOY = Size(
    "toy",
    TextSize(
        context=1024,
        windows={"code": 16, "prose": 16},
        held_out=4,
        most_characters=20_000,
        has_sdists=False,
        asked=TOY_ASKED,
    ),
    original=512,
    steps=4,
    compile=False,
    windows=2,
    asked=TOY_ASKED,
    moba_chunk=32,
    fixed_verticals=32,
    fixed_slashes=6,
    window=128,
    window_sinks=8,
    common={
        "training.dtype": "float32",
        "training.device": "cpu",
        "training.loss_chunk_tokens": 1024,
        "attention.block_size": 32,
        "metrics.log_every": 1,
        "metrics.recall_every": 2,
        "metrics.recall_rows": 16,
    },
    reserve_seconds=0,
)
SIZES = {size.name: size for size in (FULL, LONG, SHORT, TOY)}


def at_equal_time(size: Size) -> Size:
    """The study of this size that gives each method the same seconds."""
    quick = size.name == "short"
    return dataclasses.replace(
        size,
        steps=60 if quick else size.steps,
        compile=size.name != "toy",
        equal_time=True,
        points=4 if quick else 6,
        has_generation=not quick,
    )


START = "start"
"""The weights that all runs start from."""
PUBLISHED = "as_published"
"""An inference of START: dense, without YaRN, up to the length it was made for."""
DENSE = "dense"
SPARSE = "default"
"""What stands for sparse attention: vertical_slash as it is by default."""
HELD_OUT = "held_out.jsonl"
"""In the folder of a run at equal time: its held-out loss on the way."""
SEEDS = 3
"""Of DENSE and SPARSE, so that noise is known; at equal time of every method."""
RECALLS = ("recall_95", "recall_97", "recall_99")
"""SPARSE at other recalls than its own, which is 0.9."""


@dataclass(frozen=True)
class Study:
    """A study of a size. folder: of all that is written. model: folder of Hugging Face."""

    size: Size
    folder: Path
    model: Path

    @property
    def text(self) -> Path:
        """What part 0 writes."""
        return self.folder / "text"

    def seconds_file(self, method: str) -> Path:
        """The seconds of a step of the method that is not logged, in JSON."""
        return self.folder / "steps" / f"{method}.json"

    def step_seconds(self, method: str) -> float:
        """NaN until it is measured."""
        path = self.seconds_file(method)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else math.nan

    def steps(self, method: str) -> int:
        """Steps of a run of the method. 0 at equal time until its step is measured."""
        if not self.size.equal_time:
            return self.size.steps
        seconds = self.size.steps * self.step_seconds(DENSE)
        fitting = seconds / self.step_seconds(method)
        return 0 if math.isnan(fitting) else max(1, round(fitting))


class Run(NamedTuple):
    """An extension. seed: of the order of the data; the weights are the same."""

    name: str
    method: str
    seed: int


class Evaluation(NamedTuple):
    """weights: START or the name of a run. mode: a method, or PUBLISHED."""

    weights: str
    mode: str


def methods(size: Size) -> dict[str, dict[str, Any]]:
    """The keys of [attention] that make each method, dense first.

    Published: budgets of the last 64 queries, verticals and slashes each. Default: as it comes.
    """
    block = size.common.get("attention.block_size", 128)
    vertical_slash = {"pattern": "vertical_slash"}
    published = vertical_slash | {
        "vertical_slash.budget": "independent",
        "vertical_slash.probe": min(64, block),
        "vertical_slash.probe_rows": "last",
        "vertical_slash.sinks": 30,
        "vertical_slash.count_sinks": True,
        "vertical_slash.local_slashes": 2,
    }
    fixed = {
        "vertical_slash.min_verticals": size.fixed_verticals,
        "vertical_slash.min_slashes": size.fixed_slashes,
        "vertical_slash.max_verticals": size.fixed_verticals,
        "vertical_slash.max_slashes": size.fixed_slashes,
    }
    window = {"sliding_window": size.window, "window_sinks": size.window_sinks}
    found = {
        DENSE: {"pattern": "dense"},
        SPARSE: vertical_slash,
        "published_95": published | {"vertical_slash.recall": 0.95},
        "xattention": {"pattern": "xattention", "xattention.threshold": 0.9},
        "moba": {"pattern": "moba", "moba.chunk_size": size.moba_chunk, "moba.top_k": 12},
        "minference": published | fixed,
        "window": {"pattern": "dense"} | window,
        **{
            name: vertical_slash | {"vertical_slash.recall": int(name[-2:]) / 100}
            for name in RECALLS
        },
        "published_90": published | {"vertical_slash.recall": 0.9},
    }
    if size.name == "toy":
        # Its documents are shorter than what is dense by default.
        for keys in found.values():
            if keys["pattern"] in ("vertical_slash", "xattention"):
                keys[f"{keys['pattern']}.dense_below"] = 64
    return found


def runs(size: Size) -> dict[str, Run]:
    """All runs by name, ordered by importance: the main question, its noise, the other methods."""
    if size.equal_time:
        first = (DENSE, SPARSE, *RECALLS)
        others = ("xattention", "published_95", "window", "minference")
        order = [(name, 0) for name in first]
        order += [(name, seed) for seed in range(1, SEEDS) for name in first]
        order += [(name, seed) for name in others for seed in range(SEEDS)]
        found = [Run(f"{name}_seed{seed}" if seed else name, name, seed) for name, seed in order]
        return {run.name: run for run in found}
    both = [Run(name, name, 0) for name in (DENSE, SPARSE)]
    seeds = []
    for seed in range(1, SEEDS):
        seeds += [Run(f"{name}_seed{seed}", name, seed) for name in (DENSE, SPARSE)]
    others = [Run(name, name, 0) for name in list(methods(size))[2:]]
    # Those at other recalls last.
    ordered = [*both, *others[:2], *seeds[:2], *others[2:5], *seeds[2:], *others[5:]]
    return {run.name: run for run in ordered}


def evaluations(size: Size) -> dict[str, list[Evaluation]]:
    """By part, START or a run: the attentions to evaluate its weights with, dense and sparse.

    Dense weights are read by SPARSE, those of a method by that method. Weights of further seeds,
    which are there to know the noise, are only read as they were trained, except at equal time.
    """
    found = {START: [Evaluation(START, PUBLISHED), Evaluation(START, DENSE)]}
    for name, run in runs(size).items():
        found[name] = [Evaluation(name, run.method)]
        if run.seed == 0 or (size.equal_time and run.method != DENSE):
            other = SPARSE if run.method == DENSE else DENSE
            found[name].append(Evaluation(name, other))
    return found


def parts(size: Size) -> list[str]:
    return ["text", START, *runs(size)]


def configuration(study: Study, run: Run) -> Config:
    """The checked configuration of a run. Raises ConfigError."""
    size = study.size
    steps = study.steps(run.method)
    keys = _common(study, run.method) | {
        "training.output_dir": study.folder / run.name,
        "training.seed": run.seed,
        "training.steps": steps,
        "optimizer.lr": 1e-4,
        "lr_scheduler.warmup_steps": max(1, steps // 8),
        "activation_checkpoint.mode": "none",
        "compile.enable": size.compile,
        "checkpoint.enable": True,
        "checkpoint.keep_latest_k": 2,
        "checkpoint.interval": steps,
    }
    if size.equal_time:
        # A step that is logged takes longer.
        every = max(1, steps // 20)
        keys |= {"metrics.log_every": every, "metrics.recall_every": 5 * every}
    return _checked(keys | _yarn(size))


def timing_configuration(study: Study, method: str) -> Config:
    """The configuration of the steps that are timed, which are not saved. Raises ConfigError."""
    # Without a number of steps, which is not known yet.
    untimed = dataclasses.replace(study, size=dataclasses.replace(study.size, equal_time=False))
    config = configuration(untimed, Run("", method, 0))
    config.training.output_dir = str(study.folder / "steps" / method)
    config.training.steps = 2
    config.lr_scheduler.warmup_steps = 1
    config.checkpoint.enable = False
    return config


def evaluation_configuration(study: Study, mode: str) -> Config:
    """The configuration to evaluate any weights with in an attention. Raises ConfigError."""
    keys = _common(study, _method(mode))
    if mode != PUBLISHED:
        keys |= _yarn(study.size)
    return _checked(keys)


def _common(study: Study, method: str) -> dict[str, Any]:
    """Keys of training and evaluation: the model, the text and the attention of a method."""
    size = study.size
    keys = size.common | {
        "model.initial_hf": study.model,
        "data.source": study.text / "train",
        "data.tokenizer": study.text / "train",
        "data.sequences": "fixed",
        "training.seq_len": size.text.context,
    }
    attention = methods(size)[method]
    return keys | {f"attention.{key}": value for key, value in attention.items()}


def _method(mode: str) -> str:
    return DENSE if mode == PUBLISHED else mode


def longest(size: Size, mode: str) -> int:
    """Tokens that an evaluation goes up to."""
    return size.original if mode == PUBLISHED else size.text.context


def _yarn(size: Size) -> dict[str, Any]:
    return {
        "model.rope_scaling": "yarn",
        "model.rope_factor": size.text.context / size.original,
        "model.rope_original_length": size.original,
    }


def _checked(keys: dict[str, Any]) -> Config:
    words = []
    for key, value in keys.items():
        shown = show(value) if isinstance(value, bool) else value
        words.append(f"--{key}={shown}")
    config, _ = load_and_check(words, 1, 1)
    return config


def write_json(path: Path, value: Any) -> None:
    """Write atomically: the file is never half-written, and other processes may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


class OutOfTime(Exception):
    """The time of this call is over, or a signal came. Work in progress was saved."""


def check_time(size: Size, deadline: float) -> None:
    """Raises OutOfTime if too little is left until `deadline`, of time.monotonic()."""
    if deadline - time.monotonic() <= size.reserve_seconds:
        raise OutOfTime


def is_done(study: Study, name: str) -> bool:
    """Whether a run has all its steps."""
    # Imported here, as it loads torch, which --list does without.
    from titan_sparse.training.checkpoint import newest_checkpoint

    newest = newest_checkpoint(str(study.folder / name))
    steps = study.steps(runs(study.size)[name].method)
    return newest is not None and newest.endswith(f"step-{steps}")


def causal_share(size: Size, method: str) -> float:
    """The share of all causal pairs that a method's mask allows: 1, except for a window.

    Density and recall are logged as shares of what the mask allows.
    """
    keys = methods(size)[method]
    window = keys.get("sliding_window", 0)
    length = size.text.context
    pairs = causal_pairs(length, window, keys.get("window_sinks", 0))
    return pairs / causal_pairs(length)


def folder_of(study: Study, evaluation: Evaluation) -> Path:
    """Where the answers lie, a file for each question."""
    return study.folder / "evaluation" / f"{evaluation.weights}--{evaluation.mode}"
