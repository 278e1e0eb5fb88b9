"""register(), the settings, and what is refused by name."""

import subprocess
import sys

import pytest
import torch

from tests.integrations.transformers.families import (
    BLOCK,
    assert_close,
    family,
    tokens,
    transformers,
)
from tests.models.transformers_models import tiny_model
from titan_sparse import ContextParallel, recording
from titan_sparse.attention.masks import Full
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.integrations.transformers import (
    AttentionMask,
    AttentionSettings,
    attention,
    register,
)
from titan_sparse.integrations.transformers.attention import layer_mask
from titan_sparse.integrations.transformers.masks import MaskRule, ranges_of_tokens, read_rule

masking_utils = transformers.masking_utils

SEQ_LEN = 50
SPARSE = VerticalSlash(recall=0.5, sinks=1, local_slashes=1, max_verticals=8, max_slashes=2)


def density(model: torch.nn.Module) -> float:
    with recording() as seen:
        model(tokens(1, 8 * BLOCK))
    return seen.density().mean().item()


def test_the_last_settings_of_a_name_hold_and_names_live_beside_each_other():
    model = family("llama")
    model.set_attn_implementation("titan_sparse")
    register(AttentionSettings(pattern=SPARSE, block_size=BLOCK), name="ours_sparse")
    assert density(model) == 1.0
    model.set_attn_implementation("ours_sparse")
    assert density(model) < 1.0
    register(name="ours_sparse")
    assert density(model) == 1.0


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", "my_flash", "a/b", ""])
def test_names_of_transformers_are_refused(name):
    with pytest.raises(ValueError, match="write"):
        register(name=name)


def test_settings_that_are_none_are_refused():
    other_block = {"cp": ContextParallel(None, block_size=BLOCK), "block_size": 2 * BLOCK}
    for settings, message in [
        ({"pattern": "dense"}, "pattern='dense'"),
        ({"cp": 2}, "cp=2"),
        ({"backend": "sdpa"}, "backend='sdpa'"),
        ({"block_size": 100}, "block_size=100"),
        ({"block_size": 8}, "block_size=8"),
        ({"block_size": "64"}, "block_size='64'"),
        (other_block, "leave it out"),
    ]:
        with pytest.raises(ValueError, match=message):
            AttentionSettings(**settings)
    with pytest.raises(ValueError, match="AttentionSettings"):
        register({"pattern": SPARSE})
    with pytest.raises(ValueError, match="write one of"):
        AttentionMask(torch.ones(2, 2))


def test_one_line_says_that_transformers_is_missing():
    program = """
import sys
sys.modules["transformers"] = None
import titan_sparse.integrations
try:
    import titan_sparse.integrations.transformers
except ImportError as error:
    print(error)
"""
    words = [sys.executable, "-c", program]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 1
    assert 'pip install "titan-sparse[huggingface]"' in printed


def run(name: str, differences: dict | None = None, **inputs) -> None:
    """One forward in training mode, with our attention."""
    model = family(name, **(differences or {})).train()
    model.set_attn_implementation("titan_sparse")
    inputs.setdefault("input_ids", tokens(1, SEQ_LEN))
    model(**inputs)


def test_a_mask_that_was_never_built_is_refused(monkeypatch):
    mapping = transformers.AttentionMaskInterface._global_mapping
    monkeypatch.delitem(mapping, "titan_sparse")
    with pytest.raises(ValueError, match="NoneType for a mask; write register()"):
        run("llama")


def test_patterns_beside_padding_between_tokens_are_refused():
    register(AttentionSettings(pattern=SPARSE))
    attention_mask = torch.ones(1, SEQ_LEN, dtype=torch.int64)
    attention_mask[:, 10:12] = 0
    with pytest.raises(ValueError, match="vertical_slash does not compute; move the padding"):
        run("llama", attention_mask=attention_mask)


@pytest.mark.parametrize(
    ("inputs", "refusal"),
    [
        ({"output_attentions": True}, "write output_attentions=False"),
        ({"attention_mask": torch.zeros(1, 1, SEQ_LEN, SEQ_LEN)}, "attention_mask with 4 dims"),
        ({"cu_seq_lens_q": torch.tensor([0, 20, SEQ_LEN])}, "return_flash_attn_kwargs=False"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"alibi": torch.zeros(1)}, "alibi"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inputs_that_are_not_computed(inputs, refusal):
    with pytest.raises(ValueError, match=refusal):
        run("llama", **inputs)


@pytest.mark.parametrize(
    ("shape", "refusal"),
    [((3, 1, SEQ_LEN), "positions of one dimension"), ((3, SEQ_LEN), "hold 3 sequences")],
)
def test_positions_of_other_shapes(shape, refusal):
    """Positions of several dimensions are those of models with pictures."""
    q = torch.zeros(2, 1, SEQ_LEN, 16)
    with pytest.raises(ValueError, match=refusal):
        ranges_of_tokens(torch.zeros(shape), None, MaskRule(), q, AttentionSettings())


def test_attention_dropout_is_refused_in_training_only():
    differences = {"attention_dropout": 0.1}
    with pytest.raises(ValueError, match="write config.attention_dropout = 0"):
        run("llama", differences)
    model = family("llama", **differences).eval()
    model.set_attn_implementation("titan_sparse")
    model(tokens(1, SEQ_LEN))


LATENT = {
    "head_dim": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    "config_class, settings, message",
    [("Gemma2Config", {}, "softcap"), ("DeepseekV3Config", LATENT, "MLA")],
)
def test_attention_of_other_kinds_is_refused(config_class, settings, message):
    model = tiny_model(config_class, vocab_size=64, num_hidden_layers=1, **settings)
    model.set_attn_implementation("titan_sparse")
    with pytest.raises(ValueError, match=message):
        model(tokens(1, SEQ_LEN))


def test_bidirectional_and_cross_attention_are_refused():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, intermediate_size=32, vocab_size=64)
    bert = transformers.BertModel(config).eval()
    input_ids = tokens(1, SEQ_LEN)
    wanted = bert(input_ids).last_hidden_state
    bert.set_attn_implementation("titan_sparse")
    with pytest.raises(ValueError, match="bidirectional .*=AttentionMask\\(Full\\(\\)\\)"):
        bert(input_ids)
    # What it says to write.
    got = bert(input_ids, attention_mask=AttentionMask(Full())).last_hidden_state
    assert_close([got], [wanted])
    with pytest.raises(ValueError, match="bidirectional"):
        run("llama", {"is_causal": False})


def test_attention_without_a_mask_is_refused():
    """Vision towers and cross attention call for none."""
    tower = torch.nn.Module()
    tower.is_causal = False
    q = torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match="Module is bidirectional or cross attention"):
        attention.attention_forward(AttentionSettings(), tower, q, q, q, None)


def causal_mask_function(batch, head, query, key):
    """This is not transformers' function, despite its name."""
    return key <= query + 1


@pytest.mark.parametrize(
    ("mask_function", "unknown"),
    [
        (masking_utils.bidirectional_mask_function, "bidirectional attention"),
        (masking_utils.sliding_window_overlay(4), "bidirectional attention"),
        (
            masking_utils.or_masks(
                masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(4)
            ),
            "the mask function or_masks",
        ),
        (
            masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k > 2),
            "the mask function <lambda> of others",
        ),
        (causal_mask_function, "the mask function causal_mask_function of others"),
        (
            masking_utils.and_masks(
                masking_utils.sliding_window_overlay(4),
                masking_utils.sliding_window_causal_mask_function(9),
            ),
            "two mask functions sliding_window_overlay",
        ),
    ],
    ids=["bidirectional", "window alone", "union", "a user's", "a user's name", "two windows"],
)
def test_mask_functions_that_are_not_read(mask_function, unknown):
    rule = read_rule(mask_function)
    assert rule.unknown == unknown
    settings = AttentionSettings()
    sizes = {"batch_size": 1, "q_length": 9, "kv_length": 9}
    with pytest.raises(ValueError, match=f"does not read {unknown}"):
        layer_mask(settings, **sizes, mask_function=mask_function)


def test_a_mask_of_ours_may_be_bidirectional():
    model = family("llama")
    model.set_attn_implementation("titan_sparse")
    input_ids = tokens(1, SEQ_LEN)
    got = model(input_ids, attention_mask=AttentionMask(Full())).logits
    model.set_attn_implementation("eager")
    wanted = model(input_ids, attention_mask=torch.zeros(1, 1, SEQ_LEN, SEQ_LEN)).logits
    assert_close([got], [wanted])
