"""One run per folder: a lock on <output_dir>/.lock, held as long as the process lives. Without torch."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from titan_sparse.config import Refusal

logger = logging.getLogger("titan_sparse")

LOCK = ".lock"

WAIT_SECONDS = 10.0
"""The ranks of a launcher that was killed take up to so long to end."""

_held: dict[str, int] = {}
"""Path of a lock -> its open file, for the locks of this process."""


def lock_run(output_dir: str, wait_seconds: float = WAIT_SECONDS) -> None:
    """Make `output_dir`, if there is none, and keep other processes' runs out of it.

    A second call in the same process does nothing. The system gives the lock back when the process
    ends, however it ends. Raises Refusal if another run holds it after `wait_seconds`,
    or if the folder can't be written. A file system that has no locks is warned of.
    """
    path = _path(output_dir)
    if path in _held:
        return
    try:
        os.makedirs(output_dir, exist_ok=True)
        # A link might have been put there to have its target overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise Refusal(
            f"training.output_dir = {output_dir} can't be written ({error.strerror}); "
            "write a folder of your own"
        ) from error
    try:
        _wait_for(descriptor, path, output_dir, wait_seconds)
    except BaseException:
        os.close(descriptor)
        raise
    _held[path] = descriptor


def unlock_run(output_dir: str) -> None:
    """Give the lock back, if this process has it."""
    descriptor = _held.pop(_path(output_dir), None)
    if descriptor is not None:
        os.close(descriptor)


def check_lock(output_dir: str) -> None:
    """Raises FileNotFoundError if the lock that this process holds is not in `output_dir` any more:
    someone has deleted or moved the run's folder, and what is written goes nowhere."""
    path = _path(output_dir)
    if path not in _held:
        return
    try:
        if os.path.samestat(os.stat(path), os.fstat(_held[path])):
            return
    except FileNotFoundError:
        pass
    raise FileNotFoundError(
        errno.ENOENT,
        "the run's folder was deleted or moved while the run goes on; start it again",
        output_dir,
    )


def _path(output_dir: str) -> str:
    return os.path.join(os.path.realpath(output_dir), LOCK)


def _wait_for(descriptor: int, path: str, output_dir: str, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = Path(path).read_text(encoding="utf-8", errors="replace").strip()
                raise Refusal(
                    f"training.output_dir = {output_dir} is in use by another run "
                    f"({holder or 'it does not say which'}); "
                    "end that one, or write another folder"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            logger.warning(
                "the file system of %s has no locks: a second run in it would not be refused",
                output_dir,
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
