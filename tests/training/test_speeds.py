"""Speeds and the ETA of a log, with a clock of our own."""

import pytest
import torch

from tests.distributed import run_processes
from tests.runs import TINY, metrics_of, tiny_config
from titan_sparse.attention.observe import Recording
from titan_sparse.training import metrics
from titan_sparse.training.metrics import MetricsLog


def _speeds(folder) -> None:
    """A clock of our own: two steps of 1 s, with 30 s of saving and a validation between them."""
    config = tiny_config(folder, "run", training__steps=100, metrics__log_every=2)
    now = [0.0]
    metrics.time.perf_counter = lambda: now[0]
    progress = []
    metrics.logger.info = progress.append
    log = MetricsLog(config, TINY, torch.device("cpu"))
    values = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
    nothing = Recording()
    nothing.visited, nothing.visible = [torch.ones(4)], [torch.ones(())]

    def step(number: int) -> None:
        now[0] += 1
        log.count(1000)
        if log.should_log(number):
            log.log(number, 0, values, nothing, 10.0)

    for number in (1, 2, 3):
        step(number)
    now[0] += 30
    log.leave_out(30.0)
    step(4)
    now[0] += 20
    log.leave_out(20.0)
    now[0] += 7
    log.start_interval()
    step(5)
    step(6)
    log.close()
    lines = {line["step"]: line for line in metrics_of(config)}
    for line in lines.values():
        assert line["tokens_per_second_per_device"] == pytest.approx(1000)
        assert line["step_seconds"] == pytest.approx(1)
    assert [lines[n].get("save_seconds") for n in (1, 2, 4, 6)] == [None, None, 30, 20]
    assert [said.split("ETA ")[1].split()[0] for said in progress[:2]] == ["?", "0:01:38"]


def test_speeds_leave_saves_out(tmp_path):
    run_processes(1, _speeds, tmp_path)


def _etas(folder) -> None:
    """A clock of our own, and the ETA of each step."""
    config = tiny_config(folder, "run", training__steps=1000, metrics__log_every=1)
    now = [0.0]
    metrics.time.perf_counter = lambda: now[0]
    etas = []
    metrics.logger.info = lambda line: etas.append(line.split("ETA ")[1].split()[0])
    log = MetricsLog(config, TINY, torch.device("cpu"))
    nothing = Recording()
    nothing.visited, nothing.visible = [torch.ones(4)], [torch.ones(())]

    def steps(first: int, *seconds: float) -> None:
        for step, took in enumerate(seconds, first):
            now[0] += took
            log.count(1000)
            log.log(step, 0, {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1}, nothing, 10.0)

    # The first step compiles, and the times of the next ones differ.
    steps(1, 600.0, 1.0, 3.0, 0.5)
    assert etas == ["?", "0:16:38", "0:33:14", "0:24:54"]  # 998 x 1, 997 x 2, 996 x 1.5
    now[0] += 500
    log.leave_out(500.0)  # a save
    steps(5, 1.5)
    now[0] += 700
    log.start_interval()  # validation
    steps(6, 1.5)
    assert etas[4:] == ["0:24:52", "0:24:51"]
    # What was measured long ago is forgotten.
    steps(7, *[2.0] * 20)
    assert etas[-1] == "0:32:28"  # 974 x 2
    # Each step counts alike: 19 of 2 s, and 10 of 10 s in one interval.
    for _ in range(9):
        log.count(1000)
    steps(36, 100.0)
    assert etas[-1] == "1:16:27"  # 964 x 138 / 29
    log.close()


def test_the_eta_is_a_mean_over_the_last_intervals(tmp_path):
    run_processes(1, _etas, tmp_path)
