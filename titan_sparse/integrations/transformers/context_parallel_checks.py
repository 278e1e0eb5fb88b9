"""What context parallelism would get wrong in a Trainer, refused in one line."""

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from titan_sparse.attention.context_parallel.group import ContextParallel
from titan_sparse.integrations.transformers.parallelism import ContextParallelConfig
from titan_sparse.integrations.transformers.refusals import check_modules, check_rope
from titan_sparse.integrations.transformers.register import settings_of
from titan_sparse.integrations.transformers.sharding import IGNORE_INDEX


def check_class(cls: type, ours: type) -> None:
    """Raises TypeError for a class whose losses would not be those of whole sequences.

    ours: ContextParallelTrainer, which `cls` extends.
    """
    classes = cls.__mro__
    if Trainer in classes and classes.index(Trainer) < classes.index(ours):
        raise TypeError(
            f"{cls.__name__} would train whole sequences on every rank; "
            f"write class {cls.__name__}({ours.__name__}, {cls.__bases__[0].__name__})"
        )
    for other in classes:
        is_of_trl = other.__module__.partition(".")[0] == "trl" and issubclass(other, Trainer)
        if is_of_trl and other.__name__ not in ("SFTTrainer", "_BaseTrainer"):
            raise TypeError(
                f"{other.__name__} needs whole sequences for its loss, and context parallelism has "
                "parts of them; write Trainer or SFTTrainer, or leave ContextParallelTrainer out"
            )


def check_trainer(trainer: Trainer) -> None:
    """Raises ValueError for options that look at whole sequences where there are only parts."""
    args = trainer.args
    parallelism = args.parallelism_config
    if not isinstance(parallelism, ContextParallelConfig):
        raise ValueError(
            f"parallelism_config={type(parallelism).__name__} is not ours; "
            "write parallelism_config=ContextParallelConfig(cp_size=...)"
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False counts the labels of one rank; write True"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError("deepspeed does not know this mesh; write fsdp=True")
    if args.n_gpu > 1:
        raise ValueError("several GPUs in one process (DataParallel); start with torchrun")
    if trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None:
        raise ValueError(
            "compute_metrics wants logits of whole sequences, which never exist; "
            "leave it out, evaluate() gives eval_loss"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func would see one rank's tokens; leave it out, or override "
            "compute_loss() with shift_labels"
        )
    if args.label_smoothing_factor != 0:
        raise ValueError("label_smoothing_factor shifts labels inside of one rank; write 0")
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            'train_sampling_strategy="batch_rebalance" gives each rank other sequences; '
            'write "random"'
        )
    streams = isinstance(trainer.train_dataset, IterableDataset)
    if (
        streams
        and parallelism.cp_size > 1
        and args.accelerator_config.dispatch_batches is not False
    ):
        raise ValueError(
            "one process deals out an IterableDataset, other sequences to each; "
            'write accelerator_config={"dispatch_batches": False}'
        )
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"{type(trainer.model).__name__} does not take num_items_in_batch, so that losses of "
            "ranks do not add up; write a model whose forward() takes **kwargs"
        )


def check_model(model: nn.Module, cp: ContextParallel) -> None:
    """Raises ValueError for a model whose attention or loss would not look across ranks."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "the balancing loss of experts (output_router_logits) is no sum over tokens, so that "
            "ranks of one sequence get another; write router_aux_loss_coef=0.0 and "
            "config.output_router_logits = False"
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
            f"{type(model).__name__} does not predict next tokens; context parallelism trains "
            "AutoModelForCausalLM"
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
    shape = torch.tensor(input_ids.shape, device=input_ids.device)
    facts = torch.cat([shape, torch.stack(sums)])
    everyone = cp.all_gather(facts)
    if bool((everyone != facts).any()):
        raise ValueError(
            "ranks of one sequence got different batches; write a dataset and a sampler that give "
            "the same on all ranks, or leave sharding to accelerate"
        )
