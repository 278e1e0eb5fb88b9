"""Detection of the rank that holds up the others: ranks give signs of life, and one line names the
rank that is dead or stuck.

Torch's timeouts end a job that hangs, but do not say which rank was waited for. Every rank
therefore has a thread that writes into the job's key-value store, once a second: step, host,
collectives begun, and where in the code its main thread is. Each looks after the next rank only.
All are read when nothing moves, when a collective has failed, or when this rank is asked to stop.
When nothing moves, every rank also writes its stacks, and NCCL's records, to files.
"""

import faulthandler
import functools
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from titan_sparse.config import Refusal
from titan_sparse.training.faults.launcher import (
    OtherRankFailed,
    StopSignals,
    end_now,
    report_to_launcher,
)

logger = logging.getLogger("titan_sparse")

_BEATS_OF_SILENCE = 8
"""of a rank that counts as dead"""

_watches = itertools.count()
"""Numbers of the watches of this process."""

_TORCH = os.path.dirname(torch.__file__)

_COLLECTIVES = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "_fsdp_collectives.py",
    "_fsdp_param_group.py",
)
"""Files of torch.distributed in which a main thread is while it waits for other ranks."""


class Watch:
    """Inside `with Watch(...)` this rank sends heartbeats and watches those of the other ranks.
    Collective over the world. Nothing is started for a single rank.

    timeout_seconds: the time after which collectives fail; update it when that changes. step: the
    main thread sets it. signals: a rank that is asked to stop while another rank is dead ends
    within seconds. folder: where all ranks write their stacks when nothing moves; None: nowhere.
    replays: whether this rank's GPU is inside a CUDA graph, whose collectives torch neither
    counts nor times.

    If another rank has failed and this one is stuck, it ends with status 1. Raises OtherRankFailed,
    in place of what failed inside `with`, where that only follows from another rank's failure.
    """

    def __init__(
        self,
        timeout_seconds: float,
        signals: StopSignals | None = None,
        folder: Path | None = None,
        replays: Callable[[], bool] = lambda: False,
    ):
        self.timeout_seconds = timeout_seconds
        self.signals = signals or StopSignals()
        self.folder = folder
        self.replays = replays
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.beat = self.step = 0
        # The main thread has left the `with`; and this rank does not look after
        # another one any more.
        self.left = False
        self.closed = threading.Event()
        # Where the main thread has failed, as place_of() returns it.
        self.frozen: tuple[str, bool] | None = None
        # What ranks wrote last, of those that were read last; and which of these are dead.
        self.statuses: dict[int, dict] = {}
        self.dead: set[int] = set()
        # Name -> a value and since when it has been that.
        self.unchanged: dict[str, tuple[object, float]] = {}
        # The steps in which a collective of this rank has timed out, and in which nothing has
        # moved; and the line that this rank has reported for that.
        self.overdue_in = self.stuck_in = -1
        self.stuck_line = ""
        # All ranks make theirs in the same order: the number keeps the keys of earlier ones apart.
        self.prefix = f"watch {next(_watches)}"

    @property
    def beat_seconds(self) -> float:
        """Between signs of life: a second, and less where the timeout is a few seconds."""
        return min(1.0, self.timeout_seconds / 40)

    @property
    def silence_seconds(self) -> float:
        return _BEATS_OF_SILENCE * self.beat_seconds

    def __enter__(self) -> "Watch":
        if self.size > 1:
            # On the shared connection we would wait behind what the main thread waits for.
            connection = dist.distributed_c10d._get_default_store().clone()
            connection.set_timeout(timedelta(seconds=30))
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
        follows = False
        reason = "another rank has failed"
        try:
            if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
                follows = self._explain(error, frames)
            self.closed.set()
            self._give_sign()
            if error is None:
                # A thread that is inside the store when Python ends aborts the process.
                self.thread.join(5 * self.beat_seconds)
        except RuntimeError as broken:  # must not hide `error`
            self._say_that_store_is_gone(broken)
            # Who waited for other ranks has lost the host of the store, and not only the store.
            follows = self.frozen is not None and self.frozen[1]
            reason = f"it has lost {store_place()}"
        if follows:
            line = f"rank {self.rank} ends in step {self.step}, as {reason}"
            raise OtherRankFailed(line) from error

    def _give_sign(self) -> None:
        place, waits = self.frozen or place_of_main_thread()
        with self.lock:
            self.beat += 1
            status = {
                "beat": self.beat,
                "step": self.step,
                "place": place,
                "waits": waits or self.replays(),
                "host": socket.gethostname(),
                "machine": machine(),
                "process": os.getpid(),
                "has_said_so": self.closed.is_set() or self.frozen is not None,
                "collectives": collectives_begun(),
            }
            self.store.set(f"rank {self.rank}", json.dumps(status))

    def _watch(self) -> None:
        has_store = True
        while not self.closed.wait(self.beat_seconds):
            # For how long the main thread has not moved.
            still = self._seconds_unchanged("progress", (self.step, collectives_begun()))
            if self.left:
                still = 0.0
            try:
                if has_store:
                    self._give_sign()
                    self._look(still)
            except RuntimeError as broken:
                has_store = False
                if not self.closed.is_set():
                    self._say_that_store_is_gone(broken)
            # Without the store a stop signal alone may end a rank that stands still.
            if not has_store and self.signals.asked and still > self.silence_seconds:
                self._end("it is asked to stop, and the job's store is gone")

    def _look(self, still: float) -> None:
        failures = self.store.add("failures", 0)
        is_stuck = still > 0.6 * self.timeout_seconds
        # To read all ranks each time would cost the square of their number.
        is_alarmed = failures or is_stuck or self.signals.asked
        self._read_signs(range(self.size) if is_alarmed else [(self.rank + 1) % self.size])
        for rank in self.dead:
            status = self.statuses[rank]
            if self._claim(f"silent {rank} {status['beat']}"):
                logger.error("%s", describe({rank: status}, {rank}))
        if is_stuck and self.stuck_in != self.step and self.folder is not None:
            self.stuck_in = self.step
            try:
                write_stacks(self.folder / f"step-{self.step}", self.rank)
            except Exception as error:  # whatever it is, the watch goes on
                logger.warning("rank %d cannot write its stacks: %s", self.rank, error)
        # By then the silent ranks are known.
        known_after = 0.6 * self.timeout_seconds + self.silence_seconds + self.beat_seconds
        if still > known_after and self._claim(f"stuck {self.step}"):
            where = f"; stacks of all ranks: {self.folder}/step-{self.step}" if self.folder else ""
            self.stuck_line = (
                f"nothing has moved for {still:.0f} s, collectives fail after "
                f"{self.timeout_seconds:.0f} s: {describe(self.statuses, self.dead)}{where}"
            )
            logger.error("%s", self.stuck_line)
        if still > self.timeout_seconds and self.overdue_in != self.step:
            # NCCL does not inform the main thread of a timeout, and takes a minute to end the
            # processes. Gloo raises an exception there, which counts as a failure too.
            self.overdue_in = self.step
            if self.rank not in culprits(self.statuses, self.dead):
                self.store.add("failures", 1)
        unchanged = min(self._seconds_unchanged("failures", failures), still)
        if failures and unchanged > 2 * self.silence_seconds:
            self._end("another rank or a collective has failed")
        if self.signals.asked and (failures or is_stuck or self.dead):
            self._end("it is asked to stop, and a rank is dead or nothing moves")

    def _read_signs(self, ranks: Iterable[int]) -> None:
        """Those that have not begun yet are left out. A rank is dead if it has been silent or has
        ended, without having said so."""
        present = [rank for rank in ranks if self.store.check([f"rank {rank}"])]
        values = self.store.multi_get([f"rank {rank}" for rank in present]) if present else []
        statuses = {rank: json.loads(value) for rank, value in zip(present, values, strict=True)}
        dead = set()
        for rank, status in statuses.items():
            silent = self._seconds_unchanged(f"rank {rank}", status["beat"])
            is_gone = silent > self.silence_seconds or has_ended(status)
            if is_gone and not status["has_said_so"]:
                dead.add(rank)
        self.statuses, self.dead = statuses, dead

    def _seconds_unchanged(self, name: str, value: object) -> float:
        now = time.monotonic()
        if self.unchanged.get(name, ("nothing", 0))[0] != value:
            self.unchanged[name] = (value, now)
        return now - self.unchanged[name][1]

    def _say_that_store_is_gone(self, broken: RuntimeError) -> None:
        logger.error(
            "rank %d has lost %s in step %d, and does not look after other ranks from here on: %s",
            self.rank,
            store_place(),
            self.step,
            " ".join(str(broken).split())[:100],
        )

    def _claim(self, what: str) -> bool:
        # One line per job, not one per rank.
        return self.store.add(what, 1) == 1

    def _explain(self, error: BaseException, frames: TracebackType | None) -> bool:
        """Returns whether another rank has failed before, or is dead, and
        this one waited for it."""
        self.frozen = place_of([*traceback.walk_tb(frames)][::-1])
        place, waits = self.frozen
        is_first = self.store.add("failures", 1) == 1
        if isinstance(error, Refusal):  # says all by itself
            return False
        waited = waits or isinstance(error, dist.DistError)
        if not is_first:  # a full disk meets all ranks alike
            return waited or isinstance(error, OSError)
        if waited:
            # The thread reads all ranks now. A silent one is known after some beats.
            for _ in range(_BEATS_OF_SILENCE + 2):
                if self.dead and len(self.statuses) == self.size:
                    break
                time.sleep(self.beat_seconds)
            line = f"a collective failed on rank {self.rank}: {describe(self.statuses, self.dead)}"
        else:
            line = (
                f"rank {self.rank} (host {socket.gethostname()}, process {os.getpid()}) failed in "
                f"step {self.step}, at {place}"
            )
        line += f": {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        logger.error("%s", line)
        report_to_launcher(line)
        return waited and bool(self.dead)

    def _end(self, why: str) -> None:
        if self.left:
            return
        place, _ = place_of_main_thread()
        line = f"rank {self.rank} is stuck at {place} and ends, as {why}"
        logger.error("%s", line)
        report_to_launcher(self.stuck_line or line)
        end_now(1)


@functools.cache
def machine() -> str:
    """The scope in which process numbers mean the same: the host, and in it the namespace of the
    numbers."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def store_place() -> str:
    """The job's store and its host, for messages."""
    return f"the job's store on host {os.environ.get('MASTER_ADDR', 'of rank 0')}"


def has_ended(status: dict) -> bool:
    """True if the process that gave this sign is known to be no more. Only seen on its own
    machine."""
    if status["machine"] != machine():
        return False
    try:
        with open(f"/proc/{status['process']}/stat") as file:
            # "7 (name of the program) S ...": Z and X are processes that have ended.
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def write_stacks(folder: Path, rank: int) -> None:
    """Write stacks_rank_N.txt, the stacks of all threads of this process, and on GPUs
    nccl_trace_rank_N, for `torchfrtrace --prefix nccl_trace_rank_ FOLDER`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"stacks_rank_{rank}.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    if torch.cuda.is_available():
        # Pickled by torch. Without stacks: they would make it many times longer.
        trace = torch._C._distributed_c10d._dump_nccl_trace(includeStackTraces=False)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)


def culprits(statuses: dict[int, dict], silent: set[int]) -> list[int]:
    """The ranks that the others seem to wait for: the silent ones. Without any they are ranks that
    do not wait themselves, first among those that have begun fewer collectives than others of a
    group, then (transfers are not counted) among all.
    """
    if silent:
        return sorted(silent)
    most: Counter[str] = Counter()
    for status in statuses.values():
        # The larger number of each group.
        most |= Counter(status["collectives"])
    behind = [
        rank
        for rank, status in statuses.items()
        if any(number < most[group] for group, number in status["collectives"].items())
    ]
    busy = [rank for rank, status in statuses.items() if not status["waits"]]
    return [rank for rank in behind if rank in busy] or busy or behind


def describe(statuses: dict[int, dict], silent: set[int]) -> str:
    """One line: who is waited for, and where."""
    named = culprits(statuses, silent)
    what = "has given no sign of life, last seen" if silent else "holds up the others"
    parts = [
        f"rank {rank} (host {statuses[rank]['host']}, process {statuses[rank]['process']}) {what} "
        f"in step {statuses[rank]['step']}, at {statuses[rank]['place']}"
        for rank in named[:8]
    ]
    if len(named) > 8:
        parts.append(f"{len(named) - 8} more")
    return "; ".join(parts)


def collectives_begun() -> dict[str, int]:
    """The number of collectives begun, by group. Transfers along rings are left out, in which ranks
    differ."""
    counts: Counter[str] = Counter()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc.startswith(("cp inner", "cp outer")):
            continue
        key = f"{group.group_desc} {hash(tuple(dist.get_process_group_ranks(group)))}"
        counts[key] += 0
        # Two device types may share a backend, which counts once.
        backends = {group._get_backend(device_type) for device_type in group._device_types}
        for backend in backends:
            # One that has not been used yet may not have a number.
            with suppress(RuntimeError):
                counts[key] += backend._get_sequence_number_for_group()
    return counts


def place_of_main_thread() -> tuple[str, bool]:
    frame = sys._current_frames().get(threading.main_thread().ident)
    return place_of(traceback.walk_stack(frame) if frame else ())


def place_of(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, bool]:
    """The place of code outside of torch, as "file.py:line in function", and whether it waits for
    other ranks there: in torch.distributed, or in a function called wait. frames: the innermost
    first.
    """
    waits = False
    for frame, line in frames:
        code = frame.f_code
        file = os.path.basename(code.co_filename)
        is_torch = code.co_filename.startswith(_TORCH)
        is_waiting = code.co_name == "wait" or (is_torch and file in _COLLECTIVES)
        waits = waits or is_waiting
        if not is_torch and not is_waiting:
            return f"{file}:{line} in {code.co_name}", waits
    return "an unknown place", waits
