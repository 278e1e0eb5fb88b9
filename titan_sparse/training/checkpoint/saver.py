"""Save in the foreground, on a thread, or in a separate process. The files are the same.

DCP's plan (which rank writes which tensors) is made once and used for all saves of the same tensors.
During a save, ranks only exchange whether they could write, and rank 0 collects where the other
ranks' parts are. So the cost of a save hardly depends on the number of ranks.
"""

import errno
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.optim import Optimizer

from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.training.checkpoint.folders import complete_steps, incomplete_folder, step_folder
from titan_sparse.training.checkpoint.writer import Save, Staging, Writer, WriterProcess, as_bytes

logger = logging.getLogger("titan_sparse")

PINNED = "async_with_pinned_mem"

_FILES_PER_RANK = 4
"""At most; so many threads hash and write."""

_LONG_WAIT_SECONDS = 0.5


def expected_bytes(model: nn.Module, optimizers: list[Optimizer]) -> int:
    """Bytes of a save's tensors over all ranks, before the optimizer has made its own.

    Replicas are written once, frozen weights not at all. Adam has two tensors of each parameter's size.
    """
    total = _bytes_of(p for p in model.parameters() if p.requires_grad)
    moments = 0 if all(isinstance(o, torch.optim.SGD) for o in optimizers) else 2
    return total * (1 + moments)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Over all ranks: a DTensor counts all its elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def disk_problem(folder: Path, section: Checkpoint, needed_bytes: int, saves_left: int) -> str:
    """In one line, why the disk is too small for what will be saved; empty: it is not.

    needed_bytes: of one save. saves_left: what the run will do at most. Makes the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saves = 1
    if section.keep_latest_k:
        # Rotation deletes the oldest when the new one is whole: for a moment there is one more.
        room_for = section.keep_latest_k + 1 - len(complete_steps(folder))
        saves = max(1, min(saves_left, room_for))
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= saves * needed_bytes:
        return ""
    return (
        f"{folder} has {_gib(free_bytes)} GiB free, a save needs {_gib(needed_bytes)} GiB and up to "
        f"{saves} more will be there at once; free some, lower checkpoint.keep_latest_k = "
        f"{section.keep_latest_k}, or write another training.output_dir"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"


@dataclass
class Plan:
    """What this rank writes."""

    sources: dict[str, Tensor]
    """the tensors of model and optimizer that it was made for, by name"""
    tensors: dict[MetadataIndex, Tensor]
    """parts of model and optimizer that this rank writes: its shards, on their devices"""
    values: list[MetadataIndex]
    """everything else that this rank writes"""
    metadata: Metadata | None
    """of the whole save, on rank 0; the places in files are still missing"""

    def fits(self, tensors: dict[str, Tensor]) -> bool:
        """Whether it is the plan of a save of these, the very same tensors."""
        return self.sources.keys() == tensors.keys() and all(
            tensors[name] is source for name, source in self.sources.items()
        )


def make_plan(tensors: dict[str, Tensor], values: dict[str, Any]) -> Plan:
    """Share the work out among the ranks, each part to one of those that have it.

    Collective. tensors: of model and optimizer. values: name of a part -> its state.
    """
    planner = DefaultSavePlanner()
    rank = dist.get_rank()
    planner.set_up_planner({**tensors, **values}, is_coordinator=rank == 0)
    gathered: list[SavePlan | None] | None = None
    if rank == 0:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(planner.create_local_plan(), gathered, dst=0)
    metadata = None
    if gathered is not None:
        gathered, metadata = planner.create_global_plan(gathered)
    received: list[SavePlan | None] = [None]
    dist.scatter_object_list(received, gathered, src=0)
    own = planner.finish_plan(received[0])

    indices = [item.index for item in own.items]
    return Plan(
        sources=dict(tensors),
        tensors={
            index: find_state_dict_object(tensors, index).detach()
            for index in indices
            if index.fqn in tensors
        },
        values=[index for index in indices if index.fqn not in tensors],
        metadata=metadata,
    )


class SaveError(OSError):
    """A save that failed: one line for the user. The checkpoints before it are as they were."""


def check_async_mode(section: Checkpoint, device: torch.device) -> None:
    """Raises Refusal for pinned memory without a GPU."""
    if section.enable and section.async_mode == PINNED and device.type != "cuda":
        raise Refusal(
            f'checkpoint.async_mode = "{PINNED}" needs a GPU, training.device is '
            f'{device.type}; write "async"'
        )


class Saver(ABC):
    """Saves `folder`/step-N. Every method but wait() is called on all ranks alike."""

    def __init__(
        self, section: Checkpoint, folder: Path, device: torch.device, texts: dict[str, str]
    ):
        self.section = section
        self.folder = folder
        self.device = device
        self.texts = texts
        self.rank = dist.get_rank()
        self.last_save_seconds: float | None = None
        """from save() to the name step-N, of the last save that got it; None before the first"""
        self.plan: Plan | None = None
        self.save_bytes = 0
        self.staging: Staging | None = None
        self.pending: Future[None] | None = None
        self.in_background = section.async_mode != "disabled"
        self.group: dist.ProcessGroup | None = None
        self.thread: ThreadPoolExecutor | None = None
        if self.in_background:
            # Not the world's group, over which training communicates at the same time.
            self.group = dist.new_group(backend="gloo")
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        writer = WriterProcess if section.async_mode == PINNED else Writer
        self.writer: Writer | WriterProcess = writer(self.rank, _threads())

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and values: name of a part -> its state."""

    def background_groups(self) -> list[dist.ProcessGroup]:
        """Groups over which saves in the background communicate."""
        return [] if self.group is None else [self.group]

    def prepare(self) -> None:
        """Do what only the first save would have to: plan it, take (and pin) memory for it.

        Collective. Call it after a step, when the optimizer has its tensors.
        """
        self._prepare(*self.state())

    def _prepare(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.plan = make_plan(tensors, values)
        self.save_bytes = _bytes_of(tensors.values())
        if self.staging is not None:
            self.staging.close()
        to_write = self.plan.tensors
        if self.in_background:
            pinned = self.section.async_mode == PINNED
            self.staging = Staging(self.plan.tensors, self.device, pinned)
            to_write = self.staging.copies
        if isinstance(self.writer, WriterProcess):
            self.writer.use_memory(self.staging.path, self.staging.slots, self.plan.metadata)
        else:
            self.writer.use(to_write, self.plan.metadata)

    def save(self, step: int) -> float:
        """Save, or begin to. Returns the seconds for which this held up training. Collective.

        The tensors must not change between this and the return of before_update().
        Raises SaveError, one line, on all ranks, if this save failed, or in the background the one
        before.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        if waited > _LONG_WAIT_SECONDS:
            logger.warning(
                "waited %.1f s for the save before: checkpoint.interval is shorter than a save",
                waited,
            )
        tensors, values = self.state()
        flat_values, _ = flatten_state_dict(values)
        if self.plan is None or not self.plan.fits(tensors):
            self._prepare(tensors, values)
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
        return time.perf_counter() - began

    def before_update(self) -> None:
        """Let a save in the background copy what the optimizer is about to change.

        On a GPU this waits on the device only.
        """
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
            self.writer.close()
            if self.staging is not None:
                self.staging.close()
                self.staging = None

    def _write(self, save: Save, values: dict[MetadataIndex, bytes], began: float) -> None:
        """The whole of a save but the plan. Ranks fail together or not at all."""
        try:
            self._agree(save, lambda: self._begin(save))
            own = self._agree(save, lambda: self.writer.write(save, values))
            written = [b""] * dist.get_world_size() if self.rank == 0 else None
            dist.gather_object(own, written, dst=0, group=self.group)
            self._agree(save, lambda: written and self.writer.publish(save, written))
        except SaveError:
            if self.rank == 0:
                shutil.rmtree(save.incomplete, ignore_errors=True)
            raise
        self.last_save_seconds = time.perf_counter() - began
        logger.info("saved %s in %.1f s", save.checkpoint, self.last_save_seconds)

    def _begin(self, save: Save) -> None:
        if self.staging is not None:
            self.staging.copy()
        if self.rank == 0:
            save.begin()

    def _agree(self, save: Save, work: Callable[[], Any]) -> Any:
        """What `work` returns. Raises SaveError on all ranks if it failed on one."""
        result, failure = None, ""
        try:
            result = work()
        except Exception as error:
            failure = self._describe(save, error)
            if not isinstance(error, OSError):
                logger.warning("rank %d:", self.rank, exc_info=True)
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure, group=self.group)
        for text in filter(None, failures):
            raise SaveError(text)
        return result

    def _describe(self, save: Save, error: Exception) -> str:
        what = f"{save.checkpoint} could not be saved"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return (
                f"{what}: no space left on the disk ({error.strerror}); a save needs "
                f"{_gib(self.save_bytes)} GiB more than checkpoint.keep_latest_k of them; "
                "free some, or write another training.output_dir"
            )
        first_line = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return f"{what}: {first_line[0]}"


def _threads() -> int:
    """Files that a rank writes at once: its share of the node's cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(_FILES_PER_RANK, len(os.sched_getaffinity(0)) // ranks))
