"""The loss of a transformers decoder without its logits.

128K tokens with a vocabulary of 152K are 80 GB of fp32 logits, and the gradient needs as much
again.

A model's own loss and ours are compared on a few tokens. The model's own forward runs with
stand-ins for its decoder and its head. So it needs no weights, no attention, and no other ranks.
What is left is what chunk_loss() replaces: all that happens between the decoder and the loss.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from titan_sparse.integrations.transformers.sharding import shifted_labels
from titan_sparse.loss import IGNORE_INDEX, count_valid, linear_cross_entropy

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_NOT_OF_DECODER = (*_OF_LOSS, "use_cache", "return_dict")
"""Arguments of the model's forward that do not change its decoder's hidden states."""


def chunk_loss(model: PreTrainedModel, chunk_tokens: int = 2048) -> None:
    """From here on, model(..., labels=...) gives the loss and no logits.

    The loss is transformers'. At no time are there more than chunk_tokens rows of logits. Without
    labels, in generate() for one, the model is as it was. Do this before Trainer, DDP or FSDP2 wrap
    the model, and before or after PEFT does. Adapters of lm_head take one more product with it.

    The model's own loss is compared with ours on a few random tokens: here, in the first forward
    with labels, and again whenever the configuration or the kind of arguments has changed.
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
            dtype = _dtype_of_product(head.weight)
            # linear_cross_entropy() has no fp16.
            if dtype != torch.float16:
                return _loss_of_linear(rows, head.weight, targets, chunk_tokens, dtype) / count
        return _loss_of_module(rows, forward, targets, chunk_tokens) / count

    head.forward = loss
    try:
        return head(hidden)
    finally:
        del head.forward
        if own_forward is not None:
            head.forward = own_forward


def _dtype_of_product(weight: Tensor) -> torch.dtype:
    """The dtype in which torch would multiply with this weight here."""
    device_type = weight.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


def _loss_of_linear(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, dtype: torch.dtype
) -> Tensor:
    # The loss chooses its own dtypes: sums are fp32.
    with torch.autocast(hidden.device.type, enabled=False):
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


_ROWS = 2
_TOKENS = 8
_RANK = 8
"""The stand-in for the head is a product of two matrices of this rank."""
_SPREAD = 8.0
"""The standard deviation of logits. They are so large that a cap changes them."""
_TOLERANCE = 1e-5

_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "token_type_ids")
"""Arguments with a number for each token, of which the comparison has its own."""

LossOf = Callable[[Tensor, Callable[[Tensor], Tensor], Tensor, Tensor | int], Tensor]
"""Takes hidden states [B, S, D], the function that makes logits of them, targets [B, S], and the
number of items."""


def compare_losses(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    loss_of: LossOf,
    arguments: dict[str, Any],
    outputs: Any = None,
) -> str:
    """The path of the module that the model's own forward calls as its decoder.

    forward: the model's own, bound to it. loss_of: our loss. arguments: the
    user's, of this forward.
    outputs: what the decoder returned for them; None before the first forward.

    Raises ValueError, in one line with both losses, if the loss or one of its gradients differs, or
    if the model's own forward fails. The host waits for the device.
    """
    with torch.inference_mode(False), torch.enable_grad():
        try:
            probe = _Probe(model, outputs)
            inputs = probe.inputs(arguments)
            with probe.stand_ins():
                found = forward(**inputs)
            theirs = found[0] if isinstance(found, tuple) else found.loss
            targets = shifted_labels(inputs)
            count = inputs.get("num_items_in_batch", (targets != IGNORE_INDEX).sum())
            ours = loss_of(probe.hidden, probe.logits, targets, count)
            problem = probe.difference(theirs, ours) or probe.other_arguments(inputs)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            problem = f"its own forward raised {type(error).__name__}: {first_line}"
    if problem is not None:
        raise ValueError(
            f"chunk_loss() does not compute the loss of {type(model).__name__}: on a few random "
            f"tokens, {problem}; leave chunk_loss() out"
        )
    return probe.path


class _Probe:
    """Random hidden states, and the stand-ins that hand them to a model's own forward."""

    def __init__(self, model: PreTrainedModel, outputs: Any):
        self.model = model
        self.head = model.get_output_embeddings()
        if outputs is None:
            width = getattr(self.head, "in_features", None)
            width = width or model.config.get_text_config().hidden_size
            device = "cpu" if model.device.type == "meta" else model.device
            dtype = model.dtype
        else:
            width = outputs[0].shape[-1]
            device = outputs[0].device
            dtype = outputs[0].dtype
        # Quantized weights have other dtypes.
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            dtype = torch.float32
        config = model.config.get_text_config()
        self.vocab_size = getattr(self.head, "out_features", config.vocab_size)
        self.generator = torch.Generator().manual_seed(0)
        # [B, S, D], [D, rank], and [rank, V]
        self.hidden = self._random(_ROWS, _TOKENS, width).to(device, dtype).requires_grad_()
        self.down = (self._random(width, _RANK) / width**0.5).to(device)
        self.up = (self._random(_RANK, self.vocab_size) * _SPREAD / _RANK**0.5).to(device)
        self.up.requires_grad_()
        self.outputs = _with_hidden(outputs, self.hidden)
        # The first module that the model's forward calls, and its arguments.
        self.path = ""
        self.decoder: nn.Module
        self.given: dict[str, Any] = {}

    def _random(self, *shape: int) -> Tensor:
        # The global generators are left alone.
        return torch.randn(shape, generator=self.generator)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in fp32 that the stand-in for the head makes of hidden states [...,
        D]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.down @ self.up

    def inputs(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model's forward like the user's, for a few tokens."""
        config = self.model.config.get_text_config()
        size = min(self.vocab_size, config.vocab_size)
        shape = (_ROWS, _TOKENS)
        input_ids, labels = torch.randint(size, (2, *shape), generator=self.generator)
        # Losses of their own may leave out padding's tokens, or token 0.
        labels[0, 3] = 0
        labels[0, 4] = min(getattr(config, "pad_token_id", None) or 0, size - 1)
        labels[0, 6] = IGNORE_INDEX
        labels[1, :3] = IGNORE_INDEX
        device = self.hidden.device
        inputs = {"input_ids": input_ids.to(device), "labels": labels.to(device)}
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            # Losses of their own may leave out labels there.
            inputs["attention_mask"][0, -2:] = 0
        if arguments.get("num_items_in_batch") is not None:
            inputs["num_items_in_batch"] = torch.tensor(5, device=device)
        known = (*_PER_TOKEN, *_OF_LOSS)
        return inputs | {name: value for name, value in arguments.items() if name not in known}

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Let the model's forward call stand-ins in place of its modules."""
        modules = self.model._modules
        real = dict(modules)
        for name, module in real.items():
            if module is not None:
                modules[name] = _StandIn(module, name, self)
        try:
            yield
        finally:
            modules.update(real)

    def call(self, module: nn.Module, path: str, args: tuple, kwargs: dict) -> Any:
        """The result of a stand-in. The first module that is called is the decoder, embeddings
        aside."""
        if module is self.head:
            return self.logits(*args, **kwargs)
        if self.path or isinstance(module, nn.Embedding):
            return module(*args, **kwargs)
        self.path = path
        self.decoder = module
        names = inspect.signature(module.forward).parameters
        self.given = dict(zip(names, args)) | kwargs
        return self.outputs

    def difference(self, theirs: Tensor, ours: Tensor) -> str | None:
        """The difference of the two losses or their gradients, in words; None if they are the
        same."""
        if not self.path:
            return "its own forward calls none of its modules"
        losses = f"its own loss is {theirs.item():.7g}, and ours is {ours.item():.7g}"
        if not _are_close(theirs, ours, _TOLERANCE):
            return losses
        known = {id(x) for part in (self.decoder, self.head) for x in part.parameters()}
        others = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in known
        }
        leaves = [self.up, self.hidden]
        found = torch.autograd.grad(theirs, [*leaves, *others.values()], allow_unused=True)
        for name, gradient in zip(others, found[2:]):
            if gradient is not None:
                return f"{losses}, but its own depends on {name} too"
        wanted = torch.autograd.grad(ours, leaves)
        tolerances = (_TOLERANCE, 4 * torch.finfo(self.hidden.dtype).eps)
        for one, other, tolerance in zip(found, wanted, tolerances):
            if one is None or not _are_close(one, other, max(_TOLERANCE, tolerance)):
                return f"{losses}, but their gradients differ"
        return None

    def other_arguments(self, inputs: dict[str, Any]) -> str | None:
        """The argument that the decoder gets from the model's forward and not
        from ours, in words."""
        for name in sorted({*self.given, *inputs} - {*_NOT_OF_DECODER}):
            theirs = self.given.get(name)
            ours = inputs.get(name)
            if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
                is_same = theirs.shape == ours.shape and torch.equal(theirs, ours)
            elif isinstance(theirs, Tensor) or isinstance(ours, Tensor):
                is_same = False
            else:
                is_same = (theirs or None) == (ours or None)
            if not is_same:
                return f"its own forward gives {self.path} another {name} than it is given"
        return None


class _StandIn(nn.Module):
    """Calls the probe in place of a module, whose attributes it has."""

    def __init__(self, module: nn.Module, path: str, probe: _Probe):
        super().__init__()
        self.train(module.training)
        # As a plain attribute: it is not a part of this module.
        self.__dict__["call"] = (probe, module, path)

    def __getattr__(self, name: str) -> Any:
        probe, module, path = self.__dict__["call"]
        found = getattr(module, name)
        if isinstance(found, nn.Module):
            return _StandIn(found, f"{path}.{name}", probe)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        probe, module, path = self.__dict__["call"]
        return probe.call(module, path, args, kwargs)


@dataclass
class _Outputs(BaseModelOutputWithPast):
    """The outputs of a decoder before it has run: whatever else is asked for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _with_hidden(outputs: Any, hidden: Tensor) -> Any:
    """A decoder's outputs with other hidden states."""
    if outputs is None:
        return _Outputs(last_hidden_state=hidden)
    if isinstance(outputs, tuple):
        return (hidden, *outputs[1:])
    changed = copy.copy(outputs)
    changed[next(iter(outputs))] = hidden
    return changed


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """True if the norm of the difference is small. NaN is close to nothing."""
    one, other = one.detach().double(), other.detach().double()
    return bool((one - other).norm() <= tolerance * other.norm())
