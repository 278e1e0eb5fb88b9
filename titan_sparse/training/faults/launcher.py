"""End a training process: with torchrun, after a signal, or after a failure. Does not import torch,
so that mistakes in a configuration are reported at once.
"""

import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PARENT = os.getppid()
"""When this file was imported, which is early."""

_ENDED = "TITAN_SPARSE_ENDED"
"""The environment variable in which scripts/past_torchrun.sh names a file."""

logger = logging.getLogger("titan_sparse")

_HEARD = (signal.SIGINT, signal.SIGTERM)


class OtherRankFailed(RuntimeError):
    """A collective has failed on this rank, but another rank is dead or has
    failed before. Status 1."""


class Poisoned(RuntimeError):
    """The guard has given up: the run cannot go on by itself. The same on every rank. Status 3."""


def hide_warnings_of_imports() -> None:
    """Hide two warnings for the rest of this program.

    PEFT and transformers load torchao wherever it is installed. It warns of its own libraries that
    fit no GPU here, and torch of its enums: nothing that the reader can change.
    """
    _hide("torchao", "Failed to load")
    _hide("torch.utils._pytree", "Enum subclass")


def _hide(name: str, words: str) -> None:
    logging.getLogger(name).addFilter(lambda record: words not in record.getMessage())


def end_with_launcher() -> None:
    """From now on the system kills this process as soon as the torchrun that
    has started it is dead.

    A torchrun that is killed leaves its ranks behind. They would train on for good, into the folder
    of the job that takes their place. Does nothing for a process started by hand.
    """
    if path := os.environ.get(_ENDED):  # of the processes before, if torchrun starts them again
        Path(path).unlink(missing_ok=True)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # One that died before this call sends no signal, and another process has taken its place.
    parent = os.getppid()
    if parent != _PARENT or (parent == 1 and not _is_python(parent)):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_python(process: int) -> bool:
    """True if it can be torchrun. In a container, torchrun may be process 1, which adopts
    orphans."""
    with open(f"/proc/{process}/cmdline", "rb") as file:
        return b"python" in file.read()


def end_now(status: int) -> NoReturn:
    """End this process at once. An orderly end would wait for saves in the background and for
    communicators, and with them for ranks that may be dead."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def end_for_good() -> None:
    """Have scripts/past_torchrun.sh not start the run again: it has finished, or it would end in
    the same way. torchrun's status does not say so. It is 1 after every failure.
    """
    if path := os.environ.get(_ENDED):
        # Without the file the run starts again, and ends again.
        with suppress(OSError):
            Path(path).touch()


def report_to_launcher(line: str, details: str = "") -> None:
    """Have torchrun show `line`, or `details` such as a traceback, in its summary of a failed job.

    The file is that of torch.distributed.elastic's `record`, and its first writer counts.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path:
        return
    extra = {"py_callstack": details or line, "timestamp": str(int(time.time()))}
    message = {"message": {"message": line, "extraInfo": extra}}
    # A word to torchrun must not hide the failure itself. "x": the file must be new.
    with suppress(OSError), open(path, "x") as file:
        json.dump(message, file)


class StopSignals:
    """Inside `with StopSignals() as signals`, SIGINT and SIGTERM set `signals.asked_at` instead of
    ending the process. For the main thread.

    A thread hears them. The main thread may be inside C++, waiting for another rank or for a GPU,
    and Python runs no handlers there. A second signal after a SIGINT ends the process at once, with
    status 130. (A second Ctrl-C reaches torchrun, which passes it on as a SIGTERM.)
    """

    def __init__(self) -> None:
        # time.monotonic() of the first signal.
        self.asked_at = math.inf

    @property
    def asked(self) -> bool:
        return self.asked_at < math.inf

    def ask(self) -> None:
        self.asked_at = min(self.asked_at, time.monotonic())

    def has_time_for(self, seconds: float, grace_seconds: float) -> bool:
        """True if so many more seconds end within the grace, which begins with the first signal."""
        return time.monotonic() - self.asked_at + seconds <= grace_seconds

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # The C part of Python's handlers writes the number of each signal into this socket.
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _HEARD}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        was_interrupted = False
        while numbers := self._reader.recv(1):  # nothing once the writer is closed
            number = numbers[0]
            if number not in _HEARD:
                continue
            if was_interrupted:
                end_for_good()
                end_now(130)
            was_interrupted = number == signal.SIGINT
            if not self.asked:
                logger.info("%s: stopping", signal.Signals(number).name)
            self.ask()
