"""A decoder made of transformers' own modules, with the interface and the names of models.decoder.

Embedding, layers, norm and head are transformers'. The loop over layers, attention, the rotary
tables' precision and the loss are ours. transformers calls attention through a function that is
registered under ATTENTION; that function calls what was attached to the layer's attention module.
"""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from titan_sparse.loss import linear_cross_entropy
from titan_sparse.models.decoder import Attend
from titan_sparse.models.transformers_config import TransformersConfig
from titan_sparse.models.transformers_router import RoutedLayer, RouterLoss

ATTENTION = "titan_sparse_models"
"""The name of our attention in transformers' AttentionInterface."""


class LayerMasks(NamedTuple):
    """The masks of a model whose layers differ; opaque to the model, as one mask is.

    full: of layers that see everything. window: of layers with a window. tokens: bool [B, S], which
    tokens are no padding; None counts all.
    """

    full: Any
    window: Any = None
    tokens: Tensor | None = None


class Attends(NamedTuple):
    """attend(q, k, v, mask, scale=..., sinks=...) of layers that see everything, and of windows."""

    full: Attend
    window: Attend


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


class TransformersDecoder(nn.Module):
    """The model that `config.folder` describes. Make it on "meta": its code draws weights.

    `attends` compute attention; see models.decoder.Attend for shapes. Parameters have the names of
    models.decoder.Decoder, which are transformers' less "model.".
    Raises ValueError where transformers builds something else than `config` says.
    """

    def __init__(self, config: TransformersConfig, attends: Attends) -> None:
        super().__init__()
        theirs = _build(config.folder)
        inner = theirs.model
        self.config = config
        self.embed_tokens = inner.embed_tokens
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(inner.layers)})
        self.norm = inner.norm
        self.lm_head = None if config.tied_embeddings else theirs.lm_head
        self.embedding_multiplier = getattr(theirs.config, "embedding_multiplier", 1.0)
        self.logits_scaling = getattr(theirs.config, "logits_scaling", 1.0)
        self.rotary = _Rotary(type(inner.rotary_emb), theirs.config)
        self.router_loss = RouterLoss(config) if config.router_loss else None
        self._keep_scale_of_embedding()
        self._check(config)
        for layer, window in zip(self.layers.values(), config.windows, strict=True):
            layer.self_attn.attend = attends.window if window else attends.full
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

        In training, the router's loss comes on top, times the labels that count in this forward.
        """
        if not isinstance(mask, LayerMasks):
            mask = LayerMasks(full=mask)
        # [B, S, hidden_size]
        x = self.embed_tokens(tokens)
        if self.embedding_multiplier != 1.0:
            x = x * self.embedding_multiplier
        x, router_logits = self._run_layers(x, positions, mask)
        hidden = self.norm(x)
        if self.logits_scaling != 1.0:
            # The same as dividing the logits.
            hidden = hidden / self.logits_scaling
        # As in models.decoder: the loss consumes the head's weight, which is whole only here.
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if labels is None:
            return nn.functional.linear(hidden, head.weight)
        total = loss(hidden, head.weight, labels, loss_chunk_tokens, z_loss)
        if self.router_loss is not None and self.training and loss is linear_cross_entropy:
            total = total + self.router_loss(router_logits, labels, mask.tokens)
        return total

    def _run_layers(
        self, x: Tensor, positions: Tensor, masks: LayerMasks
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B, S, hidden_size] through all layers; and the router's logits [B * S, E] of those that
        give them."""
        tables = self.rotary.tables(x, positions)
        router_logits = []
        for layer, window in zip(self.layers.values(), self.config.windows, strict=True):
            layer_type = "sliding_attention" if window else "full_attention"
            x = layer(
                x,
                attention_mask=masks.window if window else masks.full,
                position_embeddings=tables[layer_type],
                position_ids=positions,
            )
            if isinstance(x, tuple):
                x, logits = x
                router_logits.append(logits)
        return x, router_logits

    def _keep_scale_of_embedding(self) -> None:
        """Gemma's embedding has its scale as a buffer, which to_empty() would wipe."""
        scale = getattr(self.embed_tokens, "scalar_embed_scale", None)
        if scale is not None:
            del self.embed_tokens.embed_scale
            self.embed_tokens.embed_scale = torch.tensor(scale, device="cpu")

    def _check(self, config: TransformersConfig) -> None:
        """Raises ValueError where config.json has been read in two ways."""
        counted = sum(parameter.numel() for parameter in self.parameters())
        if counted != config.parameters:
            raise ValueError(
                f"model.initial_hf: transformers {transformers.__version__} builds {counted:,} "
                f"parameters of a {config.model_type}, not {config.parameters:,}; "
                "its config.json has a setting that is not known here"
            )
        for number, layer in self.layers.items():
            buffers = [name for name, _ in layer.named_buffers()]
            if buffers:
                raise ValueError(
                    f"model.initial_hf: layer {number} of a {config.model_type} has the buffer "
                    f"{buffers[0]}, which is not known here"
                )


class _Rotary:
    """transformers' rotary embedding. No module of the decoder: to_empty() would wipe its
    frequencies, and .bfloat16() would round them."""

    def __init__(self, rotary_class: type[nn.Module], config: Any) -> None:
        with torch.device("cpu"):
            self.module = rotary_class(config)
        self.is_by_layer = "layer_type" in inspect.signature(rotary_class.forward).parameters
        self.device = torch.device("cpu")

    def tables(self, x: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin [B, S, D] by kind of layer, in fp32 (fp64 for fp64 x)."""
        if self.device != x.device:
            self.module.to(x.device)
            self.device = x.device
        # Only its dtype and device are asked for. In bf16 the tables would lose far positions.
        wide = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        kinds = ("full_attention", "sliding_attention")
        if not self.is_by_layer:
            return dict.fromkeys(kinds, self.module(wide, positions))
        there = [kind for kind in kinds if kind in self.module.layer_types]
        return {kind: self.module(wide, positions, kind) for kind in there}


def _build(folder: str) -> nn.Module:
    """transformers' model of `folder`/config.json, with our attention."""
    path = str(Path(folder).expanduser())
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    finally:
        quiet.setLevel(level)
