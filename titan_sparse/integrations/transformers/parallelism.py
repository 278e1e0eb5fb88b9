"""How processes are divided, told to accelerate in its own terms."""

import os
from typing import Any

from accelerate import ParallelismConfig
from accelerate.state import PartialState
from torch.distributed.device_mesh import DeviceMesh

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.integrations.transformers.settings import check_block_size


class ContextParallelConfig(ParallelismConfig):
    """accelerate's ParallelismConfig, with our context parallelism in place of torch's.

    The mesh is accelerate's: dp_replicate (where there are copies), dp_shard, cp. So are the data
    loaders, which give the ranks of one sequence the same batch, and FSDP2, which shards weights
    over dp_shard and cp together. Only `cp_enabled` is False: else accelerate would drop masks,
    and TRL would refuse to pack.
    """

    def __init__(
        self,
        cp_size: int | None = None,
        dp_replicate_size: int = 1,
        layout: str = "striped",
        schedule: str = "auto",
        block_size: int = 128,
    ):
        """cp_size: processes that share a sequence; by default, all of a copy.
        dp_replicate_size: copies of the weights, each sharded by FSDP2. What they leave of
        WORLD_SIZE gets other sequences, and shards weights too.
        layout, schedule, block_size: as in ContextParallel.

        Raises ValueError for sizes that do not divide the number of processes, and for a block_size
        that is not a power of two.
        """
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if cp_size is None:
            cp_size = processes // max(1, dp_replicate_size)
        unit = cp_size * dp_replicate_size
        if min(cp_size, dp_replicate_size) < 1 or processes % unit:
            raise ValueError(
                f"cp_size={cp_size} and dp_replicate_size={dp_replicate_size} do not divide "
                f"{processes} processes; start torchrun with --nproc-per-node={max(unit, 1)}"
            )
        check_block_size(block_size)
        self.layout = layout
        self.schedule = schedule
        self.block_size = block_size
        self._group: ContextParallel | None = None
        super().__init__(
            dp_replicate_size=1,
            dp_shard_size=processes // unit,
            tp_size=1,
            cp_size=cp_size,
            sp_size=1,
        )
        # accelerate refuses copies without dp_shard, whose weights cp shards.
        self._set_size("dp_replicate", dp_replicate_size)

    def group(self) -> ContextParallel:
        """The processes that share this one's sequences, for AttentionSettings(cp=...).

        Make TrainingArguments first: they choose the device and start the process group.
        Collective at the first call.
        """
        if self._group is None:
            mesh = None
            if self.cp_size > 1:
                mesh = self.get_device_mesh(PartialState().device.type)["cp"]
            self._group = ContextParallel(mesh, self.layout, self.schedule, self.block_size)
        return self._group

    # What accelerate reads

    @property
    def cp_enabled(self) -> bool:
        """False: context parallelism is not accelerate's business."""
        return False

    @property
    def dp_shard_enabled(self) -> bool:
        """True: FSDP2 finds its axis even where a sequence takes all processes."""
        return True

    @property
    def non_dp_dim_names(self) -> list[str]:
        return ["cp"]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return ["dp_shard", "cp"]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*self.dp_dim_names, "cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """None for a process that is alone, which may have no process group."""
        if self.total_size == 1:
            return None
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Any) -> None:
        # accelerate's own check refuses several CPU processes, which tests and examples are.
        if self.total_size != accelerator.num_processes:
            raise ValueError(
                f"torchrun started {self.total_size} processes, accelerate sees "
                f"{accelerator.num_processes}; without GPUs write use_cpu=True"
            )

    # Trainer writes its arguments to logs and, pickled, beside each checkpoint.

    def to_json(self) -> dict[str, Any]:
        attention = {name: getattr(self, name) for name in ("layout", "schedule", "block_size")}
        return self._sizes | attention

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"device_mesh": None, "_group": None}
