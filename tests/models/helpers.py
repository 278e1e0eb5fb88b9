"""Small decoders that several tests of the models use."""

import math

import torch
from torch import Tensor

from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.initialization import initialize


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Plain softmax attention in q's dtype, mask bool [S, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def build(config: DecoderConfig, seed: int = 0) -> Decoder:
    """As a trainer does: on meta, then materialised, then initialised."""
    with torch.device("meta"):
        model = Decoder(config, dense_attend)
    model = model.double().to_empty(device="cpu")
    initialize(model, seed, config)
    return model


def sample(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(13)
    tokens = torch.randint(0, config.vocab_size, (2, 13), generator=generator)
    return tokens, torch.arange(13).expand(2, -1)
