"""The loss of a transformers decoder without its logits.

128K tokens with a vocabulary of 152K are 80 GB of fp32 logits, and the gradient needs as much
again.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from titan_sparse.integrations.transformers.sharding import IGNORE_INDEX, shifted_labels
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

    The loss is transformers'. At no time are there more than chunk_tokens rows of logits. Without
    labels, in generate() for one, the model is as it was. Do this before Trainer, DDP or FSDP2 wrap the
    model, and before or after PEFT does. Adapters of lm_head take one more product with it.

    Raises ValueError for models whose logits are more than lm_head makes of hidden states, or
    whose loss is not transformers' loss of next tokens.
    """
    # PEFT's own forward calls that of the model inside.
    model = getattr(model, "get_base_model", lambda: model)()
    _check(model)
    forward_with_logits = model.forward

    # transformers reads the signature: which columns of a dataset the model takes, for one.
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        labels = {name: kwargs.pop(name, None) for name in ("labels", "shift_labels")}
        if all(tokens is None for tokens in labels.values()):
            return forward_with_logits(*args, **kwargs)
        # Trainers change the configuration of models that they are given.
        _check(self, kwargs.get("output_router_logits"))
        count = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        targets = shifted_labels(labels).to(hidden.device)
        if count is None:
            count = count_valid(targets)
        count = torch.as_tensor(count, device=hidden.device)
        loss = _loss_in_head(hidden, self.get_output_embeddings(), targets, count, chunk_tokens)
        return CausalLMOutputWithPast(loss=loss)

    model.forward = types.MethodType(forward, model)


def _loss_in_head(
    hidden: Tensor, head: nn.Module, targets: Tensor, count: Tensor, chunk_tokens: int
) -> Tensor:
    """Cross-entropy summed over targets [B, S] that count, over `count`. hidden: [B, S, D].

    It is computed in place of the head's forward, between its hooks: those of FSDP2 gather the
    head's weights, and reduce their gradients.
    """
    forward = head.forward
    own_forward = vars(head).get("forward")
    # Adapters, quantized weights and accelerate's hooks have a forward of their own.
    is_linear = getattr(forward, "__func__", None) is nn.Linear.forward

    def loss(rows: Tensor) -> Tensor:
        if is_linear:
            return _loss_of_linear(rows, head.weight, targets, chunk_tokens) / count
        return _loss_of_module(rows, forward, targets, chunk_tokens) / count

    head.forward = loss
    try:
        return head(hidden)
    finally:
        del head.forward
        if own_forward is not None:
            head.forward = own_forward


def _loss_of_linear(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    device_type = hidden.device.type
    dtype = weight.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    # The loss chooses its own dtypes: sums are fp32.
    with torch.autocast(device_type, enabled=False):
        return linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets, chunk_tokens)


def _loss_of_module(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], targets: Tensor, chunk_tokens: int
) -> Tensor:
    """The summed loss of any logits. The backward computes each chunk's logits again."""

    def loss_of_chunk(rows: Tensor, labels: Tensor) -> Tensor:
        logits = logits_of(rows).flatten(0, 1).float()
        return cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    columns = max(1, chunk_tokens // len(hidden))
    chunks = zip(hidden.split(columns, dim=1), targets.split(columns, dim=1))
    losses = [checkpoint(loss_of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum()


def _check(model: PreTrainedModel, output_router_logits: bool | None = None) -> None:
    """Raises ValueError for models whose loss is more than the next-token loss of lm_head.

    output_router_logits: the argument of forward(); None for the value in the model's config.
    """
    config = model.config.get_text_config()
    found = None
    for name, values in _NEUTRAL.items():
        if getattr(config, name, None) not in values:
            found = f"config.{name} = {getattr(config, name)}"
    if output_router_logits is None:
        output_router_logits = getattr(config, "output_router_logits", False)
    if output_router_logits:
        found = "the balancing loss of experts (output_router_logits)"
    if model.loss_function is not ForCausalLMLoss:
        found = "a loss_function other than transformers' loss of next tokens"
    head = model.get_output_embeddings()
    while hasattr(head, "base_layer") or hasattr(head, "original_module"):
        # An adapter of PEFT
        head = getattr(head, "base_layer", None) or head.original_module
    if not isinstance(head, nn.Linear) or head.bias is not None:
        found = f"an lm_head ({type(head).__name__}) other than a Linear without bias"
    if found is not None:
        raise ValueError(f"chunk_loss() does not compute {found}; leave chunk_loss() out")
