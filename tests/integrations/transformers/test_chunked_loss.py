"""chunk_loss(): transformers' own loss and gradients, without logits."""

from unittest.mock import Mock

import peft
import pytest
import torch

from tests.integrations.transformers.families import (
    DEVICE,
    assert_close,
    device_family,
    device_tokens,
    transformers,
)
from tests.models.transformers_models import SHAPE, tiny_model
from tests.refusals import refused
from titan_sparse.integrations.transformers import chunked_loss
from titan_sparse.integrations.transformers.chunked_loss import chunk_loss


def ids() -> torch.Tensor:
    return device_tokens(2, 40)


def loss_and_gradients(model, **inputs):
    out = model(**{"input_ids": ids(), "labels": ids(), **inputs})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return out, torch.autograd.grad(out.loss, trained)


def check(model, wanted, **inputs) -> None:
    """The model has the loss and gradients that loss_and_gradients() gave, and makes no logits."""
    found, gradients = loss_and_gradients(model, **inputs)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted[0].loss)
    assert_close(gradients, wanted[1])


def check_chunked(model, **inputs) -> None:
    """chunk_loss() changes neither the loss nor a gradient."""
    wanted = loss_and_gradients(model, **inputs)
    chunk_loss(model, chunk_tokens=7)
    check(model, wanted, **inputs)


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
@pytest.mark.parametrize("count", [None, 200, torch.tensor(200)])
def test_the_loss_is_that_of_transformers(name, count):
    labels = ids().masked_fill(torch.arange(40, device=DEVICE) % 3 == 0, -100)
    check_chunked(device_family(name), labels=labels, num_items_in_batch=count)


@pytest.mark.parametrize("name", ["llama4", "opt", "qwen3_5", "gpt_oss"])
def test_decoders_of_other_names(name):
    check_chunked(device_family(name))


def test_a_head_with_a_bias():
    model = tiny_model("PhiConfig", vocab_size=64).to(DEVICE)
    torch.nn.init.normal_(model.lm_head.bias)
    check_chunked(model)


def test_shifted_labels_are_not_shifted_again():
    model = device_family("llama")
    labels = ids()
    wanted = model(input_ids=ids(), labels=labels).loss
    chunk_loss(model)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    nothing = torch.full_like(labels, -100)
    found = model(input_ids=ids(), labels=nothing, shift_labels=shifted).loss
    torch.testing.assert_close(found, wanted)


def test_without_labels_there_are_logits():
    model = device_family("llama")
    wanted = model(device_tokens(1, 5)).logits
    chunk_loss(model)
    torch.testing.assert_close(model(device_tokens(1, 5)).logits, wanted)
    assert model.generate(device_tokens(1, 5), max_new_tokens=2, do_sample=False).shape == (1, 7)


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
    wanted = adapted(device_family("llama", tie_word_embeddings=is_tied), name).train()
    found = device_family("llama", tie_word_embeddings=is_tied)
    if is_first:
        chunk_loss(found, 7)
    found = adapted(found, name).train()
    if not is_first:
        chunk_loss(found, 7)

    def compare():
        torch.manual_seed(1)
        of_theirs = loss_and_gradients(wanted)
        torch.manual_seed(1)
        check(found, of_theirs)
        return of_theirs[0].loss.item()

    def losses():
        with torch.no_grad():
            return [model(ids(), labels=ids()).loss for model in (wanted, found)]

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


SMALL = {"vocab_size": 64, "num_hidden_layers": 1}
OTHER_LOSSES = [
    ("Gemma2Config", {"head_dim": 8}),
    ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 500.0}),
    ("CohereConfig", {}),
    ("GraniteConfig", {"logits_scaling": 1.01}),
    ("InklingTextConfig", {"layer_types": ["full_attention"]}),
    ("NanoChatConfig", {}),
    ("ModernBertDecoderConfig", {}),
    # A loss without a shift.
    ("BartConfig", {"d_model": 32, "decoder_layers": 1, "is_decoder": True}),
]


@pytest.mark.parametrize("config_class, changes", OTHER_LOSSES)
def test_families_with_another_loss_are_refused(config_class, changes):
    model = tiny_model(config_class, **(SMALL | changes)).to(DEVICE)
    with refused(BOTH_LOSSES):
        chunk_loss(model)


BOTH_LOSSES = r"its own loss is \d.*, and ours is \d.*; leave chunk_loss\(\) out"


def cross_entropy(logits, labels, **options):
    """Written here: the mean over next tokens."""
    logits, labels = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, **options)


def of_logits(function):
    """The loss of next tokens with other logits."""
    return lambda model, logits, labels, mask: cross_entropy(function(logits), labels)


def of_labels(function):
    """The loss of next tokens with other labels."""
    return lambda model, logits, labels, mask: cross_entropy(logits, function(labels))


def of_mean(function):
    """The loss of next tokens, changed."""
    return lambda model, logits, labels, mask: function(cross_entropy(logits, labels), model)


def z_loss(model, logits, labels, mask):
    valid = labels[:, 1:] != -100
    return cross_entropy(logits, labels) + 1e-4 * logits[:, :-1].logsumexp(-1)[valid].pow(2).mean()


def without_padding(model, logits, labels, mask):
    return cross_entropy(logits, labels if mask is None else labels.masked_fill(mask == 0, -100))


PLANTED = {
    "z-loss": z_loss,
    "factor": of_logits(lambda logits: 1.001 * logits),
    "cap": of_logits(lambda logits: 1000 * torch.tanh(logits / 1000)),
    "no shift": lambda model, logits, labels, mask: torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    ),
    "smoothing": lambda model, logits, labels, mask: cross_entropy(
        logits, labels, label_smoothing=0.01
    ),
    "padding": of_labels(lambda labels: labels.masked_fill(labels == 0, -100)),
    "weight": of_mean(lambda loss, model: 0.5 * loss),
    "constant": of_mean(lambda loss, model: loss + 1e-3),
    "all tokens": lambda model, logits, labels, mask: (
        cross_entropy(logits, labels, reduction="sum") / labels.numel()
    ),
    "in training": of_mean(lambda loss, model: loss + 1e-3 * model.training),
    # None before the first forward, and then a number.
    "of the decoder": of_mean(lambda loss, model: loss + 1e-3 * (model.model.balance or 0)),
    "padded": without_padding,
    # Correct, but for num_items_in_batch.
    "items": of_mean(lambda loss, model: loss),
    "gradients": of_logits(lambda logits: 2 * logits - logits.detach()),
    "scale": lambda model, logits, labels, mask: cross_entropy(model.scale * logits, labels),
}
"""Losses of their own that are nearly those of next tokens."""


class Balanced(transformers.LlamaModel):
    """Its forward leaves a second loss behind."""

    balance = None

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        self.balance = out.last_hidden_state.detach().float().pow(2).mean()
        return out


class OwnLoss(transformers.LlamaForCausalLM):
    """Its loss is a function of the model, the logits, the labels, and the mask of padding."""

    own = None

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.model.__class__ = Balanced

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if labels is not None:
            out.loss = type(self).own(self, out.logits, labels, attention_mask)
        return out


class OwnLossOfItems(OwnLoss):
    """The same loss with num_items_in_batch."""

    def forward(self, input_ids=None, attention_mask=None, num_items_in_batch=None, **kwargs):
        out = super().forward(input_ids, attention_mask, **kwargs)
        if num_items_in_batch is not None:
            out.loss = out.loss * (kwargs["labels"][:, 1:] != -100).sum() / num_items_in_batch
        return out


def with_loss(own, kind=OwnLoss) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SHAPE | {"vocab_size": 64})
    torch.manual_seed(0)
    return type("Planted", (kind,), {"own": staticmethod(own)})(config).to(DEVICE).eval()


def train_a_step(model):
    chunk_loss(model)
    mask = torch.ones_like(ids())
    model.train()
    model(ids(), mask, labels=ids(), num_items_in_batch=torch.tensor(78))


@pytest.mark.parametrize("name", PLANTED)
def test_losses_of_their_own_are_refused(name):
    with refused(BOTH_LOSSES):
        train_a_step(with_loss(PLANTED[name]))
    # What is not in the loss is not missed.
    if name == "scale":
        model = with_loss(PLANTED[name])
        model.scale.requires_grad_(False)
        chunk_loss(model)


class ScaledEmbedding(OwnLossOfItems):
    """It changes what the decoder gets."""

    def forward(self, input_ids=None, **kwargs):
        embedded = 2 * self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embedded, **kwargs)


class ScaledHidden(OwnLoss):
    """It changes what the head gets."""

    def forward(self, *args, labels=None, **kwargs):
        out = self.model(*args, **kwargs)
        logits = self.lm_head(1.001 * out.last_hidden_state)
        loss = None if labels is None else cross_entropy(logits, labels)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class TwoHeads(ScaledHidden):
    def forward(self, *args, labels=None, **kwargs):
        out = self.model(*args, **kwargs).last_hidden_state
        logits = self.lm_head(out)
        more = torch.nn.functional.linear(out, self.model.embed_tokens.weight)
        loss = cross_entropy(logits, labels) + 0.1 * cross_entropy(more, labels)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss)


class Failing(OwnLoss):
    def forward(self, input_ids=None, labels=None, **kwargs):
        raise KeyError("first line\nsecond line")


@pytest.mark.parametrize(
    "kind, words",
    [
        (ScaledEmbedding, "gives model another input_ids"),
        (ScaledHidden, BOTH_LOSSES),
        (TwoHeads, "loss"),
        (Failing, "raised KeyError"),
    ],
)
def test_other_ways_to_the_logits_are_refused(kind, words):
    with refused(words):
        chunk_loss(with_loss(PLANTED["items"], kind))


def test_a_loss_of_its_own_that_is_the_same_is_computed():
    # It would raise: chunk_loss() refuses a loss that differs.
    train_a_step(with_loss(PLANTED["items"], OwnLossOfItems))


def test_the_comparison_leaves_no_trace(monkeypatch):
    model = device_family("llama")
    modules = list(model.named_modules())
    for number, (_, module) in enumerate(modules):
        module.train(number % 2 == 0)
    modes = [module.training for _, module in modules]
    state = torch.get_rng_state()
    chunk_loss(model)
    compare = Mock(side_effect=chunked_loss.compare_losses)
    monkeypatch.setattr(chunked_loss, "compare_losses", compare)
    for _ in range(3):
        model(device_tokens(1, 5), labels=device_tokens(1, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert compare.call_count == 1
    assert all(a is b for (_, a), (_, b) in zip(model.named_modules(), modules, strict=True))
    assert [module.training for _, module in modules] == modes
    # What the loss may depend on.
    model(device_tokens(1, 5), labels=device_tokens(1, 5), num_items_in_batch=5)
    model.config.some_scale = 2.0
    model(device_tokens(1, 5), labels=device_tokens(1, 5))
    model.train(not model.training)
    with torch.no_grad():
        model(device_tokens(1, 5), labels=device_tokens(1, 5))
    assert compare.call_count == 4
    model.loss_function = lambda logits, **others: logits.sum()
    with pytest.raises(ValueError, match="leave chunk_loss"):
        model(device_tokens(1, 5), labels=device_tokens(1, 5))


def test_weights_that_are_not_there_yet():
    """On the meta device, as before FSDP2 or from_pretrained(device_map=...) fill them."""
    with torch.device("meta"):
        model = tiny_model("LlamaConfig", **SMALL)
        other = tiny_model("CohereConfig", **SMALL)
    chunk_loss(model)
    with pytest.raises(ValueError, match=BOTH_LOSSES):
        chunk_loss(other)
    model.to_empty(device=DEVICE)
    model.init_weights()
    assert model(ids(), labels=ids()).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes(dtype, autocast):
    if autocast and dtype == torch.float64:
        pytest.skip("autocast has no float64")
    model = device_family("llama", tie_word_embeddings=True).to(None if autocast else dtype)
    with torch.autocast(DEVICE, dtype=dtype, enabled=autocast):
        wanted = model(ids(), labels=ids()).loss
        chunk_loss(model)
        found = model(ids(), labels=ids()).loss
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-3, atol=0)


def test_arguments_by_position_and_other_outputs():
    model = device_family("llama")
    wanted = model(ids(), labels=ids(), output_hidden_states=True)
    chunk_loss(model)
    found = model(ids(), None, None, None, None, ids(), output_hidden_states=True)
    assert found.logits is None
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states)
    loss = model(ids(), labels=ids(), return_dict=False)[0]
    torch.testing.assert_close(loss, wanted.loss)
    with pytest.raises(ValueError, match="leave chunk_loss"):
        model(ids(), labels=ids(), logits_to_keep=3)


def test_compiled():
    model = device_family("llama")
    model.set_attn_implementation("eager")
    wanted = loss_and_gradients(model)
    chunk_loss(model, 7)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        check(compiled, wanted)


def test_the_loss_of_experts_is_not_left_out():
    model = device_family("mixtral")
    chunk_loss(model)
    with refused("output_router_logits"):
        model(device_tokens(1, 5), labels=device_tokens(1, 5), output_router_logits=True)
    model.config.output_router_logits = True
    # TRL's trainer sets it after the model is built.
    with refused("output_router_logits"):
        model(device_tokens(1, 5), labels=device_tokens(1, 5))
    with refused("output_router_logits"):
        chunk_loss(model)
