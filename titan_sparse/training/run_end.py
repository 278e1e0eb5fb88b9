"""The outputs of a finished run to look at: a picture of its loss, and the commands that come
next."""

import logging
import shlex
from pathlib import Path

import torch.distributed as dist

from titan_sparse.config import Config, trains_random_base
from titan_sparse.config.sources import source_formats
from titan_sparse.evaluation.pictures import loss_figure
from titan_sparse.training.metrics_output import read_lines, read_metrics

logger = logging.getLogger("titan_sparse")


def report(config: Config, began_after: int, step: int, stopped: bool) -> None:
    """Log how a run has ended, after `step`. After training.steps, also draw the loss, and log the
    commands that come next.

    began_after: the step that it was resumed at. stopped: by a signal.
    """
    if stopped:
        logger.info("stopped by a signal after step %d", step)
    elif began_after >= config.training.steps:
        logger.info(
            "the run had already finished (training.steps = %d), and its results are in %s. To train "
            "on, write more training.steps. To start anew, write another training.output_dir, or "
            "delete that folder",
            config.training.steps,
            config.training.output_dir,
        )
    else:
        logger.info("finished %d steps", step)
        if dist.get_rank() == 0:
            _show_results(config)


def _show_results(config: Config) -> None:
    if config.metrics.tensorboard:
        logger.info("wrote %s, a picture of the loss", draw_loss(config.training.output_dir))
    commands = next_commands(config)
    if commands:
        logger.info("\n  ".join(["what you can do next:", *commands]))


def draw_loss(folder: str) -> Path:
    """Write loss.png into a run's output_dir, of all steps that were logged there. Returns its path."""
    steps = {step: line["loss"] for step, line in sorted(read_metrics(folder).items())}
    validated = {}
    path = Path(folder, "validation.jsonl")
    if path.is_file():
        validated = {line["step"]: line["loss"] for line in read_lines(path)}
    picture = Path(folder, "loss.png")
    loss_figure(steps, dict(sorted(validated.items()))).savefig(picture, dpi=120)
    return picture


def next_commands(config: Config) -> list[str]:
    """The commands that a finished run of this configuration is good for."""
    run = config.training.output_dir
    commands = []
    if config.metrics.tensorboard:
        commands.append(["tensorboard", "--logdir", run])
    if config.checkpoint.enable:
        evaluate = ["titan-sparse", "evaluate", "--config", f"{run}/config.toml"]
        evaluate += ["--checkpoint", run, "--tasks", "position", "--out", f"{run}/evaluation"]
        parts = list(source_formats(config.data).items())
        if len(parts) > 1:
            # It reads one source.
            evaluate += ["--data.source", parts[0][0], "--data.format", parts[0][1]]
        commands.append(evaluate)
        # What adapters of random weights are made for is in no folder.
        if not (config.lora.rank and trains_random_base(config)):
            commands.append(["titan-sparse", "export_hf", run, f"{run}/exported"])
    return [shlex.join(words) for words in commands]
