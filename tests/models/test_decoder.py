"""titan_sparse.models.decoder: causal, shaped, differentiable everywhere, and compiled without breaks."""

import pytest
import torch
import torch.nn.functional as F

from tests.models.helpers import VARIANTS, build, causal, dense_attend, sample, variants
from titan_sparse.models.config import DecoderConfig
from titan_sparse.models.decoder import Block, inverse_frequencies, rope_tables

torch.set_num_threads(1)


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
