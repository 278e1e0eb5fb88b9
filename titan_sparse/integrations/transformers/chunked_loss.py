"""The loss of a transformers decoder without its logits, for sequences whose logits fit nowhere.

128K tokens of a vocabulary of 152K are 80 GB of fp32 logits, and as much again for their gradient.
"""

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from titan_sparse.integrations.transformers.sharding import shifted_labels
from titan_sparse.loss import count_valid, linear_cross_entropy

_NEUTRAL = {
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
    "output_multiplier": (None, 1.0),
}
"""What configurations say is done to logits, and the values that do nothing."""


def chunk_loss(model: PreTrainedModel, chunk_tokens: int = 2048) -> None:
    """From here on, model(..., labels=...) gives the loss and no logits.

    The loss is transformers': the mean over labels that count, or their sum over
    num_items_in_batch; shift_labels are not shifted again. At no time are there more than
    chunk_tokens rows of logits. Without labels, in generate() for one, the model is as it was.
    Do this before Trainer, DDP or FSDP2 wrap the model. TRL's SFTTrainer has a loss like it.

    Raises ValueError for models whose logits are more than a product with lm_head.
    """
    _check(model)
    forward_with_logits = model.forward

    # transformers reads the signature: which columns of a dataset the model takes, for one.
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        labels = {name: kwargs.pop(name, None) for name in ("labels", "shift_labels")}
        if all(tokens is None for tokens in labels.values()):
            return forward_with_logits(*args, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        targets = shifted_labels(labels).to(hidden.device)
        total = _summed_loss(hidden, self.get_output_embeddings(), targets, chunk_tokens)
        if count is None:
            count = count_valid(targets)
        return CausalLMOutputWithPast(loss=total / torch.as_tensor(count, device=total.device))

    model.forward = types.MethodType(forward, model)


def _summed_loss(hidden: Tensor, head: nn.Linear, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Cross-entropy summed over targets [B, S] that count. hidden: [B, S, D]."""
    weight = head.weight
    if isinstance(weight, DTensor):
        # A gather here would leave out the other ranks' gradients.
        raise ValueError(
            "chunk_loss() needs lm_head whole inside of the model's forward; write fully_shard() "
            "for lm_head together with the final norm, as accelerate does"
        )
    device_type = hidden.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    # The loss chooses its own dtypes: sums are fp32.
    with torch.autocast(device_type, enabled=False):
        return linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets, chunk_tokens)


def _check(model: PreTrainedModel) -> None:
    """Raises ValueError for models whose logits are more than a product with lm_head."""
    config = model.config.get_text_config()
    for name, values in _NEUTRAL.items():
        if getattr(config, name, None) not in values:
            raise ValueError(
                f"chunk_loss() does not know config.{name} = {getattr(config, name)}; "
                "leave chunk_loss() out"
            )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "chunk_loss() leaves out the balancing loss of experts; write "
            "config.output_router_logits = False, or leave chunk_loss() out"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"chunk_loss() needs an lm_head that is a Linear without bias, "
            f"not {type(head).__name__}; leave chunk_loss() out"
        )
