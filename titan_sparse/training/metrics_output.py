"""Outputs for the metrics of a run: files of JSON lines, TensorBoard, and Weights & Biases. Loads
no torch.

A file of JSON lines has one object a line. Each line is written as a whole or not at all.
TensorBoard sorts sections and what is in them by their letters, capitals first, and opens the first
two. So the loss is in a section with a capital. Weights & Biases follows its environment variables:
WANDB_PROJECT, WANDB_NAME, WANDB_MODE=offline, ...
"""

import dataclasses
import errno
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_sparse.config import Config
from titan_sparse.config.start import is_first_rank
from titan_sparse.options.values import one_line

if TYPE_CHECKING:
    import wandb

_END = 1 << 24
"""Bytes that are read in search of the last line."""

_SECTIONS = {
    "memory": "memory_",
    "attention": "density|sparse_tokens|recall|heads_capped|capped|blocks_per_query|verticals",
    "speed": "tokens_per_second|step_seconds|save_seconds|mfu|dense_equivalent",
    "comm": "cp_|exposed_communication|worker_imbalance",
}
"""Section of TensorBoard -> how its fields of metrics.jsonl begin."""

RUN_ID = "wandb_run_id"
"""File in the run folder. A resumed run goes on under the same name there."""


class JsonLines:
    """A file that lines are added to. What a process that was killed left of a line is cut off.

    Raises OSError, naming the file, also for a link, which might have been put there to have
    its target overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self.descriptor = os.open(self.path, flags, 0o666)
        size = os.fstat(self.descriptor).st_size
        # The end is enough: the lines of a long run are hundreds of megabytes.
        end = os.pread(self.descriptor, _END, max(0, size - _END))
        last = end.rpartition(b"\n")[2]
        if last and _parsed(last) is None:
            os.ftruncate(self.descriptor, size - len(last))
        elif last:
            os.write(self.descriptor, b"\n")

    def write(self, record: dict[str, Any]) -> None:
        """Add a line, in one write. Raises OSError, naming the file, where it does not fit; the
        file is as it was then."""
        line = (json.dumps(record) + "\n").encode()
        size = os.fstat(self.descriptor).st_size
        try:
            written = os.write(self.descriptor, line)
        except OSError as error:
            raise OSError(error.errno, f"cannot write: {error.strerror}", self.path) from error
        if written < len(line):
            os.ftruncate(self.descriptor, size)
            said = f"only {written} of a line's {len(line)} bytes fit, the disk is full"
            raise OSError(errno.ENOSPC, said, self.path)

    def close(self) -> None:
        os.close(self.descriptor)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line. A last line that is cut short is left out. Raises
    ValueError for another line that is not an object."""
    objects = [_parsed(line) for line in Path(path).read_bytes().split(b"\n")]
    # What follows the end of the last line: nothing, or a line whose writer was
    # killed or writes it.
    if objects[-1] is None:
        objects.pop()
    if None in objects:
        raise ValueError(f"{path}: line {objects.index(None) + 1} is not a JSON object")
    return objects


def read_metrics(run: str | Path) -> dict[int, dict[str, Any]]:
    """The lines of a run's metrics.jsonl by step. Of a step that is there twice, the run has gone
    back to a checkpoint: the later line counts, and later steps from before are left out.

    run: an output_dir or the file. Raises ValueError, one line, if there is no such file or a line
    is not a step's metrics.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{run} is neither a run's output_dir with metrics.jsonl nor such a file; "
            "write one of them"
        )
    found: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(read_lines(path), 1):
        step = line.get("step")
        if type(step) is not int:
            raise ValueError(f"{path}: line {number} does not hold a step's metrics")
        if step in found:
            found = {before: found[before] for before in found if before < step}
        found[step] = line
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def tag(field: str) -> str:
    """The tag of a field of metrics.jsonl. A field of no other section is one of training."""
    sections = (section for section, begin in _SECTIONS.items() if re.match(begin, field))
    return f"{next(sections, 'Train')}/{field}"


def open_wandb(config: Config) -> "wandb.Run | None":
    """The run of metrics.trackers; None on other ranks than the first, and without trackers.

    Call it before any process group. Raises ValueError, one line, where wandb cannot begin.
    """
    if config.metrics.trackers == "none" or not is_first_rank():
        return None
    # Only where asked for: it is optional.
    import wandb

    folder = Path(config.training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / RUN_ID
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "titan_sparse"),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=folder,
            config=dataclasses.asdict(config),
            # A resumed run may have other values, such as more steps.
            allow_val_change=True,
        )
    except (wandb.Error, OSError) as error:
        raise ValueError(
            f'metrics.trackers = "wandb": {one_line(error)}; set WANDB_MODE=offline, or write '
            'metrics.trackers = "none"'
        ) from error
    # Steps are ours: a run that goes back to a checkpoint writes some of them again.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
