"""One sequence over several ranks in transformers' Trainer and TRL's SFTTrainer.

    class LongTrainer(ContextParallelTrainer, SFTTrainer):
        pass

    args = SFTConfig(packing=True, parallelism_config=ContextParallelConfig(cp_size=8), ...)
    register(AttentionSettings(cp=args.parallelism_config.group()))

Data loaders hand whole batches to the trainer, which counts their labels. The batch is cut when
its loss is computed, after everything that looks at whole sequences.
"""

import math
from typing import Any

from torch import Tensor, nn

from titan_sparse.integrations.transformers.chunked_loss import chunk_loss
from titan_sparse.integrations.transformers.context_parallel_checks import (
    check_class,
    check_loss,
    check_model,
    check_same_batch,
    check_trainer,
)
from titan_sparse.integrations.transformers.parallelism import ContextParallelConfig
from titan_sparse.integrations.transformers.sharding import (
    IGNORE_INDEX,
    shard_batch,
    shifted_labels,
)

__all__ = [
    "ContextParallelConfig",
    "ContextParallelTrainer",
    "chunk_loss",
    "shard_batch",
]


class ContextParallelTrainer:
    """Put it before a Trainer: class LongTrainer(ContextParallelTrainer, Trainer).

    Losses, gradients and their norms are those of one process with the whole batch, up to
    rounding. Evaluation gives losses, not logits. With a ContextParallelConfig of cp_size 1, or on
    one process, it trains like the Trainer that it extends.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls, ContextParallelTrainer)

    def __init__(self, *args: Any, **kwargs: Any):
        """As the Trainer. Raises ValueError for what context parallelism would get wrong."""
        super().__init__(*args, **kwargs)
        check_trainer(self)
        self.cp = self.args.parallelism_config.group()
        check_model(self.accelerator.unwrap_model(self.model), self.cp)
        self._loss_is_known_to_count = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of this rank's tokens of the whole batch `inputs`: their sum over
        num_items_in_batch, times the number of processes, over which trainers take means."""
        local = shard_batch(inputs, self.cp)
        self._scale_noise(local["input_ids"].shape[1] / inputs["input_ids"].shape[1])
        labels = shifted_labels(inputs)
        check_same_batch(inputs["input_ids"], labels, self.cp)
        if num_items_in_batch is None:
            # TRL's evaluation counts no items: each batch has its own mean.
            sequences = self.accelerator.num_processes // self.cp.size
            num_items_in_batch = (labels != IGNORE_INDEX).sum() * sequences
        found = super().compute_loss(
            model, local, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not self._loss_is_known_to_count:
            check_loss(found[0] if return_outputs else found, local["shift_labels"], self.model)
            self._loss_is_known_to_count = True
        return found

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
            raise ValueError(
                "logits of whole sequences never exist under context parallelism; "
                "write evaluate() in place of predict()"
            )
        if inputs.get("labels") is None:
            # Trainers would run the model on the whole batch.
            raise ValueError("evaluate() wants a loss, and the batch has no labels; add labels")
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.gather_for_metrics = self._gather_for_metrics
        self.gather_function = self._gather_for_metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """As the Trainer's, which sums over ranks: this rank's part of the whole batch."""
        return super().floating_point_ops(inputs) / self.cp.size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        # Each rank of a sequence has counted all of it.
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self.cp.size

    def _gather_for_metrics(self, numbers: Tensor) -> Tensor:
        """accelerator.gather_for_metrics() over sequences in place of processes.

        numbers: a scalar for this rank's tokens, of which all ranks' are returned, [processes]; or
        losses [per_device_eval_batch_size], all the same, of which each sequence's are returned.
        """
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

    def _scale_noise(self, share: float) -> None:
        """Makes NEFTune's noise for `share` of a sequence's tokens as large as for all of them.

        Its bound is alpha / sqrt(tokens * dims), and it counts the tokens of one rank.
        """
        if self.neftune_noise_alpha is not None and self.model.training:
            embeddings = self.accelerator.unwrap_model(self.model).get_input_embeddings()
            embeddings.neftune_noise_alpha = self.neftune_noise_alpha * math.sqrt(share)
