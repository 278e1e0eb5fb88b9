"""Who holds up the others: ranks give signs of life, and one line names the rank that is dead or
stuck.

Torch's timeouts end a job that hangs, but do not say who was waited for. Every rank therefore has a
thread that writes into the job's key-value store, once a second: step, host, collectives begun, and
where in the code its main thread is. Each looks after the next rank only; all are read when nothing
moves or a collective has failed.
"""

import functools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from types import CodeType, TracebackType

import torch
import torch.distributed as dist

logger = logging.getLogger("titan_sparse")

_BEATS_OF_SILENCE = 8
"""A rank whose sign of life has not changed for so many beats counts as dead."""

_TORCH = os.path.dirname(torch.__file__)
_COLLECTIVES = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "_fsdp_collectives.py",
    "_fsdp_param_group.py",
)
"""Files of torch.distributed in which a main thread is while it waits for other ranks."""
_watches = 0


class Watch:
    """Inside `with Watch(...)` this rank gives signs of life and looks after the others. Collective
    over the world.

    timeout_seconds: after which collectives fail; set it anew when that changes. step: of the main
    thread, which sets it. Nothing is started for a single rank. The thread never keeps the process
    alive. If another rank has failed and this one is stuck, it ends the process with status 1.
    """

    def __init__(self, timeout_seconds: float):
        global _watches
        self.timeout_seconds = timeout_seconds
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.main = threading.main_thread().ident
        self.wake = threading.Event()
        self.beat = 0
        self._step = 0
        # The main thread has left the `with`; and this rank looks after nobody any more.
        self.left = False
        self.closed = False
        # Where the main thread has failed, as _place() tells.
        self.frozen: tuple[str, bool] | None = None
        # The step in which a collective of this rank has timed out.
        self.overdue_in = -1
        # All ranks make theirs in the same order: the number keeps the keys of earlier ones apart.
        self.prefix = f"watch {_watches}"
        _watches += 1

    @property
    def beat_seconds(self) -> float:
        """Between signs of life: a second, and less where the timeout is a few seconds."""
        return min(1.0, self.timeout_seconds / 40)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.wake.set()  # told at once, by the thread

    def __enter__(self) -> "Watch":
        if self.size > 1:
            connection = _connection(dist.distributed_c10d._get_default_store())
            self.store = dist.PrefixStore(self.prefix, connection)
            self.lock = threading.Lock()
            self._give_sign()
            self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self.thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self.size == 1:
            return
        self.left = True
        try:
            if isinstance(error, Exception):
                self._explain(error, frames)
            self.closed = True
            self._give_sign()
            self.wake.set()
            if error is None:
                # A thread that is inside the store when Python ends aborts the process.
                self.thread.join(5 * self.beat_seconds)
        except RuntimeError as broken:  # must not hide `error`
            self._say_that_store_is_gone(broken)

    def _give_sign(self) -> None:
        place, waits = self.frozen or _place_of_thread(self.main)
        with self.lock:
            self.beat += 1
            status = {
                "beat": self.beat,
                "step": self.step,
                "place": place,
                "waits": waits,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "closed": self.closed,
                "failed": self.frozen is not None,
                "collectives": _collectives_begun(),
            }
            self.store.set(f"rank {self.rank}", json.dumps(status))

    def _signs(self, ranks: Iterable[int]) -> dict[int, dict]:
        """What these ranks wrote last; without those that have not begun yet."""
        keys = {rank: f"rank {rank}" for rank in ranks}
        present = [rank for rank, key in keys.items() if self.store.check([key])]
        if not present:
            return {}
        values = self.store.multi_get([keys[rank] for rank in present])
        return {rank: json.loads(value) for rank, value in zip(present, values)}

    def _watch(self) -> None:
        """The thread: one sign of life and one look a beat."""
        try:
            next_rank = _Unchanged()
            progress = _Unchanged()
            failure = _Unchanged()
            while not self.closed:
                self.wake.wait(self.beat_seconds)
                self.wake.clear()
                self._give_sign()
                self._look_after_next(next_rank)
                still = progress.seconds((self.step, _collectives_begun(everything=True)))
                is_stuck = still > 0.6 * self.timeout_seconds and not self.left
                if is_stuck and self._claim(f"stuck {self.step}"):
                    self._report_stuck(still)
                is_overdue = still > self.timeout_seconds and not self.left
                if is_overdue and self.overdue_in != self.step:
                    self._note_timeout()
                failures = self.store.add("failures", 0)
                unchanged = min(failure.seconds(failures), still)
                is_lost = unchanged > 2 * _BEATS_OF_SILENCE * self.beat_seconds
                if is_lost and failures and not self.left:
                    self._end()
        except RuntimeError as broken:
            if not self.closed:
                self._say_that_store_is_gone(broken)

    def _say_that_store_is_gone(self, broken: RuntimeError) -> None:
        logger.error(
            "rank %d looks after nobody from here on, as it cannot reach the job's store, which the first node "
            "or rank 0 keeps: %s",
            self.rank,
            " ".join(str(broken).split())[:100],
        )

    def _look_after_next(self, unchanged: "_Unchanged") -> None:
        """One line if the next rank has been silent for too long. unchanged: of its beat."""
        number = (self.rank + 1) % self.size
        status = self._signs([number]).get(number)
        silent = unchanged.seconds(status["beat"] if status else None)
        if status is None or status["closed"] or status["failed"]:
            return
        if silent > _BEATS_OF_SILENCE * self.beat_seconds:
            if self._claim(f"silent {number} {status['beat']}"):
                logger.error("%s", describe({number: status}, {number}))

    def _report_stuck(self, still: float) -> None:
        statuses, silent = self._statuses()
        logger.error(
            "nothing has moved for %.0f s, collectives fail after %.0f s: %s",
            still,
            self.timeout_seconds,
            describe(statuses, silent),
        )

    def _note_timeout(self) -> None:
        """Count a failure if this rank waits for another: a collective has failed by now.

        NCCL does not tell the main thread, and takes a minute to end the processes. Gloo raises an
        exception there, which counts as a failure too.
        """
        self.overdue_in = self.step
        if self.rank not in culprits(*self._statuses()):
            self.store.add("failures", 1)

    def _statuses(self) -> tuple[dict[int, dict], set[int]]:
        """The signs of all ranks, and the ranks that were silent while this waited.

        Ranks that have said goodbye do not count as silent.
        """
        before = self._signs(range(self.size))
        for _ in range(_BEATS_OF_SILENCE + 1):
            time.sleep(self.beat_seconds)
            self._give_sign()
        after = self._signs(range(self.size))
        silent = set()
        for rank, status in before.items():
            has_left = after[rank]["closed"] or after[rank]["failed"]
            if status["beat"] == after[rank]["beat"] and not has_left:
                silent.add(rank)
        return after, silent

    def _claim(self, what: str) -> bool:
        """Whether this rank is the first to say it: one line per job, not one per rank."""
        return self.store.add(what, 1) == 1

    def _explain(self, error: Exception, frames: TracebackType | None) -> None:
        """The main thread leaves by an exception: its own fault, or that of a rank that it waited for."""
        lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(frames)]
        self.frozen = _place(lines[::-1])
        place, waits = self.frozen
        if self.store.add("failures", 1) > 1:
            return
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not waits and not isinstance(error, dist.DistError):
            logger.error(
                "rank %d (host %s, process %d) failed in step %d, at %s: %s",
                self.rank,
                socket.gethostname(),
                os.getpid(),
                self.step,
                place,
                reason,
            )
            return
        statuses, silent = self._statuses()
        logger.error(
            "a collective failed on rank %d: %s: %s", self.rank, describe(statuses, silent), reason
        )

    def _end(self) -> None:
        """Something has failed, so the job is lost; this rank is stuck and would outlive it."""
        place, _ = _place_of_thread(self.main)
        logger.error(
            "rank %d is stuck at %s and ends, as another rank or a collective has failed",
            self.rank,
            place,
        )
        logging.shutdown()
        os._exit(1)


class _Unchanged:
    """For how long a value has been the same."""

    def __init__(self):
        self.value: object = None
        self.since = time.monotonic()

    def seconds(self, value: object) -> float:
        if value != self.value:
            self.value = value
            self.since = time.monotonic()
        return time.monotonic() - self.since


def culprits(statuses: dict[int, dict], silent: set[int]) -> list[int]:
    """The ranks that the others wait for, as far as statuses tell.

    The silent ones, if any. Else those that do not wait in a collective or a transfer themselves: of
    the ranks that have begun fewer collectives than others of a group, or if those all wait (in
    transfers, which are not counted), of all.
    """
    if silent:
        return sorted(silent)
    most: dict[str, int] = {}
    for status in statuses.values():
        for group, number in status["collectives"].items():
            most[group] = max(number, most.get(group, 0))
    behind = [
        rank
        for rank, status in statuses.items()
        if any(number < most[group] for group, number in status["collectives"].items())
    ]
    busy = [rank for rank, status in statuses.items() if not status["waits"]]
    behind_and_busy = [rank for rank in behind if rank in busy]
    return behind_and_busy or busy or behind


def describe(statuses: dict[int, dict], silent: set[int]) -> str:
    """One line: who is waited for, and where; then where the others are."""
    named = culprits(statuses, silent)
    parts = []
    for rank in named[:8]:
        status = statuses[rank]
        what = "has given no sign of life, last seen" if rank in silent else "holds up the others"
        parts.append(
            f"rank {rank} (host {status['host']}, process {status['process']}) {what} "
            f"in step {status['step']}, at {status['place']}"
        )
    if len(named) > 8:
        parts.append(f"{len(named) - 8} more")
    others: dict[str, list[int]] = {}
    for rank, status in statuses.items():
        if rank not in named:
            others.setdefault(status["place"], []).append(rank)
    for place, ranks in list(others.items())[:4]:
        names = ", ".join(map(str, ranks[:8]))
        if len(ranks) > 8:
            names += " ..."
        noun = "ranks" if len(ranks) > 1 else "rank"
        parts.append(f"{noun} {names} at {place}")
    return "; ".join(parts)


@functools.cache
def _connection(store: dist.Store) -> dist.Store:
    """A connection of our own to the store.

    On the shared one we would wait behind what the main thread waits for.
    """
    connection = store.clone()
    connection.set_timeout(timedelta(seconds=30))
    return connection


def _collectives_begun(everything: bool = False) -> dict[str, int]:
    """How many, by group, with the same keys on all its ranks.

    Transfers along rings are left out unless `everything`: gloo counts them too, and ranks differ in
    how many they make.
    """
    counts: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        if everything or not group.group_desc.startswith(("cp inner", "cp outer")):
            key = f"{group.group_desc} {hash(tuple(dist.get_process_group_ranks(group)))}"
            counts[key] = counts.get(key, 0) + _sequence_number(group)
    return counts


def _sequence_number(group: dist.ProcessGroup) -> int:
    """The sum over the group's backends. A backend that has not been used yet may not have a number."""
    # Two device types may share a backend, which counts once.
    backends = {}
    for device_type in group._device_types:
        backend = group._get_backend(device_type)
        backends[id(backend)] = backend
    total = 0
    for backend in backends.values():
        try:
            total += backend._get_sequence_number_for_group()
        except RuntimeError:
            continue
    return total


def _place_of_thread(thread: int) -> tuple[str, bool]:
    """_place() of where a thread is now."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _place(frames)


def _place(frames: list[tuple[CodeType, int]]) -> tuple[str, bool]:
    """Where code outside of torch is, as "file.py:line in function", and whether it waits for other
    ranks there.

    It waits in torch.distributed and in functions called wait. frames: code and line, the innermost
    first.
    """
    waits = False
    for code, line in frames:
        file = os.path.basename(code.co_filename)
        is_torch = code.co_filename.startswith(_TORCH)
        is_waiting = code.co_name == "wait" or (is_torch and file in _COLLECTIVES)
        waits = waits or is_waiting
        if not is_torch and not is_waiting:
            return f"{file}:{line} in {code.co_name}", waits
    return "an unknown place", waits
