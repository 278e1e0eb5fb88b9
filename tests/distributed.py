"""Runs a function in several gloo processes; any failure in any of them fails the test.

Also the command line of torchrun, for tests that start programs.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(world_size: int, function: Callable, *args) -> None:
    """function(*args) in `world_size` processes of one gloo group.

    `function` must be importable (module level).
    """
    mp.get_context("forkserver").set_forkserver_preload(["datasets", "titan_sparse.trainer"])
    # A folder, since the last process to leave the store deletes its file.
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, os.path.join(folder, "rendezvous"), function, args)
        mp.start_processes(_entry, arguments, world_size, start_method="forkserver")


def torchrun(processes: int, *words: object) -> list[str]:
    """The command that starts a program, `words`, in so many processes of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes)]
    return command + [str(word) for word in words]


def _entry(rank: int, world_size: int, rendezvous: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    try:
        function(*args)
    finally:
        dist.destroy_process_group()
