"""Every family with our attention against transformers' eager attention: logits and every gradient."""

import inspect

import pytest
import torch

from tests.integrations.transformers.families import (
    ALL_FAMILIES,
    DEVICE,
    DEVICE_BLOCK,
    assert_close,
    both,
    device_family,
    device_tokens,
    logits_and_gradients,
    one_by_one,
    positions,
    transformers,
)

SEQ_LEN = 50
LENGTHS = [17, 30, 3]

# Not in transformers 5.17.
CHUNKS_BESIDE_STATIC_CACHES = "block_sequence_ids" in (
    inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_packed_documents_are_those_run_alone(name):
    model = device_family(name)
    input_ids = device_tokens(1, SEQ_LEN)
    model.set_attn_implementation("eager")
    wanted = one_by_one(model, input_ids, LENGTHS)
    model.set_attn_implementation("titan_sparse")
    packed = {"input_ids": input_ids, "position_ids": positions(*LENGTHS).to(DEVICE)}
    if name.startswith("qwen3_5"):
        # Those of text, and of the three axes of pictures.
        packed["position_ids"] = packed["position_ids"].expand(4, -1, -1)
    assert_close(logits_and_gradients(model, **packed), wanted)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_padding_on_both_sides_and_between(name):
    model = device_family(name)
    input_ids = device_tokens(3, SEQ_LEN)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :11] = 0
    attention_mask[1, 37:] = 0
    attention_mask[2, 20:24] = 0
    attention_mask[2, 31:33] = 0
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if name != "llama":
        # As generate() makes them.
        inputs["position_ids"] = (attention_mask.cumsum(1) - 1) * attention_mask
    counted = attention_mask.bool()
    assert_close(*both(model, lambda: logits_and_gradients(model, counted, **inputs)))


ALL_CACHES = [(name, "dynamic") for name in ALL_FAMILIES]
ALL_CACHES += [(name, "static") for name in ("olmo3", "gpt_oss", "qwen3_5", "llama4")]


@pytest.mark.parametrize("name, cache", ALL_CACHES)
def test_greedy_answers_of_a_padded_batch(name, cache):
    if name == "llama4" and cache == "static" and not CHUNKS_BESIDE_STATIC_CACHES:
        pytest.skip("transformers itself raises")
    model = device_family(name).eval()
    input_ids = device_tokens(3, 13)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :6] = 0
    attention_mask[1, 4:7] = 0
    # The first answer is read at padding.
    attention_mask[2, 9:] = 0

    def generate():
        return model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=2 * DEVICE_BLOCK,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )

    ours, eager = both(model, generate)
    assert torch.equal(ours.sequences, eager.sequences)
    assert_close(list(ours.logits), list(eager.logits))
