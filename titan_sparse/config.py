"""The TOML configuration: every section a dataclass, every field documented; load() reads it and check() refuses
impossible combinations. Imports no torch: both run before any process group exists, and errors come at once."""

import ast
import difflib
import inspect
import itertools
import json
import math
import os
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin


class ConfigError(ValueError):
    """A mistake of the user in the configuration; the message is always one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass
class Model:
    """Which decoder is trained."""
    flavour: str = "debug"
    "name of a published architecture, a key of titan_sparse.models.flavours.FLAVOURS"
    vocab_size: int = 0
    "rows of the embedding; 0: the flavour's"
    rope_scaling: Literal["flavour", "none", "llama3", "yarn"] = "flavour"
    "context extension of the rotary embedding; flavour: as published"
    rope_factor: float = 1.0
    "context extension factor of llama3 and yarn, above 1"
    rope_original_length: int = 0
    "length before extension in tokens, for llama3 and yarn; 0: the flavour's training length"
    rope_theta: float = 0.0
    "base of the rotary frequencies; 0: the flavour's"


@dataclass
class Data:
    """Where the text comes from and how it becomes documents of tokens."""
    source: str = "python"
    "python (the .py files of the stdlib and torch), a file (.txt .jsonl .jsonl.zst .parquet), a folder, a dataset name"
    join_packages: bool = False
    "join the files of a package (folder) to one long document; source = python only"
    text_field: str = "text"
    "column that holds the text"
    subset: str = ""
    "configuration name of a Hugging Face dataset; empty: its default"
    split: str = "train"
    "split of a Hugging Face dataset"
    tokenizer: str = "bytes"
    "bytes, or the path of a tokenizer.json"
    min_document_length: int = 0
    "shorter documents are skipped; tokens"
    shuffle: bool = True
    "permute the documents anew in every epoch"


@dataclass
class Training:
    """The step loop."""
    output_dir: str = "outputs/debug"
    "folder of the run: configuration, logs, checkpoints"
    seed: int = 0
    "seed of the weights and of the order of documents"
    steps: int = 100
    "optimizer steps in all"
    seq_len: int = 4096
    "tokens of a sequence; padded up to a multiple of attention.block_size * parallelism.cp (twice that for zigzag)"
    local_batch_size: int = 1
    "sequences per data-parallel rank per forward"
    gradient_accumulation_steps: int = 1
    "forwards and backwards per optimizer step"
    max_norm: float = 1.0
    "gradients are clipped to this norm; 0: no clipping, the norm is still logged"
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    "compute dtype; weights, reduced gradients and optimizer states stay float32 (float64 for float64)"
    loss_chunk_tokens: int = 2048
    "tokens whose logits exist at one time"
    gc_interval: int = 50
    "steps between Python garbage collections"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "auto: cuda where there is one"
    deterministic: bool = False
    "deterministic algorithms only; slower"


@dataclass
class Parallelism:
    """Degrees of the device mesh; dp_replicate * dp_shard * cp is the number of ranks."""
    dp_replicate: int = 1
    "replicas of the sharded model"
    dp_shard: int = -1
    "ranks that share the parameters (FSDP); -1: what is left of the world"
    cp: int = 1
    "context-parallel degree: ranks that share a sequence"
    cp_intra: int = 0
    "context-parallel ranks of the inner ring; 0: min(cp, ranks of a node)"
    first_step_timeout_seconds: int = 1800
    "collective timeout until the first step is done (compilation, loading); seconds"
    timeout_seconds: int = 300
    "collective timeout after the first step; seconds"
    reshard_after_forward: bool = True
    "free gathered parameters between forward and backward: less memory, one more all-gather"


@dataclass
class Dense:
    """Pattern dense: everything the mask allows. No choices."""


@dataclass
class VerticalSlash:
    """Pattern vertical_slash: columns and block diagonals chosen online from the last queries."""
    recall: float = 0.95
    "share of the probe's attention mass that the columns and diagonals must reach, in (0, 1]"
    probe: int = 0
    "last queries that choose; tokens; 0: attention.block_size"
    sinks: int = 30
    "first columns that are always on; tokens"
    local_diagonals: int = 2
    "block diagonals next to the main one that are always on, itself included"
    min_columns: int = 0
    "least columns per head"
    max_columns: int = 4096
    "most columns per head"
    min_slashes: int = 0
    "least block diagonals per head"
    max_slashes: int = 0
    "most block diagonals per head; 0: no cap"
    dense_below: int = 4096
    "documents shorter than this are dense; tokens"


@dataclass
class Attention:
    """Mask, pattern, layout, schedule, backend. Only the sub-table that `pattern` names is used: the others may hold
    changed values and do nothing, so that a sweep over variants changes one line."""
    mask: Literal["documents", "causal"] = "documents"
    "what may be seen: documents is causal inside each document, causal ignores document boundaries"
    sliding_window: int = 0
    "a query sees this many last tokens, itself included; 0: all"
    pattern: Literal["dense", "vertical_slash"] = "vertical_slash"
    "what is worth seeing"
    layout: Literal["contiguous", "zigzag", "striped"] = "striped"
    "which context-parallel rank owns which blocks"
    schedule: Literal["auto", "local", "all_gather", "ring", "double_ring"] = "auto"
    "in which order keys and values meet the queries"
    backend: Literal["auto", "eager"] = "auto"
    "which kernel computes; eager is the slow, exact reference"
    block_size: int = 128
    "tokens of a block; a power of two, at least 16"
    vertical_slash: VerticalSlash = field(default_factory=VerticalSlash)
    "choices of pattern = vertical_slash"
    dense: Dense = field(default_factory=Dense)
    "choices of pattern = dense: none"


@dataclass
class Optimizer:
    """The optimizer."""
    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    "class of torch.optim"
    lr: float = 3e-4
    "peak learning rate"
    beta1: float = 0.9
    "decay of the mean of gradients; Adam and AdamW"
    beta2: float = 0.95
    "decay of the mean of squared gradients; Adam and AdamW"
    eps: float = 1e-8
    "added to the root of the second moment; Adam and AdamW"
    weight_decay: float = 0.1
    "weight decay per unit of learning rate"
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    "how torch.optim runs the update; auto: fused where it exists"


@dataclass
class LRScheduler:
    """Linear warm-up, constant, decay."""
    warmup_steps: int = 10
    "steps of linear warm-up"
    decay_ratio: float = -1.0
    "share of the steps used for the decay at the end (WSD), in [0, 1]; -1: decay right after warm-up"
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    "shape of the decay"
    min_lr_factor: float = 0.1
    "learning rate at the end, as a share of optimizer.lr"
    total_steps: int = 0
    "steps the schedule is laid out for; 0: training.steps"


@dataclass
class ActivationCheckpoint:
    """What is kept for backward and what is recomputed."""
    mode: Literal["none", "full", "selective"] = "full"
    "full: recompute each block; selective: keep its costly results; none: keep everything"


@dataclass
class Compile:
    """torch.compile of each block. Does nothing unless enabled."""
    enable: bool = False
    "compile the blocks"
    backend: str = "inductor"
    "inductor, aot_eager or eager"


@dataclass
class Checkpoint:
    """Saving and resuming. Does nothing unless enabled."""
    enable: bool = False
    "save, and resume from what was saved"
    interval: int = 500
    "steps between saves"
    keep_latest_k: int = 3
    "checkpoints kept; 0: all; 1 is refused, as the last one may be half-written"
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    "write while training goes on"
    load_step: int = -1
    "step to resume from; -1: the newest complete one"
    initial_load_path: str = ""
    "checkpoint to start from when the run has none of its own"


@dataclass
class Metrics:
    """What is measured and where it is written."""
    log_every: int = 1
    "steps between log lines"
    recall_every: int = 50
    "steps between measurements of recall; 0: never"
    recall_rows: int = 64
    "sampled query rows per sequence in a measurement of recall"
    tensorboard: bool = True
    "write TensorBoard events to the run folder"
    peak_tflops: float = 0.0
    "peak of one device in TFLOP/s, for MFU; 0: by the GPU's name"


@dataclass
class Profiling:
    """torch.profiler. Does nothing unless enabled."""
    enable: bool = False
    "write a trace"
    first_step: int = 5
    "first traced step, counted from 1"
    steps: int = 2
    "traced steps"
    with_stack: bool = False
    "record Python stacks"


@dataclass
class Config:
    """The whole configuration; each field is a TOML section."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    attention: Attention = field(default_factory=Attention)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)


@dataclass(frozen=True)
class Flags:
    """Command-line options that are not configuration."""
    print_config: bool = False
    "print the resolved configuration and stop"


def _walk(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below a section with its type; sub-sections come after the plain fields and before their own."""
    for item in sorted(fields(section), key=lambda item: is_dataclass(item.type)):
        yield prefix + item.name, item.type
        if is_dataclass(item.type):
            yield from _walk(item.type, f"{prefix}{item.name}.")


_SECTIONS = {key: kind for key, kind in _walk(Config) if is_dataclass(kind)}
_KINDS = {key: kind for key, kind in _walk(Config) if not is_dataclass(kind)}
_OPTIONS = ("config", "print-config", "help")
_KIND_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}


# Reading: command line > TOML > defaults.

def load(argv: list[str]) -> tuple[Config, Flags]:
    """Configuration and flags from the words after the program's name: `--config X.toml`, `--section.key value`,
    `--section.key=value`, `--print-config`. Prints usage() and exits with status 0 on `--help`. Raises ConfigError."""
    pairs = _split_words(argv)
    names = [name for name, _ in pairs]
    if "help" in names:
        print(usage())
        raise SystemExit(0)
    config = Config()
    _require(names.count("config") <= 1, "command line: --config is given more than once; write one file")
    # Two passes, as the command line wins over the file wherever --config stands.
    for text in (text for name, text in pairs if name == "config"):
        _apply_file(config, text)
    for name, text in pairs:
        if name not in _OPTIONS:
            _apply_word(config, name, text)
    return config, Flags(print_config="print-config" in names)


def _split_words(argv: list[str]) -> list[tuple[str, str | None]]:
    """Pairs of an option's name and its text, None where it has none."""
    pairs: list[tuple[str, str | None]] = []
    words = ["--help" if word == "-h" else word for word in argv]
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        _require(word.startswith("--") and name != "",
                 f"command line: unexpected word {_show(word)}; write --section.key value")
        takes_text = name not in ("print-config", "help")
        _require(takes_text or not equals, f"command line: --{name} takes no value; write --{name}")
        if equals:
            pairs.append((name, text))
        elif takes_text and words and not words[0].startswith("--"):
            pairs.append((name, words.pop(0)))
        else:
            _require(name != "config", "command line: --config needs a file; write --config FILE.toml")
            pairs.append((name, None))
    return pairs


def _apply_word(config: Config, key: str, text: str | None) -> None:
    near = difflib.get_close_matches(key, _OPTIONS, 1)
    if "." not in key and key not in _SECTIONS and near:
        raise ConfigError(f"command line: unknown option --{key}; did you mean --{near[0]}?")
    if text is None and key in _KINDS and _KINDS[key] is not bool:
        raise ConfigError(f"command line: {key} needs a value; write --{key} VALUE")
    _assign(config, key, True if text is None else _from_text(text, _KINDS.get(key)), "command line")


def _from_text(text: str, kind: Any) -> Any:
    """The text as a value of the field's type, or the text itself where it is none: _typed() refuses it then."""
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def _apply_file(config: Config, path: str) -> None:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file of --config: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for key, value in _flatten(table):
        _assign(config, key, value, path)


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables; an empty table counts as a value unless it is a section."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in _KINDS and (value or key in _SECTIONS):
            yield from _flatten(value, key + ".")
        else:
            yield key, value


def _assign(config: Config, key: str, value: Any, where: str) -> None:
    if key not in _KINDS:
        raise ConfigError(f"{where}: {_unknown(key)}")
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config), name, _typed(key, value, f"{where}: "))


def _typed(key: str, value: Any, where: str) -> Any:
    """The value in the type of the field, or ConfigError. bool is no int here, and an int is a fine float."""
    kind = _KINDS[key]
    if get_origin(kind) is Literal:
        return _one_of(key, value, get_args(kind), where)
    if kind is float:
        # The comparison refuses nan, inf and integers beyond every float.
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is kind:
        return value
    raise ConfigError(f"{where}{key} = {_show(value)} is not {_KIND_NAMES[kind]}")


def _one_of(key: str, value: Any, choices: Collection[str], where: str = "") -> str:
    if value in tuple(choices):
        return value
    near = difflib.get_close_matches(str(value), choices, 1)
    hint = f"; did you mean {_show(near[0])}?" if near else ""
    raise ConfigError(f"{where}{key} = {_show(value)} is not one of {', '.join(map(_show, choices))}{hint}")


def _unknown(key: str) -> str:
    section, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in _KINDS if other.rpartition(".")[0] == section}
    if key in _SECTIONS:
        keys = [other for other in _KINDS if other.startswith(key + ".")]
        return f"{key} is a section, not a key; it has {', '.join(keys) or 'no keys'}"
    near = [siblings[name] for name in difflib.get_close_matches(name, siblings, 1)]
    # The right name in the wrong section: the nearest of the keys that end in it, however far.
    near += difflib.get_close_matches(key, [other for other in _KINDS if other.endswith("." + name)], 1, cutoff=0.0)
    near += [] if siblings else difflib.get_close_matches(key, [*_KINDS, *_SECTIONS], 1)
    hint = f"did you mean {near[0]}?" if near else f"valid here: {', '.join(siblings.values() or _SECTIONS)}"
    missing = f" (no section {section})" if section and section not in _SECTIONS else ""
    return f"unknown key {key}{missing}; {hint}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


# Writing.

def _show(value: Any) -> str:
    """A value as TOML writes it; other objects (tables, dates) as Python does, for messages only."""
    if isinstance(value, str):
        # A JSON string is a TOML string but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML, every key written; load() reads it back equal."""
    lines: list[str] = []
    for key, kind in _walk(Config):
        if is_dataclass(kind):
            lines += ["", f"[{key}]"]
        else:
            lines.append(f"{key.rpartition('.')[2]} = {_show(attrgetter(key)(config))}")
    return "\n".join(lines[1:]) + "\n"


def save(config: Config, folder: str | Path) -> None:
    """Writes to_toml(config) to `folder`/config.toml; makes the folder. Raises OSError where that is impossible."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.toml").write_text(to_toml(config), encoding="utf-8")


def field_docs(section: type) -> dict[str, str]:
    """The docstring below each field of a section class, by field name; a field without one is left out."""
    body = ast.parse(inspect.getsource(section)).body[0].body
    return {item.target.id: doc.value.value for item, doc in itertools.pairwise(body)
            if isinstance(item, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)}


def usage() -> str:
    """What --help prints: every section and key with its type, default and meaning."""
    lines = ["usage: torchrun train.py [--config FILE.toml] [--section.key VALUE ...] [--print-config] [--help]", "",
             "The command line wins over the file, the file over the defaults. A key that is true or false may",
             "stand without a value: true. --print-config prints the resolved configuration and stops."]
    for key, kind in _walk(Config):
        section, _, name = key.rpartition(".")
        if is_dataclass(kind):
            lines += ["", f"[{key}] {' '.join(inspect.getdoc(kind).split())}"]
        else:
            choices = "|".join(get_args(kind)) or kind.__name__
            default = _show(attrgetter(key)(Config()))
            lines.append(f"  --{key} {choices} (default {default}): {field_docs(_SECTIONS[section])[name]}")
    return "\n".join(lines)


# What other parts derive from the configuration.

def world_from_environment() -> tuple[int, int]:
    """(ranks in all, ranks of this node) as torchrun sets WORLD_SIZE and LOCAL_WORLD_SIZE; 1 where unset."""
    sizes = []
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, "1")
        _require(text.isdecimal() and int(text) >= 1,
                 f"environment: {name} = {_show(text)} is not a positive integer; start with torchrun or unset it")
        sizes.append(int(text))
    return sizes[0], sizes[1]


def resolve_cp_intra(parallelism: Parallelism, local_world_size: int) -> int:
    """Context-parallel ranks of the inner ring: cp_intra, or as many of cp as a node has ranks."""
    return parallelism.cp_intra or min(parallelism.cp, local_world_size)


def padding_multiple(config: Config) -> int:
    """Tokens that a padded sequence is a multiple of: a whole block for each rank, two for zigzag's mirrored chunks."""
    chunks = 2 if config.attention.layout == "zigzag" else 1
    return config.attention.block_size * config.parallelism.cp * chunks


# Checking.

_MINIMUMS = {
    0: ("model.vocab_size", "model.rope_original_length", "model.rope_theta", "data.min_document_length",
        "training.seed", "training.max_norm", "parallelism.cp_intra", "attention.sliding_window",
        "attention.vertical_slash.probe", "attention.vertical_slash.sinks", "attention.vertical_slash.min_columns",
        "attention.vertical_slash.min_slashes", "attention.vertical_slash.max_slashes", "optimizer.weight_decay",
        "lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "checkpoint.keep_latest_k", "metrics.recall_every",
        "metrics.peak_tflops"),
    1: ("model.rope_factor", "training.steps", "training.seq_len", "training.local_batch_size",
        "training.gradient_accumulation_steps", "training.loss_chunk_tokens", "training.gc_interval",
        "parallelism.dp_replicate", "parallelism.cp", "parallelism.first_step_timeout_seconds",
        "parallelism.timeout_seconds", "attention.vertical_slash.local_diagonals",
        "attention.vertical_slash.max_columns", "checkpoint.interval", "metrics.log_every", "metrics.recall_rows",
        "profiling.first_step", "profiling.steps"),
    -1: ("checkpoint.load_step",),
}


def check(config: Config, world_size: int, local_world_size: int) -> None:
    """Refuses what cannot run on `world_size` ranks with `local_world_size` on a node: ConfigError, one line that
    names the keys and what to write instead. Also re-checks types, for a configuration made in Python."""
    for key in _KINDS:
        _typed(key, attrgetter(key)(config), "")
    for minimum, keys in _MINIMUMS.items():
        for key in keys:
            value = attrgetter(key)(config)
            _require(value >= minimum, f"{key} = {_show(value)} is too small; write {minimum} or more")
    for key in ("data.source", "data.tokenizer", "data.text_field", "data.split", "training.output_dir"):
        _require(attrgetter(key)(config) != "", f"{key} is empty; write {_show(attrgetter(key)(Config()))} or another")
    _check_model(config.model, config.data)
    _check_data(config.data)
    _check_dtype(config)
    _check_world(config.parallelism, world_size, local_world_size)
    _check_attention(config)
    _check_optimizer(config.optimizer)
    _check_lr_scheduler(config.lr_scheduler, config.training.steps)
    _check_run(config)


def _check_model(model: Model, data: Data) -> None:
    # Here, as the models import torch.
    from titan_sparse.models.flavours import FLAVOURS
    _one_of("model.flavour", model.flavour, FLAVOURS)
    _require(data.tokenizer != "bytes" or model.vocab_size == 0 or model.vocab_size >= 258,
             f'model.vocab_size = {model.vocab_size} is too small for data.tokenizer = "bytes"; write 0 or 258 or more')
    if model.rope_scaling in ("yarn", "llama3"):
        _require(model.rope_factor > 1, f'model.rope_scaling = "{model.rope_scaling}" needs model.rope_factor above 1; '
                 'write the factor, or model.rope_scaling = "none"')
        return
    for key, unset in (("rope_factor", 1.0), ("rope_original_length", 0)):
        value = getattr(model, key)
        _require(value == unset, f"model.{key} = {value} would be ignored with model.rope_scaling = "
                 f'"{model.rope_scaling}"; write model.rope_scaling = "yarn" or "llama3", or model.{key} = {unset}')


def _check_data(data: Data) -> None:
    if data.source != "python":
        _require(not data.join_packages,
                 f"data.join_packages would be ignored with data.source = {_show(data.source)}; "
                 'write data.join_packages = false or data.source = "python"')
        return
    for name in ("text_field", "subset", "split"):
        value, default = getattr(data, name), getattr(Data(), name)
        _require(value == default, f'data.{name} = {_show(value)} would be ignored with data.source = "python"; '
                 f"write data.{name} = {_show(default)} or another data.source")


def _check_dtype(config: Config) -> None:
    exact = config.training.device == "cpu" or config.attention.backend == "eager"
    _require(config.training.dtype != "float64" or exact, 'training.dtype = "float64" needs training.device = "cpu" '
             'or attention.backend = "eager"; write one of them or training.dtype = "float32"')


def _check_world(parallelism: Parallelism, world_size: int, local_world_size: int) -> None:
    replicate, shard, cp = parallelism.dp_replicate, parallelism.dp_shard, parallelism.cp
    _require(shard == -1 or shard >= 1,
             f"parallelism.dp_shard = {shard} is no degree; write -1 (what is left) or 1 or more")
    unit = replicate * cp * max(shard, 1)
    fits = world_size % unit == 0 if shard == -1 else world_size == unit
    if not fits:
        nodes = max(1, world_size // local_world_size)
        step = math.lcm(unit, nodes)
        ranks = step * max(1, world_size // step) if shard == -1 else unit
        start = f"--nproc-per-node={ranks // nodes}" if ranks % nodes == 0 else f"{ranks} ranks in all"
        raise ConfigError(f"parallelism.dp_replicate = {replicate} x parallelism.dp_shard = {shard} x parallelism.cp = "
                          f"{cp} does not fit {world_size} ranks; start torchrun with {start} or change the degrees")
    intra = resolve_cp_intra(parallelism, local_world_size)
    divisors = ", ".join(str(n) for n in range(1, cp + 1) if cp % n == 0)
    _require(cp % intra == 0, f"parallelism.cp_intra = {intra} does not divide parallelism.cp = {cp}; "
             f"write parallelism.cp_intra as one of {divisors}")


def _check_attention(config: Config) -> None:
    attention, cp = config.attention, config.parallelism.cp
    size = attention.block_size
    _require(size >= 16 and size & (size - 1) == 0,
             f"attention.block_size = {size} is not a power of two of at least 16; write 64 or 128")
    _require(attention.schedule != "local" or cp == 1, f'attention.schedule = "local" cannot run with parallelism.cp = '
             f'{cp}; write attention.schedule = "auto" or parallelism.cp = 1')
    _require(attention.schedule != "double_ring" or cp > 1, 'attention.schedule = "double_ring" needs parallelism.cp '
             'above 1; write attention.schedule = "auto"')
    recall = attention.vertical_slash.recall
    _require(0 < recall <= 1, f"attention.vertical_slash.recall = {recall} is not in (0, 1]; write for example 0.95")
    if attention.pattern == "vertical_slash":
        _check_vertical_slash(attention.vertical_slash, size, config.training.seq_len)


def _check_vertical_slash(pattern: VerticalSlash, block_size: int, seq_len: int) -> None:
    table = "attention.vertical_slash"
    for value, limit, key, bound in (
            # An unset probe is one block, and the loader pads every sequence to whole blocks: it always fits.
            (pattern.probe, seq_len, f"{table}.probe", "training.seq_len"),
            (pattern.probe, pattern.dense_below, f"{table}.probe", f"{table}.dense_below"),
            (block_size, pattern.dense_below, "attention.block_size", f"{table}.dense_below"),
            (pattern.min_columns, pattern.max_columns, f"{table}.min_columns", f"{table}.max_columns"),
            (pattern.min_slashes, pattern.max_slashes or math.inf, f"{table}.min_slashes", f"{table}.max_slashes")):
        _require(value <= limit, f"{key} = {value} is above {bound} = {limit}; write {key} = {limit} or less, "
                 f"or {bound} = {value} or more")


def _check_optimizer(optimizer: Optimizer) -> None:
    _require(optimizer.lr > 0, f"optimizer.lr = {optimizer.lr} is not positive; write for example 3e-4")
    _require(optimizer.eps > 0, f"optimizer.eps = {optimizer.eps} is not positive; write for example 1e-8")
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        _require(0 <= value < 1, f"optimizer.{name} = {value} is not in [0, 1); write for example 0.9")
    for name in ("beta1", "beta2", "eps"):
        value, default = getattr(optimizer, name), getattr(Optimizer(), name)
        _require(optimizer.name != "SGD" or value == default, f"optimizer.{name} = {value} would be ignored with "
                 f'optimizer.name = "SGD"; write optimizer.{name} = {default} or another optimizer.name')


def _check_lr_scheduler(scheduler: LRScheduler, steps: int) -> None:
    total, ratio, factor = scheduler.total_steps or steps, scheduler.decay_ratio, scheduler.min_lr_factor
    _require(0 <= factor <= 1, f"lr_scheduler.min_lr_factor = {factor} is not in [0, 1]; write for example 0.1")
    _require(ratio == -1 or 0 <= ratio <= 1,
             f"lr_scheduler.decay_ratio = {ratio} is neither -1 nor in [0, 1]; write -1 or for example 0.2")
    source = "lr_scheduler.total_steps" if scheduler.total_steps else "training.steps"
    _require(scheduler.warmup_steps <= total, f"lr_scheduler.warmup_steps = {scheduler.warmup_steps} is above {source} "
             f"= {total}; write lr_scheduler.warmup_steps = {total} or less")


def _check_run(config: Config) -> None:
    """The sections about the run itself: compile, checkpoint, profiling."""
    _one_of("compile.backend", config.compile.backend, ("inductor", "aot_eager", "eager"))
    _require(config.checkpoint.keep_latest_k != 1, "checkpoint.keep_latest_k = 1 is unsafe, as the last checkpoint may "
             "be half-written; write 0 (all) or 2 or more")
    for name, unset in (("load_step", -1), ("initial_load_path", "")):
        value = getattr(config.checkpoint, name)
        _require(config.checkpoint.enable or value == unset,
                 f"checkpoint.{name} = {_show(value)} would be ignored with "
                 f"checkpoint.enable = false; write checkpoint.enable = true or checkpoint.{name} = {_show(unset)}")
    last = config.profiling.first_step + config.profiling.steps - 1
    _require(not config.profiling.enable or last <= config.training.steps,
             f"profiling.first_step and profiling.steps trace up to step {last}, beyond training.steps = "
             f"{config.training.steps}; write a smaller profiling.first_step")
