"""This process and the torchrun that has started it: outlive it never, and leave it a last word.

Also what becomes of output that nobody reads any more. Loads no torch: what the user has to change
is told before torch has been loaded.
"""

import io
import json
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import active_children
from typing import NoReturn

_POLL_SECONDS = 1.0


class _Output(io.FileIO):
    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def outlive_readers() -> None:
    """From now on, output is dropped once its reader has gone, as in `train.py --help | head`.

    A run trains on, and its log is in the run's folder anyway. Streams that someone has replaced,
    such as a test, stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # None: closed by the shell.
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            raw = _Output(stream.fileno(), "w", closefd=False)
            kept = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True
            )
            setattr(sys, name, kept)


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """From now on this process ends, with status 1, soon after the torchrun that has started it.

    A torchrun that is killed leaves its ranks behind. They would train on for good, into the folder
    of the job that takes their place. Does nothing for a process started by hand.
    """
    if is_under_torchrun():
        thread = threading.Thread(
            target=_wait_for_another_parent, args=(os.getppid(),), name="launcher", daemon=True
        )
        thread.start()


def _wait_for_another_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    rank = os.environ.get("RANK", "0")
    # The pipe to torchrun may be closed.
    with suppress(OSError, ValueError):
        print(f"rank {rank} ends, as torchrun (process {parent}) is dead", file=sys.stderr)
    end_now(1)


def end_now(status: int) -> NoReturn:
    """End this process and its children, whatever the main thread is doing.

    An orderly end would wait for saves in the background and for communicators, and with them for
    ranks that may be dead.
    """
    for child in active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def tell_launcher(line: str, details: str = "") -> None:
    """Have torchrun show `line`, or `details` such as a traceback, in its summary of a failed job.

    The first word counts. It is written as torch.distributed.elastic's `record` writes it. Does
    nothing without torchrun.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path:
        return
    extra = {"py_callstack": details or line, "timestamp": str(int(time.time()))}
    message = {"message": {"message": line, "extraInfo": extra}}
    # A word to torchrun must not hide the failure itself. "x": the file must be new.
    with suppress(OSError), open(path, "x") as file:
        json.dump(message, file)
