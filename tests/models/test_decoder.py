"""The decoder, its flavours, rotary embeddings and initialisation."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_sparse.models.decoder import Block, Decoder
from titan_sparse.models.flavours import (
    FLAVOURS,
    DecoderConfig,
    RopeConfig,
    number_of_parameters,
    resolve,
)
from titan_sparse.models.initialization import initialize
from titan_sparse.models.rope import apply_rope, inverse_frequencies, rope_tables

torch.set_num_threads(1)

TOTALS = {  # published, but for debug
    "debug": 829_568,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
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
VARIANTS = {
    "5:1, bias, qk_norm, tied": TINY,
    "multi-head, plain, untied": replace(
        TINY, heads=3, kv_heads=3, qkv_bias=False, qk_norm=False, tied_embeddings=False
    ),
    "6:2, bias, untied, yarn": replace(
        TINY,
        heads=6,
        kv_heads=2,
        qk_norm=False,
        tied_embeddings=False,
        rope=RopeConfig(1e4, "yarn", 4.0, 16),
    ),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


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


# Flavours


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_parameter_counts(flavour: str) -> None:
    config = FLAVOURS[flavour]
    with torch.device("meta"):
        model = Decoder(config, dense_attend)
    assert sum(p.numel() for p in model.parameters()) == number_of_parameters(config)
    assert number_of_parameters(config) == TOTALS[flavour]


@variants
def test_parameter_counts_of_other_shapes(config: DecoderConfig) -> None:
    assert sum(
        p.numel() for p in Decoder(config, dense_attend).parameters()
    ) == number_of_parameters(config)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_resolve_without_overrides_is_the_flavour(flavour: str) -> None:
    assert resolve(flavour) == FLAVOURS[flavour]
    assert resolve(flavour, 0, "flavour", 0, 0, 0) == FLAVOURS[flavour]


def test_resolve_applies_overrides() -> None:
    config = resolve("qwen2.5-3b", 1000, "yarn", 16.0, 0, 5e6)
    assert config.vocab_size == 1000 and config.layers == FLAVOURS["qwen2.5-3b"].layers
    assert resolve("qwen2.5-3b", layers=6) == replace(FLAVOURS["qwen2.5-3b"], layers=6)
    assert config.rope == RopeConfig(theta=5e6, scaling="yarn", factor=16.0, original_length=32768)
    assert resolve(
        "llama3.1-8b", rope_scaling="llama3", rope_factor=32.0, rope_original_length=4096
    ).rope == replace(FLAVOURS["llama3.1-8b"].rope, factor=32.0, original_length=4096)
    unscaled = resolve("llama3.1-8b", rope_scaling="none").rope
    assert (unscaled.scaling, unscaled.factor, unscaled.theta) == ("none", 1.0, 5e5)


@pytest.mark.parametrize(
    "overrides, key",
    [
        ({"flavour": "qwen2.5-3"}, 'model.flavour = "qwen2.5-3" is unknown; write "qwen2.5-3b"'),
        ({"vocab_size": -1}, "model.vocab_size"),
        ({"layers": -2}, "model.layers"),
        ({"rope_scaling": "ntk"}, "model.rope_scaling"),
        ({"rope_factor": 4.0}, "model.rope_factor"),
        ({"rope_scaling": "none", "rope_factor": 4.0}, "model.rope_factor"),
        ({"rope_scaling": "yarn", "rope_factor": 1.0}, "model.rope_factor"),
        ({"rope_scaling": "yarn", "rope_factor": 0.0}, "model.rope_factor"),
        ({"rope_original_length": 4096}, "model.rope_original_length"),
        (
            {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": -1},
            "model.rope_original_length",
        ),
        ({"rope_theta": -1.0}, "model.rope_theta"),
    ],
)
def test_resolve_refuses_what_it_would_ignore(overrides: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        resolve(**{"flavour": "qwen2.5-3b", **overrides})


@pytest.mark.parametrize(
    "change, message", [({"kv_heads": 2}, "multiple of kv_heads"), ({"head_dim": 7}, "even")]
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


# Rotary position embeddings


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
        return head_dim / 2 * math.log(rope.original_length / (2 * math.pi * rotations), rope.theta)

    low, high = (
        max(0, math.floor(boundary(rope.beta_fast))),
        min(head_dim - 1, math.ceil(boundary(rope.beta_slow))),
    )
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


# Decoder


@variants
def test_forward_is_causal_and_shaped(config: DecoderConfig) -> None:
    model = build(config)
    tokens, positions = sample(config)
    logits = model(tokens, positions, causal(13))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % config.vocab_size
    difference = (model(changed, positions, causal(13)) - logits).abs().amax(dim=(0, 2))
    assert logits.shape == (2, 13, config.vocab_size) and logits.dtype == torch.float64
    assert torch.all(difference[:7] == 0) and torch.all(difference[7:] > 0)


def test_permuted_tokens_with_their_positions_give_permuted_logits() -> None:
    model, (tokens, positions) = build(TINY), sample(TINY)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    mask = causal(13)
    permuted = model(tokens[:, order], positions[:, order], mask[order][:, order])
    torch.testing.assert_close(permuted, model(tokens, positions, mask)[:, order])


@variants
def test_loss_equals_cross_entropy_of_the_logits(config: DecoderConfig) -> None:
    model = build(config)
    tokens, positions = sample(config)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    reference = F.cross_entropy(
        model(tokens, positions, causal(13)).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    expected = torch.autograd.grad(reference, list(model.parameters()))
    loss = model(tokens, positions, causal(13), labels=labels, loss_chunk_tokens=5)
    actual = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
    for gradient, reference_gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, reference_gradient, rtol=1e-9, atol=1e-12)


@variants
def test_gradients_reach_all_parameters(config: DecoderConfig) -> None:
    model = build(config)
    tokens, positions = sample(config)
    model(tokens, positions, causal(13), labels=tokens.roll(-1, 1)).backward()
    assert [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0
    ] == []


def test_bf16_model_returns_fp32_loss_near_fp64() -> None:
    config = VARIANTS["6:2, bias, untied, yarn"]
    tokens, positions = sample(config)
    exact, half = (
        build(config, dtype=torch.float32).to(d) for d in (torch.float64, torch.bfloat16)
    )
    losses = [model(tokens, positions, causal(13), labels=tokens) for model in (exact, half)]
    assert half.inv_freq.dtype == torch.float32
    assert [loss.dtype for loss in losses] == [torch.float64, torch.float32]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-2)


def test_attend_gets_grouped_heads_and_the_very_mask() -> None:
    seen, mask = [], object()

    def attend(q: Tensor, k: Tensor, v: Tensor, given: object) -> Tensor:
        seen.append((q.shape, k.shape, v.shape, given is mask))
        return q

    Decoder(TINY, attend)(*sample(TINY), mask)
    assert seen == [((2, 5, 13, 8), (2, 1, 13, 8), (2, 1, 13, 8), True)] * TINY.layers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_matches_fp32_reference(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 24, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    norm = torch.nn.RMSNorm(24, eps=1e-6, dtype=dtype)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_names_are_those_of_hugging_face() -> None:
    names = set(Decoder(VARIANTS["multi-head, plain, untied"], dense_attend).state_dict())
    block = {f"self_attn.{p}_proj.weight" for p in "qkvo"} | {
        f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }
    block |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    expected = {f"layers.{i}.{name}" for i in range(2) for name in block}
    assert names == expected | {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    added = set(Decoder(TINY, dense_attend).state_dict()) - names
    assert {n.removeprefix("layers.0.self_attn.") for n in added if n.startswith("layers.0")} == {
        "q_proj.bias",
        "k_proj.bias",
        "v_proj.bias",
        "q_norm.weight",
        "k_norm.weight",
    }


@variants
def test_block_compiles_without_graph_breaks(config: DecoderConfig) -> None:
    torch.compiler.reset()
    block = Block(config, dense_attend)
    cos, sin = rope_tables(
        *inverse_frequencies(config.rope, config.head_dim), torch.arange(13)[None]
    )
    x = torch.randn(2, 13, config.hidden_size, requires_grad=True)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    out, expected = compiled(x, cos, sin, causal(13)), block(x, cos, sin, causal(13))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x)
    )


# Initialisation


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    first, again, other = (build(TINY, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name, x in first.items() if x.ndim == 2]
    assert len(drawn) == 1 + 7 * TINY.layers
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert not torch.equal(
        first["layers.0.mlp.up_proj.weight"], first["layers.1.mlp.up_proj.weight"]
    )


def test_distributions() -> None:
    config = FLAVOURS["debug"]
    for name, x in build(config).state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.all(x == 1)
        elif name.endswith("bias"):
            assert torch.all(x == 0)
        else:
            std = 0.02 / math.sqrt(8) if "o_proj" in name or "down_proj" in name else 0.02
            assert x.std().item() == pytest.approx(std, rel=0.05) and x.abs().max() <= 3 * std


def test_fp64_weights_are_the_fp32_ones() -> None:
    wide, narrow = (
        build(TINY, dtype=dtype).state_dict() for dtype in (torch.float64, torch.float32)
    )
    assert all(torch.equal(wide[name], narrow[name].double()) for name in wide)


def test_wrappers_do_not_change_the_weights() -> None:
    plain, wrapped = build(TINY, seed=1), build(TINY, seed=2)
    wrapped.layers["0"] = torch.compile(wrapped.layers["0"], backend="eager")
    initialize(wrapped, 1, TINY)
    assert any("_orig_mod" in name for name, _ in wrapped.named_parameters())
    for (_, a), (_, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        assert torch.equal(a, b)


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        model = Decoder(TINY, dense_attend)
    with pytest.raises(ValueError, match="to_empty"):
        initialize(model, 0, TINY)


@contextmanager
def _pretended_rank(rank: int, world_size: int) -> Iterator[None]:
    """A process group that sends nothing: whatever communicates would get wrong numbers."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(6))
def test_shards_are_cut_from_the_same_weights(rank: int) -> None:
    full = dict(build(TINY, seed=5).named_parameters())
    with _pretended_rank(rank, 6):
        # names of its own per rank: DTensor caches by mesh equality, which does not see who is asking
        mesh = init_device_mesh(
            "cpu", (2, 3), mesh_dim_names=(f"replicate_of_{rank}", f"shard_of_{rank}")
        )
        placements = (Replicate(), Shard(0))  # 37, 24, 40 and 8 rows over 3 ranks: ragged shards
        model = build(TINY, seed=0)
        for module in list(model.modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(
                    torch.empty_like(p), mesh, placements, src_data_rank=None
                )
                setattr(module, name, torch.nn.Parameter(sharded))
        initialize(model, 5, TINY)
        for name, p in model.named_parameters():
            shards = list(full[name].chunk(3)) + [full[name][:0]] * 3
            assert isinstance(p, DTensor)
            assert torch.equal(p.to_local(), shards[rank % 3]), name
