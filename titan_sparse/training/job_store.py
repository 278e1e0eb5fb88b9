"""The key-value store of this start of a job, and what the ranks compare in it before they begin.

torchrun keeps one store through all its restarts. Whoever comes first in a new attempt would read
the address of a process that is dead. TORCHELASTIC_RESTART_COUNT does not tell attempts apart: over
several nodes only the node that has failed counts. So the ranks agree on a name that is new.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist

from titan_sparse.config import Refusal

_POLL_SECONDS = 0.05
_MOST_NAMED = 8
"""Ranks that a message lists."""


def store_of_this_start(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    """The store, this rank and the world size, by torchrun's variables, or by the process group that
    exists already. Collective over the world.

    Raises OSError, saying who is missing, if not all ranks have come after timeout_seconds.
    """
    try:
        store, rank, world_size = _store_of_job(timeout_seconds)
        name = agree_on_name(store, rank, world_size, timeout_seconds)
    except dist.DistError as error:
        rank, host, port = (os.environ.get(n) for n in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        raise ConnectionError(
            f"rank {rank} cannot reach rank 0 at {host}:{port}, or has lost it: "
            f"{str(error).splitlines()[0][:100]}"
        ) from error
    return dist.PrefixStore(name, store), rank, world_size


def _store_of_job(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # As dist.rendezvous("env://") makes it, but that one waits for all ranks and names none.
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not is_torchruns,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return store, rank, world_size


def refuse_differences(
    store: dist.Store, rank: int, world_size: int, values: Mapping[str, str]
) -> None:
    """Refuse to go on where a rank's `values` differ from those of rank 0. Collective over the world.

    store: one that is new to this start. Each rank reads the values of rank 0 alone, so that the
    time grows with the number of ranks and not with its square. Raises Refusal, the same on all ranks.
    """
    host = socket.gethostname()
    if rank == 0:
        store.set("values", json.dumps({"host": host, "values": dict(values)}))
    first = json.loads(store.get("values"))
    theirs = first["values"]
    # In the order of rank 0, then what only this rank has.
    different = [key for key in theirs | values if theirs.get(key) != values.get(key)]
    if different:
        key = different[0]
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        store.compare_set(
            "difference",
            "",
            f"rank {rank} (host {host}) has {key} = {values.get(key, 'nothing')}, but rank 0 "
            f"(host {first['host']}) has {theirs.get(key, 'nothing')}{more}. Start all ranks with "
            "the same configuration, code, libraries, and files.",
        )
    if store.add("compared", 1) == world_size:
        store.set("all have compared", "")
    store.wait(["all have compared"])
    if store.check(["difference"]):
        raise Refusal(store.get("difference").decode())


def agree_on_name(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A name that all ranks of this start share, and no earlier start has had. Collective.

    Rank 0 invents it, and answers each rank that greets it under this name. An answer is to a
    process, not to a rank: a name left behind by a dead rank 0 gets none. All processes of an
    earlier start are dead by now.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        store.set("name of the start", own)
        for other in range(1, world_size):
            greeting = f"{own} greeting {other}"
            while not store.check([greeting]):
                _pause(deadline, lambda: _missing(store, own, world_size), rank, timeout_seconds)
            guest = store.get(greeting).decode()
            store.set(f"{own} answer {guest}", "welcome")
        return own

    name = ""
    while not (name and store.check([f"{name} answer {own}"])):
        if store.check(["name of the start"]):
            newest = store.get("name of the start").decode()
            if newest != name:
                name = newest
                store.set(f"{name} greeting {rank}", own)
        _pause(deadline, lambda: "rank 0", rank, timeout_seconds)
    return name


def _missing(store: dist.Store, name: str, world_size: int) -> str:
    """The ranks that have not greeted rank 0."""
    ranks = [r for r in range(1, world_size) if not store.check([f"{name} greeting {r}"])]
    named = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    more = len(ranks) - _MOST_NAMED
    return f"rank {named}" + (f" and {more} more of {world_size}" if more > 0 else "")


def _pause(deadline: float, missing: Callable[[], str], rank: int, timeout_seconds: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(
            f"rank {rank} has waited {timeout_seconds:.0f} s for {missing()} to start; "
            "parallelism.first_step_timeout_seconds says how long"
        )
    time.sleep(_POLL_SECONDS)
