"""What a start changes in the run that it resumes. A change is reported, or it is refused if the
saved state would become meaningless.

A checkpoint holds the configuration with which it was saved (config.toml), and what this
configuration meant with the files that it names (origin.json).
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import tomli

from titan_sparse.config.reading import KINDS, ConfigError, flatten, key_now, show, typed
from titan_sparse.config.sections import Config
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.flavours import resolve

ORIGIN_FILE = "origin.json"
"""Beside config.toml in a checkpoint: origin_text()."""


DATA_KEYS = {
    "share": "a part's share of data.source",
    "documents": "the number of documents of data.source",
    "tokens": "the number of prepared tokens of data.source (0: texts)",
    "vocab_size": "the vocabulary size of data.tokenizer",
    "split_special_tokens": "data.split_special_tokens",
    "sequences": "data.sequences",
    "seq_len": "training.seq_len",
    "seed": "training.seed",
    "shuffle": "data.shuffle",
    "min_document_length": "data.min_document_length",
    "format": "data.format",
    "loss_on": "data.loss_on",
    "template": "the chat template's digest",
}
"""What fixes the stream of sequences -> how to name it to the user."""


@dataclass(frozen=True)
class Origin:
    """The parts of a configuration's meaning on this machine that a saved state depends on."""

    model: DecoderConfig
    tokenizer: str
    """Tokenizer.digest"""
    device: str
    """cpu or cuda"""
    base: str = ""
    """identifies the frozen weights; empty if all weights are trained"""
    data: list[dict[str, Any]] = field(default_factory=list)
    """what decides the stream of sequences, a dict for each part of data.source"""


@dataclass(frozen=True)
class Saved:
    """What is known of the start that wrote a checkpoint."""

    checkpoint: str
    """its folder"""
    values: dict[str, Any]
    """dotted key -> value, as config.toml has them; another version may have had other keys"""
    origin: dict[str, Any]
    """origin.json; empty in checkpoints of versions that wrote none"""


@dataclass(frozen=True)
class Change:
    """A key that this start sets to another value."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {show(self.saved)} -> {show(self.now)}"


def origin_text(origin: Origin) -> str:
    """What a checkpoint holds as origin.json."""
    return json.dumps(dataclasses.asdict(origin), indent=1) + "\n"


def read_saved(checkpoint: str | None) -> Saved | None:
    """The configuration that <output_dir>/checkpoint/step-N was saved with.

    A checkpoint of a version that wrote none has that of the run's last start, in <output_dir>.
    None where neither can be read, and without a checkpoint. Call it before this start writes its
    own.
    """
    if checkpoint is None or not os.path.isdir(checkpoint):
        return None
    folder = Path(checkpoint)
    try:
        origin = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        origin = {}
    for path in (folder / "config.toml", folder.parent.parent / "config.toml"):
        try:
            saved = flatten(tomli.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
        return Saved(checkpoint, {key_now(key): value for key, value in saved}, origin)
    return None


def changes(saved: Saved, config: Config) -> list[Change]:
    """Every key that has another value now, in the order of the configuration.

    A key that the saved configuration lacks had its default. Keys that exist no longer are left
    out.
    """
    default = Config()
    found = []
    for key in KINDS:
        before = saved.values.get(key, attrgetter(key)(default))
        now = attrgetter(key)(config)
        if before != now:
            found.append(Change(key, before, now))
    return found


def saved_config(saved: Saved) -> Config:
    """The saved values as a Config; what this version cannot hold has its default."""
    config = Config()
    for key, value in saved.values.items():
        if key not in KINDS:
            continue
        try:
            value = typed(key, value, "")
        except ConfigError:
            continue
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config), name, value)
    return config


_FIXED = {
    "optimizer.name": ", whose state another optimizer cannot use",
    "training.dtype": ", and weights of float64 and of float32 are not each other's",
    "lora.rank": "",
    "lora.alpha": "",
    "lora.targets": "",
}
"""Keys that a saved state depends on -> why."""


def refuse_changes(saved: Saved, config: Config, origin: Origin) -> None:
    """Raises ConfigError, one line, for a change that makes the saved state meaningless."""
    checkpoint = saved.checkpoint
    before = {**dataclasses.asdict(origin), **saved.origin}
    found = {change.key: change for change in changes(saved, config)}
    _refuse_another_model(saved, found, config, origin.model)
    for key, reason in _FIXED.items():
        change = found.get(key)
        if change is None:
            continue
        if key != "training.dtype" or "float64" in (change.saved, change.now):
            raise ConfigError(
                f"{key} = {show(change.now)}, but {checkpoint} was saved with "
                f"{show(change.saved)}{reason}; write {key} = {show(change.saved)}, "
                f"or {_new_run(saved, config)}"
            )
    said = instead = ""
    key = "data.tokenizer"
    if before["base"] != origin.base:
        said = f"model.initial_hf = {show(config.model.initial_hf)} has other weights than those"
        if origin.base.startswith("training.seed"):
            said = f"{origin.base} draws other frozen weights than those ({before['base']})"
        said += f" that the adapters of {checkpoint} were trained on"
        instead = "write what they were"
    elif before["tokenizer"] != origin.tokenizer:
        said = (
            f"{key} = {show(config.data.tokenizer)} has another content ({origin.tokenizer[:12]}) "
            f"than that of {checkpoint} ({before['tokenizer'][:12]}), so its token ids mean other text"
        )
        instead = "bring back the file as it was"
        if key in found:
            instead = f"write {key} = {show(found[key].saved)}"
    elif differences := data_differences(before["data"], origin.data):
        said = f"{differences}, so the place in the data that {checkpoint} holds means other text"
        keys = [key for key in found if key.startswith("data.") or key in DATA_KEYS.values()]
        instead = "write " + " and ".join(f"{key} = {show(found[key].saved)}" for key in keys)
        if not keys:
            instead = "put its files back as they were"
    elif before["device"] == "cpu" and origin.device == "cuda":
        said = (
            f"training.device = {show(config.training.device)} is cuda here, but {checkpoint} "
            "was saved on the CPU and has no random numbers of a GPU"
        )
        instead = 'write training.device = "cpu"'
    if said:
        raise ConfigError(f"{said}; {instead}, or {_new_run(saved, config)}")


def _new_run(saved: Saved, config: Config) -> str:
    """What to write to leave the saved state. Weights of adapters alone make no new run."""
    if config.lora.rank or saved.values.get("lora.rank"):
        return "another training.output_dir for a new run"
    return (
        "for a new run from these weights another training.output_dir and "
        f"checkpoint.initial_load_path = {show(saved.checkpoint)}"
    )


def data_differences(saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    """The differences of two streams of sequences, for a message; empty if they are the same.

    saved, now: Origin.data.
    """
    if len(saved) != len(now):
        return f"data.source had {len(saved)} parts and has {len(now)}"
    differences = []
    for before, after in zip(saved, now, strict=True):
        for name in {**after, **before}:
            if before.get(name) == after.get(name):
                continue
            key = DATA_KEYS.get(name, f"{name} of the data, which this version does not know,")
            text = f"{key} was {before.get(name)} and is {after.get(name)}"
            # Every part has the same length and seed.
            if text not in differences:
                differences.append(text)
    return "; ".join(differences)


def _refuse_another_model(
    saved: Saved, found: dict[str, Change], config: Config, model: DecoderConfig
) -> None:
    before = model_functions(_saved_model(saved))
    now = model_functions(dataclasses.asdict(model))
    # Another version may know other fields.
    names = [name for name in now if name in before and before[name] != now[name]]
    if not names:
        return
    name = names[0]
    changed = [change for key, change in found.items() if key.startswith("model.")]
    if changed:
        said = f"{changed[0].key} = {show(changed[0].now)}"
        instead = " and ".join(f"{change.key} = {show(change.saved)}" for change in changed)
    else:
        # The same words, but the folder holds another config.json.
        key = "model.initial_hf"
        said = f"{key} = {show(config.model.initial_hf)}"
        instead = f"{key} = what still has {name} = {show(before[name])}"
    new_run = "another training.output_dir for a new run"
    if all(name.startswith("rope.") for name in names):
        new_run = _new_run(saved, config)
    raise ConfigError(
        f"{said} gives a model with {name} = {show(now[name])}, but that of {saved.checkpoint} has "
        f"{show(before[name])}; write {instead}, or {new_run}"
    )


def _saved_model(saved: Saved) -> dict[str, Any]:
    """The fields of the saved DecoderConfig; none where they are not known any more."""
    if "model" in saved.origin:
        return saved.origin["model"]
    try:
        return dataclasses.asdict(resolve(**vars(saved_config(saved).model)))
    except (ValueError, OSError):
        # Such as a model.initial_hf that has moved.
        return {}


def model_functions(model: dict[str, Any]) -> dict[str, Any]:
    """What decides over a model's shape and functions, by dotted names."""
    # The largest position limits the data. The weights do not depend on it.
    elsewhere = ("max_positions", "rope", "folder", "settings")
    fields = {name: model[name] for name in model if name not in elsewhere}
    # Tuples, which have become lists in origin.json.
    fields = {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}
    fields |= {f"config.json {name}": value for name, value in model.get("settings", ())}
    rope = model.get("rope", {})
    used = rope
    if rope.get("scaling") == "none":
        used = {"theta": rope.get("theta"), "scaling": "none"}
    return fields | {f"rope.{name}": value for name, value in used.items()}
