"""Small decoders, and folders of Hugging Face: how ours reads, changes, and writes them."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.transformers_models import VOCAB
from titan_sparse.models.config import Adapters, DecoderConfig
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.flavours import resolve
from titan_sparse.models.huggingface import export_weights, load_weights
from titan_sparse.models.huggingface_files import files_to_copy
from titan_sparse.models.initialization import initialize
from titan_sparse.models.lora import add_adapters
from titan_sparse.training.checkpoint.reader import read_into


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Plain softmax attention in q's dtype, mask bool [S, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def build(
    config: DecoderConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attend: Callable[..., Tensor] = dense_attend,
    adapters: Adapters | None = None,
) -> Decoder:
    """As a trainer does: on meta, then materialized, then initialized."""
    with torch.device("meta"):
        model = Decoder(config, attend).to(dtype)
        if adapters:
            add_adapters(model, adapters)
    model = model.to_empty(device="cpu")
    initialize(model, seed, config, adapters=adapters)
    return model


def sample(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(13)
    tokens = torch.randint(0, config.vocab_size, (2, 13), generator=generator)
    return tokens, torch.arange(13).expand(2, -1)


ORIGINAL = "original_max_position_embeddings"
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, ORIGINAL: 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    ORIGINAL: 32,
    "low_freq_factor": 2.0,
    "high_freq_factor": 6.0,
}
LENGTH = 150  # beyond the original contexts above


def decoder(folder: Path, dtype: torch.dtype = torch.float32, **overrides) -> Decoder:
    config = resolve(flavour="debug", initial_hf=str(folder), **overrides)
    with torch.device("meta"):
        model = Decoder(config, dense_attend).to(dtype)
    model = model.to_empty(device="cpu")
    load_weights(model, str(folder), config)
    return model


def tokens_and_positions() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(LENGTH).expand(2, -1)


@torch.no_grad()
def assert_same_logits(ours: Decoder, theirs: torch.nn.Module) -> None:
    tokens, positions = tokens_and_positions()
    expected = theirs(tokens).logits
    assert 0.1 < expected.std() < 10
    torch.testing.assert_close(ours(tokens, positions, causal(LENGTH)), expected, atol=1e-4, rtol=0)


def save_checkpoint(model: Decoder, folder: Path) -> str:
    dcp.save(dict(model.named_parameters()), checkpoint_id=str(folder), no_dist=True)
    return str(folder)


def export(checkpoint: str, out: str, config, dtype, source: str = "", *rest) -> None:
    read = partial(read_into, checkpoint=checkpoint)
    files = {name: path.read_bytes() for name, path in files_to_copy(source).items()}
    export_weights(checkpoint, read, out, config, dtype, source, *rest, files=files)


def set_values(folder: Path, *left_out: str, **values) -> None:
    """Changes config.json: writes null for None, and leaves keys out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: x for key, x in values.items() if key not in left_out}))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
