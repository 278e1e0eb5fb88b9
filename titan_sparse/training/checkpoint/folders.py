"""The folders of a run's checkpoints: exact names, moving aside, rotation, and the lock of a
run. Loads no torch.

<output_dir>/checkpoint holds step-N, which is complete, and step-N.incomplete, which is being
written. What is not wanted any more but may be of use is renamed, never deleted: step-N.broken,
step-N.replaced, rolled-back-K/step-N. Names that only look alike are not touched.

One run per folder: a lock on <output_dir>/.lock is held as long as the process lives.
"""

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import socket
import time
from pathlib import Path

from titan_sparse.config import Refusal

FOLDER = "checkpoint"
METADATA = ".metadata"
CHECKSUMS = "checksums.sha256"
LOCK = ".lock"
_INCOMPLETE = ".incomplete"

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")

logger = logging.getLogger("titan_sparse")

WAIT_SECONDS = 10.0
"""The ranks of a launcher that was killed take up to so long to end."""

LEASE_SECONDS = 120.0
"""A file server keeps the locks of a dead host for up to so long, NFS for 90 s by default."""

_held: dict[str, int] = {}
"""Path of a lock -> its open file, for the locks of this process."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of all checkpoints in `folder`, whole or not, in rising order."""
    matches = [_STEP.fullmatch(path.name) for path in folder.glob("*/")]
    return sorted(int(match[1]) for match in matches if match)


def complete_steps(folder: Path) -> list[int]:
    """Steps whose save came to its end, in rising order. They may have been damaged since."""
    return [s for s in saved_steps(folder) if (step_folder(folder, s) / METADATA).is_file()]


def newest_checkpoint(output_dir: str) -> str | None:
    folder = Path(output_dir, FOLDER)
    steps = complete_steps(folder)
    return str(step_folder(folder, steps[-1])) if steps else None


def move_aside(checkpoint: Path, why: str) -> Path:
    """Rename step-N to step-N.<why>, with a number where that name is taken.
    Returns the new path."""
    target = free_name(checkpoint.with_name(f"{checkpoint.name}.{why}"), first="")
    os.rename(checkpoint, target)
    sync_folder(checkpoint.parent)
    return target


def roll_back(folder: Path, step: int) -> Path | None:
    """Move every checkpoint newer than `step` into a new folder rolled-back-K, and return that."""
    newer = [later for later in saved_steps(folder) if later > step]
    if not newer:
        return None
    aside = free_name(folder / "rolled-back", first="-1")
    aside.mkdir()
    # The newest first: cut short at any point, what is left here is still a row without gaps.
    for later in reversed(newer):
        os.rename(step_folder(folder, later), step_folder(aside, later))
    sync_folder(aside)
    sync_folder(folder)
    return aside


def publish(incomplete: Path, checkpoint: Path) -> None:
    """Give a finished save its name. A checkpoint that has it already is moved aside."""
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
        leaving = folder / f"step-{step}{_INCOMPLETE}"
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(step_folder(folder, step), leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def delete_incomplete(folder: Path) -> list[str]:
    """Delete what saves that were cut short have left. Returns the names."""
    names = [path.name for path in folder.glob(f"*{_INCOMPLETE}/")]
    left_over = [name for name in names if _STEP.fullmatch(name.removesuffix(_INCOMPLETE))]
    for name in left_over:
        shutil.rmtree(folder / name, ignore_errors=True)
    return left_over


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(path: Path, first: str) -> Path:
    """The path with `first` behind its name, or with -2, -3 and so on if that exists."""
    endings = itertools.chain([first], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(path.name + ending) for ending in endings)
    return next(name for name in names if not name.exists())


def lock_run(
    output_dir: str, wait_seconds: float = WAIT_SECONDS, key: str = "training.output_dir"
) -> None:
    """Make `output_dir`, which is the value of `key`, and keep other processes' runs out of it.

    A second call in the same process does nothing, unless the folder was deleted or moved since: a
    run that failed keeps its lock. The system gives the lock back when the process ends. Raises
    Refusal if another run holds it after `wait_seconds`, or LEASE_SECONDS if it is on another host,
    or if the folder can't be written. A file system that has no locks is warned of.
    """
    path = _path(output_dir)
    if _is_there(path):
        return
    unlock_run(output_dir)
    try:
        os.makedirs(output_dir, exist_ok=True)
        # A link might have been put there to have its target overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise Refusal(
            f"{key} = {output_dir} can't be written ({error.strerror}); write a folder of your own"
        ) from error
    try:
        _wait_for(descriptor, path, f"{key} = {output_dir}", wait_seconds)
    except BaseException:
        os.close(descriptor)
        raise
    _held[path] = descriptor


def unlock_run(output_dir: str) -> None:
    descriptor = _held.pop(_path(output_dir), None)
    if descriptor is not None:
        os.close(descriptor)


def check_lock(output_dir: str) -> None:
    """Raises FileNotFoundError if the lock that this process holds is not in `output_dir` any more:
    someone has deleted or moved the run's folder, and what is written goes nowhere."""
    path = _path(output_dir)
    if path not in _held or _is_there(path):
        return
    said = "the run's folder was deleted or moved while the run goes on; start it again"
    raise FileNotFoundError(errno.ENOENT, said, output_dir)


def _is_there(path: str) -> bool:
    """True if this process holds the lock that is at this path."""
    try:
        return path in _held and os.path.samestat(os.stat(path), os.fstat(_held[path]))
    except FileNotFoundError:
        return False


def _path(output_dir: str) -> str:
    return os.path.join(os.path.realpath(output_dir), LOCK)


def _wait_for(descriptor: int, path: str, folder: str, wait_seconds: float) -> None:
    """folder: what messages call it."""
    began = time.monotonic()
    is_announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = Path(path).read_text(encoding="utf-8", errors="replace").strip()
            is_elsewhere = bool(holder) and not holder.startswith(f"host {socket.gethostname()},")
            if is_elsewhere:
                wait_seconds = LEASE_SECONDS
            if time.monotonic() - began >= wait_seconds:
                raise Refusal(
                    f"{folder} is in use by another run "
                    f"({holder or 'it does not say which'}); "
                    "end that one, or write another folder"
                ) from None
            if is_elsewhere and not is_announced:
                logger.warning("waiting up to %.0f s for the run of %s", wait_seconds, holder)
                is_announced = True
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            logger.warning(
                "the file system of %s has no locks: a second run in it would not be refused",
                folder,
            )
            return
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = f"host {socket.gethostname()}, process {os.getpid()}, started {started}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder.encode(), 0)


def _close_in_child() -> None:
    # A forked child shares the lock and would keep it after its parent's death.
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
