"""The real model on a text, with any attention, and the queries and keys of its layers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.study.real_model import load_decoder, positions_of
from titan_sparse.data.packing import IGNORED_LABEL
from titan_sparse.loss import linear_cross_entropy
from titan_sparse.models.config import RopeConfig
from titan_sparse.models.decoder import Attend
from titan_sparse.models.huggingface_config import read_config
from titan_sparse.models.rope import inverse_frequencies


class Inputs(NamedTuple):
    """Of some layers on one text.

    q: [layers, Hq, S, D], k: [layers, Hkv, S, D], after RoPE.
    cross_entropy: of the model on the text, nats a token.
    """

    q: Tensor
    k: Tensor
    cross_entropy: float


class RealModel:
    """The model in a folder of scripts.study.real_model, in fp32.

    dtype: of the queries and keys that it gives.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype):
        self.config = read_config(str(folder))
        self.device = device
        self.dtype = dtype
        self.attend: Attend = dense_attention
        self.decoder = load_decoder(folder, self._attend).to(device)

    @torch.no_grad()
    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        attend: Attend,
        loss: Callable[..., Any] = linear_cross_entropy,
    ) -> Any:
        """What `loss` of titan_sparse.loss returns, with `attend` in every layer.

        tokens, labels: int64 [B, S], labels already shifted. YaRN where S is more than the model
        was trained at.
        """
        rope = rope_of_length(self.config.rope, self.config.max_positions, tokens.shape[1])
        frequencies = inverse_frequencies(rope, self.config.head_dim)
        self.decoder.inv_freq, self.decoder.attention_factor = frequencies
        self.attend = attend
        return self.decoder(
            tokens.to(self.device),
            positions_of(tokens).expand_as(tokens).to(self.device),
            None,
            labels=labels.to(self.device),
            loss=loss,
        )

    def inputs(self, tokens: Tensor, layers: list[int]) -> Inputs:
        """What attention is given in these layers. tokens: int64 [1, S]."""
        seen: list[tuple[Tensor, Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
            seen.append((q.to(self.dtype), k.to(self.dtype)))
            return dense_attention(q, k, v, mask)

        loss = self.run(tokens, next_tokens(tokens), attend)
        q = torch.cat([seen[layer][0] for layer in layers])
        k = torch.cat([seen[layer][1] for layer in layers])
        return Inputs(q, k, loss.item() / (tokens.shape[1] - 1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return self.attend(q, k, v, mask)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    """As Decoder wants it, causal."""
    group = q.shape[1] // k.shape[1]
    # Repeated, since SDPA in fp32 on a GPU takes groups of heads by its slowest way only.
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def next_tokens(tokens: Tensor) -> Tensor:
    """Labels of tokens [B, S]; the last token has none."""
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)


def rope_of_length(rope: RopeConfig, trained: int, seq_len: int) -> RopeConfig:
    """YaRN by as much as the text is longer than what the model was trained at."""
    if seq_len <= trained:
        return rope
    return dataclasses.replace(
        rope, scaling="yarn", factor=seq_len / trained, original_length=trained
    )
