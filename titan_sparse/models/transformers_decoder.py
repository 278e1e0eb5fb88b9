"""A decoder made of transformers' own modules, with the interface and the names of models.decoder.

Embedding, layers, norm and head are transformers'. The loop over layers, attention, the rotary
tables' precision and the loss are ours. transformers calls attention through a function that is
registered under ATTENTION; that function calls what was attached to the layer's attention module.

The load-balancing loss of a mixture of experts is Switch Transformer's, as transformers computes
it, but counted once for each token of all ranks: with f_e the share of tokens that are sent to
expert e (summed over the k choices of a token) and P_e the router's mean probability, both over all
tokens of all layers, E * sum_e f_e P_e. f has no gradient, so its sum over ranks needs none.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from titan_sparse.kernels.dtypes import accumulation_dtype
from titan_sparse.loss import count_valid, linear_cross_entropy
from titan_sparse.models.decoder import Attends, LayerMasks, run_blocks
from titan_sparse.models.transformers_config import TransformersConfig, build_their_model
from titan_sparse.token_wise_modules import mixers

ATTENTION = "titan_sparse_models"
"""The name of our attention in transformers' AttentionInterface."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface: query [B, Hq, S, D], key and value [B, Hkv, S, D] ->
    [B, S, Hq, D].

    attention_mask: what TransformersDecoder.forward() handed to the layer.
    """
    # Rotary tables of fp32 have widened these two.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    sinks = {} if s_aux is None else {"sinks": s_aux}
    out = module.attend(query, key, value, attention_mask, scale=scaling, **sinks)
    return out.transpose(1, 2), None


transformers.AttentionInterface.register(ATTENTION, attention)


class _LayerCall(NamedTuple):
    """One layer with the call of a block of models.decoder. It is not part of what is compiled."""

    layer: nn.Module
    kind: Literal["full", "window", "linear"]
    router_logits: list[Tensor]
    """filled by layers that route"""

    def __call__(
        self, x: Tensor, full_tables: Any, window_tables: Any, masks: LayerMasks, positions: Tensor
    ) -> Tensor:
        """x [B, S, hidden_size] -> the same. tables: cos and sin, each [B, S, D]."""
        # Hidden states are narrower than q, k, v and out, so that they are what moves.
        move = None if self.kind == "linear" else masks.move
        if move is not None:
            x = move.to_layout(x)
        out = self.layer(
            x,
            attention_mask=getattr(masks, self.kind),
            position_embeddings=window_tables if self.kind == "window" else full_tables,
            position_ids=positions,
        )
        out, logits = out if isinstance(out, tuple) else (out, None)
        if move is not None:
            out = move.to_contiguous(out)
            if logits is not None:
                logits = move.to_contiguous(logits.view(*x.shape[:2], -1)).flatten(0, 1)
        if logits is not None:
            self.router_logits.append(logits)
        return out

    def parameters(self) -> Iterable[nn.Parameter]:
        """The layer's parameters, for training.offload."""
        return self.layer.parameters()


class TransformersDecoder(nn.Module):
    """The model that `config.folder` describes. Make it on "meta", because its code draws weights.

    `attends` compute attention; see models.decoder.Attend for shapes. Parameters have the names of
    models.decoder.Decoder, which are transformers' names without "model.".
    Raises ValueError if a layer mixes tokens or has buffers.
    """

    def __init__(self, config: TransformersConfig, attends: Attends) -> None:
        super().__init__()
        theirs = build_their_model(
            config.folder,
            config.layers,
            ATTENTION,
            config.vocab_size,
            # Models with several have those of config.json.
            config.rope.theta if config.has_one_theta else 0.0,
        )
        inner = theirs.model
        self.config = config
        self.their_config = theirs.config
        self.embed_tokens = inner.embed_tokens
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(inner.layers)})
        # As in models.decoder, training.offload may replace this function.
        self.run_blocks = run_blocks
        self.norm = inner.norm
        self.lm_head = None if config.tied_embeddings else theirs.lm_head
        # A file may have entries that the family does not read.
        read = {field.name: getattr(theirs.config, field.name) for field in fields(theirs.config)}
        self.embedding_multiplier = read.get("embedding_multiplier", 1.0)
        self.logits_scaling = read.get("logits_scaling", 1.0)
        self.rotary = _Rotary(type(inner.rotary_emb), theirs.config)
        self.router_loss = RouterLoss(config) if config.router_loss else None
        scale = getattr(self.embed_tokens, "scalar_embed_scale", None)
        if scale is not None:
            # Gemma's embedding has it as a buffer, which to_empty() would wipe.
            del self.embed_tokens.embed_scale
            self.embed_tokens.embed_scale = torch.tensor(scale, device="cpu")
        self.kinds = ["window" if window else "full" for window in config.windows]
        for number in config.linear_layers:
            self.kinds[number] = "linear"
        for number, (layer, kind) in enumerate(zip(self.layers.values(), self.kinds, strict=True)):
            if kind == "linear":
                layer.linear_attn.forward = functools.partial(attends.linear, layer.linear_attn)
                continue
            is_dense = kind == "window" or number in attends.dense_layers
            layer.self_attn.attend = attends.window if is_dense else attends.full
        # to_empty() would wipe a buffer.
        buffers = (name for name, _ in self.layers.named_buffers())
        unknown = next(itertools.chain(mixers(self.layers), buffers), None)
        if unknown is not None:
            raise ValueError(
                f"model.initial_hf: layer {unknown} of a {config.model_type} is not known to treat "
                "each token by itself, which context parallelism and packing need, or is a buffer; "
                "write a folder of another family"
            )
        if self.router_loss is not None:
            for name, layer in self.layers.items():
                if hasattr(layer.mlp, "experts"):
                    self.layers[name] = RoutedLayer(layer)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Any,
        labels: Tensor | None = None,
        loss_chunk_tokens: int = 4096,
        z_loss: float = 0.0,
        loss: Callable[..., Tensor] = linear_cross_entropy,
    ) -> Tensor:
        """As models.decoder.Decoder.forward(). mask: LayerMasks, or one mask for all layers.

        In training, the router's loss is added, times the number of labels that count in this
        forward.
        """
        if not isinstance(mask, LayerMasks):
            mask = LayerMasks(full=mask)
        # [B, S, hidden_size]
        x = self.embed_tokens(tokens)
        if x.dtype == torch.float64:
            # Grouped matmuls of experts do not take it. A loop over experts cannot be compiled.
            compiled = any(layer._compiled_call_impl for layer in self.layers.values())
            self.their_config._experts_implementation = "batched_mm" if compiled else "eager"
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        router_logits: list[Tensor] = []
        steps = [
            _LayerCall(layer, kind, router_logits)
            for layer, kind in zip(self.layers.values(), self.kinds, strict=True)
        ]
        if mask.move is not None:
            positions = mask.move.to_layout(positions[..., None])[..., 0]
        full_tables, window_tables = self.rotary.tables(x, positions)
        x = self.run_blocks(steps, x, full_tables, window_tables, mask, positions)
        hidden = self.norm(x)
        if self.logits_scaling != 1.0:
            # This is the same as dividing the logits.
            hidden = hidden / self.logits_scaling
        # As in models.decoder, the loss reads the head's weight, which is unsharded only here.
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if labels is None:
            return nn.functional.linear(hidden, head.weight)
        total = loss(hidden, head.weight, labels, loss_chunk_tokens, z_loss)
        if self.router_loss is not None and self.training and loss is linear_cross_entropy:
            total = total + self.router_loss(router_logits, labels, mask.tokens)
        return total


class _Rotary:
    """transformers' rotary embedding. It is not a submodule of the decoder, because to_empty()
    would wipe its frequencies, and .bfloat16() would round them."""

    def __init__(self, rotary_class: type[nn.Module], config: Any) -> None:
        with torch.device("cpu"):
            # On the meta device its frequencies would have no values.
            self.module = rotary_class(config)
        self.is_by_layer = "layer_type" in inspect.signature(rotary_class.forward).parameters

    def tables(self, x: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """cos and sin [B, S, D] in fp32 (fp64 for fp64 x), for layers that see everything and for
        those with a window."""
        self.module.to(x.device)
        # Only its dtype and device are used. Tables in bf16 could not distinguish far positions.
        wide = x.new_empty(0, dtype=accumulation_dtype(x.dtype))
        if hasattr(self.module, "mrope_section"):
            # Of text, all three axes are the same. transformers 5.17 does not add them itself.
            positions = positions.expand(3, -1, -1)
        if not self.is_by_layer:
            return [self.module(wide, positions)] * 2
        tables = []
        for kind in ("full_attention", "sliding_attention"):
            is_there = kind in self.module.layer_types
            tables.append(self.module(wide, positions, kind) if is_there else None)
        return tables


class RoutedLayer(nn.Module):
    """A layer of transformers that also returns its router's logits, with the same parameters under
    the same names.

    transformers collects logits by hooks that write into a list. That does not work with
    torch.compile of a layer or with activation checkpointing.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        mixer = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"
        for name in ("input_layernorm", mixer, "post_attention_layernorm", "mlp"):
            self.add_module(name, getattr(layer, name))

    def forward(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """x [B, S, hidden_size] -> the same, and logits [B * S, E]."""
        normed = self.input_layernorm(x)
        if hasattr(self, "linear_attn"):
            x = x + self.linear_attn(normed, **arguments)
        else:
            x = x + self.self_attn(normed, **arguments)[0]
        normed = self.post_attention_layernorm(x)
        # The router runs twice, here and in the block. It is small: only E output features.
        router = self.mlp.router if hasattr(self.mlp, "router") else self.mlp.gate
        logits = F.linear(normed.flatten(0, -2), router.weight, getattr(router, "bias", None))
        out = self.mlp(normed)
        if isinstance(out, tuple):
            out = out[0]
        return x + out, logits


class RouterLoss:
    """This rank's share of the load-balancing loss. The shares of all ranks add up to it."""

    def __init__(self, config: TransformersConfig) -> None:
        self.weight = config.router_loss
        self.experts = config.experts
        self.per_token = config.experts_per_token

    def __call__(self, logits: list[Tensor], labels: Tensor, tokens: Tensor | None) -> Tensor:
        """A scalar, fp32 or fp64: weight * loss * number of labels that count, to match a loss
        summed over labels.

        logits: of each layer, [B * S, E]. labels [B, S] of this rank. tokens: bool [B, S], false
        for padding; None counts all. Collective over all ranks, without a wait for the device.
        """
        wide = accumulation_dtype(logits[0].dtype)
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
        # There may be no token at all.
        rows = rows.clamp(min=1)
        factor = self.weight * self.experts * valid / rows
        return (factor * (chosen / rows).to(wide) * probabilities).sum().to(wide)
