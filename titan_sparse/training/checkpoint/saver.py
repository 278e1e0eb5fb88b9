"""Saving: in the foreground, on a thread, or in a process of its own, with the same files.

Ranks tell each other only whether they could write, and how their share can be recognized. What
they wrote goes through the folder, so that a save costs training little however many ranks it has.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex

from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.training.checkpoint.disk import save_bytes
from titan_sparse.training.checkpoint.folders import incomplete_folder, step_folder
from titan_sparse.training.checkpoint.planning import Plan, make_plan
from titan_sparse.training.checkpoint.process import WriterProcess
from titan_sparse.training.checkpoint.staging import Staging
from titan_sparse.training.checkpoint.writer import (
    Save,
    as_bytes,
    begin,
    publish_save,
    write_share,
)

logger = logging.getLogger("titan_sparse")

PINNED = "async_with_pinned_mem"

_FILES_PER_RANK = 4
"""At most; so many threads hash and write."""

_LONG_WAIT_SECONDS = 0.5


class SaveError(OSError):
    """A save that failed: one line for the user. The checkpoints before it are as they were."""


def check_async_mode(section: Checkpoint, device: torch.device) -> None:
    """Raises Refusal for pinned memory without a GPU."""
    if section.enable and section.async_mode == PINNED and device.type != "cuda":
        raise Refusal(
            f'checkpoint.async_mode = "{PINNED}" needs a GPU, training.device is '
            f'{device.type}; write "async"'
        )


class Saver:
    """Saves `folder`/step-N. Every method but wait() is called on all ranks alike.

    last_seconds: from the call of save() to the name step-N, of the last save that got it.
    last_held_seconds: of these, how long training was held up on the host.
    """

    def __init__(
        self, section: Checkpoint, folder: Path, device: torch.device, texts: dict[str, str]
    ):
        self.section = section
        self.folder = folder
        self.device = device
        self.texts = texts
        self.rank = dist.get_rank()
        self.last_seconds: float | None = None
        self.last_held_seconds: float | None = None
        self.plan: Plan | None = None
        self.save_bytes = 0
        self.staging: Staging | None = None
        self.pending: Future[None] | None = None
        self.threads = _threads()
        self.in_background = section.async_mode != "disabled"
        self.group: dist.ProcessGroup | None = None
        self.thread: ThreadPoolExecutor | None = None
        self.process: WriterProcess | None = None
        if self.in_background:
            # Not the world's group, over which training communicates at the same time.
            self.group = dist.new_group(backend="gloo")
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if section.async_mode == PINNED:
            self.process = WriterProcess()

    def prepare(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Plan a save and take the memory for it, so that no save has to. Collective."""
        self.plan = make_plan(tensors, values)
        self.save_bytes = save_bytes(self.plan.tensors.values())
        if not self.in_background:
            return
        if self.staging is not None:
            self.staging.close()
        self.staging = Staging(
            self.plan.tensors, self.device, pinned=self.section.async_mode == PINNED
        )
        if self.process is not None:
            self.process.use_memory(self.staging)

    def save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Save, or begin to. Collective.

        tensors: of model and optimizer; they are copied, and must not change between this and the
        return of before_update(). values: name of a part -> its state, which is taken now.
        Raises SaveError if this save failed, or in the background the one before.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        if waited > _LONG_WAIT_SECONDS:
            logger.warning(
                "waited %.1f s for the save before: checkpoint.interval is shorter than a save",
                waited,
            )
        flat_values, _ = flatten_state_dict(values)
        if self.plan is None or not self.plan.fits(tensors, tuple(flat_values)):
            self.prepare(tensors, values)
        own_values = {index: as_bytes(flat_values[index.fqn]) for index in self.plan.values}
        save = Save(
            incomplete=incomplete_folder(self.folder, step),
            checkpoint=step_folder(self.folder, step),
            texts=self.texts,
            keep=self.section.keep_latest_k,
        )
        if self.thread is None:
            self._write(save, own_values, began)
        else:
            self.staging.begin()
            self.pending = self.thread.submit(self._write, save, own_values, began)
        self.last_held_seconds = time.perf_counter() - began

    def before_update(self) -> None:
        """Call it before the optimizer changes what was given to save()."""
        if self.staging is not None:
            self.staging.before_update()

    def raise_failure(self) -> None:
        """Raises SaveError if the save in the background has failed. Does not wait."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises SaveError if it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then give back thread, process and memory."""
        try:
            self.wait()
        finally:
            if self.thread is not None:
                self.thread.shutdown()
            if self.process is not None:
                self.process.close()
                self.process = None
            if self.staging is not None:
                self.staging.close()
                self.staging = None

    def _write(self, save: Save, values: dict[MetadataIndex, bytes], began: float) -> None:
        """The whole of a save but the plan. Ranks fail together or not at all."""
        try:
            self._agree(save, lambda: self._begin(save))
            share_sums = self._agree(save, lambda: self._write_share(save, values))
            self._agree(save, lambda: self._publish(save, share_sums))
        except SaveError:
            if self.rank == 0:
                shutil.rmtree(save.incomplete, ignore_errors=True)
            raise
        self.last_seconds = time.perf_counter() - began
        logger.info("saved %s in %.1f s", save.checkpoint, self.last_seconds)

    def _begin(self, save: Save) -> None:
        if self.staging is not None:
            self.staging.copy()
        if self.rank == 0:
            begin(save)

    def _write_share(self, save: Save, values: dict[MetadataIndex, bytes]) -> str:
        if self.process is not None:
            return self.process.write_share(save, self.rank, values, self.threads)
        tensors = self.plan.tensors if self.staging is None else self.staging.copies
        return write_share(save, self.rank, tensors, values, self.threads)

    def _publish(self, save: Save, share_sums: list[str]) -> None:
        if self.rank > 0:
            return
        if self.process is not None:
            self.process.publish_save(save, self.plan.metadata, share_sums)
        else:
            publish_save(save, self.plan.metadata, share_sums)

    def _agree(self, save: Save, work: Callable[[], Any]) -> list[Any]:
        """What `work` returned on each rank. Raises SaveError everywhere if it failed on one."""
        result, failure = None, ""
        try:
            result = work()
        except Exception as error:
            failure = self._describe(save, error)
            if not isinstance(error, OSError):
                logger.warning("rank %d:", self.rank, exc_info=True)
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, failure), group=self.group)
        for _, text in outcomes:
            if text:
                raise SaveError(text)
        return [result for result, _ in outcomes]

    def _describe(self, save: Save, error: Exception) -> str:
        what = f"{save.checkpoint} could not be saved"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return (
                f"{what}: no space left on the disk ({error.strerror}); a save needs "
                f"{self.save_bytes / 2**30:.3g} GiB more than checkpoint.keep_latest_k of them; "
                "free some, or write another training.output_dir"
            )
        first_line = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return f"{what}: {first_line[0]}"


def _threads() -> int:
    """Files that a rank writes at once: its share of the node's cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(_FILES_PER_RANK, len(os.sched_getaffinity(0)) // ranks))
