"""The cudnn backend on a GPU: out, lse and every gradient in bf16 against fp64.

The bound of out and gradients is twice the error of torch's dense flash attention on the same
tensors, and 5e-3. Here are the pieces that it computes; attend() as a whole, with layouts, lengths
and heads; what surrounds it (torch.compile, sinks, torch's own calls); and two GPUs.

Two GPUs: torchrun --nproc-per-node 2 -m tests.gpu.test_cudnn FOLDER runs what the last test starts.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.distributed import torchrun
from tests.reference import attention_with_sinks, dense_attention, gradients, relative_error
from titan_sparse.attention import ContextParallel, attend, backends
from titan_sparse.attention.backends import BACKENDS, flash
from titan_sparse.attention.backends.base import DenseShape, Queries
from titan_sparse.attention.backends.cudnn import missing
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import VerticalSlash

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
cudnn = BACKENDS["cudnn"]
_REASON = missing()
needs_cudnn = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
HEAD_DIMS = [64, 96, 128, 256]
HEADS = [(4, 4), (6, 2), (15, 5), (7, 1)]
NAMES = ("out", "dq", "dk", "dv")
LIMIT = 5e-3
LSE_LIMIT = 1e-3


def problem(
    q_len: int, k_len: int, heads: tuple[int, int], dim: int, batch: int = 1
) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(q_len + dim)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, dim, generator=g).cuda().bfloat16()

    qkv = [normal(heads[0], q_len), normal(heads[1], k_len), normal(heads[1], k_len)]
    return qkv, normal(heads[0], q_len)


def seen_pairs(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """bool [B, Hq, Sq, Sk]; the queries of a causal shape are the last ones."""
    seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool, device=q.device)
    return seen.tril(k.shape[2] - q.shape[2]) if causal else seen


def exact(qkv: list[Tensor], d_out: Tensor, seen: Tensor) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and lse in fp64 over the pairs `seen`."""
    inputs = [x.double() for x in qkv]
    out, grads = gradients(lambda *x: dense_attention(*x, seen)[0], d_out.double(), *inputs)
    return [out, *grads], dense_attention(*inputs, seen)[1]


def flash_errors(qkv: list[Tensor], d_out: Tensor) -> list[float]:
    """Those of torch's flash attention, causal over as many keys as queries."""
    length = min(x.shape[2] for x in qkv)
    qkv = [x[:, :, :length].contiguous() for x in qkv]
    d_out = d_out[:, :, :length].contiguous()
    want, _ = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        run = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        out, grads = gradients(run, d_out, *qkv)
    return [relative_error(a, b) for a, b in zip([out, *grads], want, strict=True)]


def check(label: str, got: list[Tensor], want: list[Tensor], bounds: list[float]) -> None:
    """Prints every error, and fails with all of those that are too large."""
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    lines = []
    for name, error, bound in zip(NAMES, errors, bounds, strict=True):
        allowed = min(LIMIT, 2 * bound)
        verdict = "" if error <= allowed else "   TOO LARGE"
        lines.append(f"{label} {name}: {error:.2e} of {allowed:.2e}{verdict}")
    print("\n".join(lines))
    assert "TOO LARGE" not in "".join(lines), "\n" + "\n".join(lines)


def check_lse(label: str, lse: Tensor, want: Tensor) -> None:
    assert lse.shape == want.shape and lse.dtype == torch.float32, (label, lse.shape, lse.dtype)
    gap = (lse.double() - want).abs().max().item()
    print(f"{label} lse: {gap:.2e}")
    assert gap < LSE_LIMIT, (label, gap)


def of_piece(qkv: list[Tensor], d_out: Tensor, shape: DenseShape) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and lse by the backend's own functions."""
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    out, lse = cudnn.dense_forward(q, k, v, shape, scale)
    grads = cudnn.dense_backward(Queries(q, d_out, out, lse), k, v, shape, scale)
    return [out, *grads], lse


def of_attend(
    qkv: list[Tensor], d_out: Tensor, mask: Mask = Causal(), **options
) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and lse of attend()."""
    run = functools.partial(attend, mask=mask, backend="cudnn", **options)
    out, grads = gradients(run, d_out, *qkv)
    return [out, *grads], run(*qkv, return_aux=True)[1].lse


@needs_cudnn
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_it_is_chosen(dim):
    """auto chooses it wherever FlashAttention-4 does not come first. Where it is not chosen, the
    reason is given.
    """
    banner = backends.explain("auto", "cuda", torch.bfloat16, dim, 128)
    print(banner)
    chosen = backends.choose("auto", "cuda", torch.bfloat16, dim, 128)
    assert chosen == ("flex" if flash.serves(torch.bfloat16, dim) else "cudnn"), banner
    assert backends.choose("cudnn", "cuda", torch.bfloat16, dim, 128) == "cudnn"
    sparse = backends.choose("auto", "cuda", torch.bfloat16, dim, 128, dynamic=True)
    assert sparse in ("flex", "triton")
    assert backends.choose("auto", "cuda", torch.float32, dim, 128) == "triton"


PIECES = {
    # name: (queries, keys, causal)
    "square": (1024, 1024, True),
    "ragged square": (1001, 1001, True),
    "short square": (77, 77, True),
    "more keys": (640, 1664, False),
    "more queries": (1664, 640, False),
    "ragged rectangle": (333, 1001, False),
    "few keys": (1024, 64, False),
    "the last queries": (300, 1001, True),
}


@needs_cudnn
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", PIECES)
def test_pieces(name, dim):
    q_len, k_len, causal = PIECES[name]
    qkv, d_out = problem(q_len, k_len, (6, 2), dim, batch=2)
    got, lse = of_piece(qkv, d_out, DenseShape(causal=causal, is_whole=True))
    want, want_lse = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], causal))
    check_lse(name, lse, want_lse)
    check(f"{name} {dim}", got, want, flash_errors(qkv, d_out))


@needs_cudnn
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_attend(dim, heads):
    """The length is not a multiple of the block size. There are two sequences."""
    qkv, d_out = problem(2001, 2001, heads, dim, batch=2)
    got, lse = of_attend(qkv, d_out)
    want, want_lse = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    check_lse("attend", lse, want_lse)
    check(f"attend {dim} {heads}", got, want, flash_errors(qkv, d_out))


@needs_cudnn
@pytest.mark.parametrize("length", [1, 77, 128, 1000])
@pytest.mark.parametrize("dim", [64, 256])
def test_lengths(length, dim):
    qkv, d_out = problem(length, length, (4, 2), dim)
    got, lse = of_attend(qkv, d_out)
    want, want_lse = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    check_lse(f"length {length}", lse, want_lse)
    if length == 1:
        # Rounded, the only key's gradient is not quite 0, so errors have nothing to compare with.
        assert torch.equal(got[0], qkv[2].repeat_interleave(2, 1))
        assert relative_error(got[3], want[3]) < LIMIT
        assert max(got[1].abs().max(), got[2].abs().max()) < 0.1
        return
    check(f"length {length} {dim}", got, want, flash_errors(qkv, d_out))


@needs_cudnn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [16, 48, 80, 112, 128])
def test_other_head_dims(dim, dtype):
    qkv, d_out = problem(1024, 1024, (6, 2), dim)
    qkv = [x.to(dtype) for x in qkv]
    d_out = d_out.to(dtype)
    got, lse = of_attend(qkv, d_out)
    want, want_lse = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    check_lse("head_dim", lse, want_lse)
    check(f"head_dim {dim} {dtype}", got, want, flash_errors(qkv, d_out))


@needs_cudnn
@pytest.mark.parametrize("dim", [128, 256])
def test_pieces_of_a_ring_add_up(dim):
    """Two chunks: a square of each, and the later queries on the earlier keys, by global lse."""
    qkv, d_out = problem(2048, 2048, (6, 2), dim, batch=2)
    q, k, v = qkv
    scale = dim**-0.5
    square = DenseShape(causal=True, is_whole=False)
    full = DenseShape(causal=False, is_whole=False)
    early, late = slice(0, 1024), slice(1024, 2048)
    whole = DenseShape(causal=True, is_whole=True)
    first = cudnn.dense_forward(q[:, :, early], k[:, :, early], v[:, :, early], square, scale)
    # The queries of the second chunk are the last ones of all keys: a rectangle, merged.
    second = cudnn.dense_forward(q[:, :, late], k, v, whole, scale)
    out = torch.cat([first.out, second.out], dim=2)
    lse = torch.cat([first.lse, second.lse], dim=2)
    want, want_lse = exact(qkv, d_out, seen_pairs(q, k, True))
    check_lse("ring", lse, want_lse)

    def share(queries: slice, keys: slice, shape: DenseShape) -> tuple[Tensor, ...]:
        inputs = Queries(*(x[:, :, queries] for x in (q, d_out, out, lse)))
        return cudnn.dense_backward(inputs, k[:, :, keys], v[:, :, keys], shape, scale)

    own = share(early, early, square)
    across = share(late, early, full)
    last = share(late, late, square)
    dq = torch.cat([own[0], across[0] + last[0]], dim=2)
    dk = torch.cat([own[1] + across[1], last[1]], dim=2)
    dv = torch.cat([own[2] + across[2], last[2]], dim=2)
    check(f"ring {dim}", [out, dq, dk, dv], want, flash_errors(qkv, d_out))


@needs_cudnn
@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_rows_that_see_nothing(nothing):
    """No NaN and no gradient from rows whose lse is infinite, though their d_out is not 0."""
    (q, k, v), d_out = problem(512, 512, (4, 2), 128)
    shape = DenseShape(causal=True, is_whole=True)
    scale = 128**-0.5
    out, lse = cudnn.dense_forward(q, k, v, shape, scale)
    lse[:, :, 400:] = nothing
    got = cudnn.dense_backward(Queries(q, d_out, out, lse), k, v, shape, scale)
    seen = seen_pairs(q, k, True)
    seen[:, :, 400:] = False
    seen[:, :, 400:, 0] = True  # something to see, of which d_out = 0 makes nothing
    d_out = d_out.index_fill(2, torch.arange(400, 512, device="cuda"), 0)
    want, _ = exact([q, k, v], d_out, seen)
    for name, a, b in zip(NAMES[1:], got, want[1:], strict=True):
        assert a.isfinite().all(), name
        assert relative_error(a, b) < LIMIT, (name, relative_error(a, b))
    assert (got[0][:, :, 400:] == 0).all()


@needs_cudnn
def test_padding():
    """The padding of attend() comes out as 0 and -inf."""
    qkv, d_out = problem(1000, 1000, (4, 2), 128, batch=2)
    got, lse = of_attend(qkv, d_out, Causal(valid=(1000, 600)))
    assert (got[0][1, :, 600:] == 0).all() and (lse[1, :, 600:] == -torch.inf).all()
    for gradient in got[1:]:
        assert (gradient[1, :, 600:] == 0).all() and gradient.isfinite().all()
    short = [x[1:, :, :600] for x in qkv]
    want, _ = exact(short, d_out[1:, :, :600], seen_pairs(short[0], short[1], True))
    cut = [x[1:, :, :600] for x in got]
    check("padding", cut, want, flash_errors(short, d_out[1:, :, :600]))


@needs_cudnn
@pytest.mark.parametrize(
    "mask", [Documents([700, 3, 901]), Causal() & SlidingWindow(300)], ids=["documents", "window"]
)
def test_other_masks_are_tritons(mask):
    """To the bit."""
    qkv, d_out = problem(1604, 1604, (4, 2), 128)
    got, lse = of_attend(qkv, d_out, mask)
    run = functools.partial(attend, mask=mask, backend="triton")
    out, grads = gradients(run, d_out, *qkv)
    for a, b in zip([*got, lse], [out, *grads, run(*qkv, return_aux=True)[1].lse], strict=True):
        assert torch.equal(a, b)


@needs_cudnn
@pytest.mark.parametrize("which", ["q", "k and v", "all"])
def test_layouts(which):
    """q, k and v with [B, S, H, D] in memory, as projections give them."""
    qkv, d_out = problem(1024, 1024, (6, 2), 128, batch=2)
    want, _ = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    bounds = flash_errors(qkv, d_out)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    if which == "q":
        by_token[1:] = qkv[1:]
    elif which == "k and v":
        by_token[0] = qkv[0]
    got, _ = of_piece(by_token, d_out, DenseShape(causal=True, is_whole=True))
    check(which, got, want, bounds)


@needs_cudnn
@pytest.mark.parametrize("batch", [1, 2])
def test_after_torchs_own_calls(batch):
    """torch caches plans by the layout of q, k and v: here it has one for another layout of d_out."""
    qkv, d_out = problem(1152, 1152, (6, 2), 128, batch)
    want, _ = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    by_token = d_out.transpose(1, 2).contiguous().transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        run = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        gradients(run, by_token, *qkv)
    got, _ = of_attend(qkv, d_out)
    check("after torch", got, want, flash_errors(qkv, d_out))


@needs_cudnn
def test_sinks():
    qkv, d_out = problem(1024, 1024, (8, 2), 64)
    sinks = torch.linspace(-3, 9, 8, device="cuda")
    seen = seen_pairs(qkv[0], qkv[1], True)
    inputs = [x.double() for x in (*qkv, sinks)]
    want, wanted = gradients(lambda *x: attention_with_sinks(*x, seen)[0], d_out.double(), *inputs)
    run = functools.partial(attend, backend="cudnn")
    got, grads = gradients(lambda q, k, v, s: run(q, k, v, sinks=s), d_out, *qkv, sinks)
    check("sinks", [got, *grads[:3]], [want, *wanted[:3]], flash_errors(qkv, d_out))
    assert relative_error(grads[3], wanted[3]) < LIMIT


@needs_cudnn
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_compiled(share):
    """With a part of the sequence computed again: its later queries meet a rectangle and a square."""
    qkv, d_out = problem(2048, 2048, (8, 2), 128)
    run = functools.partial(attend, backend="cudnn", recomputed=share)
    torch._dynamo.reset()
    got, grads = gradients(torch.compile(run, fullgraph=True), d_out, *qkv)
    want, _ = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    check(f"compiled {share}", [got, *grads], want, flash_errors(qkv, d_out))


@needs_cudnn
def test_refused_by_name():
    q = torch.zeros(1, 2, 256, 192, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="and 256, not 192"):
        attend(q, q, q, backend="cudnn")
    with pytest.raises(ValueError, match="this pattern is sparse"):
        attend(q, q, q, pattern=VerticalSlash(recall=0.9), backend="cudnn")
    with pytest.raises(ValueError, match="not torch.float32"):
        attend(q.float(), q.float(), q.float(), backend="cudnn")
    assert attend(q, q, q).isfinite().all()  # auto


WAYS = [
    ("zigzag", "ring"),
    ("contiguous", "ring"),
    ("zigzag", "double_ring"),
    ("zigzag", "all_gather"),
    ("striped", "ring"),
]


@needs_cudnn
@needs_two
def test_over_nccl(tmp_path):
    """Every schedule over two GPUs: errors as on one GPU."""
    result = subprocess.run(
        torchrun(2, "-m", "tests.gpu.test_cudnn", tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    by_case = json.loads((tmp_path / "errors.json").read_text())
    print(json.dumps(by_case, indent=1))
    qkv, d_out = problem(4096, 4096, (8, 2), 128)
    bounds = [min(LIMIT, 2 * error) for error in flash_errors(qkv, d_out)]
    assert len(by_case) == len(WAYS)
    for case, found in by_case.items():
        too_large = [name for name, e, b in zip(NAMES, found, bounds, strict=True) if e > b]
        assert not too_large, (case, too_large, found, bounds)


def _main(folder: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = dist.get_world_size()
    qkv, d_out = problem(4096, 4096, (8, 2), 128)
    want, _ = exact(qkv, d_out, seen_pairs(qkv[0], qkv[1], True))
    by_case = {}
    for layout, schedule in WAYS:
        axes = (world, 1) if schedule == "double_ring" else (1, world)
        mesh = init_device_mesh("cuda", axes, mesh_dim_names=("cp_inter", "cp_intra"))
        cp = ContextParallel(mesh, layout, schedule)
        local = [cp.shard(x, 2) for x in qkv]
        run = functools.partial(attend, backend="cudnn", cp=cp)
        out, grads = gradients(run, cp.shard(d_out, 2), *local)
        whole = [cp.unshard(x, 2) for x in (out, *grads)]
        errors = [relative_error(a, b) for a, b in zip(whole, want, strict=True)]
        by_case[f"{layout} {schedule}"] = errors
    if dist.get_rank() == 0:
        (Path(folder) / "errors.json").write_text(json.dumps(by_case))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])
