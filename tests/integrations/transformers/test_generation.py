"""Tokens that follow cached ones: whatever the cache and however many, transformers' own answers."""

import pytest
import torch

from tests.integrations.transformers.families import (
    DEVICE,
    DEVICE_BLOCK,
    assert_close,
    both,
    device_family,
    device_tokens,
    transformers,
)
from titan_sparse.attention.masks import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.integrations.transformers import (
    AttentionMask,
    AttentionSettings,
    attention,
    register,
)

NAMES = ["llama", "olmo3", "gpt_oss"]

SEQ_LEN = 50


@pytest.mark.parametrize("chunks", [[1] * 20, [20, 1, 1, 20, 8], [1, 49]], ids=str)
@pytest.mark.parametrize("name", NAMES)
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
    model = device_family("olmo3", sliding_window=1).eval()
    model.set_attn_implementation("titan_sparse")
    with pytest.raises(ValueError, match="keys where transformers announced 1; write"):
        model.generate(device_tokens(1, 20), max_new_tokens=2, do_sample=False)


def test_masks_of_ours_beside_a_cache_are_refused():
    model = device_family("qwen3").eval()
    model.set_attn_implementation("titan_sparse")
    cache = model(device_tokens(1, 20), use_cache=True).past_key_values
    for masks in (AttentionMask(Causal()), {"full_attention": Causal()}):
        with pytest.raises(ValueError, match="write use_cache=False"):
            model(device_tokens(1, 5), attention_mask=masks, past_key_values=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_prompt_is_sparse_and_the_answer_dense(cache, attended, monkeypatch):
    sparse = VerticalSlash(recall=0.5, sinks=1, max_verticals=8, max_slashes=2)
    register(AttentionSettings(pattern=sparse, block_size=DEVICE_BLOCK))
    decoded = []
    beside_cache = attention.attention_beside_cache

    def decode(module, query, *args):
        decoded.append(query.shape[2])
        return beside_cache(module, query, *args)

    monkeypatch.setattr(attention, "attention_beside_cache", decode)
    model = device_family("llama").eval()
    model.set_attn_implementation("titan_sparse")
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    model.generate(device_tokens(1, SEQ_LEN), cache_implementation=cache, **options)
    prompts = [(call.tensors[0].shape[2], call.options["pattern"]) for call in attended]
    assert prompts == [(SEQ_LEN, sparse)] * 2
    assert decoded == [1] * 4


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
