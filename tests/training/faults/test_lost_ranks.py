"""Dead, stuck, or failing ranks are named. Ranks lose a peer or their launcher,
or are asked to stop."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import forkserver, on_ranks
from tests.faults.jobs import SETTINGS, free_port, run_job
from tests.faults.planted import Faults
from titan_sparse.commands import train
from titan_sparse.config import Refusal
from titan_sparse.config.reading import as_words
from titan_sparse.training.faults import heartbeat
from titan_sparse.training.faults.heartbeat import Watch, culprits, has_ended, machine
from titan_sparse.training.faults.launcher import OtherRankFailed, Poisoned, StopSignals, _is_python
from titan_sparse.training.faults.process_groups import (
    agree_on_name,
    set_timeout,
    store_of_this_start,
)


def test_a_rank_that_sleeps_is_named_before_the_timeout(texts, tmp_path):
    """It is rank 0, which keeps the store, as no torchrun does."""
    # At 3 s a busy machine's pause of 0.6 s is silence.
    settings = {"parallelism.cp": 2, "parallelism.timeout_seconds": 12, "training.steps": 4}
    paths = {"data.source": tmp_path / "texts", "training.output_dir": tmp_path / "run"}
    words = as_words(SETTINGS | settings | paths)
    faults = Faults(rank=0, code="import time; time.sleep(1e6)")
    status, output = run_job(words, tmp_path / "output", ranks=2, faults=faults)
    assert status == 1
    place = "at <string>:1 in <module>"
    named = rf"rank 0 \(host \S+, process \d+\) holds up the others in step 3, {place}; stacks"
    said = r"nothing has moved for \d+ s, collectives fail after 12 s: "
    assert re.search(said + named, output), output
    assert not re.search(r"rank 1 .* has given no sign of life", output)
    assert not re.search(r"rank 1 \(host .* holds up", output)
    assert re.search(rf"rank 0 is stuck {place}", output)
    [stacks] = tmp_path.glob("run/starts/*/step-3")
    assert f"; stacks of all ranks: {stacks}" in output
    texts = [(stacks / f"stacks_rank_{rank}.txt").read_text() for rank in range(2)]
    assert "in planted_forward_backward" in texts[0] and all("in step" in text for text in texts)


def _note_lines() -> list[str]:
    """What is logged as an error from here on."""
    lines: list[str] = []
    heartbeat.logger.error = lambda text, *args: lines.append(text % args)
    return lines


@pytest.mark.faults
@on_ranks(3)
def test_a_failing_rank_is_named():
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    lines, rank = _note_lines(), dist.get_rank()
    watch = Watch(timeout_seconds=8)
    with pytest.raises(RuntimeError), watch:
        watch.step = 4
        dist.all_reduce(torch.zeros(1))
        if rank == 1:
            raise RuntimeError("out of\nmemory")
        dist.recv(torch.zeros(1), src=1)  # in vain
    place = (
        r"at test_lost_ranks.py:\d+ in test_a_failing_rank_is_named: RuntimeError: out of memory"
    )
    wanted = rf"rank 1 \(host \S+, process \d+\) failed in step 4, {place}"
    assert len(lines) == (rank == 1), lines
    assert all(re.fullmatch(wanted, line) for line in lines), lines


@on_ranks(3)
def test_a_collective_that_times_out_silently_ends_all():
    """As with NCCL, where the timeout raises nothing on the waiting ranks: all end. A long step is
    not a failure while no rank waits for another."""
    ended: list[int] = []

    def note_end(watch: Watch, why: str) -> None:
        ended.append(watch.step)
        watch.left = True

    Watch._end = note_end
    for late in (0, 1, 2), (1,):
        with Watch(timeout_seconds=1.5) as watch:
            watch.step = len(late)
            time.sleep(3.2 if dist.get_rank() in late else 0)
            dist.all_reduce(torch.zeros(1))
    assert ended == [1], ended


@on_ranks(3)
def test_a_rank_that_holds_up_cuda_graphs_is_named_and_all_end():
    """Ranks 0 and 2 wait for their GPUs inside a replay, in code that does not look like waiting.
    No rank has begun more collectives than another."""
    ended: list[int] = []

    def note_end(watch: Watch, why: str) -> None:
        ended.append(watch.rank)
        watch.left = True

    Watch._end = note_end
    lines, rank = _note_lines(), dist.get_rank()
    with Watch(timeout_seconds=1.5, replays=lambda: rank != 1):
        time.sleep(4)
    assert ended == [rank]
    everything: list[list[str]] = [[], [], []]
    dist.all_gather_object(everything, lines)
    stuck = [line for line in sum(everything, []) if line.startswith("nothing has moved")]
    assert len(stuck) == 1 and re.search(r"rank 1 .* holds up the others", stuck[0]), stuck
    assert "rank 0" not in stuck[0] and "rank 2" not in stuck[0], stuck


@on_ranks(3)
def test_nobody_is_accused_without_reason():
    """A rank is late, but within the limit. A second watch does not read the keys of the first."""
    lines = _note_lines()
    for _ in range(2):
        with Watch(timeout_seconds=8) as watch:
            for watch.step in range(1, 3):
                time.sleep(0.2 * dist.get_rank())
                dist.all_reduce(torch.zeros(1))
            time.sleep(0.3 * dist.get_rank())  # leaving early is no death
    assert lines == [], lines


def _status(waits=True, collectives=5) -> dict:
    return {
        "host": "a",
        "process": 7,
        "step": 1,
        "place": "ring.py:1 in forward",
        "waits": waits,
        "collectives": {"world": collectives},
    }


def test_culprits():
    victim, busy, late = _status(), _status(waits=False), _status(collectives=4)
    elsewhere = _status() | {"collectives": {"other": 1}}
    for silent, statuses, wanted in (
        ({2}, (victim, victim, victim), [2]),
        (set(), (victim, busy, victim), [1]),  # in transfers: nobody is behind
        (set(), (victim, late, victim), [1]),  # behind, though it waits
        (set(), (busy, late | {"waits": False}, victim), [1]),  # behind counts more than busy
        (set(), (victim, late, busy), [2]),  # who is behind waits for who is busy
        (set(), (victim, elsewhere), []),  # in different groups
    ):
        assert culprits(dict(enumerate(statuses)), silent) == wanted


ROOT = Path(__file__).parents[3]

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


def _start_two(target: Callable, *arguments: object) -> list[BaseProcess]:
    """Two processes of target(rank, *arguments)."""
    context = forkserver()
    ranks = [context.Process(target=target, args=(rank, *arguments)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    return ranks


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
    ranks = _start_two(_beside_a_dead_peer, tmp_path)
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
    for process in _start_two(_beside_a_lost_store, tmp_path, free_port()):
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
