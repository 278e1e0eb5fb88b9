"""The load-balancing loss of a mixture of experts, counted once for each token of all ranks.

It is Switch Transformer's, as transformers computes it: with f_e the share of tokens that are sent
to expert e (summed over the k choices of a token) and P_e the router's mean probability, both over
all tokens of all layers, E * sum_e f_e P_e. f has no gradient, so its sum over ranks needs none.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_sparse.loss import count_valid
from titan_sparse.models.transformers_config import TransformersConfig


class RoutedLayer(nn.Module):
    """A layer of transformers that returns its router's logits besides; the same parameters under
    the same names.

    transformers collects logits by hooks that write into a list. Neither torch.compile of a layer
    nor activation checkpointing can do that.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """x [B, S, hidden_size] -> the same, and logits [B * S, E]."""
        attended, _ = self.self_attn(self.input_layernorm(x), **arguments)
        x = x + attended
        normed = self.post_attention_layernorm(x)
        # Computed twice, here and in the block: E columns beside the experts' matrices.
        router = self.mlp.router if hasattr(self.mlp, "router") else self.mlp.gate
        logits = F.linear(normed.flatten(0, -2), router.weight, getattr(router, "bias", None))
        out = self.mlp(normed)
        if isinstance(out, tuple):
            out = out[0]
        return x + out, logits


class RouterLoss:
    """This rank's share of the loss; the shares of all ranks add up to it."""

    def __init__(self, config: TransformersConfig) -> None:
        self.weight = config.router_loss
        self.experts = config.experts
        self.per_token = config.experts_per_token

    def __call__(self, logits: list[Tensor], labels: Tensor, tokens: Tensor | None) -> Tensor:
        """A scalar, fp32 or fp64: weight * loss * labels that count, as a sum over labels is wanted.

        logits: of each layer, [B * S, E]. labels [B, S] of this rank. tokens: bool [B, S], padding
        is false; None counts all. Collective over all ranks, without a wait for the device.
        """
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        counted = torch.ones_like(labels) if tokens is None else tokens
        # [B * S]
        counted = counted.flatten().to(wide)
        chosen = torch.zeros(self.experts, dtype=torch.float64, device=labels.device)
        probabilities = torch.zeros(self.experts, dtype=wide, device=labels.device)
        for of_layer in logits:
            # [B * S, E]
            shares = of_layer.to(wide).softmax(-1)
            experts = shares.topk(self.per_token, dim=-1).indices
            ones = counted.double().unsqueeze(1).expand_as(experts)
            chosen = chosen.index_add(0, experts.flatten(), ones.flatten())
            probabilities = probabilities + counted @ shares
        rows = counted.double().sum() * len(logits)
        totals = torch.cat([chosen, rows[None], count_valid(labels).double()[None]]).detach()
        if dist.is_initialized():
            dist.all_reduce(totals)
        chosen, rows, valid = totals[:-2], totals[-2], totals[-1]
        # No token at all: nothing was sent anywhere.
        rows = rows.clamp(min=1)
        factor = self.weight * self.experts * valid / rows
        return (factor * (chosen / rows).to(wide) * probabilities).sum().to(wide)
