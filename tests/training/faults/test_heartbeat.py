"""Jobs that hang: a dead, stuck or failing rank is named before the job ends."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed import on_ranks
from tests.faults.jobs import SETTINGS, run_job, words_of
from tests.faults.planted import Faults
from titan_sparse.training.faults import heartbeat
from titan_sparse.training.faults.heartbeat import Watch, culprits


def test_a_rank_that_sleeps_is_named_before_the_timeout(texts, tmp_path):
    """It is rank 0, which keeps the store, as no torchrun does."""
    # At 3 s a busy machine's pause of 0.6 s is silence.
    settings = {"parallelism.cp": 2, "parallelism.timeout_seconds": 12, "training.steps": 4}
    paths = {"data.source": tmp_path / "texts", "training.output_dir": tmp_path / "run"}
    words = words_of(SETTINGS | settings | paths)
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
def test_a_rank_that_fails_by_itself_is_named():
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    lines, rank = _note_lines(), dist.get_rank()
    watch = Watch(timeout_seconds=8)
    with pytest.raises(RuntimeError), watch:
        watch.step = 4
        dist.all_reduce(torch.zeros(1))
        if rank == 1:
            raise RuntimeError("out of\nmemory")
        dist.recv(torch.zeros(1), src=1)  # in vain
    place = r"at test_heartbeat.py:\d+ in test_a_rank_that_fails_by_itself_is_named: RuntimeError: out of memory"
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
