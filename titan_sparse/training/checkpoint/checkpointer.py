"""A run's checkpoints: finding the newest whole one, resuming, going back, saving.

The names on disk: tensors of the model as in the model, without frozen weights;
optimizer.state.<parameter>.<key>, without settings (learning rate, betas), which are the config's;
dataloader.*; train_state.*. Whatever else has a state is saved under its own name.
"""

import copy
import json
import logging
import math
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from titan_sparse.config import Checkpoint, Refusal
from titan_sparse.data import PackedLoader
from titan_sparse.models.initialization import canonical_name
from titan_sparse.training.checkpoint import folders
from titan_sparse.training.checkpoint.reader import Broken, read_into, verify
from titan_sparse.training.checkpoint.saver import PINNED, memory_like, write
from titan_sparse.training.faults.process_groups import on_first_rank
from titan_sparse.training.offload import Copier
from titan_sparse.training.optimizer import shard_of

logger = logging.getLogger("titan_sparse")

_ROLLED_BACK = "rolled-back.json"
"""The last load_step, and the names of the job that went back to it."""
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TITAN_SPARSE_ENDED")
"""What names a job. torchrun alone has another name for each start with --standalone, and
scripts/past_torchrun.sh another one on each host."""
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "TITAN_SPARSE_RESTART_COUNT")


@dataclass
class Progress:
    """Step and counters of the run, saved with the random-number states. The same on every rank."""

    device: torch.device
    step: int = 0
    tokens_seen: int = 0
    skipped_updates: int = 0
    """updates that the guard left out"""
    times_gone_back: int = 0
    """times that the guard went back to a checkpoint"""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and the generators' states as tensors on the CPU."""
        state = {key: value for key, value in vars(self).items() if key != "device"}
        state["cpu_generator"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["cuda_generator"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counts = dict(state)
        torch.set_rng_state(counts.pop("cpu_generator"))
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(counts.pop("cuda_generator"), self.device)
        # The rest is plain numbers.
        vars(self).update(counts)


class Checkpointer:
    """The run's checkpoints, in <output_dir>/checkpoint/step-N. Where checkpoint.enable is false
    there are none. All but wait() and raise_failure() is collective.

    In the background, copies on the CPU are saved. With pinned memory, the GPU copies during the
    next forward and backward, and only the next update waits for it.
    """

    def __init__(
        self,
        section: Checkpoint,
        output_dir: str,
        model: nn.Module,
        optimizer: Optimizer,
        loader: PackedLoader,
        progress: Progress,
        states: dict[str, Stateful],
        texts: dict[str, str],
    ):
        """states: what else is saved, of plain values and CPU tensors. texts: further files of
        every checkpoint, name -> text."""
        self.section = section
        self.folder = Path(output_dir, folders.FOLDER)
        self.texts = texts
        self.parts: dict[str, Stateful] = {"dataloader": loader, "train_state": progress, **states}
        self.model = model
        self.optimizer = optimizer
        # The model's own tensors: reading into them loads them.
        self.weights: dict[str, Tensor] = get_model_state_dict(
            model, options=StateDictOptions(ignore_frozen_params=True)
        )
        self.parameter_names = {
            parameter: canonical_name(name) for name, parameter in model.named_parameters()
        }
        self.last_save_seconds: float | None = None if section.enable else 0.0
        """from save() to the name step-N, of the last save that got it; None before the first"""
        self.pending: Future[None] | None = None
        # Of this rank's shards, for saves in the background, and the memory that they are in.
        self.memory: Tensor | None = None
        self.copies: dict[str, Tensor] = {}
        self.copier = Copier(progress.device)
        self.copied: torch.cuda.Event | None = None
        self.group: dist.ProcessGroup | None = None
        self.thread: ThreadPoolExecutor | None = None
        if section.enable and section.async_mode != "disabled":
            # Not the world's group, over which training communicates at the same time.
            self.group = dist.new_group(backend="gloo")
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """The state that is saved: the tensors of model and optimizer, and the state of each other
        part."""
        tensors = dict(self.weights)
        for parameter, state in self.optimizer.state.items():
            name = self.parameter_names[parameter]
            for key, value in state.items():
                tensors[f"optimizer.state.{name}.{key}"] = value
        return tensors, {name: part.state_dict() for name, part in self.parts.items()}

    def load(self) -> bool:
        """Resume from checkpoint.load_step, or the newest whole checkpoint. True if there was
        one. Without one, the weights alone are read from checkpoint.initial_load_path, where
        that is given.

        Raises Refusal on all ranks: if there are checkpoints and none is whole, if load_step or the
        path has none, or if one does not fit the model.
        """
        if not self.section.enable:
            return False
        deleted = on_first_rank(lambda: folders.delete_incomplete(self.folder))
        if deleted:
            logger.info("deleted saves that were cut short: %s", ", ".join(deleted))
        if self.section.load_step >= 0:
            self._roll_back(self.section.load_step)
        if self._load_newest() is not None:
            return True
        if path := self.section.initial_load_path:
            try:
                verify(path)
                read_into(dict(self.weights), path)
            except Broken as error:
                raise Refusal(
                    f"checkpoint.initial_load_path = {path} holds no whole checkpoint ({error}); "
                    "write a folder step-N of a run"
                ) from None
        return False

    def check_disk(self) -> None:
        """Refuse a disk that has no room for a save. Raises Refusal on all ranks."""
        if not self.section.enable:
            return
        # Adam has two tensors of each parameter's size.
        moments = 0 if isinstance(self.optimizer, torch.optim.SGD) else 2
        needed_bytes = sum(weight.nbytes for weight in self.weights.values()) * (1 + moments)

        def check() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self.folder).free
            if free_bytes < needed_bytes:
                raise Refusal(
                    f"{self.folder} has {free_bytes / 2**30:.3g} GiB free, and a save needs "
                    f"{needed_bytes / 2**30:.3g} GiB; free some, or write another "
                    "training.output_dir"
                )

        on_first_rank(check)

    def go_back(self, before: int) -> int | None:
        """Return to the newest whole checkpoint of a step < `before`, and move newer ones aside.
        The loader goes on where it is. Returns the step, None if there is no such checkpoint."""
        if not self.section.enable:
            return None
        self.wait()
        try:
            step = self._load_newest(before, with_loader=False)
        except Refusal as error:
            logger.warning("%s", error)
            return None
        if step is not None:
            self._move_newer(step)
        return step

    def is_due(self, step: int, last: bool) -> bool:
        """True if a save is due: at every interval, and at the run's last step."""
        return self.section.enable and (last or step % self.section.interval == 0)

    def save(self, step: int) -> float:
        """Save, or begin to. Returns the seconds for which this held up training.

        The tensors must not change before before_update(). Raises SaveError, one line, on all
        ranks, if this save failed, or in the background the one before.
        """
        began = time.perf_counter()
        self.wait()
        tensors, values = self.state()
        if self.thread is None:
            self._write(step, {**tensors, **values}, began)
        else:
            self._copy(tensors)
            state = {**tensors, **copy.deepcopy(values)}
            self.pending = self.thread.submit(self._write, step, state, began)
        return time.perf_counter() - began

    @torch.no_grad()
    def _copy(self, tensors: dict[str, Tensor]) -> None:
        """Copy this rank's shards. With pinned memory the host does not wait for it."""
        shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
        if shards.keys() != self.copies.keys():
            self.memory, self.copies = memory_like(shards, self.section.async_mode == PINNED)
        for name, shard in shards.items():
            self.copied = self.copier.start(self.copies[name], shard)

    def before_update(self) -> None:
        """The tensors may change after this: the GPU waits for the copies, the host does not."""
        self.copier.wait(self.copied)

    def raise_failure(self) -> None:
        """Raises SaveError if the save in the background has failed. Does not wait."""
        if self.pending is not None and self.pending.done():
            # This raises at once.
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises SaveError if it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then give back thread and memory."""
        try:
            self.wait()
        finally:
            if self.thread is not None:
                self.thread.shutdown()
            self.memory, self.copies = None, {}

    def _write(self, step: int, state: dict[str, Any], began: float) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        checkpoint = folders.step_folder(self.folder, step)
        write(checkpoint, state, self.copies, self.texts, self.section.keep_latest_k, self.group)
        self.last_save_seconds = time.perf_counter() - began
        logger.info("saved %s in %.1f s", checkpoint, self.last_save_seconds)

    def _load_newest(self, before: float = math.inf, with_loader: bool = True) -> int | None:
        """Load the newest checkpoint that is whole, of a step < `before`. Returns its step, None if
        there is no checkpoint at all.

        Newer ones that are broken are moved aside. Raises Refusal, and moves nothing, if all are.
        """
        steps = on_first_rank(lambda: folders.saved_steps(self.folder))
        broken: dict[Path, str] = {}
        for step in [step for step in reversed(steps) if step < before]:
            checkpoint = folders.step_folder(self.folder, step)
            try:
                verify(checkpoint)
                self._read(checkpoint, with_loader)
            except Broken as error:
                broken[checkpoint] = str(error)
                continue
            for path, problem in broken.items():
                aside = on_first_rank(lambda path=path: folders.move_aside(path, "broken"))
                logger.warning("checkpoint damaged: %s; moved to %s", problem, aside)
            return step
        for first in broken.values():
            raise Refusal(
                f"no checkpoint in {self.folder} is whole: {first}; put back a whole one, or "
                "write another training.output_dir to start a new run"
            )
        return None

    def _read(self, checkpoint: Path, with_loader: bool) -> None:
        # One that has made no step yet gets the tensors that are read into.
        get_optimizer_state_dict(self.model, self.optimizer)
        tensors, values = self.state()
        if not with_loader:
            del values["dataloader"]
        read_into({**tensors, **values}, checkpoint)
        for name, part in values.items():
            self.parts[name].load_state_dict(part)

    def _roll_back(self, step: int) -> None:
        """Make the whole checkpoint of `step` the newest, unless this is a restart of a job that
        has done it already."""
        path = self.folder / _ROLLED_BACK
        # A host that is back after it was lost does not know that the job has been restarted.
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            of_ranks, [{os.environ.get(name, "") for name in _JOBS}, _restarts()]
        )
        jobs = sorted(set().union(*(names for names, _ in of_ranks)) - {""})
        is_restart = any(count for _, count in of_ranks)

        def has_gone_back() -> bool:
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return False
            return record["load_step"] == step and not set(jobs).isdisjoint(record.get("jobs", []))

        if is_restart and on_first_rank(has_gone_back):
            return
        try:
            verify(folders.step_folder(self.folder, step))
        except Broken as error:
            raise Refusal(
                f"checkpoint.load_step = {step}: no whole checkpoint ({error}); "
                "write another step, or -1 for the newest"
            ) from None
        self._move_newer(step)
        record = json.dumps({"load_step": step, "jobs": jobs}) + "\n"
        on_first_rank(lambda: path.write_text(record, encoding="utf-8"))

    def _move_newer(self, step: int) -> None:
        if aside := on_first_rank(lambda: folders.roll_back(self.folder, step)):
            logger.info("checkpoints newer than step %d are in %s now", step, aside)


def _restarts() -> int:
    """The number of times that this job has been started again."""
    return sum(int(os.environ.get(name, 0)) for name in _RESTARTS)
