"""What ranks tell each other about themselves, and whom that makes the others wait for."""

import os
import socket
import sys
from functools import cache
from types import CodeType

import torch
import torch.distributed as dist

_TORCH = os.path.dirname(torch.__file__)
_COLLECTIVES = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "_fsdp_collectives.py",
    "_fsdp_param_group.py",
)
"""Files of torch.distributed in which a main thread is while it waits for other ranks."""


@cache
def machine() -> str:
    """Where process numbers mean the same: the host, and in it the namespace of the numbers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def has_ended(status: dict) -> bool:
    """Whether the process that gave this sign is known to be no more. Only seen on its own machine."""
    if status["machine"] != machine() or not os.path.isdir("/proc/self"):
        return False
    try:
        with open(f"/proc/{status['process']}/stat") as file:
            # "7 (name of the program) S ...": Z and X are processes that have ended.
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


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


def collectives_begun(everything: bool = False) -> dict[str, int]:
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


def place_of_thread(thread: int) -> tuple[str, bool]:
    """place_of() of where a thread is now."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return place_of(frames)


def place_of(frames: list[tuple[CodeType, int]]) -> tuple[str, bool]:
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
