"""attend(recomputed=...): same out, gradients and statistics with less memory, and only the first
part runs twice.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.attention.problems import PATTERNS
from tests.fake_step import fake_world
from tests.reference import attention_bytes, structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.call import AttentionCall
from titan_sparse.attention.context_parallel import loop
from titan_sparse.attention.masks.ranges import Causal, Documents, SlidingWindow
from titan_sparse.attention.masks.slices import Slices, sliding_window
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash.pattern import VerticalSlashIndex
from titan_sparse.models.flavours import FLAVOURS
from titan_sparse.training.model import checkpoint_contexts

BLOCK, SEQ_LEN = 16, 157
SHARES = (0.25, 0.5, 1.0)
MASKS = {
    "causal": Causal(),
    "documents": Documents([[45, 3, 90, 17], [157]]),
    "window": Causal() & SlidingWindow(45),
}
SLICES = Slices.batch(
    [sliding_window([45, 3, 90, 17], 20, sinks=5), sliding_window([157], 45, sinks=9)]
)
"""A causal mask of slices, for pattern dense."""
SELECTIVE = functools.partial(checkpoint, use_reentrant=False, context_fn=checkpoint_contexts)
CHECKPOINTS = {
    "none": lambda function, *inputs: function(*inputs),
    "selective": SELECTIVE,
    "plain": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _block(
    mask, pattern, recomputed: float, cp: ContextParallel | None = None, backend: str = "auto"
) -> Callable:
    """Attention between two functions that activation checkpointing recomputes."""

    def block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        out = attend(
            q.sin(),
            k.sin(),
            v.sin(),
            mask,
            pattern,
            cp,
            backend,
            block_size=BLOCK,
            recomputed=recomputed,
            sinks=None if sinks is None else sinks.sin(),
        )
        return out.sin()

    return block


def _problem(seed: int = 0, seq_len: int = SEQ_LEN) -> list[Tensor]:
    return [x.requires_grad_() for x in structured_qkv(2, 4, 2, seq_len, 8, seed)]


def _step(function: Callable, leaves: list[Tensor]) -> list[Tensor]:
    out = function(*leaves)
    return [out.detach(), *_gradients(out, leaves)]


def _gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """By backward(), the only way that reentrant checkpointing knows."""
    for x in leaves:
        x.grad = None
    out.square().sum().backward()
    return [x.grad for x in leaves]


def _assert_equal(got: list[Tensor], want: list[Tensor], note: object = None) -> None:
    """Of out, dq, dk, dv, and dsinks."""
    options = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got, want, **options, msg=lambda text: f"{note}: {text}")


@pytest.mark.parametrize(
    "how, compiled", [*((how, False) for how in CHECKPOINTS), ("selective", True)]
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_keeping_everything(pattern, how, compiled):
    """And learned sinks, where the mask is of documents."""
    leaves, every = _problem(), how == "selective" and not compiled
    sinks = torch.linspace(-6, 12, 4, dtype=torch.float64).requires_grad_()
    masks = [
        *(MASKS.values() if every else [MASKS["documents"]]),
        *([SLICES] if pattern == "dense" else []),
    ]
    shares = itertools.cycle(SHARES)
    for mask, share in zip(masks, shares) if every else itertools.product(masks, (0.5, 1.0)):
        ranges = mask.rows(SEQ_LEN)
        inputs = [*leaves, sinks] if mask is MASKS["documents"] else leaves
        want = _step(_block(ranges, PATTERNS[pattern], 0.0), inputs)
        function = functools.partial(CHECKPOINTS[how], _block(ranges, PATTERNS[pattern], share))
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        _assert_equal(_step(function, inputs), want, (mask, share))


def test_forwards_and_backwards_in_any_order():
    """Only autograd's context holds state: two forwards, an evaluation between them, the
    first backward last."""
    pattern, problems = PATTERNS["vertical_slash"], [_problem(seed) for seed in (1, 2)]
    ranges = [MASKS[name].rows(SEQ_LEN) for name in ("causal", "documents")]
    wanted = [_step(_block(*of, pattern, 0.0), x) for *of, x in zip(ranges, problems)]
    outs = []
    for mask, leaves, want in zip(ranges, problems, wanted):
        block = _block(mask, pattern, 0.5)
        outs.append(SELECTIVE(block, *leaves))
        with torch.no_grad():
            assert torch.equal(block(*leaves), want[0])
    for out, leaves, want in reversed(list(zip(outs, problems, wanted))):
        _assert_equal([out.detach(), *_gradients(out, leaves)], want)


@pytest.mark.parametrize(
    "pattern, mask",
    [
        ("vertical_slash", Documents([45, 11])),
        ("dense", sliding_window([45, 11], 20, sinks=5)),
    ],
)
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreted; tests/gpu/test_attend.py does it on a GPU"
)
def test_triton_and_its_tables(monkeypatch, pattern, mask):
    """The kernels and, where there are slashes, the kernels' tables serve
    fewer queries than keys."""
    monkeypatch.setattr(
        AttentionCall,
        "_has_table_kernels",
        lambda call: isinstance(call.index, VerticalSlashIndex),
    )
    # Whole blocks: what is remembered for a mask must not be that of another part.
    ranges = mask.rows(64)
    leaves = [x.requires_grad_() for x in structured_qkv(1, 2, 1, 64, 16, dtype=torch.float32)]
    want = _step(_block(ranges, PATTERNS[pattern], 0.0, backend="eager"), leaves)
    got = _step(
        functools.partial(SELECTIVE, _block(ranges, PATTERNS[pattern], 0.4, backend="triton")),
        leaves,
    )
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int] | str]:
    """Record query and key blocks of each attention forward that ran, and the selections."""
    seen = []

    def counting(call, q, k, v, forward=loop.forward):
        seen.append((q.shape[2] // BLOCK, k.shape[2] // BLOCK))
        return forward(call, q, k, v)

    def selecting(*args, select=VerticalSlash.select_tensors):
        seen.append("select")
        return select(*args)

    monkeypatch.setattr(loop, "forward", counting)
    monkeypatch.setattr(VerticalSlash, "select_tensors", selecting)
    return seen


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "share, parts, again",
    [
        (0.0, [(10, 10)], []),
        (0.3, [(7, 10), (3, 3)], [(3, 3)]),
        (1.0, [(10, 10)], [(10, 10)]),
    ],
)
def test_only_the_first_part_runs_twice(calls, compiled, share, parts, again):
    """And what checkpointing saves runs once, in each of two steps."""
    ranges, leaves = MASKS["documents"].rows(SEQ_LEN), _problem()
    for pattern, selections in (("vertical_slash", ["select"]), ("dense", [])):
        function = functools.partial(SELECTIVE, _block(ranges, PATTERNS[pattern], share))
        if compiled:
            torch._dynamo.reset()  # its guards don't look at a function's defaults
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            calls.clear()
            out = function(*leaves)
            assert calls == [*selections, *parts]
            out.sum().backward()
            assert calls == [*selections, *parts, *again]


def _kept_by_hooks(function: Callable, leaves: list[Tensor]) -> int:
    """Bytes of what a compiled forward saves in addition to its inputs."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.update({x.data_ptr(): x.nbytes}) or x, lambda x: x
    ):
        out = function(*leaves)
    for x in (*leaves, out):
        saved.pop(x.data_ptr(), None)
    return sum(saved.values())


def test_what_is_kept_shrinks_as_promised():
    """It shrinks by out and lse of the rows before the boundary, and at 1 also by
    the gathered verticals."""
    if torch.__version__ < "2.12":
        pytest.skip(
            "with aot_eager torch 2.11 saves other tensors too; "
            "tests/gpu/test_attend.py measures the memory itself, on 2.11 as well"
        )
    pattern = PATTERNS["vertical_slash"]
    ranges, leaves, kept = Documents([100, 60]).rows(160), _problem(seq_len=160), {}
    for share in (0.0, 0.3, 1.0):
        function = functools.partial(SELECTIVE, _block(ranges, pattern, share))
        torch._dynamo.reset()  # its guards don't look at a function's defaults
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
        function(*leaves)  # what is remembered for the mask is not kept for the backward
        kept[share] = _kept_by_hooks(function, leaves)
    whole = attention_bytes(
        dataclasses.replace(FLAVOURS["debug"], heads=4, kv_heads=2, head_dim=8),
        2 * 160,
        torch.float64,
    )
    assert whole == 2 * 4 * 160 * (8 + 1) * 8  # out and lse of both sequences
    assert kept[0.0] - kept[0.3] == 0.3 * whole
    verticals = pattern.vertical_capacity(160, BLOCK, packed=True)
    assert kept[0.0] - kept[1.0] == whole + 2 * 2 * 4 * verticals * 8 * 8


@pytest.mark.parametrize(
    "how, share",
    [("selective", 0.25), ("plain", 0.0), ("reentrant", 0.5)],
)
def test_a_layer_is_counted_once(how, share):
    leaves = _problem(seq_len=160)
    ranges = MASKS["documents"].rows(160)
    pattern = PATTERNS["vertical_slash"]
    with recording(recall_rows=SEQ_LEN) as want:
        for factor in (1, 2):
            _block(ranges, pattern, 0.0)(leaves[0] * factor, *leaves[1:])
    ranges = MASKS["documents"].rows(160)  # nothing is remembered for it
    with recording(recall_rows=SEQ_LEN) as got:
        for factor in (1, 2):
            CHECKPOINTS[how](
                _block(ranges, pattern, share), leaves[0] * factor, *leaves[1:]
            ).sum().backward()
    assert torch.equal(got.density(), want.density()) and len(got.recall) == len(got.capped) == 2
    assert torch.equal(torch.stack(got.recall), torch.stack(want.recall))


def test_layouts_refused():
    q = torch.zeros(1, 1, 4 * BLOCK, 8)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        cp = ContextParallel(mesh, "zigzag", "ring", BLOCK)
        with pytest.raises(ValueError, match='recomputed=0.5 needs layout "striped"'):
            attend(q, q, q, cp=cp, recomputed=0.5)
        attend(q, q, q, cp=cp, recomputed=1.0)
