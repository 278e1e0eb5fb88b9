"""The changes that a start makes to the run that it resumes. A change is reported, or it is refused
if the saved state would become meaningless.

A checkpoint holds the configuration with which it was saved (config.toml), and what this
configuration meant with the files that it names (origin.json).
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tomli

from titan_sparse.config.reading import KINDS, ConfigError, flatten
from titan_sparse.config.sections import Config
from titan_sparse.models.config import DecoderConfig
from titan_sparse.options.values import show

ORIGIN_FILE = "origin.json"
"""Beside config.toml in a checkpoint: origin_text()."""


DATA_KEYS = {
    "share": "a part's share of data.source",
    "documents": "the number of documents of data.source",
    "tokens": "the number of prepared tokens of data.source (0: texts)",
    "vocab_size": "the vocabulary size of data.tokenizer",
    "split_special_tokens": "data.split_special_tokens",
    "add_bos": "data.add_bos (0: no token stands before a text)",
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

_STATE_KEYS = "optimizer.name lora.rank lora.alpha lora.targets lora.trainable_tokens".split()
"""What decides which tensors there are, and what they mean."""


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


class Saved(NamedTuple):
    checkpoint: str
    """its folder"""
    values: dict[str, Any]
    """dotted key -> value, as config.toml has them; a later version may have other keys"""
    origin: dict[str, Any]
    """origin.json"""


class Change(NamedTuple):
    """A key that this start sets to another value."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {show(self.saved)} -> {show(self.now)}"


def origin_text(origin: Origin) -> str:
    return json.dumps(dataclasses.asdict(origin), indent=1) + "\n"


def read_saved(checkpoint: str | None) -> Saved | None:
    """The configuration that <output_dir>/checkpoint/step-N was saved with.

    None where it cannot be read, and without a checkpoint.
    """
    if checkpoint is None or not os.path.isdir(checkpoint):
        return None
    folder = Path(checkpoint)
    try:
        origin = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
        saved = tomli.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Saved(checkpoint, dict(flatten(saved)), origin)


def changes(saved: Saved | None, config: Config) -> list[Change]:
    """Every key that has another value now, in the order of the configuration; none
    without a saved one.

    A key that the saved configuration lacks had its default. Keys that exist no longer are left
    out.
    """
    if saved is None:
        return []
    default = Config()
    found = (
        Change(key, saved.values.get(key, attrgetter(key)(default)), attrgetter(key)(config))
        for key in KINDS
    )
    return [change for change in found if change.saved != change.now]


def refuse_changes(saved: Saved | None, config: Config, origin: Origin) -> None:
    """Raises ConfigError, one line, for a change that makes the saved state meaningless. Nothing is
    refused without one."""
    if saved is None:
        return
    found = {change.key: change for change in changes(saved, config)}
    before = saved.origin

    def refuse(said: str, *sections: str, keeps_weights: bool = True) -> NoReturn:
        """sections: beginnings of the keys that decide over it. keeps_weights: whether a new run
        can begin with the saved weights."""
        instead = " and ".join(
            f"{key} = {show(change.saved)}"
            for key, change in found.items()
            if key.startswith(sections)
        )
        new_run = "another training.output_dir for a new run"
        # The weights of adapters alone make no new run.
        if keeps_weights and not (config.lora.rank or saved.values.get("lora.rank")):
            new_run += (
                f" and checkpoint.initial_load_path = {show(saved.checkpoint)} for its weights"
            )
            if config.model.initial_hf:
                new_run += (
                    " (with model.random_weights = true, so that the folder gives the shape alone)"
                )
        either = f"write {instead}, or" if instead else "put the files back as they were, or write"
        raise ConfigError(
            f"{said}, so the state in {saved.checkpoint} cannot be used; {either} {new_run}"
        )

    old_model = model_functions(before["model"])
    model = model_functions(dataclasses.asdict(origin.model))
    # A later version may know other fields.
    names = [name for name in model if name in old_model and old_model[name] != model[name]]
    if names:
        said = f"{names[0]} of the model was {show(old_model[names[0]])} and is {show(model[names[0]])}"
        refuse(said, "model.", keeps_weights=all(name.startswith("rope.") for name in names))
    for key, change in found.items():
        # Weights are float32 in all runs but those of float64.
        is_width = key == "training.dtype" and "float64" in (change.saved, change.now)
        if key in _STATE_KEYS or is_width:
            refuse(f"{key} was {show(change.saved)} and is {show(change.now)}", key)
    if before["base"] != origin.base:
        said = f"the adapters were trained on other weights ({before['base']}) than {origin.base}"
        refuse(said, "model.", "training.seed")
    if before["tokenizer"] != origin.tokenizer:
        said = f"the content of data.tokenizer was {before['tokenizer'][:12]} and is {origin.tokenizer[:12]}"
        refuse(said, "data.tokenizer")
    differences = data_differences(before["data"], origin.data)
    if differences:
        refuse(differences, "data.", *DATA_KEYS.values())
    if before["device"] == "cpu" and origin.device == "cuda":
        found["training.device"] = Change("training.device", "cpu", "cuda")
        refuse("it was saved on the CPU, without random numbers of a GPU", "training.device")


def data_differences(saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    """The differences of two streams of sequences, for a message; empty if they are the same.

    saved, now: Origin.data.
    """
    if len(saved) != len(now):
        return f"data.source had {len(saved)} parts and has {len(now)}"
    differences = [
        f"{DATA_KEYS.get(name, f'{name} of the data')} was {before.get(name)} and is {after.get(name)}"
        for before, after in zip(saved, now, strict=True)
        for name in {**after, **before}
        if before.get(name) != after.get(name)
    ]
    # Every part has the same length and seed, which are named once.
    return "; ".join(dict.fromkeys(differences))


def model_functions(model: dict[str, Any]) -> dict[str, Any]:
    """The options that decide a model's shape and functions, by dotted names."""
    # The largest position limits the data. The weights do not depend on it.
    elsewhere = ("max_positions", "rope", "folder", "settings", "linears")
    fields = {name: model[name] for name in model if name not in elsewhere}
    # Tuples, which have become lists in origin.json.
    fields = {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}
    fields |= {f"config.json {name}": value for name, value in model.get("settings", ())}
    rope = model["rope"]
    if rope["scaling"] == "none":
        rope = {"theta": rope["theta"], "scaling": "none"}
    return fields | {f"rope.{name}": value for name, value in rope.items()}
