"""chunk_loss(): transformers' own loss and gradients, without logits."""

import pytest
import torch

from tests.integrations.transformers.families import family, tokens
from titan_sparse.integrations.transformers.chunked_loss import chunk_loss


def loss_and_gradients(model, **inputs):
    out = model(input_ids=tokens(2, 40), **inputs)
    gradients = torch.autograd.grad(out.loss, list(model.parameters()))
    return out, gradients


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral"])
@pytest.mark.parametrize("count", [None, 200, torch.tensor(200)])
def test_the_loss_is_that_of_transformers(name, count):
    model = family(name)
    labels = tokens(2, 40).masked_fill(torch.arange(40) % 3 == 0, -100)
    inputs = {"labels": labels, "num_items_in_batch": count}
    wanted, wanted_gradients = loss_and_gradients(model, **inputs)
    chunk_loss(model, chunk_tokens=7)
    found, gradients = loss_and_gradients(model, **inputs)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)


def test_shifted_labels_are_not_shifted_again():
    model = family("llama")
    labels = tokens(2, 40)
    wanted = model(input_ids=tokens(2, 40), labels=labels).loss
    chunk_loss(model)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    nothing = torch.full_like(labels, -100)
    found = model(input_ids=tokens(2, 40), labels=nothing, shift_labels=shifted).loss
    torch.testing.assert_close(found, wanted)


def test_without_labels_there_are_logits():
    model = family("llama")
    wanted = model(tokens(1, 5)).logits
    chunk_loss(model)
    torch.testing.assert_close(model(tokens(1, 5)).logits, wanted)
    assert model.generate(tokens(1, 5), max_new_tokens=2, do_sample=False).shape == (1, 7)


def test_autocast():
    model = family("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(input_ids=tokens(2, 40), labels=tokens(2, 40)).loss
        chunk_loss(model)
        found = model(input_ids=tokens(2, 40), labels=tokens(2, 40)).loss
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "key, value", [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0), ("logit_scale", 0.5)]
)
def test_more_than_a_product_is_refused(key, value):
    model = family("llama")
    setattr(model.config, key, value)
    with pytest.raises(ValueError, match=f"config.{key} = {value}; leave chunk_loss"):
        chunk_loss(model)


def test_the_loss_of_experts_is_not_left_out():
    model = family("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits = False"):
        chunk_loss(model)


def test_a_bias_is_refused():
    model = family("llama")
    model.set_output_embeddings(torch.nn.Linear(32, 64))
    with pytest.raises(ValueError, match="Linear without bias"):
        chunk_loss(model)
