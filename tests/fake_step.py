"""A training step of the real, sharded model on fake tensors, counting the bytes that are alive.

Nothing is computed. On the CPU some operations take more memory than their CUDA kernels do:
RMSNorm, which is one kernel that keeps its input, and the loss, which works in place. Stand-ins
with the CUDA kernels' memory take their place.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_sparse import loss
from titan_sparse.attention import attend
from titan_sparse.attention.masks import Causal, MaskRanges
from titan_sparse.attention.patterns import Dense
from titan_sparse.config import ActivationCheckpoint, Compile
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.chunked_mlp import ChunkedMLP
from titan_sparse.models.config import Adapters
from titan_sparse.models.decoder import MLP, Decoder
from titan_sparse.models.lora import add_adapters
from titan_sparse.training.model import parallelize

_DENSE = Dense()


class LiveBytes(TorchDispatchMode):
    """now: bytes of the live storages that operations have made.

    peak: the largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.add(x)
        return out

    def add(self, x: Tensor) -> None:
        local = x._local_tensor if isinstance(x, DTensor) else x
        storage = local.untyped_storage()
        if storage._cdata not in self.sizes:
            weakref.finalize(storage, self.resize, storage._cdata, None)
        self.resize(storage._cdata, storage.nbytes())

    def resize(self, key: int, size: int | None) -> None:
        """A storage has a new size; None: it is gone."""
        self.now -= self.sizes.pop(key, 0)
        if size is not None:
            self.now += size
            self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def take_peak(self) -> float:
        """The peak since the last call, in GiB."""
        peak = self.peak
        self.peak = self.now
        return peak / 2**30


class _Norm(torch.autograd.Function):
    """RMSNorm with the CUDA kernel's memory: it keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx, x, weight):
        inverse_rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse_rms)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def like_cuda(monkeypatch, live: LiveBytes) -> None:
    """Put the stand-ins in place, and count storages that FSDP frees or fills again as such."""

    def norm(self, x):
        return _Norm.apply(x, self.weight)

    def matmul(a, b, out, beta=0):
        return out

    def cross_entropy(logits, *_):
        return logits.new_empty(len(logits)), logits

    resize = torch.UntypedStorage.resize_

    def counted(storage, size):
        resize(storage, size)
        if storage._cdata in live.sizes:
            live.resize(storage._cdata, size)

    monkeypatch.setattr(nn.RMSNorm, "forward", norm)
    monkeypatch.setattr(loss, "matmul", matmul)
    monkeypatch.setattr(loss, "cross_entropy_naive", cross_entropy)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", counted)


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group whose collectives do nothing, seen from `rank`."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _with_ids(adapters: Adapters) -> Adapters:
    """Which rows are trained does not matter."""
    return dataclasses.replace(adapters, token_ids=tuple(range(len(adapters.tokens))))


def peaks_of_a_step(monkeypatch, step: StepShape) -> tuple[float, float, float]:
    """GiB at the peak of forward, backward and optimizer step of the second step of one sequence.

    Weights are in float32, with adapters in bfloat16; the optimizer is AdamW (foreach).
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskRanges) -> Tensor:
        return attend(q, k, v, mask, _DENSE, None, "eager")

    mlp = MLP
    if step.mlp_chunk_tokens:
        mlp = functools.partial(ChunkedMLP, chunk_tokens=step.mlp_chunk_tokens)
    live = LiveBytes()
    with fake_world(step.shards):
        with torch.device("meta"):
            model = Decoder(step.model, attention, mlp)
            if step.adapters:
                add_adapters(model.to(torch.bfloat16), _with_ids(step.adapters))
        mesh = init_device_mesh("cpu", (step.shards,))
        checkpointing = ActivationCheckpoint(step.mode)
        parallelize(model, mesh, torch.bfloat16, True, checkpointing, Compile())
        like_cuda(monkeypatch, live)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], foreach=True
            )
            inputs = torch.zeros(1, step.seq_len, dtype=torch.long, device="cpu")
            ranges = Causal().rows(step.seq_len, torch.device("cpu"))
            with live:
                for parameter in model.parameters():
                    live.add(parameter.data)
                # Optimizer states come with the first step.
                for _ in range(2):
                    live.take_peak()
                    total = model(inputs, inputs, ranges, inputs, step.loss_chunk_tokens)
                    forward = live.take_peak()
                    total.backward()
                    backward = live.take_peak()
                    optimizer.step()
                    of_optimizer = live.take_peak()
                    optimizer.zero_grad()
    return forward, backward, of_optimizer
