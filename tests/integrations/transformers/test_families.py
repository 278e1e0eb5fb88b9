"""Every family with our attention against transformers' eager attention: logits, every gradient,
and the tokens that follow cached ones, whatever the cache and however many."""

import inspect
from unittest.mock import Mock

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
    with_ours,
)
from tests.refusals import refused
from titan_sparse.attention.masks import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.integrations.transformers import (
    AttentionMask,
    AttentionSettings,
    attention,
    register,
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


# Tokens that follow cached ones


@pytest.mark.parametrize("chunks", [[1] * 20, [20, 1, 1, 20, 8], [1, 49]], ids=str)
@pytest.mark.parametrize("name", ["llama", "olmo3", "gpt_oss"])
def test_a_text_in_any_chunks_is_the_text_at_once(name, chunks):
    """Chunks are shorter and longer than the window, of one token and of several."""
    model = device_family(name).eval()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.7
    input_ids = device_tokens(2, sum(chunks))
    model.set_attn_implementation("eager")
    wanted = model(input_ids).logits
    model.set_attn_implementation("titan_sparse")
    past = None
    found = []
    for part in input_ids.split(chunks, dim=1):
        answer = model(part, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        found.append(answer.logits)
    assert_close([torch.cat(found, dim=1)], [wanted])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunked_prefill_beams_and_assisted_generation(cache):
    model = device_family("llama").eval()
    input_ids = device_tokens(2, 20)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :5] = 0

    def generate(rows: int = 2, **options):
        return model.generate(
            input_ids[:rows],
            attention_mask=attention_mask[:rows],
            max_new_tokens=10,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            **options,
        )

    assert torch.equal(*both(model, lambda: generate(prefill_chunk_size=6)))
    assert torch.equal(*both(model, lambda: generate(num_beams=3)))
    if cache == "dynamic":
        assert torch.equal(*both(model, lambda: generate(rows=1, prompt_lookup_num_tokens=4)))


def test_a_cache_that_holds_more_than_it_says_is_refused():
    """transformers' cache of a window of one token drops nothing."""
    model = with_ours("olmo3", DEVICE, sliding_window=1).eval()
    with refused("keys where transformers announced 1; write"):
        model.generate(device_tokens(1, 20), max_new_tokens=2, do_sample=False)


def test_masks_of_ours_beside_a_cache_are_refused():
    model = with_ours("qwen3", DEVICE).eval()
    cache = model(device_tokens(1, 20), use_cache=True).past_key_values
    for masks in (Causal(), AttentionMask(Causal()), {"full_attention": Causal()}):
        with refused("write use_cache=False"):
            model(device_tokens(1, 5), attention_mask=masks, past_key_values=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_prompt_is_sparse_and_the_answer_dense(cache, attended, monkeypatch):
    sparse = VerticalSlash(recall=0.5, sinks=1, max_verticals=8, max_slashes=2)
    register(AttentionSettings(pattern=sparse, block_size=DEVICE_BLOCK))
    decode = Mock(side_effect=attention.attention_beside_cache)
    monkeypatch.setattr(attention, "attention_beside_cache", decode)
    model = with_ours("llama", DEVICE).eval()
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    model.generate(device_tokens(1, SEQ_LEN), cache_implementation=cache, **options)
    prompts = [(call.args[0].shape[2], call.kwargs["pattern"]) for call in attended]
    assert prompts == [(SEQ_LEN, sparse)] * 2
    assert [call.args[1].shape[2] for call in decode.call_args_list] == [1] * 4


def test_turns_of_a_batch_of_chats():
    """The second turn follows answers that ended early and prompts of other lengths: from the
    cache of the first turn, and from the whole history."""
    model = device_family("gpt_oss").eval()
    prompt = device_tokens(2, 13)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    turn = device_tokens(2, 7, seed=1)

    def generate() -> torch.Tensor:
        options = {"max_new_tokens": 6, "do_sample": False}
        first = model.generate(prompt, attention_mask=mask, return_dict_in_generate=True, **options)
        answer_mask = torch.ones(2, 6, dtype=torch.int64, device=DEVICE)
        answer_mask[1, 3:] = 0
        history = torch.cat([first.sequences, turn], dim=1)
        history_mask = torch.cat([mask, answer_mask, torch.ones_like(turn)], dim=1)
        options["attention_mask"] = history_mask
        cached = model.generate(history, past_key_values=first.past_key_values, **options)
        return torch.cat([cached, model.generate(history, **options)])

    assert torch.equal(*both(model, generate))


@pytest.mark.slow
def test_a_static_cache_compiles():
    """generate() compiles the decoding of a static cache where it can, here by force."""
    model = device_family("olmo3").eval()
    input_ids = device_tokens(1, 20)

    def generate():
        config = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
        config._compile_all_devices = True
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
        return model.generate(input_ids, compile_config=config, **options)

    assert torch.equal(*both(model, generate))
