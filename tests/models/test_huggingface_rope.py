"""titan_sparse.models.huggingface_config: the table of config.json is read as transformers reads it."""

import math
from typing import Any

import pytest
import torch

from titan_sparse.models.config import RopeConfig
from titan_sparse.models.decoder import inverse_frequencies
from titan_sparse.models.huggingface_config import read_rope, write_rope

ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, ORIGINAL: 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    ORIGINAL: 32,
    "low_freq_factor": 2.0,
    "high_freq_factor": 6.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
SCALE = 0.1 * math.log(4) + 1
"""What YaRN by 4 multiplies cos and sin with."""


def values(table: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 256, "rope_parameters": table, **others}


@pytest.mark.parametrize(
    "table",
    [
        PLAIN,
        PLAIN | {"partial_rotary_factor": 1.0},
        PLAIN | {"rope_theta": 2**31 - 1},
        {"rope_type": "default"},
        LLAMA3,
        YARN,
        YARN | {"truncate": True},
        YARN | {"rope_theta": 1.5},
        YARN | {"factor": 1},
        YARN | {"factor": 1.5},
        YARN | {"beta_fast": 9, "beta_slow": 2.5},
        YARN | {"beta_fast": 0, "beta_slow": None},
        YARN | {"attention_factor": None},
        YARN | {"attention_factor": SCALE * (1 + 1e-7)},
        {key: value for key, value in YARN.items() if key != ORIGINAL},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(table):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    rope = read_rope(values(table))
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, **values(dict(table)))
    theirs = modeling.LlamaRotaryEmbedding(config)
    inv_freq, attention_factor = inverse_frequencies(rope, 32)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)
    length = 256 if rope.scaling == "none" else table.get(ORIGINAL, 256)
    assert rope.original_length == length


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e3, "yarn", 3.0, 96, beta_fast=9.0, beta_slow=2.5),
        RopeConfig(1e3, "llama3", 3.0, 96, low_frequency_factor=2.0, high_frequency_factor=6.0),
    ],
    ids=lambda rope: rope.scaling,
)
def test_what_is_written_is_read_again(rope):
    given = {"max_position_embeddings": 256, "rope_theta": 1e3, "rope_scaling": write_rope(rope)}
    assert read_rope(given) == rope


def test_no_table_is_written_without_scaling():
    assert write_rope(RopeConfig(700.0, "none", 1.0, 256)) is None
    expected = RopeConfig(700.0, "none", 1.0, 256)
    assert read_rope({"max_position_embeddings": 256, "rope_theta": 700.0}) == expected


def test_the_names_of_older_files():
    older = {"type": "yarn", "factor": 4.0, ORIGINAL: 64}
    given = {"max_position_embeddings": 256, "rope_theta": 1e3, "rope_scaling": older}
    assert read_rope(given) == read_rope(values(YARN)) == RopeConfig(1e3, "yarn", 4.0, 64)


@pytest.mark.parametrize("table", [YARN, LLAMA3, PLAIN], ids=lambda table: table["rope_type"])
def test_the_original_length_at_the_top_level_beats_the_table(table):
    """As in transformers: test_huggingface_oddities.py compares the logits."""
    assert read_rope(values(table, **{ORIGINAL: 96})).original_length == 96


def test_two_tables_must_agree():
    assert read_rope(values(YARN, rope_scaling=YARN)) == read_rope(values(YARN))
    for table, key in [
        (YARN | {"factor": 2.0}, "factor"),
        ({key: value for key, value in YARN.items() if key != "factor"}, "factor"),
        (YARN | {"attention_factor": None}, "a null"),
    ]:
        for first, second in ((YARN, table), (table, YARN)):
            with pytest.raises(ValueError, match=f"disagree on {key};"):
                read_rope(values(first, rope_scaling=second))


@pytest.mark.parametrize(
    "table, expected",
    [
        (PLAIN | {"rope_theta": 0}, "rope_theta = 0 of the rotary embedding is not a positive num"),
        (PLAIN | {"rope_theta": 2**31}, "rope_theta = 2147483648 of the rotary embedding is not"),
        (PLAIN | {"rope_theta": True}, "rope_theta = true of the rotary embedding is not"),
        (PLAIN | {"rope_type": "linear"}, 'rope_type = "linear" is unknown'),
        (PLAIN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 cannot"),
        (PLAIN | {"factor": 2.0}, 'rope scaling "default" with factor cannot be trained'),
        (LLAMA3 | {"factor": 0.0}, "factor = 0.0 of the rotary embedding is not a positive number"),
        (LLAMA3 | {"low_freq_factor": 6.0}, "low_freq_factor = 6.0 cannot be trained"),
        (YARN | {ORIGINAL: 64.0}, f"{ORIGINAL} = 64.0 of the rotary embedding is not a positive i"),
        (YARN | {"factor": 0.99}, "factor = 0.99 cannot be trained; write 1 or more"),
        (YARN | {"rope_theta": 1.0}, "needs a rope_theta above 1, not 1.0"),
        (YARN | {"truncate": False}, "truncate = false cannot be trained"),
        # Not the same number any more, even in fp32.
        (YARN | {"attention_factor": SCALE * (1 + 1.5e-6)}, "cannot be trained, only 1.13863"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused(table, expected):
    with pytest.raises(ValueError) as caught:
        read_rope(values(table))
    assert expected in str(caught.value)
