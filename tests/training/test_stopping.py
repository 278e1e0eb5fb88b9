"""A stop signal in the middle of a step of many micro-batches: left out or finished, nothing lost."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, write_texts
from titan_sparse.config import Config
from titan_sparse.trainer import Trainer

MICRO_BATCHES = 8
SECONDS = 0.25


def _config(folder: Path, output: str, grace: int) -> Config:
    return tiny_config(
        folder,
        output,
        parallelism__cp=2,
        training__steps=4,
        training__seq_len=64,
        training__gradient_accumulation_steps=MICRO_BATCHES,
        training__stop_grace_seconds=grace,
        checkpoint__enable=True,
        checkpoint__interval=100,
    )


def _train(config: Config, stop_in: int = 0) -> tuple[int, float]:
    """With slow micro-batches in step `stop_in`, in whose third one rank 1 gets a SIGTERM.

    Returns the last step, and the seconds from the signal to the end.
    """
    trainer = Trainer(config)
    forward_backward, counts, signalled = trainer._forward_backward, {}, [time.monotonic()]

    def slow(*args):
        step = trainer.progress.step + 1
        counts[step] = counts.get(step, 0) + 1
        if step == stop_in:
            time.sleep(SECONDS)
            if counts[step] == 3:
                signalled.append(time.monotonic())
                if dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(*args)

    trainer._forward_backward = slow
    trainer.train()
    seconds = time.monotonic() - signalled[-1]
    dist.barrier()
    return trainer.progress.step, seconds


def _losses(config: Config) -> dict[int, tuple]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in metrics_of(config)}


def _stop_and_resume(folder: Path, grace: int, wanted_step: int) -> None:
    whole = _config(folder, "whole", grace)
    _train(whole)
    stopped = _config(folder, "stopped", grace)
    step, seconds = _train(stopped, stop_in=3)
    assert step == wanted_step
    assert seconds < (MICRO_BATCHES - 3) * SECONDS or wanted_step == 3, seconds
    saved = sorted(path.name for path in (folder / "stopped/checkpoint").glob("step-*"))
    assert saved == [f"step-{wanted_step}"]
    assert max(_losses(stopped)) == wanted_step
    assert _train(stopped)[0] == 4
    assert _losses(stopped) == _losses(whole)


@pytest.mark.parametrize(
    ("grace", "wanted_step"), [(1, 2), pytest.param(60, 3, marks=pytest.mark.slow)]
)
def test_a_step_is_left_out_or_finished_and_a_resume_loses_nothing(tmp_path, grace, wanted_step):
    write_texts(tmp_path / "texts")
    run_processes(2, _stop_and_resume, tmp_path, grace, wanted_step)


def _stop_at_once(folder: Path) -> None:
    """Nothing was finished since the start: nothing is saved, and the checkpoint is not replaced."""
    config = _config(folder, "run", 0)
    assert _train(config, stop_in=1)[0] == 0
    assert not list((folder / "run/checkpoint").glob("step-*"))


def test_a_stop_in_the_first_step_saves_nothing(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _stop_at_once, tmp_path)
