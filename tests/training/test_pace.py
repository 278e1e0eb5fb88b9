"""ETA and speeds: without the first step, which compiles, and without saves."""

import pytest
import torch

from tests.distributed import run_processes
from tests.runs import TINY, metrics_of, tiny_config
from titan_sparse.attention.observe.statistics import Recording
from titan_sparse.training import metrics
from titan_sparse.training.metrics import MetricsLog, eta
from titan_sparse.training.metrics_output import Tracker


@pytest.mark.parametrize(
    "steps, seconds, wanted",
    [
        (0, None, "00:00:00"),
        (5, None, "?"),
        (60, 61.0, "01:01:00"),
        (1000, 180.0, "2 d 02:00:00"),
    ],
)
def test_eta(steps, seconds, wanted):
    assert eta(steps, seconds) == wanted


def _speeds(folder) -> None:
    """A clock of our own: two steps of 1 s, with 30 s of saving and a validation between them."""
    config = tiny_config(folder, "run", training__steps=100, metrics__log_every=2)
    now = [0.0]
    metrics.time.perf_counter = lambda: now[0]
    progress = []
    metrics.logger.info = progress.append
    log = MetricsLog(config, TINY, torch.device("cpu"), writes=True, tracker=Tracker(None))
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
    assert [said.split("ETA ")[1].split()[0] for said in progress[:2]] == ["?", "00:01:38"]


def test_speeds_leave_saves_out(tmp_path):
    run_processes(1, _speeds, tmp_path)
