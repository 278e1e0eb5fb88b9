"""Small decoders that several tests of the models use."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tests.runs import TINY
from titan_sparse.models.config import DecoderConfig, RopeConfig
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.initialization import initialize

WITH_YARN = replace(
    TINY,
    heads=6,
    kv_heads=2,
    qk_norm=False,
    tied_embeddings=False,
    rope=RopeConfig(1e4, "yarn", 4.0, 16),
)


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Plain softmax attention in q's dtype, mask bool [S, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def build(config: DecoderConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """As a trainer does: on meta, then materialised, then initialised."""
    with torch.device("meta"):
        model = Decoder(config, dense_attend)
    model = model.to(dtype).to_empty(device="cpu")
    initialize(model, seed, config)
    return model


def sample(config: DecoderConfig, batch: int = 2, length: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
    return tokens, torch.arange(length).expand(batch, -1)
