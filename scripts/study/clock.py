"""How long a call of the study may take."""

import time

from scripts.study.sizes import Size


class Clock:
    """The time that a call may take; minutes: infinite for no limit."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self.end - time.monotonic()


class OutOfTime(Exception):
    """The clock has run out, or a signal has come; what was begun is saved."""


def check_time(size: Size, clock: Clock) -> None:
    """Raises OutOfTime if too little is left to begin anything."""
    if clock.left() <= size.reserve_seconds:
        raise OutOfTime
