"""The study's runs: methods, the configuration of each run, and what it costs. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.study.sizes import Size
from titan_sparse.config import Config, load_and_check
from titan_sparse.config.reading import show
from titan_sparse.estimate.flops import causal_pairs, flops_per_token
from titan_sparse.models.huggingface_config import read_config

START = "start"
"""The weights that all runs start from."""
PUBLISHED = "as_published"
"""An inference of START: dense, without YaRN, up to the length it was made for."""
DENSE = "dense"
SPARSE = "default"
"""What stands for sparse attention: vertical_slash as it is by default."""
SEEDS = 3
"""Of DENSE and SPARSE, so that noise is known."""

STEP_SECONDS = "step_seconds.json"
"""In the folder of a run of seed 0: what a step takes that is not logged."""


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
        "vertical_slash.local_diagonals": 2,
    }
    fixed = {
        "vertical_slash.min_columns": size.fixed_columns,
        "vertical_slash.min_slashes": size.fixed_slashes,
        "vertical_slash.max_columns": size.fixed_columns,
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
        "default_95": vertical_slash | {"vertical_slash.recall": 0.95},
        "published_90": published | {"vertical_slash.recall": 0.9},
    }
    if size.name == "toy":
        # Its documents are shorter than what is dense by default.
        for keys in found.values():
            if keys["pattern"] in ("vertical_slash", "xattention"):
                keys[f"{keys['pattern']}.dense_below"] = 64
    return found


def runs(size: Size) -> dict[str, Run]:
    """All runs by name, ordered by worth: the question, its noise, the other methods."""
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
    which are there to know the noise, are only read as they were trained.
    """
    found = {START: [Evaluation(START, PUBLISHED), Evaluation(START, DENSE)]}
    for name, run in runs(size).items():
        found[name] = [Evaluation(name, run.method)]
        if run.seed == 0:
            other = SPARSE if run.method == DENSE else DENSE
            found[name].append(Evaluation(name, other))
    return found


def parts(size: Size) -> list[str]:
    """Their names in order."""
    return ["text", START, *runs(size)]


def configuration(study: Study, run: Run) -> Config:
    """The checked configuration of a run. Raises ConfigError."""
    size = study.size
    keys = _common(study, run.method) | {
        "training.output_dir": study.folder / run.name,
        "training.seed": run.seed,
        "training.steps": size.steps,
        "optimizer.lr": 1e-4,
        "lr_scheduler.warmup_steps": max(1, size.steps // 8),
        "activation_checkpoint.mode": "none",
        "compile.enable": size.compile,
        "checkpoint.enable": True,
        "checkpoint.keep_latest_k": 2,
        "checkpoint.interval": size.steps,
    }
    return _checked(keys | _yarn(size))


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


def is_done(study: Study, name: str) -> bool:
    """Whether a run has all its steps."""
    # Imported here, as it loads torch, which --list does without.
    from titan_sparse.training.checkpoint import newest_checkpoint

    newest = newest_checkpoint(str(study.folder / name))
    return newest is not None and newest.endswith(f"step-{study.size.steps}")


def causal_share(size: Size, method: str) -> float:
    """Of all causal pairs the share that a method's mask allows: 1, but for a window.

    Density and recall are logged as shares of what the mask allows.
    """
    keys = methods(size)[method]
    window = keys.get("sliding_window", 0)
    length = size.text.context
    pairs = causal_pairs(length, window, keys.get("window_sinks", 0))
    return pairs / causal_pairs(length)


class Cost(NamedTuple):
    """Of a run. tokens: trained on. linear, attention: FLOPs, attention's as if it were dense."""

    tokens: int
    linear: float
    attention: float


def cost(study: Study) -> Cost:
    """What a run is to cost; sparse attention is its density's share of what stands here."""
    length = study.size.text.context
    tokens = length * study.size.steps
    model = read_config(str(study.model))
    pairs = causal_pairs(length) / length * model.layers * model.heads  # of a token
    linear = flops_per_token(model, 0)
    return Cost(tokens, linear * tokens, (flops_per_token(model, pairs) - linear) * tokens)
