"""Measure what each recall of vertical_slash costs and saves, with your model and your text.

    titan-sparse choose --model FOLDER --seq-len 65536 --data.source TEXTS [--section.key value ...]

Trains a few steps densely and with several recalls, on the same batches and with a learning rate
that changes no weight. Prints the loss, the density, the recall, and the seconds of a step of each
with their spread, and the share of heads that caps keep below the recall. Recommends a setting with
the TOML lines to write. It is the one with the fewest pairs of those that are faster than dense
here and lose at most 0.01 of loss. If none is faster, two steps of half the length say from about
which length sparse attention pays.

On a CPU, a step is a forward pass, and times say nothing about a GPU. Other words are options of
the configuration, as train.py takes them; --config reads a file. Under torchrun it uses all ranks.
See docs/masks_and_patterns.md.
"""

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist

from titan_sparse.commands import in_tokens, parser_of, positive, refuses
from titan_sparse.config import Config, ConfigError, check, world_from_environment
from titan_sparse.config.reading import KINDS, as_words, given_keys, load_config
from titan_sparse.config.sections import Checkpoint, Metrics, Profiling, Validation
from titan_sparse.config.start import is_first_rank
from titan_sparse.data.shards import write_json
from titan_sparse.models.flavours import resolve
from titan_sparse.options.values import show
from titan_sparse.training.attention import selecting_layers, sparse_from, why_dense
from titan_sparse.training.checkpoint.folders import lock_run
from titan_sparse.training.faults.process_groups import choose_device, on_first_rank
from titan_sparse.training.metrics_output import read_lines
from titan_sparse.training.trainer import Trainer

RECALLS = (0.9, 0.95, 0.97, 0.99)
MOST_LOSS = 0.01
"""Nats a token above dense that the choice may lose."""
TIMED_STEPS = 5
"""Steps that are timed on a GPU."""

Row = dict[str, Any]
"""Of a setting: means of loss, density, recall, and heads_capped, median step_seconds, and their
lists by batch or step, losses and seconds."""

KEYS = {
    "training.gradient_accumulation_steps": 1,
    # Less than any weight can hold.
    "optimizer.lr": 1e-30,
    "lr_scheduler.warmup_steps": 0,
}
"""What every measured run has."""
VARIED = (
    *("attention.pattern", "attention.vertical_slash.recall", "training.steps"),
    *("training.seq_len", "training.output_dir", "model.initial_hf"),
)
"""What the options of this command decide."""
UNUSED = ("checkpoint.", "guard.", "lr_scheduler.", "metrics.", "profiling.", "validation.")
"""Sections that nothing measured depends on, but for metrics.recall_rows."""


@refuses
def main(words: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--seq-len", type=in_tokens, required=True, help="tokens of a sequence")
    parser.add_argument("--batches", type=positive, default=3, help="batches of each setting")
    parser.add_argument("--out", type=Path, default=Path("outputs/choose"), help="folder to write")
    args, rest = parser.parse_known_args(words)
    options = words_of_runs(args.model, args.batches, rest)
    configs = configurations(options, args.seq_len, args.out)
    # Everything is dense if the lowest recall is.
    first = f"recall {RECALLS[0]}"
    refuse_dense(configs[first])
    if is_first_rank():
        lock_run(str(args.out), key="--out")
    rows = {first: measured(first, configs[first])}
    if rows[first]["density"] == 1:
        say(all_dense(configs[first], rows[first]))
        return 0
    for name in configs:
        if name not in rows:
            rows[name] = measured(name, configs[name])
    rows = {name: rows[name] for name in configs}
    if is_first_rank():
        write_json(args.out / "choose.json", rows)
    say(table(rows))
    chosen = choice(rows)
    say(reason(rows, chosen))
    if not faster(rows):
        say(crossing(options, args.seq_len, args.out, rows))
    say(f"choice: {chosen}\n\n{toml_lines(configs[chosen])}")
    return 0


def say(text: str) -> None:
    if is_first_rank():
        print(text, flush=True)


def words_of_runs(model: str, batches: int, words: list[str]) -> list[str]:
    """The options that all measured runs share. Raises ConfigError."""
    for key in given_keys(words) - {"metrics.recall_rows"}:
        if key in KEYS or key in VARIED or key.startswith(UNUSED):
            raise ConfigError(f"command line: choose itself sets {key}; leave it out")
    own = {"model.initial_hf": model, **KEYS, "training.steps": batches}
    return [*words, *as_words(own)]


def configurations(words: list[str], seq_len: int, out: Path) -> dict[str, Config]:
    """The checked configuration of dense and of each recall, by name. Raises ConfigError."""
    settings: dict[str, dict[str, Any]] = {"dense": {"attention.pattern": "dense"}}
    for recall in RECALLS:
        settings[f"recall {recall}"] = {
            "attention.pattern": "vertical_slash",
            "attention.vertical_slash.recall": recall,
        }
    configs = {}
    for name, keys in settings.items():
        folder = out / name.replace(" ", "_")
        keys |= {"training.seq_len": seq_len, "training.output_dir": folder}
        config = load_config([*words, *as_words(keys)])
        config.checkpoint = Checkpoint()
        config.profiling = Profiling()
        config.validation = Validation()
        config.metrics = Metrics(
            log_every=1,
            # In the first step.
            recall_every=config.training.steps + 1,
            recall_rows=config.metrics.recall_rows,
            tensorboard=False,
        )
        check(config, *world_from_environment())
        configs[name] = config
    return configs


def refuse_dense(config: Config) -> None:
    """Raises ConfigError if nothing could be sparse."""
    model = resolve(**vars(config.model))
    if not selecting_layers(config.attention, model):
        raise ConfigError(why_dense(config, model))
    least = sparse_from(config.attention)
    if config.training.seq_len < least:
        raise ConfigError(
            f"--seq-len {config.training.seq_len}: everything would be dense, as vertical_slash leaves "
            f"out pairs only in documents of {least} tokens or more; write --seq-len {least} or more, "
            "or a smaller --attention.vertical_slash.dense_below"
        )


def all_dense(config: Config, row: Row) -> str:
    """Say that the lowest recall computes everything, and why."""
    least = sparse_from(config.attention)
    why = (
        f"this model needs all pairs of {config.training.seq_len} tokens; write a longer --seq-len"
    )
    if row.get("sparse_tokens") == 0:
        why = (
            f"no document of these batches has {least} tokens; write another data.source, or a smaller "
            "attention.vertical_slash.dense_below"
        )
    return f"stopped: at recall {RECALLS[0]} the density is 100 %, and so at the others: {why}"


def measured(name: str, config: Config) -> Row:
    """Train, and read what was logged. Collective; the same on all ranks. Prints a line."""
    with fresh_trainer(config) as trainer:
        is_gpu = trainer.device.type == "cuda"
        if not is_gpu:
            # Without a backward through its layers, a step takes a quarter of the time.
            trainer.model.requires_grad_(False)
            trainer.model.norm.requires_grad_(True)
        if trainer.train():
            raise KeyboardInterrupt
        steps = config.training.steps
        # The first step on a CPU also measures recall, and those after it tell the time.
        seconds = []
        if is_gpu or steps == 1:
            seconds = seconds_of_steps(trainer, TIMED_STEPS if is_gpu else 1)

        def read() -> Row:
            records = read_lines(Path(config.training.output_dir, "metrics.jsonl"))[-steps:]
            return row_of(records, seconds or [record["step_seconds"] for record in records[1:]])

        row = on_first_rank(read)
    say(f"measured {name}: density {row['density']:.1%}, {row['step_seconds']:.3f} s a step")
    return row


def row_of(records: list[dict[str, Any]], seconds: list[float]) -> Row:
    """records: of metrics.jsonl."""
    losses = [record["loss"] for record in records]
    row = {
        "loss": fmean(losses),
        "density": fmean(record["density"] for record in records),
        "recall": records[0].get("recall", 1.0),
        "heads_capped": fmean(record.get("heads_capped", 0.0) for record in records),
        "step_seconds": median(seconds),
        "losses": losses,
        "seconds": seconds,
    }
    if "sparse_tokens" in records[0]:
        row["sparse_tokens"] = fmean(record["sparse_tokens"] for record in records)
    return row


@contextlib.contextmanager
def fresh_trainer(config: Config) -> Iterator[Trainer]:
    """A trainer on an empty GPU, of several in one process."""
    # The trainer before it.
    gc.collect()
    # torch compiles the same code only so many times, and each run is another configuration.
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        yield Trainer(config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def seconds_of_steps(trainer: Trainer, steps: int) -> list[float]:
    """The times of further steps, which are not logged. Those before have compiled."""
    section = trainer.metrics.section
    trainer.metrics.section = dataclasses.replace(section, log_every=sys.maxsize, recall_every=0)
    synchronize = torch.cuda.synchronize if trainer.device.type == "cuda" else torch.cpu.synchronize
    seconds = []
    for _ in range(steps):
        synchronize()
        began = time.perf_counter()
        trainer.step()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def table(rows: dict[str, Row]) -> str:
    """For people; the last column says how many steps fit into the time of a dense step."""
    lines = [
        f"{'setting':<12}{'loss':>7}{'above dense':>19}{'density':>9}{'recall':>8}{'capped':>8}"
        f"{'seconds a step':>24}{'steps per dense step':>22}"
    ]
    dense = rows["dense"]
    for name, row in rows.items():
        differences = [a - b for a, b in zip(row["losses"], dense["losses"], strict=True)]
        above = f"{fmean(differences):+.4f}"
        if len(differences) > 1:
            above += f" +- {stdev(differences):.4f}"
        seconds = f"{row['step_seconds']:.3f} ({min(row['seconds']):.3f}-{max(row['seconds']):.3f})"
        lines.append(
            f"{name:<12}{row['loss']:>7.4f}{above:>19}"
            f"{row['density']:>9.1%}{row['recall']:>8.1%}{row['heads_capped']:>8.0%}{seconds:>24}"
            f"{dense['step_seconds'] / row['step_seconds']:>22.2f}"
        )
    lines.append("+-: standard deviation over batches; in parentheses: fastest and slowest step")
    if any(row["heads_capped"] for row in rows.values()):
        lines.append(
            "capped: heads that max_verticals or max_slashes of [attention.vertical_slash] keeps below the "
            "recall; with higher caps a recall selects more pairs, and loses less"
        )
    return "\n".join(lines)


def faster(rows: dict[str, Row]) -> list[str]:
    """The settings whose median step takes less time than that of dense."""
    most = rows["dense"]["step_seconds"]
    return [name for name, row in rows.items() if row["step_seconds"] < most]


def choice(rows: dict[str, Row]) -> str:
    """The name of the row with the fewest pairs among those that are faster than dense and lose at
    most MOST_LOSS; dense if there is none."""
    most = rows["dense"]["loss"] + MOST_LOSS
    fit = [name for name in faster(rows) if rows[name]["loss"] <= most]
    return min(fit, key=lambda name: rows[name]["density"], default="dense")


def reason(rows: dict[str, Row], chosen: str) -> str:
    """Say why it was chosen."""
    dense = rows["dense"]["step_seconds"]
    if chosen != "dense":
        times = dense / rows[chosen]["step_seconds"]
        return (
            f"{chosen} has the fewest pairs of those that are faster and lose at most {MOST_LOSS}: "
            f"it is {times:.2f} times as fast as dense"
        )
    if faster(rows):
        return f"dense: what is faster loses more than {MOST_LOSS} of loss"
    best = min(row["step_seconds"] for name, row in rows.items() if name != "dense")
    return f"dense is faster here: the best of the others has {dense / best:.2f} of its speed"


def crossing(words: list[str], seq_len: int, out: Path, rows: dict[str, Row]) -> str:
    """Measure dense and the fastest recall at half the length, and say from
    where sparse should pay."""
    fastest = min((n for n in rows if n != "dense"), key=lambda n: rows[n]["step_seconds"])
    half = seq_len // 2
    unknown = "the length from which sparse pays is not known ({}); measure a longer --seq-len"
    try:
        configs = configurations(words, half, out / "half")
        sparse = configs[fastest]
        options = sparse.attention.vertical_slash
        # Selection costs what it does, also where a run would not select yet.
        options.dense_below = min(options.dense_below, half)
        options.check_block_size(sparse.attention.block_size)
        refuse_dense(sparse)
        shorter = {n: measured(f"{n}, {half} tokens", configs[n]) for n in ("dense", fastest)}
    except ValueError as error:
        return unknown.format(error)
    times = [[of[n]["step_seconds"] for of in (shorter, rows)] for n in ("dense", fastest)]
    length = crossing_length(seq_len, *times)
    if length is None:
        return unknown.format("steps do not take much longer than those of half the length")
    device = choose_device(sparse.training.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return f"sparse pays from about {length:,.0f} tokens on {name} (estimated from {half} and {seq_len})"


def crossing_length(seq_len: int, dense: list[float], sparse: list[float]) -> float | None:
    """Tokens from which sparse steps take less time than dense ones, by a model of costs.

    dense, sparse: seconds at half of seq_len and at seq_len. A dense step of n tokens takes a
    n + b n^2. A sparse one takes the same a n, c for its selection, and d n^2. None if the
    times do not fit.
    """
    # In units of half of seq_len, where n is 1 and 2.
    b = (dense[1] - 2 * dense[0]) / 2
    a = dense[0] - b
    d = (sparse[1] - sparse[0] - a) / 3
    c = sparse[0] - a - d
    if not (b > max(d, 0) and c > 0):
        return None
    return (c / (b - d)) ** 0.5 * seq_len / 2


def toml_lines(config: Config) -> str:
    """The keys of [attention] that differ from their defaults, and the
    pattern, as a file has them."""
    pattern = config.attention.pattern
    sections: dict[str, list[str]] = {"attention": [], f"attention.{pattern}": []}
    for key in KINDS:
        section, _, name = key.rpartition(".")
        value = attrgetter(key)(config)
        differs = value != attrgetter(key)(Config())
        if section in sections and (differs or name in ("pattern", "recall")):
            sections[section].append(f"{name} = {show(value)}")
    tables = [[f"[{section}]", *lines] for section, lines in sections.items() if lines]
    return "\n\n".join("\n".join(lines) for lines in tables)
