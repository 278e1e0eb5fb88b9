"""metrics.trackers: the metrics of a run at Weights & Biases too, one run of theirs for one of ours.

Environment variables of theirs are followed: WANDB_PROJECT, WANDB_NAME, WANDB_MODE=offline, ...
"""

import dataclasses
import os
import secrets
from pathlib import Path
from typing import Any

from titan_sparse.config import Config

RUN_ID = "wandb_run_id"
"""File in the run folder. A resumed run goes on under the same name there."""


class Tracker:
    """Writes nothing where `run` is None."""

    def __init__(self, run: Any) -> None:
        """run: of wandb.init()."""
        self.run = run
        if run is not None:
            # Steps are ours: a run that goes back to a checkpoint writes some of them again.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")

    def log(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if self.run is not None:
            self.run.log(record)

    def log_validation(self, record: dict[str, Any]) -> None:
        """A line of validation.jsonl: what its tags in TensorBoard say."""
        if self.run is None:
            return
        values = {"step": record["step"]}
        for name in ("loss", "perplexity"):
            values[f"validation/{name}"] = record[name]
        for bucket in record["buckets"]:
            values[f"validation_loss_by_position/{bucket['start']}"] = bucket["loss"]
        for name, value in record.get("needle", {}).items():
            if name != "cells":
                values[f"validation_needle/{name}"] = value
        self.run.log(values)

    def close(self) -> None:
        """Send what is left."""
        if self.run is not None:
            self.run.finish()


def open_tracker(config: Config) -> Tracker:
    """The tracker of metrics.trackers; on other ranks than the first, one that writes nothing.

    Call it before any process group. Raises ValueError, one line, where wandb cannot begin.
    """
    if config.metrics.trackers == "none" or os.environ.get("RANK", "0") != "0":
        return Tracker(None)
    # Only where asked for: it is optional.
    import wandb

    folder = Path(config.training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "titan_sparse"),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=_run_id(folder / RUN_ID),
            resume="allow",
            dir=folder,
        )
        # A resumed run may have other values, such as more steps.
        run.config.update(dataclasses.asdict(config), allow_val_change=True)
    except (wandb.Error, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f'metrics.trackers = "wandb": {reason}; set WANDB_MODE=offline, or write '
            'metrics.trackers = "none"'
        ) from error
    return Tracker(run)


def _run_id(path: Path) -> str:
    if not path.is_file():
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
