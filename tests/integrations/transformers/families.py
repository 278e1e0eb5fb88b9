"""Tiny models of transformers' families, with random weights, and what two of
them are compared by."""

from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from tests.models.transformers_models import EXPERTS, LINEAR, MODELS, WINDOW, tiny_model
from tests.reference import DEVICE
from titan_sparse import ContextParallel

__all__ = ["WINDOW", "transformers"]

CHUNK = 16
VOCAB = 64
BLOCK = 16
DEVICE_BLOCK = 64 if DEVICE == "cuda" else BLOCK
"""Of tests that also run on GPUs, whose kernels take blocks of 64 and more."""

OTHERS: dict[str, tuple[str, dict]] = {
    # Its positions are learned, and counted without padding.
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": CHUNK,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
        },
    ),
}
"""Families that our trainer does not train."""

HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""On a GPU their linear attention multiplies in tf32, which tests/gpu/test_linear.py allows for."""

ALL_FAMILIES = [
    name
    for name in [*MODELS, *OTHERS]
    if name != "qwen2" and not (name in HYBRID and DEVICE == "cuda")
]

_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 16}

# The same of models with convolutions or recurrences along the sequence.
MIXING: dict[str, tuple[str, dict]] = {
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "olmo_hybrid": ("OlmoHybridConfig", LINEAR),
    "minimax": (
        "MiniMaxConfig",
        {"layer_types": ["linear_attention", "full_attention"], **EXPERTS},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"layers_block_type": ["mamba", "attention"], "ssm_state_size": 16, **_MAMBA},
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
        },
    ),
}


def family(name: str, device: str = "cpu", **changes) -> nn.Module:
    """A tiny model in fp32 and in training mode; its weights follow from the family."""
    class_name, differences = (MODELS | OTHERS | MIXING)[name]
    settings = {"vocab_size": VOCAB, "eos_token_id": None, **differences, **changes}
    model = tiny_model(class_name, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            # Left empty by its model; some large enough to matter.
            nn.init.normal_(parameter, std=2.0)
        if name.endswith("A_log"):
            # States of linear attention that last, so that gradients of the decay are not rounding.
            nn.init.uniform_(parameter, -4.0, 0.0)
    return model.to(device)


def with_ours(name: str, device: str = "cpu", **changes) -> nn.Module:
    """family() with our attention."""
    model = family(name, device, **changes)
    model.set_attn_implementation("titan_sparse")
    return model


def tokens(batch: int, seq_len: int, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, seq_len), generator=generator).to(device)


device_family = partial(family, device=DEVICE)
device_tokens = partial(tokens, device=DEVICE)


def positions(*lengths: int) -> Tensor:
    """int64 [1, S] of packed documents."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def logits_and_gradients(model: nn.Module, counted: Tensor | None = None, **inputs) -> list[Tensor]:
    """The logits [B, S, V], and gradients of their weighted sum in every parameter; of the tokens
    that are `counted`, bool [B, S]."""
    logits = model(use_cache=False, **inputs).logits
    return _with_gradients(model, logits, counted)


def one_by_one(model: nn.Module, input_ids: Tensor, lengths: list[int]) -> list[Tensor]:
    """The same of documents packed in input_ids [1, S], each run alone."""
    logits = [model(part, use_cache=False).logits for part in input_ids.split(lengths, dim=1)]
    return _with_gradients(model, torch.cat(logits, dim=1), None)


def _with_gradients(model: nn.Module, logits: Tensor, counted: Tensor | None) -> list[Tensor]:
    if counted is not None:
        logits = logits * counted[..., None]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    weights = weights.to(logits.device)
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    gradients = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    return [logits.detach(), *(gradient for gradient in gradients if gradient is not None)]


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    """Each tensor to `tolerance`, relative by norm."""
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        assert a.isfinite().all()
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


def both(model: nn.Module, compute: Callable[[], object], name: str = "titan_sparse") -> tuple:
    """What compute() returns with our attention, and with transformers' eager attention."""
    model.set_attn_implementation(name)
    ours = compute()
    model.set_attn_implementation("eager")
    return ours, compute()


def pretended_ranks() -> ContextParallel:
    """The first of two ranks alone: what is refused is refused before anything is sent."""
    cp = ContextParallel(None, block_size=BLOCK)
    cp.size = 2
    return cp
