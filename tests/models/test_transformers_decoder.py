"""Models that run through transformers' own code: loss and gradients are those of transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.transformers_models import (
    LENGTH,
    MODELS,
    batch_of_tokens,
    decoder_of,
    masks_of,
    save_model,
)

pytest.importorskip("transformers")

torch.set_num_threads(1)

EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss"]


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    """By transformers' names, in memory."""
    gradients = {}
    for name, parameter in model.named_parameters():
        is_ours = not name.startswith(("model.", "lm_head."))
        gradients[f"model.{name}" if is_ours else name] = parameter.grad
    return gradients


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    expected = gradients_by_name(theirs)
    found = gradients_by_name(ours)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{name}: {error}"


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """transformers' eager attention, dense, sequences that are not packed."""
    theirs = save_model(tmp_path, name)
    ours, config = decoder_of(tmp_path)
    tokens, positions, labels = batch_of_tokens()
    expected = cross_entropy(theirs(tokens).logits, labels)
    expected.backward()
    found = ours(tokens, positions, masks_of(config, None, 2), labels, loss_chunk_tokens=48)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_those_run_alone(tmp_path: Path, name: str) -> None:
    theirs = save_model(tmp_path, name)
    ours, config = decoder_of(tmp_path)
    tokens, _, labels = batch_of_tokens(1)
    lengths = [33, 47]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.zeros(())
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        expected = expected + cross_entropy(theirs(tokens[:, part]).logits, labels[:, part])
        start += length
    assert start == LENGTH
    expected.backward()
    found = ours(tokens, positions, masks_of(config, [lengths], 1), labels)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("name", EXPERTS)
def test_router_loss_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = save_model(tmp_path, name, output_router_logits=True, router_aux_loss_coef=0.5)
    ours, config = decoder_of(tmp_path)
    assert config.router_loss == 0.5
    tokens, positions, labels = batch_of_tokens()
    outputs = theirs(tokens)
    mean = cross_entropy(outputs.logits, labels) / labels.numel()
    expected = mean + 0.5 * outputs.aux_loss
    expected.backward()
    assert outputs.aux_loss > 0.5
    total = ours(tokens, positions, masks_of(config, None, 2), labels)
    found = total / labels.numel()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("name", EXPERTS)
def test_router_loss_counts_no_padding(tmp_path: Path, name: str) -> None:
    theirs = save_model(tmp_path, name, output_router_logits=True, router_aux_loss_coef=0.5)
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
