"""Two ranks: a stop signal in the middle of a step of many micro-batches, which is left out or
finished and nothing is lost; and timeouts, which are long for the first step and while saving."""

import contextlib
import io
import os
import signal
import time
from pathlib import Path

import pytest
import torch
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
        attention__pattern="dense",
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

    # Nothing was finished since the start: nothing is saved.
    assert _train(_config(folder, "at_once", 0), stop_in=1)[0] == 0
    assert not list((folder / "at_once/checkpoint").glob("step-*"))


@pytest.mark.parametrize(
    ("grace", "wanted_step"), [(1, 2), pytest.param(60, 3, marks=pytest.mark.slow)]
)
def test_a_step_is_left_out_or_finished_and_a_resume_loses_nothing(tmp_path, grace, wanted_step):
    write_texts(tmp_path / "texts")
    run_processes(2, _stop_and_resume, tmp_path, grace, wanted_step)


def _timeouts() -> dict[str, float]:
    """Seconds, by group."""
    timeouts = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        timeouts[f"{group.group_desc} {group.group_name}"] = timeout.total_seconds()
    return timeouts


def _check_timeouts(folder: Path) -> None:
    """Rank 1 is late where that is allowed, in the first step and after a save."""
    for async_mode in ("disabled", "async"):
        config = tiny_config(
            folder,
            async_mode,
            parallelism__cp=2,
            parallelism__first_step_timeout_seconds=60,
            parallelism__timeout_seconds=1,
            checkpoint__enable=True,
            checkpoint__interval=2,
            checkpoint__async_mode=async_mode,
            training__steps=3,
        )
        trainer = Trainer(config)
        forward, save, seen = trainer.model.forward, trainer.checkpointer.save, {}
        late = 1.5 if dist.get_rank() == 1 and async_mode == "disabled" else 0

        def late_forward(*args, trainer=trainer, forward=forward, seen=seen, late=late):
            seen[f"step {trainer.progress.step + 1}"] = _timeouts()
            time.sleep(late if trainer.progress.step == 0 else 0)
            return forward(*args)

        def late_save(step: int, save=save, seen=seen, late=late):
            seen[f"save {step}"] = _timeouts()
            seconds = save(step)
            time.sleep(late if step == 2 else 0)
            return seconds

        trainer.model.forward, trainer.checkpointer.save = late_forward, late_save
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer.train()
        # The banner is there once.
        assert ("expect a peak of" in printed.getvalue()) == (dist.get_rank() == 0)
        background = getattr(trainer.checkpointer.group, "group_name", None)
        assert (background is None) == (async_mode == "disabled")
        assert set(seen) == {"step 1", "step 2", "step 3", "save 2", "save 3"}
        for when, timeouts in seen.items():
            groups = {name.rpartition(" ")[0] for name in timeouts}
            assert groups >= {"cp", "cp verticals", "cp inner", "cp inner_gradient"}
            for name, seconds in timeouts.items():
                is_short = when in ("step 2", "step 3") and name.split()[-1] != background
                assert seconds == (1 if is_short else 60), (when, name, seconds)


def test_timeouts_are_long_for_the_first_step_and_saves_else_short(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _check_timeouts, tmp_path)
