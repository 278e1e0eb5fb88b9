"""Timeouts of collectives: long for the first step and while saving, short otherwise."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed import run_processes
from tests.runs import tiny_config, write_texts
from titan_sparse.config import Config
from titan_sparse.trainer import Trainer


def _timeouts() -> dict[str, float]:
    """Seconds, by group."""
    groups = list(dist.distributed_c10d._world.pg_map)
    timeouts = {}
    for group in groups:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        timeouts[f"{group.group_desc} {group.group_name}"] = timeout.total_seconds()
    return timeouts


def _check_timeouts(folder: Path) -> None:
    for async_mode in ("disabled", "async"):
        config = tiny_config(
            folder,
            async_mode,
            parallelism__cp=2,
            parallelism__first_step_timeout_seconds=60,
            parallelism__timeout_seconds=2,
            checkpoint__enable=True,
            checkpoint__interval=2,
            checkpoint__async_mode=async_mode,
            training__steps=3,
        )
        seen, background = _train_dawdling(config, seconds=3 if async_mode == "disabled" else 0)
        assert set(seen) == {"step 1", "step 2", "step 3", "save 2", "save 3"}
        for when, timeouts in seen.items():
            assert {"cp", "cp verticals", "cp inner", "cp inner_gradient"} <= {
                name.rpartition(" ")[0] for name in timeouts
            }
            for name, seconds in timeouts.items():
                short = when in ("step 2", "step 3") and name.split()[-1] not in background
                assert seconds == (2 if short else 60), (when, name, seconds)
        assert len(background) == (async_mode != "disabled")


def _train_dawdling(config: Config, seconds: float) -> tuple[dict, list[str]]:
    """Rank 1 is late where that is allowed, in the first step and after a save.

    Returns the timeouts of all groups at each step and save, and the names of the groups that talk
    in the background.
    """
    trainer = Trainer(config)
    forward, save, seen = trainer.model.forward, trainer.checkpointer.save, {}
    late = seconds if dist.get_rank() == 1 else 0

    def late_forward(*args):
        seen[f"step {trainer.progress.step + 1}"] = _timeouts()
        time.sleep(late if trainer.progress.step == 0 else 0)
        return forward(*args)

    def late_save(*args):
        seen[f"save {trainer.progress.step}"] = _timeouts()
        seconds = save(*args)
        time.sleep(late if trainer.progress.step == 2 else 0)
        return seconds

    trainer.model.forward, trainer.checkpointer.save = late_forward, late_save
    trainer.train()
    return seen, [group.group_name for group in trainer.checkpointer.background_groups()]


def test_long_for_the_first_step_and_saves_else_short(tmp_path):
    write_texts(tmp_path / "texts")
    run_processes(2, _check_timeouts, tmp_path)
