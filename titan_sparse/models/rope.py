"""Rotary position embeddings in the rotate-half convention of Hugging Face, with llama3 and YaRN
scaling."""

import math

import torch
from torch import Tensor

from titan_sparse.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per token for every pair of dims, and the factor that multiplies cos and sin.

    The frequencies are fp32 [head_dim / 2] on the CPU. Raises ValueError for an unknown scaling.
    """
    # The device is named so that a surrounding torch.device("meta") does not swallow the numbers.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.scaling == "none":
        return inv_freq, 1.0
    if rope.scaling == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.scaling == "yarn":
        return _yarn(inv_freq, rope, head_dim), 0.1 * math.log(rope.factor) + 1.0
    raise ValueError(
        f'model.rope_scaling = "{rope.scaling}" is unknown; write "none", "llama3" or "yarn".'
    )


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3's scaling: slow frequencies are divided by `factor`, fast ones kept, and those in
    between blended linearly in frequency."""
    wavelengths = 2 * math.pi / inv_freq
    rotations = rope.original_length / wavelengths
    low = rope.low_frequency_factor
    high = rope.high_frequency_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor


def _yarn(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN's scaling: pairs that turn more than beta_fast times in the training length are kept,
    those below beta_slow divided by `factor`, and those in between blended linearly by index."""
    low = max(math.floor(_pair_with_rotations(rope.beta_fast, rope, head_dim)), 0)
    high = min(math.ceil(_pair_with_rotations(rope.beta_slow, rope, head_dim)), head_dim - 1)
    # The reference widens an empty ramp by this much; the published checkpoints were trained with
    # it.
    width = (high - low) if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - low) / width).clamp(0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor


def _pair_with_rotations(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Index of the pair of dims that turns this many times in the training length, as a
    fraction."""
    wavelength = rope.original_length / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def rope_tables(
    inv_freq: Tensor, attention_factor: float, positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [B, 1, S, D] in `dtype` (float32, or float64 for fp64 models).

    inv_freq fp32 [D / 2] radians per token, positions int [B, S] in tokens; both on one device.
    """
    # [B, 1, S, 1] * [D / 2] -> [B, 1, S, D / 2]
    angles = positions.to(dtype)[:, None, :, None] * inv_freq.to(dtype)
    # [B, 1, S, D]: the two halves of a head turn by the same angles.
    angles = torch.cat((angles, angles), dim=-1)
    cos = angles.cos() * attention_factor
    sin = angles.sin() * attention_factor
    return cos, sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, S, D] by the tables [B, 1, S, D].

    Computed in the tables' precision or better, returned as x.dtype. Raises ValueError when the
    tables are in half precision, which cannot tell distant positions apart.
    """
    if cos.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"rope tables are {cos.dtype} and must stay float32; "
            "with FSDP write MixedPrecisionPolicy(cast_forward_inputs=False)."
        )
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    # [B, H, S, D / 2] each
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos + rotated * sin).to(x.dtype)
