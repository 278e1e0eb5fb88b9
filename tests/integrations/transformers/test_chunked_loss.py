"""chunk_loss(): transformers' own loss and gradients, without logits."""

import peft
import pytest
import torch

from tests.integrations.transformers.families import (
    DEVICE,
    assert_close,
)
from tests.integrations.transformers.families import (
    device_family as family,
)
from tests.integrations.transformers.families import (
    device_tokens as tokens,
)
from titan_sparse.integrations.transformers.chunked_loss import chunk_loss


def loss_and_gradients(model, **inputs):
    out = model(input_ids=tokens(2, 40), **inputs)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return out, torch.autograd.grad(out.loss, trained)


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
@pytest.mark.parametrize("count", [None, 200, torch.tensor(200)])
def test_the_loss_is_that_of_transformers(name, count):
    model = family(name)
    labels = tokens(2, 40).masked_fill(torch.arange(40, device=DEVICE) % 3 == 0, -100)
    inputs = {"labels": labels, "num_items_in_batch": count}
    wanted, wanted_gradients = loss_and_gradients(model, **inputs)
    chunk_loss(model, chunk_tokens=7)
    found, gradients = loss_and_gradients(model, **inputs)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss)
    assert_close(gradients, wanted_gradients)


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


ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"target_modules": ["lm_head"], "use_dora": True},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
}


def adapted(model, name):
    """The model with an adapter that changes the loss."""
    torch.manual_seed(0)
    config = peft.LoraConfig(init_lora_weights=False, **ADAPTERS[name])
    model = peft.get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.rand_like(parameter)
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_lm_head(name):
    """PEFT's own losses: with the adapter, without it, merged, and unloaded. chunk_loss() comes
    before PEFT or after it."""
    is_tied = name in ("lora", "tokens")
    is_first = name in ("lora", "dora")
    wanted = adapted(family("llama", tie_word_embeddings=is_tied), name).train()
    found = family("llama", tie_word_embeddings=is_tied)
    if is_first:
        chunk_loss(found, 7)
    found = adapted(found, name).train()
    if not is_first:
        chunk_loss(found, 7)
    inputs = {"labels": tokens(2, 40)}

    def compare():
        torch.manual_seed(1)
        one, one_gradients = loss_and_gradients(wanted, **inputs)
        torch.manual_seed(1)
        two, gradients = loss_and_gradients(found, **inputs)
        assert two.logits is None
        torch.testing.assert_close(two.loss, one.loss)
        assert_close(gradients, one_gradients)
        return one.loss.item()

    def losses():
        with torch.no_grad():
            return [model(tokens(2, 40), **inputs).loss for model in (wanted, found)]

    with_adapter = compare()
    with wanted.disable_adapter(), found.disable_adapter():
        base = losses()
    torch.testing.assert_close(*base)
    assert abs(base[0].item() - with_adapter) > 1e-4
    for model in (wanted, found):
        model.merge_adapter()
    torch.testing.assert_close(*losses())
    wanted, found = (model.merge_and_unload().requires_grad_() for model in (wanted, found))
    compare()


def test_autocast():
    model = family("llama")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
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
    chunk_loss(model)
    refused = pytest.raises(ValueError, match="output_router_logits")
    with refused:
        model(tokens(1, 5), labels=tokens(1, 5), output_router_logits=True)
    model.config.output_router_logits = True
    # TRL's trainer sets it after the model is built.
    with refused:
        model(tokens(1, 5), labels=tokens(1, 5))
    with refused:
        chunk_loss(model)


def test_another_loss_and_another_head_are_refused():
    model = family("llama")
    model.loss_function = lambda logits, **others: logits.sum()
    with pytest.raises(ValueError, match="loss_function .*; leave chunk_loss"):
        chunk_loss(model)
    model = family("llama")
    model.set_output_embeddings(torch.nn.Linear(32, 64, device=DEVICE))
    with pytest.raises(ValueError, match="Linear without bias"):
        chunk_loss(model)
