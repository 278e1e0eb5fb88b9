"""Models that run through transformers' own code, on one GPU: compiled layers in bf16 are as near
transformers' own in fp32 as its own bf16 is, and experts go through the grouped matmul."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_transformers_decoder import cross_entropy, gradients_by_name
from tests.models.transformers_models import VOCAB, save_model
from titan_sparse.attention.masks.ranges import Documents, SlidingWindow
from titan_sparse.config import Attention
from titan_sparse.from_config import build_attends
from titan_sparse.models.build import build_decoder
from titan_sparse.models.decoder import LayerMasks
from titan_sparse.models.huggingface import load_weights
from titan_sparse.models.transformers_config import read_transformers_config
from titan_sparse.training.build_model import checkpointed
from titan_sparse.training.compiling import compile_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = [300, 212]
LENGTH = sum(LENGTHS)
WIDER = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
"""Sizes that kernels of bf16 take: rows of 16 bytes."""


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
    tokens, labels = torch.randint(3, VOCAB, (2, 1, LENGTH), generator=generator).cuda()
    wanted, expected = _by_documents(theirs, tokens, labels)
    rounded, _ = _by_documents(theirs.bfloat16(), tokens, labels)

    mask = Documents([LENGTHS])
    window = (mask & SlidingWindow(config.window)).rows(LENGTH, "cuda") if config.window else None
    masks = LayerMasks(mask.rows(LENGTH, "cuda"), window)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()
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
    for length in LENGTHS:
        part = slice(start, start + length)
        total = total + cross_entropy(model(tokens[:, part]).logits.float(), labels[:, part])
        start += length
    total.backward()
    gradients = {name: x.float().clone() for name, x in gradients_by_name(model).items()}
    return gradients, total.detach()
