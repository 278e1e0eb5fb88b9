"""Ranks that lose a peer or their launcher, or are asked to stop, and an earlier attempt's store."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import forkserver
from tests.faults.jobs import free_port
from titan_sparse.commands import train
from titan_sparse.config import Refusal
from titan_sparse.training.faults.heartbeat import Watch, has_ended, machine
from titan_sparse.training.faults.launcher import OtherRankFailed, Poisoned, StopSignals, _is_python
from titan_sparse.training.faults.process_groups import (
    agree_on_name,
    set_timeout,
    store_of_this_start,
)

ROOT = Path(__file__).parents[2]

STUCK = """
import ctypes, sys
from titan_sparse.training.faults.launcher import end_with_launcher
from titan_sparse.training.faults.launcher import StopSignals
end_with_launcher()
with StopSignals():
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time waits in C for good
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""

# Starts the program above, tells its number, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


# Its launcher dies before it has said that it ends with it.
LATE = """
import os, time
from titan_sparse.training.faults.launcher import end_with_launcher
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
end_with_launcher()
time.sleep(60)
"""


def _start(*words: str, **environment: str) -> tuple[subprocess.Popen, str]:
    """A Python program, and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_at_once_and_terminations_are_patient(second, tmp_path):
    process, line = _start(STUCK, TITAN_SPARSE_ENDED=str(tmp_path / "ended"))
    assert line == "ready"
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.2)
    assert process.poll() is None and not (tmp_path / "ended").exists()
    process.send_signal(second)
    assert process.wait(5) == 130 and (tmp_path / "ended").exists()


def test_a_signal_is_noted_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as signals:
        assert not signals.asked and signals.has_time_for(1e9, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        _wait_for(lambda: signals.asked)
        assert signals.has_time_for(1, 60) and not signals.has_time_for(61, 60)
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    "outcome, status, ended",
    [
        (0, 0, True),
        (Refusal("write 2"), 2, True),
        (ValueError("before there is a process group"), 2, True),
        (Poisoned("gone back 2 times"), 3, True),
        (KeyboardInterrupt(), 130, True),
        (OSError(28, "No space left on device"), 1, False),
        (OtherRankFailed("rank 1 ends in step 3"), 1, False),
        (RuntimeError("a mistake of ours"), 1, False),
    ],
)
def test_the_launcher_sees_that_another_start_is_of_no_use(
    tmp_path, monkeypatch, outcome, status, ended
):
    monkeypatch.setenv("TITAN_SPARSE_ENDED", str(tmp_path / "ended"))
    (tmp_path / "ended").touch()  # of an earlier start by the same torchrun

    def run(words: list[str]) -> int:
        assert not (tmp_path / "ended").exists()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(train, "_run", run)
    assert train.main([]) == status
    assert (tmp_path / "ended").exists() == ended


@pytest.mark.parametrize("program", [STUCK, LATE], ids=["later", "before"])
@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_rank_ends_with_its_torchrun_but_not_with_a_shell(under_torchrun, program):
    """The launcher dies before or after the rank has said that it ends with it."""
    parent, line = _start(PARENT, program, **{"TORCHELASTIC_RUN_ID": "a"} if under_torchrun else {})
    child = int(line)
    parent.kill()
    parent.wait()
    if under_torchrun:
        _wait_for(lambda: has_ended({"machine": machine(), "process": child}))
    else:
        time.sleep(1.3)
        assert not has_ended({"machine": machine(), "process": child})
        os.kill(child, signal.SIGKILL)


def test_process_1_may_be_torchrun_in_a_container():
    """Then it is the parent of ranks that are no orphans."""
    assert _is_python(os.getpid())
    shell = subprocess.Popen(["sleep", "60"])
    assert not _is_python(shell.pid)
    shell.kill()
    shell.wait()


def _beside_a_dead_peer(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with StopSignals() as signals, Watch(60, signals) as watch:
        watch.step = 1
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "ready").touch()
        store.wait(["never"])  # in C++, for five minutes


def test_a_rank_with_a_dead_peer_leaves_soon_after_sigterm(tmp_path):
    context = forkserver()
    ranks = [context.Process(target=_beside_a_dead_peer, args=(r, tmp_path)) for r in (0, 1)]
    for process in ranks:
        process.start()
    ranks[1].join(60)
    assert ranks[1].exitcode == -signal.SIGKILL
    _wait_for((tmp_path / "ready").exists)
    assert ranks[0].is_alive()
    os.kill(ranks[0].pid, signal.SIGTERM)
    ranks[0].join(8)
    assert ranks[0].exitcode == 1


def test_a_new_timeout_causes_no_warning(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_timeout(30)
    dist.destroy_process_group()


def _beside_a_lost_store(rank: int, folder: Path, port: int) -> None:
    os.environ["MASTER_ADDR"] = "node-a"
    store = dist.TCPStore("127.0.0.1", port, world_size=2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        with Watch(60) as watch:
            watch.step = 7
            dist.barrier()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    except OtherRankFailed as failed:
        (folder / "failed").write_text(str(failed))


def test_a_rank_that_loses_the_host_of_the_store_says_so_without_a_traceback(tmp_path):
    port = free_port()
    context = forkserver()
    ranks = [context.Process(target=_beside_a_lost_store, args=(r, tmp_path, port)) for r in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    wanted = "rank 1 ends in step 7, as it has lost the job's store on host node-a"
    assert (tmp_path / "failed").read_text() == wanted


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


def test_a_rank_that_never_comes_is_named(monkeypatch):
    """Without torchrun, as Slurm starts them: one line, which main() gives to an OSError."""
    port = str(free_port())
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConnectionError, match=f"^rank 1 cannot reach rank 0 at 127.0.0.1:{port}"):
        store_of_this_start(1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TimeoutError, match="^rank 0 has waited 1 s for rank 1 to start"):
        store_of_this_start(1)
