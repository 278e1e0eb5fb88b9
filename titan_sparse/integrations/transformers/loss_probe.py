"""A model's own loss and ours, compared on a few tokens.

The model's own forward runs with stand-ins for its decoder and its head. So it needs no weights, no
attention, and no other ranks. What is left is what chunk_loss() replaces: all that happens between
the decoder and the loss.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from titan_sparse.integrations.transformers.sharding import shifted_labels
from titan_sparse.loss import IGNORE_INDEX

_ROWS = 2
_TOKENS = 8
_RANK = 8
"""The stand-in for the head is a product of two matrices of this rank."""
_SPREAD = 8.0
"""The standard deviation of logits. They are so large that a cap changes them."""
_TOLERANCE = 1e-5

_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "token_type_ids")
"""Arguments with a number for each token, of which the comparison has its own."""
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_NEUTRAL = (*_OF_LOSS, "use_cache", "return_dict")
"""Arguments of a decoder that do not change its hidden states."""

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

    forward: the model's own, bound to it. loss_of: our loss. arguments: the user's, of this forward.
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
        """The argument that the decoder gets from the model's forward and not from ours, in words."""
        for name in sorted({*self.given, *inputs} - {*_NEUTRAL}):
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
