"""A new attempt in a store that an earlier one has left behind."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titan_sparse.training.distributed import agree_on_name, init_distributed, store_of_this_start
from titan_sparse.training.heartbeat import Watch


def _names(store: dist.Store, order: list[int]) -> list[str]:
    """What the ranks of one attempt agree on, if they come in this order."""
    names = {}

    def join(rank: int) -> None:
        names[rank] = agree_on_name(store, rank, len(order), timeout_seconds=10)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return [names[rank] for rank in sorted(names)]


def test_each_attempt_agrees_on_a_new_name_whoever_comes_first():
    store = dist.HashStore()
    attempts = [_names(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert all(len(names) == 3 and len(set(names)) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == 3


def test_an_attempt_that_died_in_between_is_passed_over():
    store = dist.HashStore()
    # Rank 0 has published a name, and rank 1 has greeted it; then all were killed.
    store.set("name of the start", "old")
    store.set("old greeting 1", "a process that is dead")
    store.set("old answer a process that is dead", "welcome")
    names = _names(store, [1, 0])
    assert names[0] == names[1] != "old"


def test_who_is_missing_is_said():
    store = dist.HashStore()
    store.set("name of the start", "old")
    for rank, size, missing in (
        (0, 2, "rank 1"),
        (0, 12, "rank 1 and 10 more of 12"),
        (1, 2, "rank 0"),
    ):
        with pytest.raises(
            TimeoutError, match=f"rank {rank} has waited 0 s for {missing} to start"
        ):
            agree_on_name(store, rank, size, timeout_seconds=0.1)


def test_a_rank_that_never_comes_is_named(monkeypatch):
    """Without torchrun, as Slurm starts them: one line, which main() gives to an OSError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConnectionError, match=f"^rank 1 cannot reach rank 0 at 127.0.0.1:{port}"):
        store_of_this_start(1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TimeoutError, match="^rank 0 has waited 1 s for rank 1 to start"):
        store_of_this_start(1)


def _attempt(rank: int, port: int, attempt: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    init_distributed(torch.device("cpu"), timeout_seconds=30)
    ended: list[str] = []
    Watch._end = lambda watch, why: ended.append(why)
    with Watch(timeout_seconds=2) as watch:
        for watch.step in range(2):
            dist.barrier()
        if attempt == 0:
            watch.store.add("failures", 1)
        else:
            time.sleep(1.5)  # of healthy work, longer than it takes to give up a lost job
    dist.destroy_process_group()
    assert attempt == 0 or not ended, ended


def test_failures_of_an_earlier_attempt_do_not_end_a_healthy_job():
    # As torchrun's agent keeps it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in (0, 1):
        mp.start_processes(_attempt, (store.port, attempt), 2, start_method="forkserver")
