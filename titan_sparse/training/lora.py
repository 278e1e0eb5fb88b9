"""What training does differently with adapters: where the frozen weights are from, and dropout."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from titan_sparse.config import Config, trains_random_base
from titan_sparse.config.changes import read_saved
from titan_sparse.config.reading import show
from titan_sparse.models.flavours import DecoderConfig
from titan_sparse.models.huggingface_files import weights_digest
from titan_sparse.models.initialization import stable_seed
from titan_sparse.models.lora import peft_config
from titan_sparse.models.lora_config import Adapters, resolve_adapters


def find_adapters(config: Config, model: DecoderConfig) -> Adapters | None:
    """What is trained in place of all weights; None without adapters.

    Raises ValueError where PEFT is missing.
    """
    adapters = resolve_adapters(model, **vars(config.lora))
    if adapters:
        peft_config(adapters)
    return adapters


def base_digest(config: Config) -> str:
    """What tells frozen weights from others; "" where all weights are trained.

    Checkpoints hold adapters alone, which mean nothing with another base.
    """
    if not config.lora.rank:
        return ""
    if trains_random_base(config):
        return f"training.seed = {config.training.seed}"
    return weights_digest(config.model.initial_hf)


def check_base(config: Config, checkpoint: str) -> None:
    """Raises ValueError unless the frozen weights of `config` are those that the adapters of a
    checkpoint were trained on."""
    saved = read_saved(checkpoint)
    if saved is not None and saved.origin.get("base") != base_digest(config):
        raise ValueError(
            f"model.initial_hf = {show(config.model.initial_hf)} has other weights than those that "
            f"the adapters of {checkpoint} were trained on; put them back"
        )


def draw_dropout(config: Config, step: int) -> None:
    """What this rank drops in this step: the same in a resumed run, and other inputs on each rank."""
    if config.lora.dropout:
        name = f"dropout of step {step} on rank {dist.get_rank()}"
        torch.manual_seed(stable_seed(config.training.seed, name))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()
