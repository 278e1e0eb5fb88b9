"""Two ranks: a stop signal in the middle of a step of many micro-batches, which is left out and
nothing is lost; and timeouts, which are long for the first step and while saving."""

import contextlib
import io
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import metrics_of, tiny_config, write_texts
from titan_sparse.config import Config
from titan_sparse.trainer import Trainer

MICRO_BATCHES = 6
SECONDS = 0.3


def _config(folder: Path, output: str) -> Config:
    return tiny_config(
        folder,
        output,
        parallelism__cp=2,
        attention__pattern="dense",
        training__steps=3,
        training__seq_len=64,
        training__gradient_accumulation_steps=MICRO_BATCHES,
        training__stop_grace_seconds=1,
        checkpoint__enable=True,
        checkpoint__interval=100,
    )


def _train(config: Config, stop_in: int = 0) -> int:
    """With slow micro-batches in step `stop_in`, in whose third one rank 1 gets a SIGTERM. Returns
    the last step."""
    trainer = Trainer(config)
    forward_backward, counts = trainer._forward_backward, {}

    def slow(*args):
        step = trainer.progress.step + 1
        counts[step] = counts.get(step, 0) + 1
        if step == stop_in:
            time.sleep(SECONDS)
            if counts[step] == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(*args)

    trainer._forward_backward = slow
    trainer.train()
    dist.barrier()
    return trainer.progress.step


def _losses(config: Config) -> dict[int, tuple]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in metrics_of(config)}


def _stop_and_resume(folder: Path) -> None:
    whole, stopped = _config(folder, "whole"), _config(folder, "stopped")
    _train(whole)
    assert _train(stopped, stop_in=2) == 1
    assert [path.name for path in (folder / "stopped/checkpoint").glob("step-*")] == ["step-1"]
    assert max(_losses(stopped)) == 1
    assert _train(stopped) == 3
    assert _losses(stopped) == _losses(whole)


def test_a_step_is_left_out_and_a_resume_loses_nothing(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _stop_and_resume, tmp_path)


def _timeouts() -> dict[str, float]:
    """Seconds, by group."""
    timeouts = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        timeouts[f"{group.group_desc} {group.group_name}"] = timeout.total_seconds()
    return timeouts


def _check_timeouts(folder: Path) -> None:
    """Rank 1 is late where that is allowed, in the first step and after a save."""
    config = tiny_config(
        folder,
        "run",
        parallelism__cp=2,
        parallelism__first_step_timeout_seconds=60,
        parallelism__timeout_seconds=1,
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__async_mode="async",
        training__steps=3,
    )
    trainer = Trainer(config)
    forward, save, seen = trainer.model.forward, trainer.checkpointer.save, {}
    late = 1.2 * dist.get_rank()

    def late_forward(*args):
        seen[f"step {trainer.progress.step + 1}"] = _timeouts()
        time.sleep(late if trainer.progress.step == 0 else 0)
        return forward(*args)

    def late_save(step: int):
        seen[f"save {step}"] = _timeouts()
        seconds = save(step)
        time.sleep(late if step == 2 else 0)
        return seconds

    trainer.model.forward, trainer.checkpointer.save = late_forward, late_save
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    # The banner is there once.
    assert ("expect a peak of" in printed.getvalue()) == (dist.get_rank() == 0)
    assert set(seen) == {"step 1", "step 2", "step 3", "save 2", "save 3"}
    for when, timeouts in seen.items():
        groups = {name.rpartition(" ")[0] for name in timeouts}
        assert groups >= {"cp", "cp verticals", "cp inner", "cp inner_gradient"}
        for name, seconds in timeouts.items():
            is_background = name.split()[-1] == trainer.checkpointer.group.group_name
            is_short = when in ("step 2", "step 3") and not is_background
            assert seconds == (1 if is_short else 60), (when, name, seconds)


def test_timeouts_are_long_for_the_first_step_and_saves_else_short(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _check_timeouts, tmp_path)
