"""transformers' models on a GPU: our attention in bf16 against sdpa's errors, and who waits."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.transformers.families import family, positions, tokens
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.integrations.transformers import AttentionSettings, register

SEQ_LEN = 1000
LENGTHS = [300, 60, 640]


def on_gpu(name: str, **changes) -> nn.Module:
    sizes = {"head_dim": 64, "max_position_embeddings": 1024}
    return family(name, **sizes, **changes).to("cuda", torch.bfloat16)


def logits(model: nn.Module, implementation: str, **inputs: Tensor) -> Tensor:
    model.set_attn_implementation(implementation)
    on_device = {name: value.cuda() for name, value in inputs.items()}
    with torch.no_grad():
        return model(**on_device, use_cache=False).logits.float()


def padded(first: slice, second: slice) -> Tensor:
    attention_mask = torch.ones(2, SEQ_LEN, dtype=torch.int64)
    attention_mask[0, first] = 0
    attention_mask[1, second] = 0
    return attention_mask


INPUTS = {
    "plain": {},
    "packed": {"position_ids": positions(*LENGTHS)},
    "padded": {"attention_mask": padded(slice(200), slice(900, None))},
    "padded between tokens": {"attention_mask": padded(slice(100, 250), slice(600, 601))},
}


@pytest.mark.parametrize(
    "name, inputs",
    [*(("llama", inputs) for inputs in INPUTS), ("olmo3", "packed"), ("gpt_oss", "packed")],
)
def test_logits_are_as_near_as_those_of_eager_attention(name, inputs):
    """To those of fp32 weights: at most twice the error of transformers' own bf16.

    GPT-OSS's own attention does not see where documents begin: there, documents run alone.
    """
    register()
    model = on_gpu(name)
    given = {"input_ids": tokens(2, SEQ_LEN), **INPUTS[inputs]}
    ours = logits(model, "titan_sparse", **given)
    theirs = _reference(model, **given)
    wanted = _reference(model.float(), **given)
    real = INPUTS[inputs].get("attention_mask", torch.ones(2, SEQ_LEN)).bool()
    error, bound = (ours - wanted)[real].norm(), (theirs - wanted)[real].norm()
    assert error <= 2 * bound + 1e-3 * wanted[real].norm()


def _reference(model: nn.Module, input_ids: Tensor, **others: Tensor) -> Tensor:
    if "position_ids" not in others:
        return logits(model, "eager", input_ids=input_ids, **others)
    parts = input_ids.split(LENGTHS, dim=1)
    return torch.cat([logits(model, "eager", input_ids=part) for part in parts], dim=1)


@pytest.mark.parametrize("pattern", [None, VerticalSlash(recall=0.8, dense_below=128)])
@pytest.mark.parametrize("inputs", ["plain", "packed", "padded"])
def test_more_layers_wait_no_more(inputs, pattern):
    """The host waits for the device where the mask is built, and in no layer."""
    register(AttentionSettings() if pattern is None else AttentionSettings(pattern=pattern))
    few, many = (waits(on_gpu("llama", num_hidden_layers=n), INPUTS[inputs]) for n in (2, 5))
    assert few == many


def waits(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """How often a forward waits for the device, after one to warm up."""
    given = {"input_ids": tokens(2, SEQ_LEN).cuda()}
    given |= {name: value.cuda() for name, value in inputs.items()}
    model.set_attn_implementation("titan_sparse")
    model(**given, use_cache=False)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(**given, use_cache=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def test_reduce_overhead_replays_the_same(fresh_compiler):
    """Dense attention is in the CUDA graphs of mode "reduce-overhead". cuDNN
    adds dq in any order."""
    register()
    model = on_gpu("llama")
    model.set_attn_implementation("titan_sparse")
    wanted = _losses_and_norms(model, torch.compile(model))
    torch.compiler.reset()
    captured = torch.compile(model, mode="reduce-overhead")
    found = _losses_and_norms(model, captured)
    torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=0, atol=0)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4)
    with torch.profiler.profile() as profile:
        _losses_and_norms(model, captured)
        torch.cuda.synchronize()
    assert any("cudaGraphLaunch" in event.name for event in profile.events())


def _losses_and_norms(model: nn.Module, run: Callable) -> Tensor:
    """[steps, 1 + parameters]: the loss and the gradients' norms at steps of other tokens each."""
    found = []
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        ids = tokens(2, 1024, seed=step).cuda()
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms = [parameter.grad.float().norm() for parameter in model.parameters()]
        found.append(torch.stack([loss.detach().float(), *norms]))
    return torch.stack(found)
