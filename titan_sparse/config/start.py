"""Check that a run can begin here: what torchrun has set, and the files and folders of the run.

A dry run needs none of these files.
"""

import os
import re
import tempfile
from pathlib import Path

from titan_sparse.config.reading import ConfigError, require
from titan_sparse.config.sections import Checkpoint, Config, Flags, Parallelism
from titan_sparse.config.sources import (
    data_files,
    is_path,
    single_source,
    source_weights,
    tokenizer_folder,
    tokenizer_name,
)
from titan_sparse.models.huggingface_config import read_object
from titan_sparse.models.huggingface_files import files_to_copy
from titan_sparse.options.extras import is_installed
from titan_sparse.options.values import show

RANKS_PER_NODE = 8
"""Ranks of a node where torchrun does not say."""


def world_from_environment() -> tuple[int, int]:
    """(ranks in all, ranks of this node) as torchrun sets WORLD_SIZE and LOCAL_WORLD_SIZE; 1 where
    unset. Raises ConfigError for other words than positive integers."""
    return _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)


def cores_of_rank() -> int:
    """This rank's share of the cores that processes of its node may use, 1 or more."""
    return max(1, len(os.sched_getaffinity(0)) // world_from_environment()[1])


def is_first_rank() -> bool:
    """By torchrun's environment, before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def world_of(
    flags: Flags, parallelism: Parallelism, world_size: int, local_world_size: int
) -> tuple[int, int]:
    """(ranks in all, ranks of a node): torchrun's, unless --ranks says how many.

    Where nothing is started, and torchrun has not started this either, they are as many as the
    configuration needs at least.
    """
    ranks = flags.ranks
    if not ranks and flags.starts_nothing and world_size == 1:
        ranks = parallelism.dp_replicate * max(parallelism.dp_shard, 1) * parallelism.cp
    if not ranks:
        return world_size, local_world_size
    ranks_per_node = local_world_size if local_world_size > 1 else RANKS_PER_NODE
    return ranks, min(ranks, ranks_per_node)


def check_launch() -> None:
    """Refuse an environment in which this process would train alone, or on another's data, although
    it was meant to be one of several: either torchrun has set all of its variables, or none of them
    names a world of several ranks. Raises ConfigError."""
    world_size, local_world_size = world_from_environment()
    rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if "RANK" not in os.environ:
        missing = ["RANK"] if world_size > 1 else []
    require(
        not missing,
        f"environment: {', '.join(missing)} is not set, but other variables of torchrun are; start "
        "with torchrun, or unset RANK and WORLD_SIZE to train in one process",
    )
    require(
        rank < world_size and local_rank < local_world_size <= world_size,
        f"environment: RANK = {rank}, WORLD_SIZE = {world_size}, LOCAL_RANK = {local_rank} and "
        f"LOCAL_WORLD_SIZE = {local_world_size} do not go together; start with torchrun or unset them",
    )


def _number(name: str, least: int) -> int:
    """The variable as an integer of `least` or more, which it is where it is unset."""
    text = os.environ.get(name, str(least))
    require(
        re.fullmatch("[0-9]{1,9}", text) is not None and int(text) >= least,
        f"environment: {name} = {show(text)} is not an integer of {least} or more; start with torchrun "
        "or unset it",
    )
    return int(text)


def check_start(config: Config) -> None:
    """Refuses files and folders that do not exist, or cannot be used, without reading texts.

    Leaves no trace. Raises ConfigError or ValueError, one line that names the key.
    """
    _check_output_dir(config.training.output_dir)
    trackers = config.metrics.trackers
    require(
        trackers == "none" or is_installed(trackers),
        f'metrics.trackers = "{trackers}" is not installed; write '
        'pip install "titan-sparse[wandb]", or write metrics.trackers = "none"',
    )
    for source in source_weights(config.data.source):
        _check_source(source, "data.source")
    validated = config.validation.source
    if config.validation.enable and validated:
        _check_source(single_source(validated, "validation.source"), "validation.source")
    tokenizer = tokenizer_name(config)
    if tokenizer != "bytes":
        tokenizer_folder(tokenizer)
    costs = config.attention.balance_costs
    require(
        not costs or os.path.isfile(costs),
        f"attention.balance_costs = {show(costs)}: this file does not exist; write what "
        'scripts.calibrate wrote with --out, or ""',
    )
    _check_first_checkpoint(config.checkpoint, Path(config.training.output_dir))
    if config.checkpoint.last_save_in_hf:
        # What would end the run after its last step.
        if path := files_to_copy(config.model.initial_hf).get("generation_config.json"):
            read_object(path, f"model.initial_hf = {show(config.model.initial_hf)}")


def _check_output_dir(name: str) -> None:
    path = Path(name).absolute()
    # A link to nowhere exists too: no folder can be made in its place.
    folder = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        # Only a write shows what a file system allows, even to root. The file never has a name.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"training.output_dir = {show(name)} cannot be written: {error.strerror}; write a "
            "folder that can be made"
        ) from error


def _check_source(source: str, key: str) -> None:
    folder = os.path.expanduser(source)
    # The folder of prepared tokens says more of itself when it is opened.
    marks = [os.path.join(folder, name) for name in ("meta.json", "plan.json")]
    is_prepared = any(map(os.path.isfile, marks))
    if source != "python" and not is_prepared and is_path(source):
        data_files(source, key)


def _check_first_checkpoint(section: Checkpoint, output_dir: Path) -> None:
    path = section.initial_load_path
    require(
        not path or os.path.isfile(os.path.join(path, ".metadata")),
        f"checkpoint.initial_load_path = {show(path)} holds no complete checkpoint; write a folder "
        "step-N that has a file .metadata",
    )
    step = section.load_step
    if step < 0:
        return
    folder = output_dir / "checkpoint"
    words = [path.name.removeprefix("step-") for path in folder.glob("step-*/")]
    numbers = sorted(int(word) for word in words if word.isdecimal())
    listed = ", ".join(f"step-{number}" for number in numbers)
    found = f"only {listed}" if listed else "no checkpoint"
    # A run that went on from `step` may have rotated it out, and then has later ones.
    require(
        any(number >= step for number in numbers),
        f"checkpoint.load_step = {step}: {folder} has {found}; write another step, or -1 "
        "for the newest",
    )
