"""The folders of a run's checkpoints: exact names, moving aside, rotation. Without torch.

<output_dir>/checkpoint holds step-N, which is complete, and step-N.incomplete, which is being
written. What is not wanted any more but may be of use is renamed, never deleted: step-N.broken,
step-N.replaced, rolled-back-K/step-N. Names that only look alike are not touched.
"""

import os
import re
import shutil
from pathlib import Path

FOLDER = "checkpoint"
METADATA = ".metadata"
CHECKSUMS = "checksums.sha256"

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_INCOMPLETE = re.compile(_STEP.pattern + r"\.incomplete")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, among those in `folder`."""
    return folder / f"step-{step}"


def incomplete_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is while it is written."""
    return folder / f"step-{step}.incomplete"


def saved_steps(folder: Path) -> list[int]:
    """Steps of all checkpoints in `folder`, whole or not, in rising order."""
    matches = [_STEP.fullmatch(path.name) for path in _folders_in(folder)]
    return sorted(int(match[1]) for match in matches if match)


def is_complete(checkpoint: Path) -> bool:
    """Whether a save into this folder came to its end. It may have been damaged since."""
    return (checkpoint / METADATA).is_file()


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, in rising order."""
    return [step for step in saved_steps(folder) if is_complete(step_folder(folder, step))]


def newest_checkpoint(output_dir: str) -> str | None:
    """The newest complete checkpoint of a run, None without one."""
    folder = Path(output_dir, FOLDER)
    steps = complete_steps(folder)
    return str(step_folder(folder, steps[-1])) if steps else None


def move_aside(checkpoint: Path, why: str) -> Path:
    """Rename step-N to step-N.<why>, with a number where that name is taken. Returns the new path."""
    target = _free_name(checkpoint.with_name(f"{checkpoint.name}.{why}"))
    os.rename(checkpoint, target)
    sync_folder(checkpoint.parent)
    return target


def roll_back(folder: Path, step: int) -> Path | None:
    """Move every checkpoint newer than `step` into a new folder rolled-back-K.

    Returns that folder, None if there was nothing newer.
    """
    newer = [later for later in saved_steps(folder) if later > step]
    if not newer:
        return None
    number = 1
    while (folder / f"rolled-back-{number}").exists():
        number += 1
    aside = folder / f"rolled-back-{number}"
    aside.mkdir()
    # The newest first: cut short at any point, what is left here is still a row without gaps.
    for later in reversed(newer):
        os.rename(step_folder(folder, later), step_folder(aside, later))
    sync_folder(aside)
    sync_folder(folder)
    return aside


def publish(incomplete: Path, checkpoint: Path) -> None:
    """Give a finished save its name. A checkpoint that has it already is moved aside, not written
    into."""
    sync_folder(incomplete)
    if checkpoint.exists():
        move_aside(checkpoint, "replaced")
    os.rename(incomplete, checkpoint)
    sync_folder(checkpoint.parent)


def rotate(folder: Path, keep: int) -> None:
    """Delete all complete checkpoints but the newest `keep`; 0: none is deleted."""
    if not keep:
        return
    for step in complete_steps(folder)[:-keep]:
        # Renamed first: cut short, this leaves nothing that looks like a checkpoint.
        leaving = incomplete_folder(folder, step)
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(step_folder(folder, step), leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def delete_incomplete(folder: Path) -> list[str]:
    """Delete what saves that were cut short have left. Returns the names. Call it under the lock."""
    left_over = [path for path in _folders_in(folder) if _INCOMPLETE.fullmatch(path.name)]
    for path in left_over:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left_over]


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _free_name(path: Path) -> Path:
    """`path`, or path-2, path-3 and so on if that exists."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
