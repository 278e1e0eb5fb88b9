"""What a start says that goes on from a checkpoint: every key that it changes, and a learning rate
that jumps."""

import logging
from operator import attrgetter

import torch

from titan_sparse.config import Config
from titan_sparse.config.changes import Saved, changes, saved_config
from titan_sparse.config.reading import show
from titan_sparse.training.optimizer import build_schedule

logger = logging.getLogger("titan_sparse")

_SCHEDULE_KEYS = (
    "optimizer.lr",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.decay_type",
    "lr_scheduler.min_lr_factor",
)
"""What decides over the learning rate besides the number of steps."""


def report_changes(saved: Saved, config: Config, step: int) -> None:
    """Log what differs from the start that saved the checkpoint of `step`. For one rank."""
    for change in changes(saved, config):
        logger.info("changed since the checkpoint: %s", change)
    warning = schedule_warning(saved_config(saved), config, step)
    if warning:
        logger.warning(warning)


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of the update that follows `step` updates."""
    placeholder = torch.optim.SGD([torch.zeros(1)], lr=config.optimizer.lr)
    schedule = build_schedule([placeholder], config.lr_scheduler, config.training.steps)
    return config.optimizer.lr * schedule.schedulers[0].lr_lambdas[0](step)


def schedule_warning(saved: Config, config: Config, step: int) -> str:
    """One line, if the learning rate jumps where `config` takes over from `saved`, else "".

    It names both learning rates, and what to write for the old ones.
    """
    before = learning_rate(saved, step)
    now = learning_rate(config, step)
    if now == before:
        return ""
    instead = []
    old_total = saved.lr_scheduler.total_steps or saved.training.steps
    if old_total != (config.lr_scheduler.total_steps or config.training.steps):
        instead.append(f"lr_scheduler.total_steps = {old_total}")
    for key in _SCHEDULE_KEYS:
        old = attrgetter(key)(saved)
        if old != attrgetter(key)(config):
            instead.append(f"{key} = {show(old)}")
    return (
        f"the learning rate of step {step + 1} is {now:.3g} under the schedule as it is written now "
        f"and was {before:.3g} under that of the checkpoint; {' and '.join(instead)} keeps the old "
        "schedule"
    )
