"""Small decoders that several tests of the models use."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_sparse.models.config import DecoderConfig, RopeConfig
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.initialization import initialize

TINY = DecoderConfig(
    vocab_size=37,
    hidden_size=24,
    layers=2,
    heads=5,
    kv_heads=1,
    head_dim=8,
    intermediate_size=40,
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=True,
    norm_eps=1e-6,
    max_positions=64,
    rope=RopeConfig(theta=1e4, scaling="none", factor=1.0, original_length=64),
)

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


@contextmanager
def pretended_rank(rank: int, world_size: int) -> Iterator[None]:
    """A process group that sends nothing: whatever communicates would get wrong numbers."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
