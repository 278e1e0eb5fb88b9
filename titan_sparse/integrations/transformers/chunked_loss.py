"""The loss of a transformers decoder without its logits.

128K tokens with a vocabulary of 152K are 80 GB of fp32 logits, and the gradient needs as much
again.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from titan_sparse.integrations.transformers.loss_probe import compare_losses
from titan_sparse.integrations.transformers.sharding import shifted_labels
from titan_sparse.loss import IGNORE_INDEX, count_valid, linear_cross_entropy

_NOT_OF_DECODER = ("labels", "shift_labels", "num_items_in_batch", "use_cache", "return_dict")
"""Arguments of the model's forward that its decoder does not get."""


def chunk_loss(model: PreTrainedModel, chunk_tokens: int = 2048) -> None:
    """From here on, model(..., labels=...) gives the loss and no logits.

    The loss is transformers'. At no time are there more than chunk_tokens rows of logits. Without
    labels, in generate() for one, the model is as it was. Do this before Trainer, DDP or FSDP2 wrap the
    model, and before or after PEFT does. Adapters of lm_head take one more product with it.

    The model's own loss is compared with ours on a few random tokens: here, in the first forward with
    labels, and again whenever the configuration or the kind of arguments has changed.
    Raises ValueError if they differ, and for the balancing loss of experts.
    """
    # PEFT's own forward calls that of the model inside.
    model = getattr(model, "get_base_model", lambda: model)()
    own_forward = model.forward
    # transformers reads the signature: which columns of a dataset the model takes, for one.
    their_forward = type(model).forward
    names = list(inspect.signature(their_forward).parameters)[1:]

    def loss_of(
        hidden: Tensor, logits_of: Callable, targets: Tensor, count: Tensor | int
    ) -> Tensor:
        return _loss_of_module(hidden, logits_of, targets, chunk_tokens) / count

    _check_router_loss(model, {})
    decoder = compare_losses(model, own_forward, loss_of, {})
    compared: set[tuple] = set()

    @functools.wraps(their_forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args)) | kwargs
        if all(arguments.get(name) is None for name in ("labels", "shift_labels")):
            return own_forward(*args, **kwargs)
        inputs = {name: x for name, x in arguments.items() if name not in _NOT_OF_DECODER}
        outputs = self.get_submodule(decoder)(**inputs, use_cache=False)
        loss = loss_of_outputs(self, outputs, arguments)
        found = CausalLMOutputWithPast(
            loss=loss,
            hidden_states=getattr(outputs, "hidden_states", None),
            attentions=getattr(outputs, "attentions", None),
        )
        return found.to_tuple() if arguments.get("return_dict") is False else found

    @torch.compiler.disable
    def loss_of_outputs(self: PreTrainedModel, outputs: Any, arguments: dict[str, Any]) -> Tensor:
        # Trainers change the configuration of models that they are given.
        _check_router_loss(self, arguments)
        conditions = _conditions(self, arguments)
        if conditions not in compared:
            compare_losses(self, own_forward, loss_of, arguments, outputs)
            compared.add(conditions)
        hidden = outputs[0]
        targets = shifted_labels(arguments).to(hidden.device)
        count = arguments.get("num_items_in_batch")
        if count is None:
            count = count_valid(targets)
        count = torch.as_tensor(count, device=hidden.device)
        return _loss_in_head(hidden, self.get_output_embeddings(), targets, count, chunk_tokens)

    model.forward = types.MethodType(forward, model)


def _conditions(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple:
    """The conditions that the loss of a model may depend on, apart from numbers."""
    kinds: dict[str, object] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            kinds[name] = value.ndim
        else:
            kinds[name] = value if isinstance(value, str) else bool(value)
    config = repr(vars(model.config))
    return (model.training, model.loss_function, config, *sorted(kinds.items()))


def _check_router_loss(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raises ValueError for a model that adds the balancing loss of its experts."""
    is_wanted = arguments.get("output_router_logits")
    if is_wanted is None:
        is_wanted = getattr(model.config.get_text_config(), "output_router_logits", False)
    if is_wanted:
        raise ValueError(
            "chunk_loss() does not compute the balancing loss of experts; write "
            "config.output_router_logits = False, or leave chunk_loss() out"
        )


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
    is_own = getattr(forward, "__func__", None) is nn.Linear.forward

    def loss(rows: Tensor) -> Tensor:
        if is_own and isinstance(head, nn.Linear) and head.bias is None:
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
