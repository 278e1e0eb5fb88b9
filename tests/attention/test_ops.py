"""attend() inside torch.compile. test_recomputed.py has it under activation checkpointing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.problems import PATTERNS, op_arguments
from tests.fake_step import fake_world
from tests.reference import by_token, structured_qkv
from tests.slice_cases import cut_square, random_legal
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.masks.ranges import Causal, Documents, MaskRanges, SlidingWindow
from titan_sparse.attention.masks.slices import Dilated, Slices, prefix_lm
from titan_sparse.attention.patterns import MoBA, Pattern, VerticalSlash, XAttention

BLOCK, SEQ_LEN, WIDTH = 16, 128, 32
ONE_RANK = ContextParallel(None, "contiguous", "local", BLOCK)
LENGTHS = [[128], [50, 50, 20], [7, 90, 31]]
DOCUMENTS = [Documents(lengths) for lengths in LENGTHS]
SLICES = [
    Slices.of(written)
    for written in (
        random_legal(3, 3, SEQ_LEN),
        cut_square(SEQ_LEN),
        random_legal(5, 5, SEQ_LEN),
    )
]


class Layer(nn.Module):
    """Attention with its projections: 4 query heads, 2 KV heads."""

    def __init__(self, pattern: Pattern):
        super().__init__()
        torch.manual_seed(0)
        self.pattern = pattern
        self.q, self.kv, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, ranges: MaskRanges) -> Tensor:
        """x [B, S, WIDTH] -> [B, S, WIDTH]"""
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, dim=1)
        out = attend(q, k, v, ranges, self.pattern, cp=ONE_RANK, block_size=BLOCK)
        return x + self.out(out.transpose(1, 2).flatten(2))


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _input(seed: int) -> Tensor:
    return torch.randn(2, SEQ_LEN, WIDTH, generator=torch.Generator().manual_seed(seed))


def _step(layer: nn.Module, function: Callable, x: Tensor, ranges: MaskRanges) -> list[Tensor]:
    """Output, gradient of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out = function(x, ranges)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize(
    "pattern, masks", [*((pattern, DOCUMENTS) for pattern in PATTERNS), ("dense", SLICES)]
)
def test_compiled_once_equal_to_eager_for_all_masks(pattern, masks):
    """Of documents, or of any number of slices."""
    layer = Layer(PATTERNS[pattern])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed, mask in enumerate(masks):
        ranges = mask.rows(SEQ_LEN)
        want = _step(layer, layer, _input(seed), ranges)
        got = _step(layer, compiled, _input(seed), ranges)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1, "compiled again for another mask"


@pytest.mark.parametrize(
    "kind, options",
    [(VerticalSlash, {"dense_below": 32}), (XAttention, {"stride": 4}), (MoBA, {"chunk_size": 16})],
)
def test_a_pattern_made_inside_of_a_compiled_function(kind, options):
    """Tracing does not run what makes it. Its index comes out as well. Numbers that change from
    call to call are constants of a graph, as is a scale."""
    q, k, v = structured_qkv(1, 4, 2, SEQ_LEN, 8)

    def selecting(share: float, cap: int, scale: float) -> list[Tensor]:
        # These options were never used before.
        more = {"top_k": cap} if kind is MoBA else {"threshold": share}
        more = {"recall": share, "max_verticals": 9 * cap} if kind is VerticalSlash else more
        pattern = kind(**options, **more)
        more = {"block_size": BLOCK, "return_aux": True, "scale": scale}
        out, aux = attend(q, k, v, DOCUMENTS[1], pattern, **more)
        return [out, aux.lse, *aux.index.tensors()]

    compiled = torch.compile(selecting, fullgraph=True, backend="aot_eager")
    for numbers in ((0.6543, 3, 0.2), (0.5432, 2, 1), (0.4321, 1, 2)):
        torch.testing.assert_close(compiled(*numbers), selecting(*numbers), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_options_that_change_from_call_to_call(pattern):
    """They are constants of a graph, of which there is one for each."""
    qkv = structured_qkv(1, 4, 2, SEQ_LEN, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for size, scale, recomputed in ((16, 0.2, 0.0), (24, 1, 0.5), (8, 2, 1), (8, 0.3, 0.25)):
        options = {"block_size": size, "scale": scale, "recomputed": recomputed}
        found = compiled(*qkv, Causal(), PATTERNS[pattern], **options)
        wanted = attend(*qkv, Causal(), PATTERNS[pattern], **options)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "make",
    [lambda: DOCUMENTS[1] & Dilated(32, 2), lambda: prefix_lm(LENGTHS[1], [9, 0, 20]) & Causal()],
    ids=["intersected", "made inside"],
)
def test_what_cannot_be_traced_is_refused(make):
    """With what to write instead. Where the graph may break, it does."""
    qkv = structured_qkv(1, 4, 2, SEQ_LEN, 8)

    def attended(*qkv: Tensor) -> Tensor:
        return attend(*qkv, make(), block_size=BLOCK)

    with pytest.raises(Unsupported, match="torch.compile cannot trace .* outside of the compiled"):
        torch.compile(attended, fullgraph=True, backend="eager")(*qkv)
    wanted = attended(*qkv)
    assert torch.equal(torch.compile(attended, backend="eager")(*qkv), wanted)
    rows = make().rows(SEQ_LEN)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*qkv, rows, block_size=BLOCK), wanted)


@pytest.mark.parametrize("schedule", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_ranks_compile_with_dynamic_shapes(schedule, pattern):
    """Sizes of a ContextParallel are constants of the graph, in which only ops
    communicate and count."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        cp = ContextParallel(mesh, "zigzag", schedule, BLOCK)

        def attended(*qkv: Tensor) -> tuple[Tensor, list[Tensor]]:
            out, aux = attend(*qkv, DOCUMENTS[1], PATTERNS[pattern], cp, return_aux=True)
            return out, [aux.lse, *aux.index.tensors()]

        compiled = torch.compile(attended, fullgraph=True, dynamic=True, backend="aot_eager")
        local = [cp.shard(x, 2) for x in structured_qkv(1, 4, 2, SEQ_LEN, 8)]
        sent = []
        for function in (attended, compiled, compiled):
            before = cp.sent.copy()
            with torch._dynamo.config.patch(error_on_recompile=True):
                out, of_heads = function(*local)
            assert out.shape == local[0].shape
            assert all(x.shape[:2] == (1, 4) for x in of_heads)
            sent.append(cp.sent - before)
        assert sent[0] == sent[1] == sent[2]


WIDTHS = [(3, 128, 8), (3, 128, 16)]
LONGER = [(3, 128, 8), (5, 96, 8), (7, 100, 8)]
"""Sequences, tokens and D of one call after the other."""


@pytest.mark.parametrize(
    "pattern, shapes, dynamic, graphs",
    # Without dynamic=True the second length shows torch.compile that lengths change.
    [
        ("dense", WIDTHS, True, 2),
        ("vertical_slash", LONGER, True, 1),
        ("dense", LONGER, None, 2),
        ("xattention", LONGER, None, 2),
        ("moba", LONGER, None, 2),
    ],
)
def test_compiles_for_changing_shapes(pattern, shapes, graphs, dynamic):
    """Another D makes another graph, as kernels need; other batches and lengths share one."""
    calls_with_new_graphs = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        # The first call of a dynamic graph comes here twice.
        calls_with_new_graphs.add((batch, seq_len, head_dim))
        return aot_eager(graph, inputs)

    compiled = torch.compile(_grouped, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch, seq_len, head_dim in shapes:
        of_heads = [(batch, heads, seq_len, head_dim) for heads in (4, 2, 2)]
        leaves = [torch.randn(shape, requires_grad=True) for shape in of_heads]
        ranges = Causal().rows(seq_len)
        results = []
        for function in (_grouped, compiled):
            out = function(*leaves, ranges, PATTERNS[pattern])
            gradients = torch.autograd.grad(out.square().sum(), leaves)
            results.append([out.detach(), *gradients])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert len(calls_with_new_graphs) == graphs


@pytest.mark.parametrize("mask", [Causal(valid=(100,)), SlidingWindow(100), Documents([100])])
def test_masks_compile_for_changing_lengths(mask):
    """Also one that is plain at some lengths: no padding is left at 100 tokens."""
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for seq_len in (128, 112, 100):
        q = torch.randn(2, 2, seq_len, 8)
        torch.testing.assert_close(compiled(q, q, q, mask), attend(q, q, q, mask))


def _grouped(q: Tensor, k: Tensor, v: Tensor, ranges: MaskRanges, pattern: Pattern) -> Tensor:
    return attend(q, k, v, ranges, pattern, block_size=BLOCK, scale=0.3)


def test_opcheck():
    """All ops; a part of attention has no gradient of its own."""
    pattern, mask = PATTERNS["vertical_slash"], Documents([[40, 3, 57, 9], [20, 41, 1, 55]])
    q, k, v = structured_qkv(2, 4, 2, 125, 8)
    ranges = mask.rows(125)
    ops = torch.ops.titan_sparse
    cp = one_rank(BLOCK)
    for selecting in (pattern, PATTERNS["xattention"]):
        arguments = op_arguments([], ranges, selecting, cp, 0.3)[2:]
        torch.library.opcheck(ops.select.default, (q, k, *arguments))
    index = pattern.select(q, k, mask, block_size=BLOCK).tensors()
    _, *whole = op_arguments(index, ranges, pattern, cp, 0.3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sinks = torch.linspace(-6, 12, 4, dtype=torch.float64).requires_grad_()
    for op in (ops.attend_forward, ops.attend_recomputed):
        torch.library.opcheck(op.default, (*leaves, sinks, *whole))
    out, lse, verticals = ops.attend_forward(q, k, v, None, *whole)
    saved = [out, lse, verticals]
    arguments = (torch.ones_like(q), q, k, v, saved, *whole)
    torch.library.opcheck(ops.attend_backward.default, arguments)
    # In memory by token, [B, S, H, D], as models have them: so are the results.
    qkv = [by_token(x) for x in (q, k, v)]
    torch.library.opcheck(ops.attend_forward.default, (*qkv, None, *whole))
    results = ops.attend_forward(*qkv, None, *whole)
    assert torch.equal(results[0], out) and results[0].stride() == qkv[0].stride()
    backward = (torch.ones_like(q), *qkv, [*results], *whole)
    torch.library.opcheck(ops.attend_backward.default, backward)
    gradients = zip(ops.attend_backward(*backward), ops.attend_backward(*arguments), qkv)
    assert all(torch.equal(a, b) and a.stride() == x.stride() for a, b, x in gradients)
    arguments = (torch.ones_like(out), out, lse, sinks.detach())
    torch.library.opcheck(ops.attend_sinks_backward.default, arguments)

    second = op_arguments(index, ranges, pattern, cp, 0.3, 0.4, 1.0)
    torch.library.opcheck(ops.attend_forward.default, (q, k, v, *second))
    second_out, second_lse, vertical_kv = ops.attend_forward(q, k, v, *second)
    assert second_out.shape[2] == 125 - 3 * 16
    first = op_arguments([*index, vertical_kv], ranges, pattern, cp, 0.3, 0.0, 0.4)
    torch.library.opcheck(ops.attend_recomputed.default, (q, k, v, *first))
    first_out, first_lse, nothing = ops.attend_recomputed(q, k, v, *first)
    assert nothing.numel() == 0
    shares = [first_out, second_out, first_lse, second_lse, vertical_kv]
    result = torch.library.opcheck(ops.attend_join.default, (*leaves, sinks, *whole, shares))
    assert set(result.values()) == {"SUCCESS"}
    with pytest.raises(ValueError, match="join"):
        ops.attend_forward(*leaves, *second)


def test_what_another_process_has_exported_is_refused_in_one_line(monkeypatch):
    """Keys of options live in the process that has traced the call."""

    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, q, q, pattern=VerticalSlash(recall=0.41), block_size=BLOCK)

    q = _input(0).unflatten(-1, (4, -1)).transpose(1, 2)
    exported = torch.export.export(Attention(), (q,)).module()
    torch.testing.assert_close(exported(q), Attention()(q))
    monkeypatch.setattr(one_rank(BLOCK), "calls", {})
    with pytest.raises(RuntimeError, match="traced in another process.*trace the model where"):
        exported(q)
