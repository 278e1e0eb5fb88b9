"""Whether a run can begin here: its files and folders. A dry run needs none of them."""

import importlib.util
import os
import tempfile
from pathlib import Path

from titan_sparse.config.mixture import single_source, source_weights
from titan_sparse.config.reading import ConfigError, require, show
from titan_sparse.config.sections import Checkpoint, Config, Metrics
from titan_sparse.config.text_files import data_files, is_path, tokenizer_file
from titan_sparse.models.huggingface_files import files_to_copy

_FILES = (
    ".lock",
    "config.toml",
    "metrics.jsonl",
    "validation.jsonl",
    "wandb_run_id",
    "checkpoint/rolled-back.json",
)
_FOLDERS = ("checkpoint", "tensorboard", "profile", "huggingface", "wandb")
"""What a run writes into training.output_dir."""

_LONGEST_BELOW = 200
"""Bytes of the longest path that a run makes below training.output_dir, and to spare."""


def check_start(config: Config) -> None:
    """Refuses files and folders that do not exist, or cannot be used, without reading texts.

    Leaves no trace. Raises ConfigError or ValueError, one line that names the key.
    """
    _check_output_dir(config.training.output_dir)
    _check_trackers(config.metrics)
    for source in source_weights(config.data.source):
        _check_source(source, "data.source")
    if config.validation.enable and config.validation.source:
        _check_source(
            single_source(config.validation.source, "validation.source"), "validation.source"
        )
    if config.data.tokenizer != "bytes":
        tokenizer_file(config.data.tokenizer)
    _check_balance_costs(config.attention.balance_costs)
    _check_first_checkpoint(config.checkpoint, Path(config.training.output_dir))
    if config.checkpoint.last_save_in_hf:
        files_to_copy(config.model.initial_hf)


def _check_output_dir(name: str) -> None:
    path = Path(name).absolute()
    try:
        folder = _nearest_folder(path)
        _check_lengths(path, folder)
        # Only a write shows what a file system allows, even to root. The file never has a name.
        tempfile.TemporaryFile(dir=folder).close()
        _check_run_folder(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"training.output_dir = {show(name)} cannot be written: {reason}; write a "
            "folder that can be made"
        ) from error


def _check_trackers(metrics: Metrics) -> None:
    if metrics.trackers == "none":
        return
    found = importlib.util.find_spec(metrics.trackers)
    # A folder "wandb" of earlier runs, where this one is started, looks like a package without code.
    require(
        found is not None and found.origin is not None,
        f'metrics.trackers = "{metrics.trackers}" is not installed; pip install -e ".[wandb]", or '
        'write metrics.trackers = "none"',
    )


def _nearest_folder(path: Path) -> Path:
    """`path`, or the folder in which it would be made. Raises OSError for a file on the way."""
    for candidate in (path, *path.parents):
        # A link to nowhere exists too: no folder can be made in its place.
        if os.path.lexists(candidate):
            if not candidate.is_dir():
                raise NotADirectoryError(0, f"{show(str(candidate))} is no folder")
            return candidate
    return Path(path.anchor)


def _check_lengths(path: Path, folder: Path) -> None:
    """Raises OSError for names that the file system of `folder` does not take."""
    longest_name = max(len(os.fsencode(part)) for part in path.parts)
    name_limit = os.pathconf(folder, "PC_NAME_MAX")
    path_limit = os.pathconf(folder, "PC_PATH_MAX") - _LONGEST_BELOW
    if longest_name > name_limit:
        raise OSError(0, f"a name of {longest_name} bytes is longer than {name_limit}")
    if len(os.fsencode(path)) > path_limit:
        raise OSError(0, f"{len(os.fsencode(path))} bytes are more than {path_limit}")


def _check_run_folder(path: Path) -> None:
    """Raises OSError where something else has the name of a file or folder of the run."""
    for name in _FILES:
        # It may come from anyone. What a link leads to would be overwritten.
        if (path / name).is_symlink():
            raise FileExistsError(0, f"{name} in it is a link")
        if (path / name).is_dir():
            raise IsADirectoryError(0, f"{name} in it is a folder")
    for name in _FOLDERS:
        if os.path.lexists(path / name) and not (path / name).is_dir():
            raise NotADirectoryError(0, f"{name} in it is no folder")


def _check_source(source: str, key: str) -> None:
    folder = os.path.expanduser(source)
    is_prepared = any(
        os.path.isfile(os.path.join(folder, name)) for name in ("meta.json", "plan.json")
    )
    # The folder of prepared tokens says more of itself when it is opened.
    if source != "python" and not is_prepared and is_path(source):
        data_files(source, key)


def _check_balance_costs(path: str) -> None:
    require(
        not path or os.path.isfile(path),
        f"attention.balance_costs = {show(path)}: no such file; write what scripts.calibrate wrote "
        'with --out, or ""',
    )


def _check_first_checkpoint(section: Checkpoint, output_dir: Path) -> None:
    """Refuses a checkpoint to begin with that is not there. Whether it is whole is seen later."""
    path = section.initial_load_path
    require(
        not path or os.path.isfile(os.path.join(path, ".metadata")),
        f"checkpoint.initial_load_path = {show(path)} holds no complete checkpoint; write a folder "
        "step-N that has a file .metadata",
    )
    step = section.load_step
    if step < 0:
        return
    numbers = set()
    for folder in (output_dir / "checkpoint").glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdecimal() and folder.is_dir():
            numbers.add(int(number))
    # A run that went on from `step` may have rotated it out, and then has later ones.
    require(
        any(number >= step for number in numbers),
        f"checkpoint.load_step = {step}: {output_dir / 'checkpoint'} has "
        f"{_list_of_steps(numbers)}; write another step, or -1 for the newest",
    )


def _list_of_steps(numbers: set[int]) -> str:
    if not numbers:
        return "no checkpoint"
    return "only " + ", ".join(f"step-{number}" for number in sorted(numbers))
