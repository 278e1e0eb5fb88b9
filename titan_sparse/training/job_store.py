"""The key-value store of this start of a job.

torchrun keeps one store through all its restarts. Whoever comes first in a new attempt would read
the address of a process that is dead. TORCHELASTIC_RESTART_COUNT does not tell attempts apart: over
several nodes only the node that has failed counts. So the ranks agree on a name that is new.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.05


def store_of_this_start(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    """The store, this rank and the world size, by torchrun's variables. Collective over the world.

    Raises RuntimeError, saying who is missing, if not all ranks have come after timeout_seconds.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    name = agree_on_name(store, rank, world_size, timeout_seconds)
    return dist.PrefixStore(name, store), rank, world_size


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
                _pause(deadline, f"rank {other}", rank, timeout_seconds)
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
        _pause(deadline, "rank 0", rank, timeout_seconds)
    return name


def _pause(deadline: float, missing: str, rank: int, timeout_seconds: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"rank {rank} has waited {timeout_seconds:.0f} s for {missing} to start; "
            "parallelism.first_step_timeout_seconds says how long"
        )
    time.sleep(_POLL_SECONDS)
