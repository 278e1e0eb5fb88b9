"""Saving and resuming: torchtitan's manager over torch.distributed.checkpoint (DCP).

A checkpoint holds model, optimizer, schedule, loader position, step, counters and random-number
states. DCP writes its metadata file last, so a folder without one is a save that was cut short and
is passed over. Tensors are resharded on loading: any world size, any context-parallel degree.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint as TorchtitanCheckpoint

from titan_sparse.config import Checkpoint
from titan_sparse.data import PackedLoader
from titan_sparse.models.flavours import DecoderConfig

logger = logging.getLogger("titan_sparse")

FOLDER = "checkpoint"


class Progress:
    """step and tokens_seen of the run, saved with the random-number states. The same on every rank."""

    def __init__(self, device: torch.device):
        self.device = device
        self.step = 0
        self.tokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and the generators' states as tensors."""
        state = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "cpu_generator": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_generator"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self.step = state["step"]
        self.tokens_seen = state["tokens_seen"]
        torch.set_rng_state(state["cpu_generator"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_generator"], self.device)


class Checkpointer:
    """The run's checkpoints, in <output_dir>/checkpoint/step-N.

    Does nothing where checkpoint.enable is false.
    """

    def __init__(
        self,
        section: Checkpoint,
        output_dir: str,
        model: nn.Module,
        optimizers: OptimizersContainer,
        schedule: LRSchedulersContainer,
        loader: PackedLoader,
        progress: Progress,
    ):
        self.section = section
        self.model = model
        self.manager = CheckpointManager(
            dataloader=loader,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedule,
            states={"train_state": progress},
            checkpoint_config=_torchtitan_section(section),
            sd_adapter=None,
            base_folder=output_dir,
        )

    def load(self) -> bool:
        """Resume from checkpoint.load_step, or the newest complete checkpoint. True if there was one.

        If there is none, the weights alone are read from checkpoint.initial_load_path, where that is
        given.
        Raises ValueError for a load_step or a path without a complete checkpoint.
        """
        if not self.section.enable:
            return False
        load_step = self.section.load_step
        if load_step >= 0 and not _complete(self._path(load_step)):
            raise ValueError(
                f"checkpoint.load_step = {load_step}: no complete checkpoint in "
                f"{self._path(load_step)}; write another step, or -1 for the newest"
            )
        if self.manager.load(step=load_step):
            return True
        if self.section.initial_load_path:
            self._load_weights(self.section.initial_load_path)
        return False

    def is_due(self, step: int, last: bool) -> bool:
        """Whether save() would save: at every interval, and at the run's last step."""
        if not self.section.enable:
            return False
        return last or step % self.section.interval == 0

    def background_groups(self) -> list[dist.ProcessGroup]:
        """Groups over which saves in the background communicate."""
        group = getattr(self.manager, "pg", None)
        return [] if group is None else [group]

    def save(self, step: int, last: bool) -> None:
        """Save if `step` is due, or in any case if it is the run's last."""
        if self.is_due(step, last):
            began = time.perf_counter()
            self.manager.save(step, last_step=last)
            logger.info("saved %s in %.1f s", self._path(step), time.perf_counter() - began)

    def before_update(self) -> None:
        """Wait until a save in the background has copied the weights.

        Call it before the optimizer changes them.
        """
        if self.section.enable:
            self.manager.maybe_wait_for_staging()

    def close(self) -> None:
        """Wait for saves still being written."""
        if self.section.enable:
            self.manager._async_wait()
            self.manager.close()

    def save_in_hf(self, step: int, config: DecoderConfig, dtype: torch.dtype, source: str) -> None:
        """Write step's checkpoint once more, for transformers, as export_weights() does.

        Does nothing if that folder is there already. Call it after close(), and on one rank only,
        which reads what all have saved. Raises ValueError if there is nothing to read.
        """
        folder = Path(self.manager.folder).parent / "huggingface" / f"step-{step}"
        if not _complete(self._path(step)):
            raise ValueError(
                f"checkpoint.last_save_in_hf: no complete checkpoint in {self._path(step)}"
            )
        if not folder.exists():
            # Only where asked for: it needs safetensors.
            from titan_sparse.models.huggingface import export_weights

            export_weights(self._path(step), str(folder), config, dtype, source)
            logger.info("saved %s for transformers", folder)

    def _path(self, step: int) -> str:
        return os.path.join(self.manager.folder, f"step-{step}")

    def _load_weights(self, path: str) -> None:
        if not _complete(path):
            raise ValueError(
                f"checkpoint.initial_load_path = {path} holds no complete checkpoint; write a folder "
                "step-N that has a file .metadata"
            )
        state = get_model_state_dict(self.model)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state)


def newest_checkpoint(output_dir: str) -> str | None:
    """The newest complete checkpoint of a run, None without one."""
    paths: dict[int, str] = {}
    for path in Path(output_dir, FOLDER).glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and _complete(str(path)):
            paths[int(number)] = str(path)
    return paths[max(paths)] if paths else None


def _complete(path: str) -> bool:
    """Whether a save into this folder came to its end."""
    return os.path.isfile(os.path.join(path, ".metadata"))


def _torchtitan_section(section: Checkpoint) -> TorchtitanCheckpoint:
    return TorchtitanCheckpoint(
        enable=section.enable,
        folder=FOLDER,
        interval=section.interval,
        keep_latest_k=section.keep_latest_k,
        async_mode=section.async_mode,
        last_save_model_only=False,
    )
