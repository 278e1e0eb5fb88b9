"""The process group of a run: devices, the key-value store, meshes, and timeouts.

torchrun keeps one store through all its restarts. A rank that comes first in a new attempt would
read the address of a process that is dead. TORCHELASTIC_RESTART_COUNT does not identify an attempt:
over several nodes only the node that has failed counts. So the ranks agree on a new name.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_sparse.config import Parallelism, Refusal, resolve_cp_intra

_POLL_SECONDS = 0.05


class Meshes(NamedTuple):
    """The meshes of a run. Ranks count dp_replicate, dp_shard, cp_inter, cp_intra from the outside
    in, so that cp_intra stays in a node."""

    fsdp: DeviceMesh
    """axis ("dp_shard_cp",): parameters are sharded over all data- and context-parallel ranks. With
    replicas ("dp_replicate", "dp_shard_cp"), which fully_shard reads as HSDP"""
    cp: DeviceMesh
    """axes ("cp_inter", "cp_intra")"""
    dp_size: int
    """data-parallel ranks"""
    dp_rank: int
    """the ranks of one context-parallel group share it and read the same data"""


def choose_device(name: str) -> torch.device:
    """Return the device that training.device names, and make a GPU the current one of this process:
    that of LOCAL_RANK, or without torchrun the current one. Raises ValueError if there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise ValueError('training.device = "cuda", but torch sees no GPU; write "cpu" or "auto"')
    if "LOCAL_RANK" in os.environ:
        index = int(os.environ["LOCAL_RANK"])
    else:
        index = torch.cuda.current_device()
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"this node has {count} GPUs; start at most as many processes on it")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def init_distributed(
    device: torch.device, timeout_seconds: int, alike: Mapping[str, str] | None = None
) -> None:
    """Join torchrun's process group, or make one of this process alone; one that exists is kept.

    alike: what must be the same on all ranks, by name. Counters travel by gloo, tensors on GPUs
    by NCCL. All groups made later meet in the same store, which no earlier attempt of torchrun
    has used. Raises Refusal on all ranks, before any of them has sent another a tensor, if
    `alike` differs.
    """
    store, rank, world_size = store_of_this_start(timeout_seconds)
    refuse_differences(store, rank, world_size, alike or {})
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL's flight recorder keeps the last collectives, unless the environment says otherwise.
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def build_meshes(parallelism: Parallelism, device_type: str) -> Meshes:
    world_size = dist.get_world_size()
    cp_intra = resolve_cp_intra(parallelism)
    cp, replicas = parallelism.cp, parallelism.dp_replicate
    dp_size = world_size // cp
    # Two meshes over the same ranks: one mesh cannot name dp_shard x cp as a single axis and its
    # parts too.
    axes = ("dp_replicate", "dp_shard_cp")
    shape = (replicas, world_size // replicas)
    sharding = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    axes = ("dp", "cp_inter", "cp_intra")
    shape = (dp_size, cp // cp_intra, cp_intra)
    sequence = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    fsdp = sharding if replicas > 1 else sharding["dp_shard_cp"]
    return Meshes(fsdp, sequence["cp_inter", "cp_intra"], dp_size, dist.get_rank() // cp)


def set_timeout(seconds: float, without: dist.ProcessGroup | None = None) -> None:
    """Change the timeout of every process group made so far, for collectives that begin after this.

    without: a group that keeps its own. Before the timeout gets shorter all ranks should barrier().
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not without:
            group.set_timeout(timedelta(seconds=seconds))


def barrier() -> None:
    """Wait until all ranks are here. No GPU is waited for."""
    dist.all_reduce(torch.zeros(()))


def on_first_rank(work: Callable[[], Any]) -> Any:
    """The result of `work` on rank 0, on all ranks; or its Refusal or OSError, raised on all of
    them."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except (Refusal, OSError) as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, device=torch.device("cpu"))
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def store_of_this_start(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    """The store, this rank and the world size, by torchrun's variables, or by the process group
    that exists already. Collective over the world.

    Raises OSError, saying who is missing, if not all ranks have come after timeout_seconds.
    """
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            rank, world_size = dist.get_rank(), dist.get_world_size()
        elif "RANK" not in os.environ:
            store, rank, world_size = dist.HashStore(), 0, 1
        else:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            # As dist.rendezvous("env://") makes it, but that one waits for all
            # ranks and names none.
            is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=rank == 0 and not is_torchruns,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        name = agree_on_name(store, rank, world_size, timeout_seconds)
    except dist.DistError as error:
        rank, host, port = (os.environ.get(n) for n in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
        raise ConnectionError(
            f"rank {rank} cannot reach rank 0 at {host}:{port}, or has lost it: "
            f"{str(error).splitlines()[0][:100]}"
        ) from error
    return dist.PrefixStore(name, store), rank, world_size


def refuse_differences(
    store: dist.Store, rank: int, world_size: int, values: Mapping[str, str]
) -> None:
    """Raise Refusal, the same on all ranks, where a rank's `values` differ from those of rank 0.
    Collective over the world. store: one that is new to this start.
    """
    store.set(f"values {rank}", json.dumps([socket.gethostname(), dict(values)]))
    if rank == 0:
        store.set("difference", _difference(store, world_size))
    if difference := store.get("difference").decode():
        raise Refusal(difference)


def _difference(store: dist.Store, world_size: int) -> str:
    """Empty if all ranks are alike."""
    host, first = json.loads(store.get("values 0"))
    for rank in range(1, world_size):
        other_host, other = json.loads(store.get(f"values {rank}"))
        # In the order of rank 0, then what only this rank has.
        different = [key for key in first | other if first.get(key) != other.get(key)]
        if different:
            key = different[0]
            more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
            return (
                f"rank {rank} (host {other_host}) has {key} = {other.get(key, 'nothing')}, but rank 0 "
                f"(host {host}) has {first.get(key, 'nothing')}{more}. Start all ranks with the same "
                "configuration, code, libraries, and files."
            )
    return ""


def agree_on_name(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A name that all ranks of this start share, and no earlier start has had. Collective.

    Rank 0 invents it, and answers each rank that greets it under this name. An answer is to a
    process, not to a rank: a name left behind by a dead rank 0 gets none. All processes of an
    earlier start are dead by now.
    """
    own = uuid.uuid4().hex
    name = own if rank == 0 else ""
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        store.set("name of the start", own)
    awaited = set(range(1, world_size)) if rank == 0 else {0}
    while awaited:
        if rank == 0:
            come = {other for other in awaited if store.check([f"{own} greeting {other}"])}
            for other in come:
                guest = store.get(f"{own} greeting {other}").decode()
                store.set(f"{own} answer {guest}", "welcome")
            awaited -= come
        elif store.check(["name of the start"]):
            newest = store.get("name of the start").decode()
            if newest != name:
                name = newest
                store.set(f"{name} greeting {rank}", own)
            if store.check([f"{name} answer {own}"]):
                break
        if awaited and time.monotonic() > deadline:
            more = f" and {len(awaited) - 1} more of {world_size}" if len(awaited) > 1 else ""
            raise TimeoutError(
                f"rank {rank} has waited {timeout_seconds:.0f} s for rank {min(awaited)}{more} to "
                "start; parallelism.first_step_timeout_seconds says how long"
            )
        time.sleep(_POLL_SECONDS)
    return name
