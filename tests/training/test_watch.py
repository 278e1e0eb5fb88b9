"""Jobs that hang: a dead, stuck or failing rank is named before the job ends."""

import logging
import os
import re
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_processes, torchrun
from tests.runs import write_texts
from titan_sparse.training.heartbeat import Watch, culprits, describe

ROOT = Path(__file__).parents[2]

# train.py, but for what one rank does in the third step.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from titan_sparse.trainer import Trainer
from titan_sparse import train

forward_backward = Trainer._forward_backward

def hold_up(*_):
    Path(sys.argv[0]).with_suffix(".hit").write_text(str(time.time()))
    {action}

def forward_backward_or_not(self, *args):
    third = self.progress.step == 2 and os.environ["RANK"] == "{rank}"
    return hold_up() if third else forward_backward(self, *args)

Path(sys.argv[0]).with_name("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
Trainer._forward_backward = forward_backward_or_not
sys.exit(train.main())
"""


def run_until_it_ends(
    folder: Path, processes: int, rank: int, action: str, options: dict
) -> tuple[str, float]:
    """What torchrun over so many ranks prints, and the seconds from the third step of `rank` to the end
    of all processes."""
    (folder / "job.py").write_text(SCRIPT.format(rank=rank, action=action))
    options = {"training.output_dir": folder / "run", "metrics.tensorboard": "false"} | options
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    path = filter(None, [os.environ.get("PYTHONPATH")])
    result = subprocess.run(
        torchrun(processes, folder / "job.py", *words),
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *path]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert result.returncode != 0 and (folder / "job.hit").is_file(), result.stdout
    seconds = time.time() - float((folder / "job.hit").read_text())
    for number in range(processes):
        assert not Path(f"/proc/{(folder / f'pid{number}').read_text()}").exists(), (
            f"rank {number} outlived its job"
        )
    return result.stdout, seconds


def _run_until_it_ends(folder: Path, rank: int, action: str) -> tuple[str, float]:
    """As above: three ranks on the CPU."""
    write_texts(folder / "texts")
    return run_until_it_ends(
        folder,
        3,
        rank,
        action,
        {
            "data.source": folder / "texts",
            "training.seq_len": 192,
            "training.device": "cpu",
            "training.dtype": "float32",
            "attention.block_size": 16,
            "parallelism.cp": 3,
            "parallelism.timeout_seconds": 10,
            "lr_scheduler.warmup_steps": 1,
        },
    )


@pytest.mark.faults
def test_a_killed_rank_is_named(tmp_path):
    output, seconds = _run_until_it_ends(
        tmp_path, 1, "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    named = r"rank 1 \(host \S+, process \d+\) has given no sign of life, last seen in step 3, at "
    assert re.search(named, output), output
    assert not re.search(r"rank [02] .* has given no sign of life", output)
    assert seconds < 20


def test_a_rank_that_sleeps_is_named_before_the_timeout(tmp_path):
    output, seconds = _run_until_it_ends(tmp_path, 2, "time.sleep(1e6)")
    named = r"rank 2 \(host \S+, process \d+\) holds up the others in step 3, at job.py:\d+ in hold_up; rank"
    assert re.search(
        r"nothing has moved for \d+ s, collectives fail after 10 s: " + named, output
    ), output
    # The sleeping rank itself may be silent too, on a busy machine.
    assert not re.search(r"rank [01] .* has given no sign of life", output)
    assert not re.search(r"rank [01] \(host .* holds up", output)
    assert "rank 2 is stuck at job.py" in output
    [stacks] = tmp_path.glob("run/starts/*/step-3")
    assert f"; stacks of all ranks: {stacks}" in output
    texts = [(stacks / f"stacks_rank_{rank}.txt").read_text() for rank in range(3)]
    assert "in hold_up" in texts[2] and all("in step" in text for text in texts)
    assert seconds < 30


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("titan_sparse").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _check_failure() -> None:
    log, rank = _Lines(), dist.get_rank()
    watch = Watch(timeout_seconds=8)
    with pytest.raises(RuntimeError), watch:
        watch.step = 4
        dist.all_reduce(torch.zeros(1))
        if rank == 1:
            raise RuntimeError("out of\nmemory")
        dist.recv(torch.zeros(1), src=1)  # in vain
    place = r"at test_watch.py:\d+ in _check_failure: RuntimeError: out of memory"
    wanted = rf"rank 1 \(host \S+, process \d+\) failed in step 4, {place}"
    assert len(log.lines) == (rank == 1) and all(
        re.fullmatch(wanted, line) for line in log.lines
    ), log.lines


@pytest.mark.faults
def test_a_rank_that_fails_by_itself_is_named():
    run_processes(3, _check_failure_with_short_timeout)


def _check_failure_with_short_timeout() -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    _check_failure()


def _check_timeout() -> None:
    """As with NCCL, where the timeout raises nothing on the waiting ranks: all end. A long step is
    not a failure while no rank waits for another.
    """
    ended: list[int] = []

    def note_end(watch: Watch, why: str) -> None:
        ended.append(watch.step)
        watch.left = True

    Watch._end = note_end
    for late in (0, 1, 2), (1,):
        with Watch(timeout_seconds=2) as watch:
            watch.step = len(late)
            time.sleep(4.5 if dist.get_rank() in late else 0)
            dist.all_reduce(torch.zeros(1))
    assert ended == [1], ended


def test_a_collective_that_times_out_silently_ends_all():
    run_processes(3, _check_timeout)


def _check_quiet() -> None:
    """A rank is late, but within the limit: no rank is blamed. A second watch does not read the
    keys of the first.
    """
    log = _Lines()
    for _ in range(2):
        with Watch(timeout_seconds=8) as watch:
            for watch.step in range(1, 4):
                time.sleep(0.4 * dist.get_rank())
                dist.all_reduce(torch.zeros(1))
            time.sleep(dist.get_rank())  # leaving early is no death
    assert log.lines == [], log.lines


def test_nobody_is_accused_without_reason():
    run_processes(3, _check_quiet)


def _status(step=1, waits=True, collectives=5, place="ring.py:1 in forward") -> dict:
    return {
        "host": "a",
        "process": 7,
        "step": step,
        "place": place,
        "waits": waits,
        "collectives": {"world": collectives},
    }


def test_culprits():
    victim, busy, late = (
        _status(),
        _status(waits=False, place="x.py:3 in f"),
        _status(collectives=4),
    )
    assert culprits({0: victim, 1: victim, 2: victim}, {2}) == [2]
    assert culprits({0: victim, 1: busy, 2: victim}, set()) == [1]  # in transfers: nobody is behind
    assert culprits({0: victim, 1: late, 2: victim}, set()) == [1]  # behind, though it waits
    assert culprits({0: busy, 1: late | {"waits": False}, 2: victim}, set()) == [
        1
    ]  # behind counts more than busy
    assert culprits({0: victim, 1: late, 2: busy}, set()) == [
        2
    ]  # who is behind waits for who is busy
    assert (
        culprits({0: victim, 1: _status() | {"collectives": {"other": 1}}}, set()) == []
    )  # in different groups


def test_description_is_one_short_line_for_many_ranks():
    statuses = {rank: _status() for rank in range(1000)} | {
        999: _status(3, False, place="a.py:1 in b")
    }
    line = describe(statuses, set())
    assert line == (
        "rank 999 (host a, process 7) holds up the others in step 3, at a.py:1 in b; "
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 ... at ring.py:1 in forward"
    )
    assert len(describe(statuses, set(range(1000)))) < 2000
