"""Signals that ask a run to stop: SIGINT and SIGTERM."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from titan_sparse.training.launcher import end_now

logger = logging.getLogger("titan_sparse")

_HEARD = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Inside `with StopSignals() as signals`, SIGINT and SIGTERM set `signals.asked_at` instead of
    ending the process. For the main thread.

    A thread hears them. The main thread may be inside C++, waiting for another rank or for a GPU,
    and Python runs no handlers there. A second signal after a SIGINT ends the process at once, with
    status 130. (A second Ctrl-C reaches torchrun, which passes it on as a SIGTERM.)
    """

    def __init__(self) -> None:
        # time.monotonic() of the first signal.
        self.asked_at: float | None = None
        self._was_interrupted = False

    @property
    def asked(self) -> bool:
        """Whether this process has been asked to stop."""
        return self.asked_at is not None

    def ask(self) -> None:
        """Ask this process to stop, as a signal does."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()

    def has_time_for(self, seconds: float, grace_seconds: float) -> bool:
        """Whether so many more seconds end within the grace, which begins with the first signal."""
        if self.asked_at is None:
            return True
        return time.monotonic() - self.asked_at + seconds <= grace_seconds

    def __enter__(self) -> "StopSignals":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # The C part of Python's handlers writes the number of each signal into this socket.
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _do_nothing) for number in _HEARD}
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
        while numbers := self._reader.recv(16):  # nothing once the writer is closed
            for number in numbers:
                if number in _HEARD:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        if self._was_interrupted:
            end_now(130)
        self._was_interrupted = number == signal.SIGINT
        if not self.asked:
            logger.info("%s: stopping", signal.Signals(number).name)
        self.ask()


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started inside, by this thread or by threads started inside, do not hear
    SIGINT and SIGTERM.

    torchrun passes signals on to the children of its ranks too. One that writes a checkpoint must
    live on, or the last save fails. It ends with its rank. This process goes on hearing them, in
    another thread.
    """
    # Python opens both signals when it starts this helper of its own, with the first child.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(*_: object) -> None:
    """A handler in Python, without which the C part does not run either."""
