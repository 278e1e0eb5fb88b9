"""Runs a function, or a program, in several processes; any failure in any of them fails the test.

Also the command line of torchrun, for tests of how a program is started.
"""

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(world_size: int, function: Callable, *args) -> None:
    """function(*args) in `world_size` processes of one gloo group.

    `function` must be importable (module level).
    """
    # A folder, since the last process to leave the store deletes its file.
    with tempfile.TemporaryDirectory() as folder:
        _start(_entry, (world_size, os.path.join(folder, "rendezvous"), function, args), world_size)


def on_ranks(world_size: int) -> Callable[[Callable], Callable]:
    """Make a function of the test that runs it in `world_size` processes of one gloo group.

    Its arguments are fixtures that can be pickled.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def test(**fixtures: Any) -> None:
            run_processes(world_size, _run_test, function.__module__, function.__name__, fixtures)

        return test

    return decorate


def _run_test(module: str, name: str, fixtures: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)


def on_one_rank(function: Callable, *args) -> Any:
    """function(*args), computed by rank 0 and sent to all. Collective.

    It saves the cores of the other ranks where all results are equal.
    """
    results = [function(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    return results[0]


def run_program(world_size: int, main: Callable[[list[str]], int], words: list[str]) -> str:
    """main(words) in `world_size` processes that find torchrun's variables.
    Returns what they print.

    torchrun itself would start a Python for each process, which takes seconds.
    """
    # Held here, as torchrun does: the first rank may end before another has joined.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        _start(_entry_of_program, (world_size, store.port, main, words, folder), world_size)
        return "".join(Path(folder, str(rank)).read_text() for rank in range(world_size))


def _start(entry: Callable, arguments: tuple, world_size: int) -> None:
    """entry(rank, *arguments) in as many processes.

    torchtitan asks CUDA for its devices when it is imported, and a process that is forked after
    that cannot use a GPU.
    """
    forkserver()
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    mp.start_processes(entry, arguments, world_size, start_method=method)


def forkserver() -> BaseContext:
    """Processes are forked from one that has imported what they need."""
    context = mp.get_context("forkserver")
    imported = [
        "datasets",
        "titan_sparse.training.trainer",
        "transformers.models.llama.modeling_llama",
    ]
    context.set_forkserver_preload(imported)
    return context


def torchrun(processes: int, *words: object) -> list[str]:
    """The command that starts a program, `words`, in so many processes of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes)]
    return command + [str(word) for word in words]


def set_variables(rank: int, world_size: int) -> None:
    """Make this process a rank, with one thread, as torchrun would."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _entry(rank: int, world_size: int, rendezvous: str, function: Callable, args: tuple) -> None:
    set_variables(rank, world_size)
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    try:
        function(*args)
    finally:
        dist.destroy_process_group()


def _entry_of_program(
    rank: int, world_size: int, port: int, main: Callable, words: list[str], folder: str
) -> None:
    set_variables(rank, world_size)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    sys.argv = [main.__module__, *words]
    with open(Path(folder, str(rank)), "w") as printed, contextlib.redirect_stdout(printed):
        status = main(words)
    assert status == 0, f"status {status}"
