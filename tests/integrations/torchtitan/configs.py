"""Small models in torchtitan's configuration, for its command line: --module of this file.

plain is an override of the same kind as ours: attention by softmax over a
boolean mask, for one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import BaseAttention, GQAttention
from torchtitan.models.gpt_oss import config_registry as gpt_oss_configs
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.models.llama3 import config_registry as llama3_configs
from torchtitan.models.qwen3 import config_registry as qwen3_configs
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

LAYERS = 2
TOKENS = 512


class Sequences(IterableDataset):
    """Packed sequences of random tokens, the same over any number of data-parallel ranks."""

    def __init__(self, rank: int, ranks: int, packed: bool):
        self.rank, self.ranks, self.packed = rank, ranks, packed
        self.next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            number = self.next * self.ranks + self.rank
            self.next += 1
            generator = torch.Generator().manual_seed(number)
            # Tokens that repeat can be learned, so that losses fall.
            tokens = torch.randint(200, (TOKENS // 4 + 1,), generator=generator).repeat(4)
            positions = torch.arange(TOKENS)
            if self.packed:
                cuts = torch.randint(1, TOKENS, (5,), generator=generator).sort().values
                begins = torch.zeros(TOKENS, dtype=torch.int64)
                begins[cuts] = cuts
                positions = positions - begins.cummax(0).values
            inputs = {"input": tokens[:TOKENS], "positions": positions}
            yield inputs, tokens[1 : TOKENS + 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class SequenceLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        packed: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        sequences = Sequences(dp_rank, dp_world_size, config.packed)
        super().__init__(sequences, dp_rank, dp_world_size, batch_size=local_batch_size)


def _small(config: Trainer.Config) -> Trainer.Config:
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.dataloader = SequenceLoader.Config()
    config.training.local_batch_size = 2
    config.training.seq_len = TOKENS
    config.training.steps = 3
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.optimizer.implementation = "foreach"
    config.metrics.log_freq = 1
    config.validator.enable = False
    config.activation_checkpoint = None
    config.checkpoint.enable = True
    config.checkpoint.interval = 1000
    config.checkpoint.export_dtype = "float32"
    config.debug.enable_structured_logging = False
    config.debug.seed = 0
    return config


def llama3() -> Trainer.Config:
    return _small(llama3_configs.llama3_debugmodel())


def qwen3() -> Trainer.Config:
    return _small(qwen3_configs.qwen3_debugmodel())


def qwen3_moe() -> Trainer.Config:
    return _small(qwen3_configs.qwen3_moe_debug())


def gpt_oss() -> Trainer.Config:
    return _small(gpt_oss_configs.gpt_oss_debugmodel())


class PlainAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int = TOKENS

    def __init__(self, config: Config):
        super().__init__()
        self.window = config.window

    def forward(self, q, k, v, *, attention_masks, scale=None, out_transform=None, **_):
        """q, k, v: [B, S, H, D]. attention_masks: positions [B, S]."""
        document = (attention_masks == 0).cumsum(1)
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        near = (distance >= 0) & (distance < self.window)
        seen = (document[:, :, None] == document[:, None, :]) & near
        group = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
        if out_transform is None:
            return out
        return out_transform(out, scores.logsumexp(-1).transpose(1, 2))


class PlainGQAttention(GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(self, x_BLD, attention_masks, positions=None):
        return super().forward(x_BLD, positions, positions)


class PlainGptOssAttention(GptOssAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        pass

    def forward(self, x, attention_masks, positions=None):
        return super().forward(x, positions, positions)


@override(target=BaseAttention.Config)
def plain(cfg):
    classes = {GQAttention.Config: PlainGQAttention, GptOssAttention.Config: PlainGptOssAttention}
    window = getattr(cfg, "sliding_window_size", None) or TOKENS
    inner = PlainAttention.Config(window=window)
    return derive(cfg, classes[type(cfg)].Config, inner_attention=inner)
