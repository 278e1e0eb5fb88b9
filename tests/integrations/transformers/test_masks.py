"""Masks: our own ones, what padding sees, what is built how often, and who gets a pattern."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.integrations.transformers.families import (
    BLOCK,
    WINDOW,
    assert_close,
    both,
    family,
    logits_and_gradients,
    positions,
    tokens,
    with_ours,
)
from titan_sparse import recording
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.masks import (
    Causal,
    Documents,
    Mask,
    SlidingWindow,
    documents,
    prefix_lm,
)
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.integrations.transformers import (
    AttentionMask,
    AttentionSettings,
    keep_attention,
    register,
)
from titan_sparse.integrations.transformers.masks import MaskRule, ranges_of_tokens

eager = BACKENDS["eager"]

SEQ_LEN = 50
LENGTHS = [17, 30, 3]
SPARSE = VerticalSlash(recall=0.5, sinks=1, local_slashes=1, max_verticals=8, max_slashes=2)


def added_to_scores(mask: Mask) -> Tensor:
    """[B, 1, S, S], as transformers' eager attention takes a mask."""
    seen = mask.dense(SEQ_LEN)[:, None]
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def ours_and_eager(model, ours, eager) -> tuple:
    """Logits and gradients with the mask `ours`, and of eager attention with `eager`."""
    input_ids = tokens(1, SEQ_LEN)
    model.set_attn_implementation("titan_sparse")
    got = logits_and_gradients(model, input_ids=input_ids, attention_mask=ours)
    model.set_attn_implementation("eager")
    return got, logits_and_gradients(model, input_ids=input_ids, attention_mask=eager)


OWN_MASKS = [Documents(LENGTHS), documents(LENGTHS), Causal() & SlidingWindow(20)]


@pytest.mark.parametrize("mask", [*OWN_MASKS, prefix_lm(LENGTHS, [5, 20, 3])])
@pytest.mark.parametrize("wrap", [lambda x: x, AttentionMask, lambda x: x.rows(SEQ_LEN)])
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_a_mask_of_ours_in_a_model_with_one_kind_of_layers(name, wrap, mask):
    assert_close(*ours_and_eager(family(name), wrap(mask), added_to_scores(mask)))


def test_bounds_of_documents_may_stand_beside_positions():
    """As collators that pack add them, TRL's among them, for any attention."""
    model = with_ours("llama")
    inputs = {"input_ids": tokens(1, SEQ_LEN), "position_ids": positions(*LENGTHS)}
    bounds = torch.tensor([0, 17, 47, 50], dtype=torch.int32)
    assert_close([model(**inputs, cu_seq_lens_q=bounds).logits], [model(**inputs).logits])
    for other in (torch.tensor([0, 18, 47, 50]), torch.tensor([0, 50])):
        with pytest.raises(ValueError, match="position_ids say something else; leave it out"):
            model(**inputs, cu_seq_lens_q=other)


def test_chunks_are_written_as_a_mask_of_their_own():
    chunks = Documents([16, 1, 16, 14, 3])
    ours = {"full_attention": Documents(LENGTHS), "chunked_attention": chunks}
    eager = {kind: added_to_scores(mask) for kind, mask in ours.items()}
    assert_close(*ours_and_eager(family("llama4"), ours, eager))


@pytest.mark.parametrize("mask", OWN_MASKS, ids=["ranges", "slices", "window"])
@pytest.mark.parametrize("resolved", [False, True])
@pytest.mark.parametrize("wrap", [lambda x: x, AttentionMask])
def test_layers_with_a_window_see_what_mask_and_window_allow(mask, resolved, wrap):
    both = mask & SlidingWindow(WINDOW)
    ours = wrap(mask.rows(SEQ_LEN) if resolved else mask)
    wanted = added_to_scores(both)
    assert_close(*ours_and_eager(family("mistral"), ours, wanted))
    wanted = {"full_attention": added_to_scores(mask), "sliding_attention": wanted}
    assert_close(*ours_and_eager(family("olmo3"), ours, wanted))


@pytest.mark.parametrize("wrap", [lambda x: x, AttentionMask, lambda x: x.rows(SEQ_LEN)])
@pytest.mark.parametrize("name", ["qwen3", "olmo3", "gpt_oss"])
def test_masks_of_ours_for_each_kind_of_layer(name, wrap):
    """They are used unchanged: the sliding layers' mask is wider than the model's window."""
    masks = {
        "full_attention": Documents(LENGTHS),
        "sliding_attention": Documents(LENGTHS) & SlidingWindow(WINDOW + 5),
    }
    ours = {kind: wrap(mask) for kind, mask in masks.items()}
    eager = {kind: added_to_scores(mask) for kind, mask in masks.items()}
    assert_close(*ours_and_eager(family(name), ours, eager))


@pytest.mark.parametrize("rule", [MaskRule(window=2**40), MaskRule(chunk=2**40)])
def test_windows_and_chunks_without_a_bound(rule):
    ranges = ranges_of_tokens(None, None, rule, torch.zeros(1, 1, SEQ_LEN, 8), Dense())
    assert not ranges.start.any()


JUMPING = torch.cat([torch.arange(20), torch.arange(100, 130)])[None]
"""Of one document: PoSE trains far positions on short sequences."""


@pytest.mark.parametrize("inputs", ["mask of ones", "cache", "neither"])
@pytest.mark.parametrize("position_ids", [JUMPING, JUMPING * 0, JUMPING * 0 + 7])
def test_positions_that_jump_or_stay_are_read_as_eager_reads_them(position_ids, inputs):
    """With neither, transformers begins a document at each jump."""
    model = family("llama")
    input_ids = tokens(2, SEQ_LEN)
    kwargs = {"position_ids": position_ids, "use_cache": inputs == "cache"}
    if inputs == "mask of ones":
        kwargs["attention_mask"] = torch.ones_like(input_ids)
    ours, eager = both(model, lambda: model(input_ids, **kwargs).logits)
    assert_close([ours], [eager])


def test_documents_are_found_beside_a_2d_mask():
    """With padding before, between and behind documents."""
    model = family("mistral")
    input_ids = tokens(1, SEQ_LEN)
    position_ids = positions(22, 18, 10)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[:, 17:22] = 0
    attention_mask[:, 36:40] = 0
    attention_mask[:, 43:] = 0
    model.set_attn_implementation("titan_sparse")
    got = model(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits
    model.set_attn_implementation("eager")
    for begin, end in [(0, 17), (22, 36), (40, 43)]:
        alone = model(input_ids[:, begin:end]).logits
        assert_close([got[:, begin:end]], [alone])


CHUNK = 5 * BLOCK
SLIDING = {"full_attention": Causal(), "sliding_attention": SlidingWindow(WINDOW)}


@pytest.mark.parametrize(
    "name, changes, inputs, near",
    [
        ("llama4", {"attention_chunk_size": CHUNK}, {}, Documents([CHUNK, CHUNK])),
        ("olmo3", {}, {}, SlidingWindow(WINDOW)),
        ("olmo3", {}, {"attention_mask": SLIDING}, SlidingWindow(WINDOW)),
    ],
    ids=["chunks", "window", "our masks"],
)
def test_patterns_are_for_layers_that_see_far(name, changes, inputs, near):
    register(AttentionSettings(pattern=SPARSE, block_size=BLOCK))
    model = with_ours(name, **changes)
    with recording() as seen:
        model(tokens(1, 2 * CHUNK), **inputs)
    dense, sparse = (visited.mean().item() for visited in seen.visited)
    assert dense == near.dense(2 * CHUNK).sum()
    assert sparse < 0.9 * Causal().dense(2 * CHUNK).sum()


CHECKPOINTING = {
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "keeps attention": keep_attention(),
}


@pytest.mark.parametrize("how", CHECKPOINTING)
def test_activation_checkpointing_changes_nothing(how, monkeypatch):
    model = with_ours("qwen3")
    inputs = {"input_ids": tokens(1, SEQ_LEN), "position_ids": positions(*LENGTHS)}
    wanted = logits_and_gradients(model, **inputs)
    model.gradient_checkpointing_enable(CHECKPOINTING[how])
    model.train()
    if how == "reentrant":
        model.enable_input_require_grads()
    logits = model(**inputs, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    forward = Mock(side_effect=eager.forward)
    monkeypatch.setattr(eager, "forward", forward)
    (logits * weights).sum().backward()
    again = 0 if how == "keeps attention" else model.config.num_hidden_layers
    assert forward.call_count == again
    parameters = sorted(model.named_parameters())
    assert_close([logits.detach(), *(p.grad for _, p in parameters)], wanted)


def test_autocast_computes_in_its_dtype(attended):
    """Qwen3's norms of queries and keys, with fp32 weights, leave them in fp32."""
    model = with_ours("qwen3")
    input_ids = tokens(1, SEQ_LEN)
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(input_ids).logits
        model.set_attn_implementation("sdpa")
        wanted = model(input_ids).logits
    assert {x.dtype for call in attended for x in call.args} == {torch.bfloat16}
    assert (ours - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(
    ("name", "layers"), [("llama", 1), pytest.param("gpt_oss", 2, marks=pytest.mark.slow)]
)
def test_a_compiled_model_computes_the_same(name, layers):
    model = with_ours(name, num_hidden_layers=layers)
    compiled = torch.compile(model, backend="aot_eager")
    for lengths in (LENGTHS, [SEQ_LEN]):
        inputs = {"input_ids": tokens(1, SEQ_LEN), "position_ids": positions(*lengths)}
        got = logits_and_gradients(compiled, **inputs)
        wanted = logits_and_gradients(model, **inputs)
        # The compiled model's parameters have longer names, in the same order.
        assert_close(got, wanted)
