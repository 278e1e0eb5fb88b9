"""Models that run through transformers' own code: loss and gradients are those of transformers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.qwen3 import modeling_qwen3

from tests.models.helpers import set_values
from tests.models.transformers_models import (
    LENGTH,
    MODELS,
    batch_of_tokens,
    decoder_of,
    masks_of,
    read_model,
    save_model,
    widen_hybrid,
)
from titan_sparse.config import Float8
from titan_sparse.models.initialization import initialize
from titan_sparse.models.transformers_decoder import RouterLoss
from titan_sparse.training import offload
from titan_sparse.training.model import checkpointed, convert_to_float8
from titan_sparse.training.offload import OffloadedBlocks

ROUTED = ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe"]


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    """By transformers' names, in memory."""
    gradients = {}
    for name, parameter in model.named_parameters():
        is_ours = not name.startswith(("model.", "lm_head."))
        gradients[f"model.{name}" if is_ours else name] = parameter.grad
    return gradients


def assert_same(found: Tensor, expected: Tensor, ours: nn.Module, theirs: nn.Module) -> None:
    """Two losses and their gradients, which are computed here."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found.backward()
    expected.backward()
    gradients = gradients_by_name(ours)
    wanted = gradients_by_name(theirs)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error}"


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("lengths", [[LENGTH], [33, 47]], ids=["one document", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(
    tmp_path: Path, name: str, lengths, monkeypatch
) -> None:
    """transformers' eager attention, dense, of each document alone."""
    theirs = save_model(tmp_path, name)
    ours, config = decoder_of(tmp_path)
    if config.linear_layers:
        widen_hybrid(monkeypatch, ours, theirs)
    tokens, _, labels = batch_of_tokens(1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.zeros(())
    for part, wanted in zip(tokens.split(lengths, dim=1), labels.split(lengths, dim=1)):
        expected = expected + cross_entropy(theirs(part).logits, wanted)
    masks = masks_of(config, [lengths], 1)
    found = ours(tokens, positions, masks, labels, loss_chunk_tokens=48)
    assert_same(found, expected, ours, theirs)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "granite"])
def test_multipliers_are_those_of_families_that_read_them(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, name)
    set_values(tmp_path, embedding_multiplier=5.0, logits_scaling=3.0)
    theirs = read_model(tmp_path)
    ours, config = decoder_of(tmp_path)
    tokens, positions, labels = batch_of_tokens(1)
    expected = cross_entropy(theirs(tokens).logits, labels)
    found = ours(tokens, positions, masks_of(config, None, 1), labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ROUTED)
def test_router_loss_is_that_of_transformers(tmp_path: Path, name: str, monkeypatch) -> None:
    theirs = save_model(tmp_path, name, output_router_logits=True, router_aux_loss_coef=0.5)
    ours, config = decoder_of(tmp_path)
    if config.linear_layers:
        widen_hybrid(monkeypatch, ours, theirs)
    assert config.router_loss == 0.5
    tokens, positions, labels = batch_of_tokens()
    outputs = theirs(tokens)
    mean = cross_entropy(outputs.logits, labels) / labels.numel()
    assert outputs.aux_loss > 0.5
    total = ours(tokens, positions, masks_of(config, None, 2), labels)
    assert_same(total / labels.numel(), mean + 0.5 * outputs.aux_loss, ours, theirs)


def test_router_loss_of_bfloat16_is_not_rounded() -> None:
    """As transformers computes it of the same logits in float64."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    torch.manual_seed(0)
    logits = list(torch.randn(3, 96, 8).bfloat16())
    config = SimpleNamespace(router_loss=0.5, experts=8, experts_per_token=2)
    labels = torch.zeros(1, 96, dtype=torch.long)
    found = RouterLoss(config)(logits, labels, None) / labels.numel()
    wanted = 0.5 * load_balancing_loss_func(tuple(layer.double() for layer in logits), 8, 2)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_router_loss_counts_no_padding(tmp_path: Path) -> None:
    theirs = save_model(tmp_path, "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    ours, config = decoder_of(tmp_path)
    tokens, positions, labels = batch_of_tokens()
    attention_mask = torch.ones_like(tokens)
    attention_mask[:, 60:] = 0
    labels[:, 60:] = -100
    outputs = theirs(tokens, attention_mask=attention_mask)
    masks = masks_of(config, None, 2)._replace(tokens=attention_mask.bool())
    with_router = ours(tokens, positions, masks, labels)
    ours.eval()
    without = ours(tokens, positions, masks, labels)
    found = (with_router - without) / (labels != -100).sum()
    torch.testing.assert_close(found, 0.5 * outputs.aux_loss, rtol=1e-4, atol=0)


def decoder_and_batch(folder: Path) -> tuple[nn.Module, tuple]:
    """The decoder, and what its forward reads."""
    model, config = decoder_of(folder)
    tokens, positions, labels = batch_of_tokens()
    return model, (tokens, positions, masks_of(config, None, 2), labels)


def test_offloaded_layers_are_the_same_to_the_bit(tmp_path: Path, monkeypatch) -> None:
    save_model(tmp_path, "mistral", num_hidden_layers=4)
    monkeypatch.setattr(offload, "MIN_BYTES", 1024)
    found = []
    for is_offloaded in (False, True):
        model, batch = decoder_and_batch(tmp_path)
        for number, layer in model.layers.items():
            model.layers[number] = checkpointed(layer, "full")
            model.layers[number].compile(backend="aot_eager", fullgraph=True)
        if is_offloaded:
            model.run_blocks = OffloadedBlocks(torch.device("cpu"))
        loss = model(*batch)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        if is_offloaded:
            assert sum(map(len, model.run_blocks.pool.free.values())) >= 6
        torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_angles_are_not_rounded(tmp_path: Path, name: str) -> None:
    """bf16 models have fp32 tables, of frequencies that were never cast."""
    save_model(tmp_path, name)
    model, _ = decoder_of(tmp_path)
    positions = torch.tensor([[200_001]])
    x = torch.zeros(1, 1, 32)
    full, _ = model.rotary.tables(x, positions)
    rounded, _ = model.bfloat16().rotary.tables(x.bfloat16(), positions)
    assert rounded[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(full, rounded, strict=True))
    assert not torch.equal(full[0], full[0].bfloat16().float())


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_half_precision_is_near(tmp_path: Path, name: str) -> None:
    """Queries and keys that wide rotary tables have widened meet values of bf16."""
    save_model(tmp_path, name)
    model, batch = decoder_and_batch(tmp_path)
    expected = model(*batch)
    found = model.bfloat16()(*batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)


def test_layers_are_compiled_once_for_each_kind(tmp_path: Path) -> None:
    """Windows and full layers are two kinds, whatever the number of layers."""
    save_model(tmp_path, "olmo3", num_hidden_layers=5, layer_types=None)
    model, batch = decoder_and_batch(tmp_path)
    counter = CompileCounterWithBackend("eager")
    for layer in model.layers.values():
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        model(*batch).backward()
    assert counter.frame_count == 2


# First weights


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_leave_the_scale_of_hidden_states(tmp_path: Path, name: str) -> None:
    """Norms scale nothing, also those that start at 0; biases are nothing."""
    save_model(tmp_path, name)
    model, config = decoder_of(tmp_path)
    initialize(model, 0, config)
    for parameter_name, parameter in model.named_parameters():
        values = parameter.detach()
        starts_at_0 = name in ("gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe")
        if parameter_name.endswith("A_log"):
            assert 0.01 <= values.exp().min() <= values.exp().max() <= 16
        elif parameter_name.endswith(("dt_bias", "linear_attn.norm.weight")):
            assert (values == 1).all(), parameter_name
        elif parameter_name.endswith("bias"):
            assert (values == 0).all(), parameter_name
        elif "norm" in parameter_name:
            assert values.unique().tolist() == [0.0 if starts_at_0 else 1.0], parameter_name
        else:
            assert 0.005 < values.std() < 0.03, parameter_name
    x = 3 * torch.randn(1, 5, config.hidden_size)
    torch.testing.assert_close(model.norm(x).pow(2).mean(-1), torch.ones(1, 5), atol=1e-3, rtol=0)


def test_linear_layers_in_float8_are_near(tmp_path: Path) -> None:
    """As ours: all linear layers, under the same names."""
    save_model(tmp_path, "phi3")
    model, batch = decoder_and_batch(tmp_path)
    model = model.bfloat16()
    expected = model(*batch)
    names = [name for name, _ in model.named_parameters()]
    assert convert_to_float8(model, Float8(enable=True, filter="o_proj"), emulate=True) == 2 * 3
    assert [name for name, _ in model.named_parameters()] == names
    found = model(*batch)
    found.backward()
    assert found != expected
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)


def test_layers_that_mix_tokens_are_refused(tmp_path: Path, monkeypatch) -> None:
    """A convolution with the parameters that config.json announces."""
    save_model(tmp_path, "qwen3")
    mlp = modeling_qwen3.Qwen3MLP
    monkeypatch.setattr(modeling_qwen3, "Qwen3MLP", type("Qwen3ShortConv", (mlp,), {}))
    with pytest.raises(ValueError, match=r"layer 0\.mlp \(Qwen3ShortConv\) .* is not known"):
        decoder_of(tmp_path)
