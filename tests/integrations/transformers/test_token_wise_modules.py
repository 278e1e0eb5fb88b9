"""Models whose tokens see each other outside of attention, and models whose attention is not ours.

The truth is brute force: without attention, one token is exchanged, and the others are looked at.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.transformers.families import (
    ALL_FAMILIES,
    BLOCK,
    MIXING,
    assert_close,
    both,
    family,
    logits_and_gradients,
    positions,
    pretended_ranks,
    tokens,
    transformers,
    with_ours,
)
from tests.refusals import refused
from titan_sparse import ContextParallel
from titan_sparse.attention.masks import Documents
from titan_sparse.integrations.transformers import AttentionMask, AttentionSettings, register
from titan_sparse.integrations.transformers.context_parallel import check_model
from titan_sparse.token_wise_modules import mixers

SEQ_LEN = 2 * BLOCK
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **_
) -> tuple[Tensor, None]:
    """A function of each token's own query, key and value."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    share = (query * key).mean(-1, keepdim=True).sigmoid()
    return (share * value).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _no_attention_registered() -> None:
    transformers.AttentionInterface.register("no_attention", no_attention)
    transformers.AttentionMaskInterface.register("no_attention", lambda **_: None)


def two_ranks() -> ContextParallel:
    cp = pretended_ranks()
    register(AttentionSettings(cp=cp), name="two_ranks")
    return cp


def tokens_see_each_other(model: nn.Module) -> bool:
    model.eval()
    model.set_attn_implementation("no_attention")
    input_ids = tokens(1, SEQ_LEN)
    others = input_ids.clone()
    others[0, 9] = input_ids[0, 9] % 40 + 5
    with torch.no_grad():
        changes = model(input_ids, use_cache=False).logits - model(others, use_cache=False).logits
    has_changed = changes[0].norm(dim=-1) > 1e-6
    assert has_changed[9]
    return has_changed.sum().item() > 1


@pytest.mark.parametrize("name", [*ALL_FAMILIES, *MIXING])
def test_models_are_let_through_whose_tokens_see_each_other_by_attention_alone(name):
    model = family(name)
    is_hybrid = name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    assert tokens_see_each_other(model) == (name in MIXING or is_hybrid)
    two_ranks()
    if name in MIXING or name == "llama4":
        with pytest.raises(ValueError, match=r"layers\.\d.* \(\w+\) .* write cp_size=1"):
            model.set_attn_implementation("two_ranks")
    else:
        model.set_attn_implementation("two_ranks")


def test_one_rank_and_one_document_may_mix():
    model = family("lfm2")
    inputs = {"input_ids": tokens(1, SEQ_LEN)}
    assert_close(*both(model, lambda: logits_and_gradients(model, **inputs)))


@pytest.mark.parametrize(
    "documents",
    [
        {"position_ids": positions(20, SEQ_LEN - 20)},
        {"attention_mask": AttentionMask(Documents([20, SEQ_LEN - 20]))},
    ],
    ids=["position_ids", "mask"],
)
@pytest.mark.parametrize("name", ["lfm2", "olmo_hybrid"])
def test_packed_documents_do_not_leak(name, documents):
    model = with_ours(name)
    with pytest.raises(ValueError, match="packed documents would see each other"):
        model(tokens(1, SEQ_LEN), use_cache=False, **documents)


def test_modules_that_were_exchanged():
    cp = two_ranks()
    model = family("llama")
    model.set_attn_implementation("two_ranks")
    check_model(model, cp)
    model.model.layers[1].mlp.act_fn = nn.Conv1d(64, 64, 3)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.act_fn \(Conv1d\) is not known"):
        check_model(model, cp)


OWN_ATTENTION = {
    "BloomConfig": {},
    "FalconConfig": {},
    "GPTNeoConfig": {"attention_types": [[["global"], 1]], "num_layers": 1},
    "MptConfig": {},
    "TrOCRConfig": {"decoder_ffn_dim": 32},
    "OpenAIGPTConfig": {},
    "DogeConfig": {"intermediate_size": 32},
    "MambaConfig": {"state_size": 4},
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_attention_that_is_not_ours_to_compute(name):
    config = getattr(transformers, name)(**SMALL, **OWN_ATTENTION[name])
    causal_lm = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = causal_lm.from_config(config, attn_implementation="eager")
        # Some look up their class of attention by the name.
        with refused("titan_sparse|write attn", (ValueError, KeyError)):
            causal_lm.from_config(config, attn_implementation="titan_sparse")
    with refused('write attn_implementation="eager"'):
        model.set_attn_implementation("titan_sparse")


def test_models_of_pictures_are_asked_about_their_text():
    text = {**SMALL, "intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    vision["intermediate_size"] = 32
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    two_ranks()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="two_ranks"
        )
    assert next(mixers(model), None) is not None
