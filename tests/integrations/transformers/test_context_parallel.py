"""transformers' models over two processes against one: each holds its blocks of the sequence."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import on_ranks
from tests.integrations.transformers.families import (
    BLOCK,
    WINDOW,
    assert_close,
    family,
    logits_and_gradients,
    positions,
    tokens,
)
from titan_sparse import ContextParallel
from titan_sparse.attention.masks import Documents, SlidingWindow
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.integrations.transformers import AttentionMask, AttentionSettings, register
from titan_sparse.integrations.transformers.sharding import shard_batch

SEQ_LEN = 8 * BLOCK
LENGTHS = [50, 13, 65]
SPARSE = VerticalSlash(recall=0.5, sinks=1, max_verticals=8, max_slashes=2, dense_below=16)


def over_ranks(
    model: nn.Module,
    cp: ContextParallel,
    table: Tensor | None,
    counted: Tensor | None = None,
    **inputs,
) -> list:
    """logits_and_gradients() of the whole sequence, of which each rank computes its blocks."""
    local = {}
    for name, value in inputs.items():
        local[name] = cp.shard(value, 1, table) if isinstance(value, Tensor) else value
    logits = model(use_cache=False, **local).logits
    if counted is not None:
        logits = logits * cp.shard(counted, 1, table)[..., None]
    shape = (*inputs["input_ids"].shape, logits.shape[-1])
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    weighted = logits * cp.shard(weights, 1, table)
    gradients = torch.autograd.grad(weighted.sum(), parameters, allow_unused=True)
    summed = []
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient)
            summed.append(gradient)
    return [cp.unshard(logits.detach(), 1, table), *summed]


def _padding_over_ranks(cp: ContextParallel, name: str) -> None:
    """A 2D mask with padding on both sides, and positions that jump, on a batch that shard_batch()
    cuts. Linear attention refuses padding between tokens."""
    register(AttentionSettings(cp=cp), name="two_ranks")
    model = family(name)
    attention_mask = torch.ones(2, SEQ_LEN, dtype=torch.int64)
    attention_mask[0, :20] = 0
    if name == "mistral":
        attention_mask[0, 60:71] = 0
    attention_mask[1, 100:] = 0
    counted = attention_mask.bool()
    batch = {
        "input_ids": tokens(2, SEQ_LEN),
        "attention_mask": attention_mask,
        "position_ids": torch.cat([torch.arange(70), torch.arange(100, 158)])[None],
    }
    model.set_attn_implementation("eager")
    wanted = logits_and_gradients(model, counted, **batch)
    model.set_attn_implementation("two_ranks")
    local = shard_batch(batch | {"labels": batch["input_ids"]}, cp)
    batch["attention_mask"] = local["attention_mask"]
    assert torch.equal(local["input_ids"], cp.shard(batch["input_ids"], 1))
    assert torch.equal(local["position_ids"], cp.shard(batch["position_ids"].expand(2, -1), 1))
    assert_close(over_ranks(model, cp, None, counted, **batch), wanted)


def _nothing_leaks(cp: ContextParallel, name: str) -> None:
    """States hardly decay and convolutions pass their input on. A document that spans both ranks is
    changed: other documents stay as they are to the bit, and its own tokens all see it."""
    register(AttentionSettings(block_size=BLOCK), name="one_rank")
    register(AttentionSettings(cp=cp), name="two_ranks")
    model = family(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("A_log"):
                parameter.fill_(-12.0)
            if path.endswith("conv1d.weight"):
                parameter.zero_()[:, 0, -1] = 1
            if path.endswith("mlp.gate.weight"):
                # Other tokens in an expert's matmul would round differently.
                parameter.zero_()
    position_ids = positions(30, 60, 38)
    documents = AttentionMask(Documents([30, 60, 38]))
    inside = torch.zeros(1, SEQ_LEN, dtype=torch.bool)
    inside[:, 30:90] = True
    hidden = model.get_input_embeddings()(tokens(1, SEQ_LEN)).detach()
    weights = torch.randn(1, SEQ_LEN, 64, generator=torch.Generator().manual_seed(1))

    def run(changed: slice, is_spread: bool) -> list[Tensor]:
        """Logits, and the gradient of their weighted sum in hidden states,
        of the whole sequence."""
        own = partial(cp.shard, dim=1) if is_spread else Tensor.contiguous
        x = hidden.clone()
        x[:, changed] += 1
        x = own(x).requires_grad_()
        model.set_attn_implementation("two_ranks" if is_spread else "one_rank")
        inputs = {"position_ids": own(position_ids), "attention_mask": documents}
        logits = model(inputs_embeds=x, use_cache=False, **inputs).logits
        found = [logits.detach(), *torch.autograd.grad((logits * own(weights)).sum(), x)]
        return [cp.unshard(tensor, 1) for tensor in found] if is_spread else found

    assert_close(run(slice(0), True), run(slice(0), False))
    for is_spread in (False, True):
        before = run(slice(0), is_spread)
        for a, b in zip(before, run(slice(30, 90), is_spread), strict=True):
            assert torch.equal(a[~inside], b[~inside])
            assert (a != b)[inside].any(-1).all()
        # The first token is seen by all that follow, and their gradients reach it.
        logits, gradient = run(slice(30, 31), is_spread)
        assert (
            (logits - before[0])[inside].norm(dim=-1) > 1e-3 * before[0][inside].norm(dim=-1)
        ).all()
        assert not torch.equal(gradient[:, 30], before[1][:, 30])


def _whole_prompts(cp: ContextParallel) -> None:
    """As a callback evaluates or samples: refused, whatever the length and the tokens."""
    register(AttentionSettings(cp=cp), name="two_ranks")
    model = family("llama").eval()
    model.set_attn_implementation("two_ranks")
    for length in (1, 50, SEQ_LEN):
        prompt = tokens(1, length, seed=cp.rank)
        with pytest.raises(ValueError, match=r'register\(name="one_rank"\)'):
            model(prompt)
        with pytest.raises(ValueError, match=r'register\(name="one_rank"\)'):
            model.generate(prompt, max_new_tokens=3)
    register(name="one_rank")
    model.set_attn_implementation("one_rank")
    answers = model.generate(prompt, max_new_tokens=3, do_sample=False)
    model.set_attn_implementation("eager")
    assert torch.equal(answers, model.generate(prompt, max_new_tokens=3, do_sample=False))


@on_ranks(2)
def test_two_ranks_compute_what_one_does():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for name, pattern, layout, schedule in [
        ("llama", VerticalSlash(recall=1.0), "striped", "auto"),
        ("qwen3", SPARSE, "zigzag", "auto"),
        ("gpt_oss", SPARSE, "striped", "auto"),
        ("qwen3_next", SPARSE, "contiguous", "auto"),
        ("qwen3_5", SPARSE, "zigzag", "auto"),
        ("qwen3_5", Dense(), "balanced", "group_cast"),
        ("olmo3", Dense(), "balanced", "group_cast"),
    ]:
        cp = ContextParallel(mesh, layout, schedule, BLOCK)
        register(AttentionSettings(pattern=pattern, block_size=BLOCK), name="one_rank")
        register(AttentionSettings(pattern=pattern, cp=cp), name="two_ranks")
        model = family(name)
        inputs = {"input_ids": tokens(1, SEQ_LEN), "position_ids": positions(*LENGTHS)}
        model.set_attn_implementation("one_rank")
        wanted = logits_and_gradients(model, **inputs)
        model.set_attn_implementation("two_ranks")
        ranges = cp.balance(Documents(LENGTHS).rows(SEQ_LEN))
        masks = AttentionMask(ranges)
        assert_close(over_ranks(model, cp, ranges.table, **inputs, attention_mask=masks), wanted)
    window = (Documents(LENGTHS) & SlidingWindow(WINDOW)).rows(SEQ_LEN)
    masks = {
        "full_attention": ranges,
        "sliding_attention": window._replace(table=ranges.table),
    }
    assert_close(over_ranks(model, cp, ranges.table, **inputs, attention_mask=masks), wanted)

    cp = ContextParallel(mesh, "zigzag", block_size=BLOCK)
    for name in ("mistral", "qwen3_5"):
        _padding_over_ranks(cp, name)
    for name in ("qwen3_next", "qwen3_5"):
        _nothing_leaks(cp, name)
    _whole_prompts(cp)
