"""One sequence over several ranks in transformers' Trainer and TRL's SFTTrainer.

    class LongTrainer(ContextParallelTrainer, SFTTrainer):
        pass

    args = SFTConfig(packing=True, parallelism_config=ContextParallelConfig(cp_size=8), ...)
    register(AttentionSettings(cp=args.parallelism_config.group()))

Data loaders give whole batches to the trainer, which counts their labels. compute_loss() cuts the
batch, after everything that looks at whole sequences.
"""

import math
import os
from typing import TYPE_CHECKING, Any

import torch
from accelerate import ParallelismConfig
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.integrations.transformers.chunked_loss import chunk_loss
from titan_sparse.integrations.transformers.masks import check_block_size, settings_of
from titan_sparse.integrations.transformers.refusals import check_modules, check_rope
from titan_sparse.integrations.transformers.sharding import shard_batch, shifted_labels
from titan_sparse.loss import IGNORE_INDEX

__all__ = ["ContextParallelConfig", "ContextParallelTrainer", "chunk_loss", "shard_batch"]


class ContextParallelConfig(ParallelismConfig):
    """accelerate's ParallelismConfig, with our context parallelism in place of torch's.

    The mesh is accelerate's (dp_replicate where there are copies, dp_shard, cp). So are the data
    loaders, which give the ranks of one sequence the same batch, and FSDP2.
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
        dp_replicate_size: copies of the weights. What is left of WORLD_SIZE gets other sequences.
        layout, schedule, block_size: as in ContextParallel.

        Raises ValueError for sizes that do not divide the number of processes.
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
        """False, or accelerate would drop masks, and TRL would refuse to pack."""
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
        # A process that is alone may have no process group.
        return super().build_device_mesh(device_type) if self.total_size > 1 else None

    def _validate_accelerator(self, accelerator: Any) -> None:
        # accelerate's own check refuses several CPU processes, which tests and examples are.
        if self.total_size != accelerator.num_processes:
            raise ValueError(
                f"torchrun started {self.total_size} processes, accelerate sees "
                f"{accelerator.num_processes}; without GPUs write use_cpu=True"
            )

    # Trainer writes its arguments to logs and, pickled, beside each checkpoint.

    def to_json(self) -> dict[str, Any]:
        return self._sizes | {"layout": self.layout, "schedule": self.schedule}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"device_mesh": None, "_group": None}


if TYPE_CHECKING:
    # It stands before a Trainer, whose attributes it uses.
    _Trainer = Trainer
else:
    _Trainer = object


class ContextParallelTrainer(_Trainer):
    """Put it before a Trainer: class LongTrainer(ContextParallelTrainer, Trainer).

    Losses, gradients and their norms are those of one process with the whole batch, up to
    rounding. Evaluation gives losses, not logits.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        """As the Trainer. Raises ValueError for what context parallelism would get wrong."""
        super().__init__(*args, **kwargs)
        self.cp = check_trainer(self).group()
        check_model(self.accelerator.unwrap_model(self.model), self.cp)
        self._loss_is_known_to_count = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of this rank's tokens of `inputs`: their sum over num_items_in_batch, times the
        number of processes, over which trainers take means."""
        local = shard_batch(inputs, self.cp)
        labels = shifted_labels(inputs)
        check_same_batch(inputs["input_ids"], labels, self.cp)
        self._scale_noise(model, local["input_ids"].shape[1] / inputs["input_ids"].shape[1])
        if num_items_in_batch is None:
            # TRL's evaluation counts no items: each batch has its own mean.
            sequences = self.accelerator.num_processes // self.cp.size
            num_items_in_batch = (labels != IGNORE_INDEX).sum() * sequences
        found = super().compute_loss(
            model, local, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not self._loss_is_known_to_count:
            loss = found[0] if isinstance(found, tuple) else found
            check_loss(loss, local["shift_labels"], self.accelerator.unwrap_model(model))
            self._loss_is_known_to_count = True
        return found

    def _scale_noise(self, model: nn.Module, share: float) -> None:
        """Scale NEFTune's noise on `share` of a sequence's tokens to the size that the whole would
        get: its bound is alpha / sqrt(tokens * dims), and it counts the tokens of one rank."""
        if self.neftune_noise_alpha is not None and model.training:
            embeddings = self.accelerator.unwrap_model(model).get_input_embeddings()
            embeddings.neftune_noise_alpha = self.neftune_noise_alpha * math.sqrt(share)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As the Trainer's. Raises ValueError where logits are wanted."""
        if not prediction_loss_only:
            raise ValueError(f"predict() {_NO_LOGITS}")
        if inputs.get("labels") is None:
            # Trainers would run the model on the whole batch.
            raise ValueError("evaluate() wants a loss, and the batch has no labels; add labels")
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.gather_for_metrics = self._gather_for_metrics
        self.gather_function = self._gather_for_metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the Trainer's, of this rank's part of the batch: it sums over ranks."""
        return super().floating_point_ops(inputs) // self.cp.size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        # Each rank of a sequence has counted all of it.
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self.cp.size

    def _gather_for_metrics(self, numbers: Tensor) -> Tensor:
        """accelerator.gather_for_metrics() over sequences in place of processes: of a scalar for
        this rank's tokens, or of losses [per_device_eval_batch_size] that are all the same."""
        ranks = self.accelerator.gather(numbers)
        if numbers.ndim == 0:
            # accelerate would take them for samples, and leave out ranks of a smaller last batch.
            return ranks
        # The mesh's last axis is cp: [sequences, cp, batch] -> [sequences * batch]
        losses = ranks.view(-1, self.cp.size, len(numbers)).mean(1).flatten()
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            losses = losses[: state.remainder]
        return losses


def check_class(cls: type[ContextParallelTrainer]) -> None:
    """Raises TypeError for a class whose losses would not be those of whole sequences."""
    classes = cls.__mro__
    if Trainer in classes and classes.index(Trainer) < classes.index(ContextParallelTrainer):
        raise TypeError(
            f"{cls.__name__} would train whole sequences on every rank; "
            f"write class {cls.__name__}(ContextParallelTrainer, {cls.__bases__[0].__name__})"
        )
    for other in classes:
        is_of_trl = other.__module__.partition(".")[0] == "trl" and issubclass(other, Trainer)
        if is_of_trl and other.__name__ not in ("SFTTrainer", "_BaseTrainer"):
            raise TypeError(
                f"{other.__name__} needs whole sequences for its loss, and context parallelism has "
                "parts of them; write Trainer or SFTTrainer, or leave ContextParallelTrainer out"
            )


_NO_LOGITS = (
    "wants logits of whole sequences, which never exist; leave it out, and write evaluate()"
)

_REFUSED = {
    "compute_metrics": _NO_LOGITS,
    "preprocess_logits_for_metrics": _NO_LOGITS,
    "compute_loss_func": "sees one rank's tokens; leave it out, or override compute_loss()",
    "is_deepspeed_enabled": "means a mesh that is not ours; write fsdp=True",
}
"""Attributes of a Trainer that must not be set, and why."""


def check_trainer(trainer: Trainer) -> ContextParallelConfig:
    """The trainer's parallelism_config.

    Raises ValueError for options that look at whole sequences where there are only parts.
    """
    args = trainer.args
    parallelism = args.parallelism_config
    if not isinstance(parallelism, ContextParallelConfig):
        raise ValueError(
            f"parallelism_config={type(parallelism).__name__} is not ours; "
            "write parallelism_config=ContextParallelConfig(cp_size=...)"
        )
    for name, reason in _REFUSED.items():
        if getattr(trainer, name) not in (None, False):
            raise ValueError(f"{name} {reason}")
    streams = isinstance(trainer.train_dataset, IterableDataset) and parallelism.cp_size > 1
    model = type(trainer.model).__name__
    for is_refused, reason in (
        (not args.average_tokens_across_devices, "average_tokens_across_devices=False; write True"),
        (args.n_gpu > 1, "several GPUs in one process (DataParallel); start with torchrun"),
        (
            args.label_smoothing_factor != 0,
            "label_smoothing_factor shifts labels inside of one rank; write 0",
        ),
        (
            args.train_sampling_strategy == "batch_rebalance",
            'train_sampling_strategy="batch_rebalance" gives each rank other sequences; '
            'write "random"',
        ),
        (
            streams and getattr(args.accelerator_config, "dispatch_batches", None) is not False,
            "one process deals out an IterableDataset, other sequences to each; "
            'write accelerator_config={"dispatch_batches": False}',
        ),
        (
            not trainer.model_accepts_loss_kwargs,
            f"{model} does not take num_items_in_batch, so that losses of ranks do not add up; "
            "write a model whose forward() takes **kwargs",
        ),
    ):
        if is_refused:
            raise ValueError(reason)
    return parallelism


def check_model(model: PreTrainedModel, cp: ContextParallel) -> None:
    """Raises ValueError for a model whose attention or loss would ignore the other ranks."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "the balancing loss of experts is not a sum over tokens; write "
            "router_aux_loss_coef=0.0 and config.output_router_logits = False"
        )
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(
                f"an adapter of {type(adapter).__name__} looks at the beginning or the end of whole "
                "sequences, which one rank has; write LoraConfig without alora_invocation_tokens"
            )
    check_rope(config, cp.size)
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise ValueError(
            f"{type(model).__name__} does not predict next tokens; write AutoModelForCausalLM"
        )
    name = config._attn_implementation
    settings = settings_of(name)
    if settings is None:
        raise ValueError(
            f'attn_implementation="{name}" sees the tokens of one rank; write '
            'from_pretrained(..., attn_implementation="titan_sparse")'
        )
    if settings.cp is not cp and max(cp.size, settings.ranks) > 1:
        raise ValueError(
            f'register() gave "{name}" other ranks than this trainer has; write '
            "register(AttentionSettings(cp=args.parallelism_config.group()))"
        )
    # Once more: modules may have been exchanged since the model was made.
    check_modules(model, name, settings.ranks)


def check_loss(loss: Tensor, shift_labels: Tensor, model: nn.Module) -> None:
    """Raises ValueError for a loss that shift_labels [B, S] had no part in.

    The host waits for the device.
    """
    has_labels = bool((shift_labels != IGNORE_INDEX).any())
    # Models that shift labels by themselves find none: a loss of 0, or 0 / 0.
    if has_labels and not bool(loss > 0):
        raise ValueError(
            f"{type(model).__name__} does not hand shift_labels to its loss, and would shift "
            "labels inside of one rank; override compute_loss() with shift_labels"
        )


def check_same_batch(input_ids: Tensor, labels: Tensor, cp: ContextParallel) -> None:
    """Raises ValueError, on all ranks, if ranks of one sequence got different batches.

    input_ids, labels: int64 [B, S]. Collective; the host waits for the device.
    """
    if cp.size == 1:
        return
    place = torch.arange(1, input_ids.numel() + 1, device=input_ids.device)
    sums = [(tokens.flatten() * place).sum() for tokens in (input_ids, labels)]
    facts = torch.stack([*place.new_tensor(input_ids.shape), *sums])
    if bool((cp.all_gather(facts) != facts).any()):
        raise ValueError(
            "ranks of one sequence got different batches; write a dataset and a sampler that give "
            "the same on all ranks, or leave sharding to accelerate"
        )
