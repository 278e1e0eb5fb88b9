"""titan_sparse.models.decoder: causal, shaped, differentiable everywhere, and compiled without breaks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.helpers import TINY, VARIANTS, build, causal, dense_attend, sample, variants
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import Block, Decoder, inverse_frequencies, rope_tables

torch.set_num_threads(1)


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
