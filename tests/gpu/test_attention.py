"""On CUDA: bf16 attention against fp64, one GPU and several (NCCL), and a short training run. `make test-gpu`."""

import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.distributed import torchrun
from tests.reference import (
    attention_bytes,
    dense_attention,
    gradients,
    relative_error,
    structured_qkv,
)
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal, Documents
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.training.build_model import checkpoint_contexts

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SEQ_LEN = 2048
PATTERNS = [Dense(), VerticalSlash(recall=0.8, sinks=4, max_verticals=100, dense_below=256)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def inputs(seq_len: int = SEQ_LEN, device: str = "cuda", seed: int = 0) -> list[torch.Tensor]:
    q, k, v = structured_qkv(1, 8, 2, seq_len, 64, seed, torch.bfloat16)
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 1)).bfloat16()
    return [x.to(device) for x in (q, k, v, d_out)]


def errors(cp, mask, pattern, q, k, v, d_out, backend="auto") -> list[float]:
    """Relative Frobenius errors of out, dq, dk, dv in bf16 against fp64 over the pairs that were chosen."""
    ranges = cp.balance(mask.rows(q.shape[2], q.device))
    local = [cp.shard(x, 2, ranges.table) for x in (q, k, v)]
    _, aux = attend(*local, ranges, pattern, cp, backend, return_aux=True)
    seen = aux.index.dense(mask)
    wanted, wanted_grads = gradients(
        lambda *x: dense_attention(*x, seen)[0], d_out.double(), *(x.double() for x in (q, k, v))
    )
    got, grads = gradients(
        lambda *x: attend(*x, ranges, pattern, cp, backend),
        cp.shard(d_out, 2, ranges.table),
        *local,
    )
    return [
        relative_error(cp.unshard(x, 2, ranges.table), want)
        for x, want in zip((got, *grads), (wanted, *wanted_grads))
    ]


def flash_errors(mask, q, k, v, d_out) -> list[float]:
    """The same errors of torch's dense flash attention in bf16, with the mask's documents as separate calls."""
    seq_len = q.shape[2]
    lengths = mask.lengths[0] if isinstance(mask, Documents) else [seq_len]

    def flash(*qkv):
        pieces = zip(*(x.split([*lengths, seq_len - sum(lengths)], dim=2) for x in qkv))
        return torch.cat(
            [_sdpa(*piece) if n < len(lengths) else piece[0] * 0 for n, piece in enumerate(pieces)],
            dim=2,
        )

    seen = mask.dense(seq_len, q.device)[:, None].expand(1, 8, -1, -1)
    wanted, wanted_grads = gradients(
        lambda *x: dense_attention(*x, seen)[0], d_out.double(), *(x.double() for x in (q, k, v))
    )
    got, grads = gradients(flash, d_out, q, k, v)
    return [relative_error(x, want) for x, want in zip((got, *grads), (wanted, *wanted_grads))]


def _sdpa(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


@needs_gpu
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "mask", [Causal(), Documents([[700, 9, 1000, 301]])], ids=["causal", "documents"]
)
def test_bf16_on_one_gpu(mask, pattern):
    bounds = [2 * error for error in flash_errors(mask, *inputs())]
    got = errors(ContextParallel(None, "contiguous", "local"), mask, pattern, *inputs())
    assert all(error <= bound for error, bound in zip(got, bounds)), (got, bounds)


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["triton", "flex"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_recomputed_attention(pattern, backend, compiled):
    """Recompute the first part of a sequence: out, gradients and memory.

    Plain causal, so flex takes its fastest path.
    """
    q, k, v = (
        x.cuda().requires_grad_() for x in structured_qkv(1, 16, 2, 8192, 128, dtype=torch.bfloat16)
    )
    results, kept, ranges = (
        [],
        [],
        Causal().rows(8192, "cuda"),
    )  # as in training: once for all calls, and its tables with it
    for share in (0.0, 0.5):

        def block(q, k, v, share=share):
            # Another tensor than the one that is kept, so that the caller's hold on it counts the same.
            return 2 * attend(q * 1.5, k, v, ranges, pattern, backend=backend, recomputed=share)

        torch._dynamo.reset()  # its guards don't look at a function's defaults, which hold the share
        function = functools.partial(
            checkpoint, block, use_reentrant=False, context_fn=checkpoint_contexts
        )
        function = torch.compile(function, fullgraph=True) if compiled else function
        torch.autograd.grad(
            function(q, k, v).float().square().sum(), (q, k, v)
        )  # compiles, and remembers for the mask
        gc.collect()  # now, and not while this measures
        before = torch.cuda.memory_allocated()
        out = function(q, k, v)
        kept.append(torch.cuda.memory_allocated() - before)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
        del out
    promised = attention_bytes(
        dataclasses.replace(FLAVOURS["debug"], heads=16, kv_heads=2, head_dim=128),
        4096,
        torch.bfloat16,
    )
    assert 0.99 * promised < kept[0] - kept[1] < 1.01 * promised
    errors = [relative_error(a, b) for a, b in zip(*results)]
    assert errors[0] < 1e-3 and max(errors) < 3e-3, errors


@needs_two
def test_bf16_over_nccl(tmp_path):
    """Every schedule over all GPUs: errors as on one GPU."""
    result = subprocess.run(
        torchrun(torch.cuda.device_count(), "-m", "tests.gpu.test_attention", tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    by_case = json.loads((tmp_path / "errors.json").read_text())
    bounds = [2 * error for error in flash_errors(Documents([[700, 9, 1000, 301]]), *inputs())]
    assert len(by_case) == 12
    for case, got in by_case.items():
        assert all(error <= bound for error, bound in zip(got, bounds)), (case, got, bounds)


@needs_gpu
def test_training_run(tmp_path):
    """The demo on all GPUs, compiled, in bf16."""
    gpus = torch.cuda.device_count()
    gpus = gpus if gpus & (gpus - 1) == 0 else 1
    words = ["train.py", "--config", "train_configs/demo_gpu.toml", "--checkpoint.enable"]
    words += ["--parallelism.cp", gpus]
    words += ["--training.steps", 20]
    words += ["--training.seq_len", 8192]
    words += ["--metrics.recall_every", 10]
    words += ["--training.output_dir", tmp_path]
    result = subprocess.run(
        torchrun(gpus, *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] and 0 < lines[-1]["mfu"] < 1
    assert (tmp_path / "checkpoint/step-20/.metadata").is_file()


def _main(folder: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("cp_inter", "cp_intra"))
    by_case = {}
    for layout, schedule in (
        ("striped", "all_gather"),
        ("striped", "ring"),
        ("striped", "double_ring"),
        ("striped", "group_cast"),
        ("balanced", "ring"),
        ("balanced", "group_cast"),
    ):
        cp = ContextParallel(mesh, layout, schedule)
        for pattern in PATTERNS:
            by_case[f"{layout} {schedule} {pattern.name}"] = errors(
                cp, Documents([[700, 9, 1000, 301]]), pattern, *inputs()
            )
    if dist.get_rank() == 0:
        (Path(folder) / "errors.json").write_text(json.dumps(by_case))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])
