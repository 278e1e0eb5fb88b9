"""titan_sparse.models.decoder: rotary position embeddings."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.models.helpers import TINY, pretended_rank
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.models.config import RopeConfig
from titan_sparse.models.decoder import Decoder, apply_rope, inverse_frequencies, rope_tables
from titan_sparse.training.build_model import parallelize


def _llama3_by_loop(rope: RopeConfig, head_dim: int) -> list[float]:
    frequencies = []
    for pair in range(head_dim // 2):
        frequency = rope.theta ** (-2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > rope.original_length / rope.low_frequency_factor:
            frequency /= rope.factor
        elif wavelength >= rope.original_length / rope.high_frequency_factor:
            smooth = rope.original_length / wavelength - rope.low_frequency_factor
            smooth /= rope.high_frequency_factor - rope.low_frequency_factor
            frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def _yarn_by_loop(rope: RopeConfig, head_dim: int) -> list[float]:
    def boundary(rotations: float) -> float:
        wavelength = rope.original_length / rotations
        turns = math.log(wavelength / (2 * math.pi), rope.theta)
        return head_dim / 2 * turns

    low = max(0, math.floor(boundary(rope.beta_fast)))
    high = min(head_dim - 1, math.ceil(boundary(rope.beta_slow)))
    frequencies = []
    for pair in range(head_dim // 2):
        share = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequency = rope.theta ** (-2 * pair / head_dim)
        frequencies.append(share * frequency / rope.factor + (1 - share) * frequency)
    return frequencies


@pytest.mark.parametrize(
    "theta, factor, original_length, head_dim",
    [
        (5e5, 8.0, 8192, 128),
        (1e6, 3.0, 32768, 64),
        (1e4, 4.0, 2048, 32),
    ],
)
def test_scaled_frequencies_match_a_loop(
    theta: float, factor: float, original_length: int, head_dim: int
) -> None:
    for scaling, loop in (("llama3", _llama3_by_loop), ("yarn", _yarn_by_loop)):
        rope = RopeConfig(theta, scaling, factor, original_length)
        inv_freq, attention_factor = inverse_frequencies(rope, head_dim)
        expected = torch.tensor(loop(rope, head_dim), dtype=torch.float64)
        assert inv_freq.dtype == torch.float32 and inv_freq.shape == (head_dim // 2,)
        torch.testing.assert_close(inv_freq.double(), expected, rtol=1e-5, atol=0)
        assert attention_factor == (0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0)
        # the fastest pair is kept and the slowest divided: both ends of the blend are exercised
        assert inv_freq[0] == 1.0
        assert inv_freq[-1].item() == pytest.approx(
            theta ** (-(head_dim - 2) / head_dim) / factor, rel=1e-5
        )


_CASES = {
    "plain": RopeConfig(1e4, "none", 1.0, 64),
    "llama3": RopeConfig(1e3, "llama3", 6.0, 256, 2.0, 9.0),
    "yarn": RopeConfig(1e3, "yarn", 4.0, 64),
    "yarn, other betas": RopeConfig(1e4, "yarn", 3.0, 256, beta_fast=9.0, beta_slow=2.0),
    # Pair 23 of 8 would turn beta_slow times, the cap is 15.
    "yarn, the ramp beyond the head": RopeConfig(10.0, "yarn", 4.0, 4096, beta_fast=500.0),
    # Not even the fastest pair turns once.
    "yarn, an empty ramp": RopeConfig(1e4, "yarn", 4.0, 4),
    "yarn, by one": RopeConfig(1e3, "yarn", 1.0, 64),
}


@pytest.mark.parametrize("rope", _CASES.values(), ids=_CASES.keys())
def test_frequencies_are_those_of_transformers(rope: RopeConfig) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    given = {
        "rope_type": "default" if rope.scaling == "none" else rope.scaling,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
    }
    if rope.scaling == "llama3":
        given["low_freq_factor"] = rope.low_frequency_factor
        given["high_freq_factor"] = rope.high_frequency_factor
    if rope.scaling == "yarn":
        given["beta_fast"] = rope.beta_fast
        given["beta_slow"] = rope.beta_slow
    theirs = modeling.LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=given)
    )
    inv_freq, attention_factor = inverse_frequencies(rope, 16)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="model.rope_scaling"):
        inverse_frequencies(RopeConfig(1e4, "ntk", 2.0, 64), 8)


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("llama3", 8.0), ("yarn", 8.0)])
@pytest.mark.parametrize("shift", [1, 4097, 1_000_003])
def test_scores_depend_on_relative_position_only(scaling: str, factor: float, shift: int) -> None:
    inv_freq, attention_factor = inverse_frequencies(RopeConfig(1e4, scaling, factor, 256), 16)
    q, k = torch.randn(
        2, 1, 3, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def scores(positions: Tensor) -> Tensor:
        tables = rope_tables(inv_freq, attention_factor, positions[None], torch.float64)
        return apply_rope(q, *tables) @ apply_rope(k, *tables).mT

    positions = torch.arange(11) ** 2
    torch.testing.assert_close(scores(positions + shift), scores(positions), rtol=0, atol=1e-8)


def test_rotation_pairs_the_two_halves_of_the_head() -> None:
    inv_freq, attention_factor = inverse_frequencies(TINY.rope, 4)
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64)
    rotated = apply_rope(
        x, *rope_tables(inv_freq, attention_factor, torch.tensor([[3]]), torch.float64)
    )
    as_complex = torch.complex(x[..., :2], x[..., 2:]) * torch.exp(3j * inv_freq.double())
    torch.testing.assert_close(rotated, torch.cat((as_complex.real, as_complex.imag), -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rope_dtypes(dtype: torch.dtype) -> None:
    inv_freq, attention_factor = inverse_frequencies(TINY.rope, 8)
    positions = torch.tensor([[0, 1, 1_048_575]])
    cos, sin = rope_tables(inv_freq, attention_factor, positions)
    x = torch.randn(1, 2, 3, 8).to(dtype)
    out = apply_rope(x, cos, sin)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape == (1, 1, 3, 8)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, apply_rope(x.double(), cos, sin).to(dtype), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        cos[0, 0, :, :4], (positions[0, :, None].float() * inv_freq).cos(), rtol=0, atol=0
    )


def test_rope_tables_in_half_precision_are_refused() -> None:
    cos, sin = rope_tables(*inverse_frequencies(TINY.rope, 8), torch.arange(3)[None])
    with pytest.raises(ValueError, match="cast_forward_inputs=False"):
        apply_rope(torch.randn(1, 1, 3, 8), cos.bfloat16(), sin.bfloat16())


FAR = dataclasses.replace(
    TINY,
    heads=4,
    kv_heads=2,
    head_dim=64,
    qk_norm=False,
    rope=RopeConfig(1e6, "none", 1.0, 131_072),
)


def _turned_by_transformers(q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
    """q and k [B, H, S, D] in fp32, turned by transformers, and rounded to their dtype once.

    A bf16 model of transformers rounds the tables too, so it is no reference for bf16.
    """
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    rotary = modeling.LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=FAR.heads * FAR.head_dim,
            num_attention_heads=FAR.heads,
            head_dim=FAR.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": FAR.rope.theta},
        )
    )
    cos, sin = rotary(q.float(), positions)
    turned = modeling.apply_rotary_pos_emb(q.float(), k.float(), cos, sin)
    return [x.to(q.dtype) for x in turned]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoder_turns_far_tokens_as_transformers_does(dtype: torch.dtype, sharded: bool) -> None:
    """In bf16 too: tables of bf16, or positions, would change a third of the elements or all."""
    projected: list[Tensor] = []
    attended: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        attended.extend([q, k])
        return q

    def keep(module: torch.nn.Module, inputs: object, out: Tensor) -> None:
        projected.append(out.unflatten(-1, (-1, FAR.head_dim)).transpose(1, 2))

    torch.manual_seed(0)
    model = Decoder(FAR, attend).to(torch.float32 if sharded else dtype)
    for block in model.layers.values():
        block.self_attn.q_proj.register_forward_hook(keep)
        block.self_attn.k_proj.register_forward_hook(keep)
    positions = torch.arange(131_072 - 32, 131_072)[None]
    tokens = positions % FAR.vocab_size
    with pretended_rank(0, 1), torch.no_grad():
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            parallelize(model, mesh, dtype, True, ActivationCheckpoint("none"), Compile())
        model(tokens, positions, None)
    assert len(attended) == 2 * FAR.layers
    for layer in range(FAR.layers):
        here = slice(2 * layer, 2 * layer + 2)
        wanted = _turned_by_transformers(*projected[here], positions)
        for got, want in zip(attended[here], wanted, strict=True):
            assert got.dtype == want.dtype == dtype
            # The last bit of an fp32 sum may tip the rounding.
            assert (got != want).float().mean() < 0.01
            torch.testing.assert_close(got, want)
