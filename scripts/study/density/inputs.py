"""Queries and keys of the real model on a text."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.study.real_model import load_decoder, positions_of
from titan_sparse.models.config import RopeConfig
from titan_sparse.models.huggingface_config import read_config
from titan_sparse.models.rope import inverse_frequencies

_IGNORED = -100
"""Label of a token that the loss leaves out."""


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
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.decoder = load_decoder(folder, self._attend).to(device)

    @torch.no_grad()
    def inputs(self, tokens: Tensor, layers: list[int]) -> Inputs:
        """What attention is given in these layers. tokens: int64 [1, S]."""
        rope = rope_of_length(self.config.rope, self.config.max_positions, tokens.shape[1])
        frequencies = inverse_frequencies(rope, self.config.head_dim)
        self.decoder.inv_freq, self.decoder.attention_factor = frequencies
        labels = F.pad(tokens[:, 1:], (0, 1), value=_IGNORED)
        loss = self.decoder(
            tokens.to(self.device),
            positions_of(tokens).to(self.device),
            None,
            labels=labels.to(self.device),
        )
        q = torch.cat([self.seen[layer][0] for layer in layers])
        k = torch.cat([self.seen[layer][1] for layer in layers])
        self.seen.clear()
        return Inputs(q, k, loss.item() / (tokens.shape[1] - 1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        self.seen.append((q.to(self.dtype), k.to(self.dtype)))
        group = q.shape[1] // k.shape[1]
        # Repeated, since SDPA in fp32 on a GPU takes groups of heads by its slowest way only.
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rope_of_length(rope: RopeConfig, trained: int, seq_len: int) -> RopeConfig:
    """YaRN by as much as the text is longer than what the model was trained at."""
    if seq_len <= trained:
        return rope
    return dataclasses.replace(
        rope, scaling="yarn", factor=seq_len / trained, original_length=trained
    )
