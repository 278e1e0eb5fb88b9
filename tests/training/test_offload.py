"""What blocks keep for the backward, on the CPU: the same to the bit, from a pool of buffers that does not grow."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.runs import TINY
from titan_sparse.attention import attend
from titan_sparse.attention.masks.ranges import Documents
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.models.decoder import Decoder
from titan_sparse.models.initialization import initialize
from titan_sparse.training import offload
from titan_sparse.training.model import checkpointed
from titan_sparse.training.offload import OffloadedBlocks

LAYERS, TOKENS, HIDDEN, HEADS, HEAD_DIM = 3, 256, 32, 4, 8
CONFIG = replace(TINY, layers=LAYERS)
PATTERN = VerticalSlash(recall=0.8, sinks=2, local_slashes=1, max_verticals=32, dense_below=64)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_tensors_too(monkeypatch, fresh_compiler) -> None:
    # LSE, but neither norms nor biases
    monkeypatch.setattr(offload, "MIN_BYTES", TOKENS * HEADS * 4)


def _decoder(backend: str | object = "aot_eager", blocks: OffloadedBlocks | None = None) -> Decoder:
    """fp32, checkpointed and compiled block by block."""
    call = functools.partial(attend, pattern=PATTERN, block_size=16, backend="eager")
    model = Decoder(CONFIG, lambda q, k, v, mask: call(q, k, v, mask))
    initialize(model, 0, CONFIG)
    for name, block in model.layers.items():
        model.layers[name] = checkpointed(block, "full")
        model.layers[name].compile(backend=backend, fullgraph=True)
    if blocks is not None:
        model.run_blocks = blocks
    return model


def _loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, 200, (2, 1, TOKENS), generator=generator)
    documents = Documents([[100 + seed, 156 - seed]]).rows(TOKENS)
    return model(tokens, torch.arange(TOKENS)[None], documents, labels)


def _gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients


def _assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(map(torch.equal, got, want)) and len(got) == len(want)


def test_steps_are_the_same_to_the_bit_and_the_pool_stays():
    plain, wanted = _decoder(), []
    for seed in (0, 1):
        loss = _loss(plain, seed)
        loss.backward()
        wanted.append((loss.detach(), _gradients(plain)))
    blocks = OffloadedBlocks(CPU)
    counter = CompileCounterWithBackend("aot_eager")
    model = _decoder(counter, blocks=blocks)
    sizes = set()
    for seed in (0, 1, 0):
        loss = _loss(model, seed)
        loss.backward()
        wanted_loss, wanted_gradients = wanted[seed]
        assert torch.equal(loss, wanted_loss)
        _assert_equal(_gradients(model), wanted_gradients)
        sizes.add(blocks.pool.nbytes)
        given_back = sum(size * len(buffers) for size, buffers in blocks.pool.free.items())
        assert given_back == blocks.pool.nbytes, "buffers were not given back"
        with torch.no_grad():
            _loss(model, 1 - seed)
    assert len(sizes) == 1, "the pool grew"
    # With gradients and without.
    assert counter.frame_count <= 2, "compiled anew"
    buffers = {nbytes: len(free) for nbytes, free in blocks.pool.free.items()}
    # Input and out of each block, and its LSE.
    wide = TOKENS * HIDDEN * 4
    lse = TOKENS * HEADS * 4
    assert buffers.pop(wide) == 2 * (LAYERS - 1)
    assert buffers.pop(lse) == LAYERS - 1
    # What is left are the verticals that the pattern has gathered.
    (verticals,) = buffers
    assert verticals % (2 * HEADS * HEAD_DIM * 4) == 0
    assert buffers[verticals] == LAYERS - 1
    assert blocks.pool.nbytes == (LAYERS - 1) * (2 * wide + lse + verticals)


def test_two_forwards_before_their_backwards():
    plain, wanted = _decoder("eager"), []
    for seed in (0, 1):
        _loss(plain, seed).backward()
        wanted.append(_gradients(plain))
    model = _decoder("eager", blocks=OffloadedBlocks(CPU))
    losses = [_loss(model, 0), _loss(model, 1)]
    with torch.no_grad():
        _loss(model, 2)
    # Not last in, first out: buffers must not be mixed up.
    losses[0].backward()
    _assert_equal(_gradients(model), wanted[0])
    losses[1].backward()
    _assert_equal(_gradients(model), wanted[1])


def test_what_is_kept_may_not_change():
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square()

    class ChangesTheFirstInput(Square):
        def forward(self, x: Tensor) -> Tensor:
            first.add_(1)
            return x

    first = torch.randn(64, 64, requires_grad=True).clone()
    with pytest.raises(RuntimeError, match="changed in place"):
        OffloadedBlocks(CPU)([Square(), ChangesTheFirstInput(), Square()], first)
