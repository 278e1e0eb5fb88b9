"""The study's settings: sizes, methods, runs, and the configuration of each. Imports no torch.

A study trains each run, then evaluates its weights. Add a method in methods(), a size in SIZES.
"""

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_sparse.config import Config, ConfigError, load_and_check
from titan_sparse.config.reading import as_words, given_keys
from titan_sparse.estimate.flops import causal_pairs


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Size:
    """The size of a whole study.

    context: tokens of a sequence, and a step is one sequence. text: contexts to train on by kind of
    text, fewer where packages hold less. windows: held-out contexts of each kind, for the loss by
    position. code_windows: of code, for the loss of names; a name is far if it was last seen more
    than far_names tokens back. lengths, depths, needles: of
    the prompts, so many needles at each length and depth. most_characters: of each installed
    package. has_sdists: False takes the text of installed packages alone. common: keys that all
    runs share. reserve_seconds: with less time left nothing is begun. equal_time: each method has
    as many steps as fit into the seconds of `steps` dense steps, and its held-out loss is measured
    `points` times on the way.
    """

    name: str
    context: int
    steps: int
    text: dict[str, int]
    windows: int
    lengths: tuple[int, ...]
    needles: int
    code_windows: int = 8
    far_names: int = 16384
    depths: int = 5
    most_characters: int = 4_000_000
    has_sdists: bool = True
    compile: bool = True
    moba_chunk: int = 512
    fixed_verticals: int = 1000
    fixed_slashes: int = 48
    window: int = 4096
    window_sinks: int = 64
    common: dict[str, Any] = field(default_factory=dict)
    reserve_seconds: float = 60
    equal_time: bool = False
    points: int = 6

    @property
    def title(self) -> str:
        return f"{self.name}, equal time" if self.equal_time else self.name


# MoBA: chunks as large a share of the context as published (4096 of 524288). Fixed budgets as
# published. The window visits an eighth of the pairs.
FULL = Size(
    "full",
    context=65536,
    steps=300,
    # At equal time a sparse run takes about 1,000 contexts.
    text={"code": 360, "prose": 320, "mixed": 200},
    windows=12,
    lengths=(4096, 8192, 16384, 32768, 65536),
    needles=4,
    common={
        "training.dtype": "bfloat16",
        "training.device": "cuda",
        "training.loss_chunk_tokens": 8192,
        "metrics.log_every": 1,
        "metrics.recall_every": 20,
    },
)
SHORT = dataclasses.replace(
    FULL,
    name="short",
    steps=30,
    text={"code": 90, "prose": 80, "mixed": 50},
    windows=3,
    needles=1,
    compile=False,
    common=FULL.common | {"metrics.recall_every": 8},
    reserve_seconds=40,
)
LONG = dataclasses.replace(
    SHORT,
    name="long",
    context=131072,
    steps=20,
    text={"code": 45, "prose": 40, "mixed": 25},
    windows=2,
    points=4,
    lengths=(8192, 32768, 131072),
)
TOY = Size(
    "toy",
    context=1024,
    steps=4,
    text={"code": 16, "prose": 16},
    windows=2,
    lengths=(512, 1024),
    needles=1,
    code_windows=2,
    far_names=256,
    depths=2,
    most_characters=20_000,
    has_sdists=False,
    compile=False,
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
SIZES = {size.name: size for size in (FULL, SHORT, LONG, TOY)}


def at_equal_time(size: Size) -> Size:
    """The study of this size that gives each method the same seconds."""
    timed = dataclasses.replace(size, equal_time=True, compile=size.name != "toy")
    return dataclasses.replace(timed, steps=60, points=4) if size.name == "short" else timed


ADJUSTABLE = {"activation_checkpoint.mode", "compile.enable", "optimizer.lr"}
"""What options may replace of what all runs share."""
START = "start"
"""The weights that all runs start from."""
QUESTIONS = ("position", "needle_forced", "names")
"""What is asked of weights in an attention: loss by position, needles, and names in code."""
DENSE = "dense"
SPARSE = "recall_95"
"""What stands for sparse attention."""
SEEDS = 3
"""Of DENSE and SPARSE, so that noise is known. At equal time of every method."""
RECALLS = ("recall_95", "recall_90", "recall_97", "recall_99")
"""vertical_slash, by the recall that it is asked for."""


@dataclass(frozen=True)
class Study:
    """A study of a size.

    folder: of all that is written. model: folder of Hugging Face. options: words of the command
    line that set keys of the configuration for all runs.
    """

    size: Size
    folder: Path
    model: Path
    options: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The title: what all that is in `folder` has in common."""
        return " ".join([self.size.title, *self.options])

    @property
    def original(self) -> int:
        """The context that the model was made for."""
        return read_json(self.model / "config.json")["max_position_embeddings"]

    @property
    def claim_file(self) -> Path:
        """It says of which size the study in `folder` is."""
        return self.folder / "study.json"

    @property
    def text(self) -> Path:
        return self.folder / "text"

    def held_out(self, run: str) -> Path:
        """The held-out loss of a run at equal time, on the way."""
        return self.folder / run / "held_out.jsonl"

    def seconds_file(self, method: str) -> Path:
        """The seconds of a step of the method that is not logged, in JSON."""
        return self.folder / "steps" / f"{method}.json"

    def step_seconds(self, method: str) -> float:
        """NaN until it is measured."""
        path = self.seconds_file(method)
        return read_json(path) if path.is_file() else math.nan

    def steps(self, method: str) -> int:
        """Steps of a run of the method. 0 at equal time until its step is measured."""
        if not self.size.equal_time:
            return self.size.steps
        seconds = self.size.steps * self.step_seconds(DENSE)
        fitting = seconds / self.step_seconds(method)
        return 0 if math.isnan(fitting) else max(1, round(fitting))


class Run(NamedTuple):
    """An extension. seed: of the order of the data. The weights are the same."""

    name: str
    method: str
    seed: int


class Evaluation(NamedTuple):
    """weights: START or the name of a run. mode: the method that reads them."""

    weights: str
    mode: str


def methods(size: Size) -> dict[str, dict[str, Any]]:
    """The keys of [attention] that make each method, in order of importance.

    Published: budgets of the last 64 queries, verticals and slashes each.
    """
    vertical_slash = {"pattern": "vertical_slash"}
    published = vertical_slash | {
        "vertical_slash.budget": "independent",
        "vertical_slash.probe": min(64, size.common.get("attention.block_size", 128)),
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
        **{
            name: vertical_slash | {"vertical_slash.recall": int(name[-2:]) / 100}
            for name in RECALLS
        },
        "xattention": {"pattern": "xattention", "xattention.threshold": 0.9},
        "published_95": published | {"vertical_slash.recall": 0.95},
        "window": {"pattern": "dense"} | window,
        "minference": published | fixed,
        "moba": {"pattern": "moba", "moba.chunk_size": size.moba_chunk, "moba.top_k": 12},
    }
    if size.name == "toy":
        # Its documents are shorter than what is dense by default.
        for keys in found.values():
            if keys["pattern"] in ("vertical_slash", "xattention"):
                keys[f"{keys['pattern']}.dense_below"] = 64
    return found


def runs(size: Size) -> dict[str, Run]:
    """All runs by name, ordered by importance: the main question, its noise, the other methods."""
    main = [DENSE, *RECALLS] if size.equal_time else [DENSE, SPARSE]
    others = [name for name in methods(size) if name not in main]
    order = [(name, seed) for seed in range(SEEDS) for name in main]
    order += [(name, seed) for name in others for seed in range(SEEDS if size.equal_time else 1)]
    found = [Run(f"{name}_seed{seed}" if seed else name, name, seed) for name, seed in order]
    return {run.name: run for run in found}


def evaluations(size: Size) -> dict[str, list[Evaluation]]:
    """By part, START or a run: the attentions to evaluate its weights with.

    Every run is read by its own method. Sparse weights are also read densely, and dense ones by
    SPARSE. At equal steps further seeds, which are there to know the noise, are read once.
    """
    found = {START: [Evaluation(START, DENSE)]}
    for name, run in runs(size).items():
        found[name] = [Evaluation(name, run.method)]
        if run.seed == 0 or (size.equal_time and run.method != DENSE):
            found[name].append(Evaluation(name, SPARSE if run.method == DENSE else DENSE))
    return found


def training_configuration(study: Study, run: Run, steps: int) -> Config:
    """The checked configuration of a run. Raises ConfigError."""
    keys = _common(study, run.method) | {
        "training.output_dir": study.folder / run.name,
        "training.seed": run.seed,
        "training.steps": steps,
        "optimizer.lr": 1e-4,
        "lr_scheduler.warmup_steps": max(1, steps // 8),
        "activation_checkpoint.mode": "none",
        "compile.enable": study.size.compile,
        "checkpoint.enable": True,
        "checkpoint.keep_latest_k": 2,
        "checkpoint.interval": steps,
    }
    if study.size.equal_time:
        # A step that is logged takes longer.
        every = max(1, steps // 20)
        keys |= {"metrics.log_every": every, "metrics.recall_every": 5 * every}
    return _checked(study, keys)


def evaluation_configuration(study: Study, mode: str) -> Config:
    """The configuration to evaluate any weights with in an attention. Raises ConfigError."""
    return _checked(study, _common(study, mode))


def check_options(study: Study, parts: list[str]) -> None:
    """Raises ConfigError if a run of these parts, or without one the dense
    run, does not take them."""
    every = runs(study.size)
    for name in every.keys() & set(parts) or {DENSE}:
        training_configuration(study, every[name], steps=1)


def _common(study: Study, method: str) -> dict[str, Any]:
    """Keys of training and evaluation: the model, the text and the attention of a method."""
    size = study.size
    keys = size.common | {
        "model.initial_hf": study.model,
        "model.rope_scaling": "yarn",
        "model.rope_factor": size.context / study.original,
        "model.rope_original_length": study.original,
        "data.source": study.text / "train",
        "data.tokenizer": study.text / "train",
        "data.sequences": "fixed",
        "training.seq_len": size.context,
    }
    attention = methods(size)[method]
    return keys | {f"attention.{key}": value for key, value in attention.items()}


def _checked(study: Study, keys: dict[str, Any]) -> Config:
    """The configuration of these keys and the study's options. Raises ConfigError."""
    decided = keys.keys() - study.size.common.keys() - ADJUSTABLE
    for key in sorted(decided & given_keys(study.options)):
        raise ConfigError(f"command line: the study itself sets {key}; leave it out")
    # Of two words for a key the last counts.
    config, _ = load_and_check([*as_words(keys), *study.options], 1, 1)
    return config


class OutOfTime(Exception):
    """The time of this call is over, or a signal came. Work in progress was saved."""


def check_time(size: Size, deadline: float) -> None:
    """Raises OutOfTime if too little is left until `deadline`, of time.monotonic()."""
    if deadline - time.monotonic() <= size.reserve_seconds:
        raise OutOfTime


def is_done(study: Study, run: Run) -> bool:
    """True if a run has all its steps. Its checkpoints may be gone once it is evaluated."""
    # Imported here, as it loads torch, which --help does without.
    from titan_sparse.training.checkpoint.folders import newest_checkpoint

    if not any(missing_answers(study, one) for one in evaluations(study.size)[run.name]):
        return True
    newest = newest_checkpoint(str(study.folder / run.name))
    if newest is None:
        return False
    return newest.endswith(f"step-{study.steps(run.method)}")


def missing_answers(study: Study, evaluation: Evaluation) -> list[str]:
    folder = folder_of(study, evaluation)
    return [name for name in QUESTIONS if not (folder / f"{name}.json").is_file()]


def causal_share(size: Size, method: str) -> float:
    """The share of all causal pairs that a method's mask allows: 1, except for a window.

    Density and recall are logged as shares of what the mask allows.
    """
    keys = methods(size)[method]
    window = keys.get("sliding_window", 0)
    pairs = causal_pairs(size.context, window, keys.get("window_sinks", 0))
    return pairs / causal_pairs(size.context)


def folder_of(study: Study, evaluation: Evaluation) -> Path:
    """The folder of the answers, a file for each question."""
    return study.folder / "evaluation" / f"{evaluation.weights}--{evaluation.mode}"
