"""Compiled layers on one GPU: gradients in bf16 are as near those in fp32 as without torch.compile.

Of real shapes, of which no kernel reads back what its other threads store; and of families that run
through transformers' own code.
"""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests.models.test_transformers_decoder import cross_entropy, gradients_by_name
from tests.models.transformers_models import VOCAB as TINY_VOCAB
from tests.models.transformers_models import save_model
from titan_sparse.attention.masks.ranges import Documents, SlidingWindow
from titan_sparse.config import Attention
from titan_sparse.models.build import build_decoder
from titan_sparse.models.decoder import LayerMasks
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.models.huggingface import load_weights
from titan_sparse.models.transformers_config import read_transformers_config
from titan_sparse.training.attention import build_attends
from titan_sparse.training.model import checkpointed, compile_layer

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LENGTHS = [700, 324]
LENGTH = sum(LENGTHS)
VOCAB = 512
SHORT_LENGTHS = [300, 212]
SHORT = sum(SHORT_LENGTHS)
WIDER = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
"""Sizes that kernels of bf16 take: rows of 16 bytes."""
GEMMA = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama3.1-8b", "gemma3"])
def test_layers_of_real_shapes(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    if name == "gemma3":
        save_model(tmp_path, "gemma3", **GEMMA)
        config = read_transformers_config(str(tmp_path))
    else:
        config = replace(FLAVOURS[name], layers=2, vocab_size=VOCAB)
    attends = build_attends(Attention(pattern="dense", block_size=128), None)
    model = build_decoder(config, attends).cuda().float()
    exact = _gradients(model, config)
    model = model.bfloat16()
    rounded = _gradients(copy.deepcopy(model), config)

    for layer in model.layers.values():
        compile_layer(layer, "inductor")
    found, codes = run_and_get_code(_gradients, model, config)
    # Forward and backward: all layers are alike.
    assert len(codes) >= 2
    assert [kernel for code in codes for kernel in read_back_kernels(code)] == []
    for parameter, gradient in found.items():
        wanted = exact[parameter]
        error = (gradient - wanted).norm()
        error_of_eager = (rounded[parameter] - wanted).norm()
        assert error < 2 * error_of_eager + 0.01 * wanted.norm(), parameter


def _gradients(model: nn.Module, config) -> dict[str, Tensor]:
    """In fp32 by name, of one packed sequence."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, VOCAB, (2, 1, LENGTH), generator=generator).cuda()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()
    mask = Documents([LENGTHS])
    rows = mask.rows(LENGTH, "cuda")
    window = getattr(config, "window", 0)
    if window:
        rows = LayerMasks(rows, (mask & SlidingWindow(window)).rows(LENGTH, "cuda"))
    model.zero_grad()
    model(tokens, positions, rows, labels).backward()
    return {name: x.grad.float().clone() for name, x in model.named_parameters()}


def read_back_kernels(code: str) -> list[str]:
    """Names of the Triton kernels that load in one loop what they stored in an earlier one, with no
    barrier in between."""
    found = []
    for body in re.findall(r"^def (triton_\w+\(.*?)^'''", code, re.MULTILINE | re.DOTALL):
        stored: set[str] = set()
        stored_before: set[str] = set()
        for line in body.splitlines():
            if re.match(r"    for \w+ in ", line) or "debug_barrier" in line:
                stored_before |= stored
                stored = set()
            if "debug_barrier" in line:
                stored_before = set()
            stored |= set(re.findall(r"tl\.store\((\w+) \+", line))
            if stored_before & set(re.findall(r"tl\.load\((\w+) \+", line)):
                found.append(body[: body.index("(")])
                break
    return found


@pytest.mark.parametrize(
    "name", ["qwen2, windows", "smollm3", "gemma3", "granite", "qwen3_moe", "gpt_oss"]
)
def test_compiled_bf16_is_near_eager_fp32(tmp_path: Path, name: str) -> None:
    settings = WIDER | ({"head_dim": 256} if name == "gemma3" else {})
    theirs = save_model(tmp_path, name, **settings).cuda()
    config = read_transformers_config(str(tmp_path))
    attends = build_attends(Attention(pattern="dense", block_size=128), None)
    with torch.device("meta"):
        model = build_decoder(config, attends).to(torch.float32)
    model = model.to_empty(device="cuda")
    load_weights(model, str(tmp_path), config)
    model = model.bfloat16()
    for number, layer in model.layers.items():
        model.layers[number] = checkpointed(layer, "full")
        compile_layer(model.layers[number], "inductor")

    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(3, TINY_VOCAB, (2, 1, SHORT), generator=generator).cuda()
    wanted, expected = _by_documents(theirs, tokens, labels)
    rounded, _ = _by_documents(theirs.bfloat16(), tokens, labels)

    mask = Documents([SHORT_LENGTHS])
    window = (mask & SlidingWindow(config.window)).rows(SHORT, "cuda") if config.window else None
    masks = LayerMasks(mask.rows(SHORT, "cuda"), window)
    positions = torch.cat([torch.arange(length) for length in SHORT_LENGTHS])[None].cuda()
    found = model(tokens, positions, masks, labels)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)
    for parameter_name, gradient in gradients_by_name(model).items():
        name_in_memory = parameter_name.replace("_checkpoint_wrapped_module.", "")
        exact = wanted[name_in_memory]
        error = (gradient.float() - exact).norm()
        error_of_theirs = (rounded[name_in_memory] - exact).norm()
        # A router that flips between experts that are nearly alike moves all of a token's gradient.
        slack = 0.5 if "router" in name_in_memory else 0.05
        assert error < 2 * error_of_theirs + slack * exact.norm(), name_in_memory


def _by_documents(
    model: nn.Module, tokens: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients in fp32 by name, and the loss, of documents that are run alone."""
    model.zero_grad()
    total = torch.zeros((), device=tokens.device)
    start = 0
    for length in SHORT_LENGTHS:
        part = slice(start, start + length)
        total = total + cross_entropy(model(tokens[:, part]).logits.float(), labels[:, part])
        start += length
    total.backward()
    gradients = {name: x.float().clone() for name, x in gradients_by_name(model).items()}
    return gradients, total.detach()
