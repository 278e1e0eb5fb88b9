"""Rotary position embeddings in the rotate-half convention of Hugging Face, with llama3 and YaRN scaling."""

import math

import torch
from torch import Tensor

from titan_sparse.models.flavours import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per token for every pair of dims: (fp32 [head_dim / 2] on the CPU, factor that multiplies cos and sin).

    Raises ValueError for an unknown scaling.
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
    """Long waves are interpolated by `factor`, short ones kept, and those between blended linearly in frequency."""
    wavelengths = 2 * math.pi / inv_freq
    rotations = rope.original_length / wavelengths
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor


def _yarn(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs turning more than beta_fast times in the training length are kept, those below beta_slow divided."""

    def pair_with_rotations(rotations: float) -> float:
        turns = rope.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_with_rotations(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(rope.beta_slow)), head_dim - 1)
    # The reference widens an empty ramp by this much; the published checkpoints were trained with it.
    width = (high - low) if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pairs - low) / width).clamp(0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor


def rope_tables(
    inv_freq: Tensor, attention_factor: float, positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [B, 1, S, D] in `dtype` (float32, or float64 for fp64 models).

    inv_freq fp32 [D / 2] radians per token, positions int [B, S] in tokens; both on one device.
    """
    angles = positions.to(dtype)[:, None, :, None] * inv_freq.to(dtype)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, S, D] by the tables [B, 1, S, D]; computed in the tables' precision or better, out as x.dtype.

    Raises ValueError when the tables are in half precision, which cannot tell distant positions apart.
    """
    if cos.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"rope tables are {cos.dtype} and must stay float32; "
            "with FSDP write MixedPrecisionPolicy(cast_forward_inputs=False)."
        )
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos + rotated * sin).to(x.dtype)
