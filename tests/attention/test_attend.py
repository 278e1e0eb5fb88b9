"""attend() on one rank against dense masked attention in fp64, with and without learned sinks, and
invariants of every selection."""

import copy
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.attention.dense_twin import let_eager_serve_dense
from tests.attention.problems import PATTERNS as ONE_OF_EACH
from tests.attention.problems import (
    RANGES,
    Problem,
    assert_equal,
    combinations,
    op_arguments,
    problem,
    sink_logits,
)
from tests.fake_step import fake_world
from tests.reference import dense_attention, gradients, relative_error
from tests.refusals import refused
from titan_sparse.attention import ContextParallel, attend, ops
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.group import one_rank
from titan_sparse.attention.context_parallel.layouts import Costs
from titan_sparse.attention.masks.ranges import Causal, Documents, Full, SlidingWindow
from titan_sparse.attention.masks.slices import prefix_lm, sliding_window
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import VerticalSlash

CAPPED = VerticalSlash(
    recall=0.95, probe=7, sinks=0, max_verticals=21, max_slashes=2, dense_below=32
)
PATTERNS = ONE_OF_EACH | {"capped": CAPPED}

# heads, KV heads, tokens
SHAPES = [(16, 2, 192), (5, 1, 203), (3, 3, 203), (5, 1, 192)]
MASKS = RANGES | {
    "slices": prefix_lm([60, 50], [9, 20]),
    "slices, window": sliding_window([60, 50], 20, sinks=5),
}
COMBINATIONS = combinations(MASKS, PATTERNS)


def _problem(shape: tuple[int, int, int], mask: str, pattern: str, sinks: bool = False) -> Problem:
    *heads, seq_len = shape
    return problem(heads, MASKS[mask], PATTERNS[pattern], seq_len=seq_len, sinks=sinks)


def _gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    "shape, mask, pattern",
    [(SHAPES[number % 4], *combination) for number, combination in enumerate(COMBINATIONS)],
    ids=str,
)
def test_attend_is_dense_attention_over_what_was_selected(shape, mask, pattern, sinks):
    """A sink is a column of the scores that has no value."""
    p = _problem(shape, mask, pattern, sinks)
    assert_equal(p.results(), p.wanted(p.seen()))


@pytest.mark.parametrize("mask", ["padded", "windowed documents"])
def test_packed_kernels(monkeypatch, mask):
    """Dense packed documents by kernels that know documents, padding included."""
    p = _problem(SHAPES[2], mask, "dense", sinks=True)
    want = p.wanted(p.seen())
    let_eager_serve_dense(monkeypatch)
    monkeypatch.setattr(BACKENDS["eager"], "forward", None)
    assert_equal(p.results(), want)


@pytest.mark.parametrize("mask", ["causal", "nothing at all"])
def test_a_sink_of_minus_infinity_is_none(mask):
    """Also where a row sees no key either."""
    p = _problem(SHAPES[2], mask, "dense")
    infinite = torch.full((3,), -torch.inf, dtype=torch.float64)
    got = p._replace(inputs=[*p.inputs, infinite]).results()
    assert_equal(got, p.results() | {"dsinks": torch.zeros_like(infinite)})


@pytest.mark.parametrize("window", [None, 20])
def test_equals_the_attention_of_gpt_oss(window):
    """The eager attention of transformers, which adds a mask to the scores."""
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    p = _problem((8, 2, 192), "causal", "dense", sinks=True)
    if window is not None:
        p = p._replace(mask=Causal() & SlidingWindow(window))
    seen = p.mask.dense(192)[:, None]
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)

    def theirs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        module = nn.Module()
        module.sinks, module.num_key_value_groups = sinks, 4
        out, _ = eager_attention_forward(module.eval(), q, k, v, added, scaling=0.4)
        return out.transpose(1, 2)

    got, grads = gradients(lambda *x: p.attend(*x, scale=0.4), p.d_out, *p.inputs)
    want, wanted = gradients(theirs, p.d_out, *p.inputs)
    for a, b in zip((got, *grads), (want, *wanted), strict=True):
        assert _gap(a, b) < 1e-9


@pytest.mark.parametrize(
    "dtype, sink_dtype, bound",
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float16, torch.float16, 2e-3),
    ],
    ids=str,
)
def test_lower_precision(dtype, sink_dtype, bound):
    p = _problem(SHAPES[2], "documents", "vertical_slash", sinks=True)
    *qkv, sinks = p.inputs
    low = p._replace(inputs=[*(x.to(dtype) for x in qkv), sinks.to(sink_dtype)])
    found = low.results()
    for name, want in low.wanted(low.seen()).items():
        assert found[name].dtype == {"lse": torch.float32, "dsinks": sink_dtype}.get(name, dtype)
        assert relative_error(found[name], want) < bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask, pattern", COMBINATIONS)
def test_autocast_changes_nothing(mask, pattern, dtype):
    """Not the selection, the sums, or the gradients, also if the backward is inside of it."""
    p = _problem(SHAPES[2], mask, pattern, sinks=True)
    p = p._replace(inputs=[x.to(dtype) for x in p.inputs])
    for recomputed in (0.5,) if mask == "causal" else (0, 1):
        want = p.results(recomputed=recomputed)
        with torch.autocast("cpu", torch.bfloat16):
            assert_equal(p.results(recomputed=recomputed), want, tolerance=0)
            found = p.seen()
        assert torch.equal(found, p.seen())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scale(pattern):
    p = _problem(SHAPES[2], "causal", pattern)
    out, aux = p.attend(*p.inputs, scale=0.2, return_aux=True)
    assert _gap(out, dense_attention(*p.inputs, aux.index.dense(p.mask), scale=0.2)[0]) < 1e-9


def test_the_default_block_size_is_128():
    p = _problem(SHAPES[2], "causal", "dense")
    out, aux = attend(*p.inputs, return_aux=True)
    assert aux.index.block_size == 128
    assert _gap(out, p.attend(*p.inputs)) < 1e-12


def _with_index(p: Problem, tensors: list[Tensor], *qkv: Tensor) -> Tensor:
    """The forward op alone, with a given index."""
    ranges = p.mask.rows(qkv[0].shape[2])._replace(plain=False)
    scale = qkv[0].shape[3] ** -0.5
    arguments = op_arguments(tensors, ranges, p.pattern, one_rank(p.block), scale)
    return torch.ops.titan_sparse.attend_forward(*qkv, *arguments)[0]


def _skipping_rows(p: Problem, seen: Tensor, verticals: Tensor, poisoned: int) -> Tensor:
    """bool [B, Hq, S]: rows whose block skips some KV block, in heads without verticals there."""
    size, seq_len = p.block, seen.shape[-1]
    here = slice(poisoned * size, (poisoned + 1) * size)
    padded = torch.nn.functional.pad(seen, (0, 0, 0, -seq_len % size))
    meets = padded[..., here].any(-1).unflatten(-1, (-1, size)).any(-1)
    has_vertical = ((verticals >= here.start) & (verticals < here.stop)).any(-1)
    return ~(meets | has_vertical[..., None]).repeat_interleave(size, -1)[..., :seq_len]


@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_not_selected_is_not_read(mask, pattern):
    """A NaN in a KV block would become 0 * NaN if the block were read and only masked."""
    p = _problem((4, 2, 203), mask, pattern)
    q, *kv = p.inputs
    index = p.pattern.select(q, kv[0], p.mask, block_size=p.block)
    seen = index.dense(p.mask)
    poisoned = 7
    skipping = _skipping_rows(p, seen, index.verticals, poisoned)

    def function(*qkv: Tensor) -> Tensor:
        return _with_index(p, index.tensors(), *qkv)

    clean, (clean_dq, _, _) = gradients(function, torch.ones_like(q), *p.inputs)
    here = slice(poisoned * 16, poisoned * 16 + 16)
    for x in kv:
        x[:, :, here] = torch.nan
    out, (dq, _, _) = gradients(function, torch.ones_like(q), q, *kv)
    # In a dense causal problem only the rows before the block skip it. Otherwise some after it do
    # as well.
    assert (skipping & (torch.arange(203) >= here.stop)).any() != (
        pattern == "dense" and mask == "causal"
    )
    assert skipping.any(), "the case proves nothing"
    assert torch.equal(out[skipping], clean[skipping]) and torch.equal(
        dq[skipping], clean_dq[skipping]
    )
    assert out[seen[..., here].any(-1)].isnan().all()


@pytest.mark.parametrize("mask, pattern", [x for x in COMBINATIONS if x[0] != "nothing at all"])
def test_statistics_count_what_is_computed(mask, pattern):
    """They are of the keys alone, even with sinks that leave these almost no mass, and of both
    parts where one is computed again."""
    p = _problem(SHAPES[1], mask, pattern)
    aux = p.aux()
    seen, visible = aux.index.dense(p.mask), p.mask.dense(203)
    want = seen.sum((0, 2, 3)).double() / 2 / (visible.sum().double() / len(visible))
    dense_lse = dense_attention(*p.inputs, visible[:, None].expand_as(seen))[1]
    kept = (aux.lse - dense_lse).exp()
    rows = visible.any(-1)[:, None].expand_as(kept)
    recall = torch.where(rows, kept, 0).sum((0, 2)) / rows.sum((0, 2))
    sinks = sink_logits(5) + 40
    for more, share in ((None, 0.0), (sinks, 0.0), (sinks, 0.4)):
        if share and mask in ("full", "slices"):
            continue
        with recording(recall_rows=10**6) as record:
            p.attend(*p.inputs, more, recomputed=share)
        assert (record.visited[0] * 2 == seen.sum((0, 2, 3))).all()
        assert torch.equal(record.density(), want[None])
        assert _gap(record.recall[0], recall) < 1e-9


def test_statistics_of_budgets_and_layers():
    p = _problem(SHAPES[0], "causal", "capped")
    q, k, v = p.inputs
    with recording() as record:
        first, second = (p.attend(q * factor, k, v, return_aux=True)[1].index for factor in (1, 3))
    assert record.density().shape == (2, 16) and record.recall == []
    for got, index in zip(record.capped, (first, second), strict=True):
        assert torch.equal(got, index.capped.double().mean((0, 2)))
    assert 0 < torch.stack(record.capped).mean() <= 1
    p.attend(*p.inputs)
    assert len(record.visited) == 2, "recorded outside of recording()"
    with recording() as empty:
        pass
    with pytest.raises(ValueError, match="no layers: .* not called inside of recording"):
        empty.density()


def test_layers_with_different_heads_have_no_density_of_one_tensor():
    kv = torch.randn(1, 2, 64, 8)
    with recording() as record:
        for heads in (4, 2):
            attend(torch.randn(1, heads, 64, 8), kv, kv)
    with refused(r"they have \[2, 4\] heads; write \[visited / visible for"):
        record.density()
    assert [len(x / all_of) for x, all_of in zip(record.visited, record.visible)] == [4, 2]


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "8"])
@pytest.mark.parametrize("name", ["recall_rows", "thumbnail_cells"])
def test_a_recording_counts_in_whole_numbers(name, value):
    with refused(f"{name}={value!r} is not a whole number"), recording(**{name: value}):
        pass


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "q, k, v, words",
    [
        (_x(2, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 8), "needs q"),
        (_x(1, 2, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 4), "needs q"),
        (_x(2, 2, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 8), "multiple of Hkv"),
        (_x(1, 2, 16, 8), _x(1, 2, 32, 8), _x(1, 2, 32, 8), "multiple of Hkv"),
        (_x(1, 2, 16, 8), _x(1, 2, 16, 4), _x(1, 2, 16, 4), "multiple of Hkv"),
        (_x(1, 1, 16, 8), _x(1, 2, 16, 8), _x(1, 2, 16, 8), "multiple of Hkv"),
        (_x(1, 1, 16, 8), _x(1, 1, 16, 8, dtype=torch.float64), _x(1, 1, 16, 8), "dtype"),
        (_x(1, 1, 16, 8), _x(1, 1, 16, 8), _x(1, 1, 16, 8, dtype=torch.bfloat16), "dtype"),
        (*[_x(1, 1, 16, 8, dtype=torch.int64)] * 3, "dtype"),
        (*[_x(1, 1, 16, 8, dtype=torch.float8_e4m3fn)] * 3, "dtype, .*not torch.float8_e4m3fn"),
    ],
)
def test_tensors_that_do_not_fit(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        attend(q, k, v)


REFUSED = [
    ({"mask": Causal().rows(15)}, "15 tokens"),
    ({"mask": Causal(valid=(3, 4, 5))}, "3 sequences"),
    ({"mask": Documents([9, 8])}, "17 tokens"),
    ({"mask": "causal"}, "mask=str is not a mask; write a mask of titan_sparse.attention.masks"),
    ({"mask": Full(), "pattern": CAPPED, "block_size": 16}, "causal"),
    ({"pattern": "dense"}, "pattern=str is not a pattern; write one of"),
    ({"pattern": VerticalSlash(dense_below=15), "block_size": 16}, "dense_below = 16 or more"),
    (
        {"pattern": VerticalSlash(dense_below=16, probe=17), "block_size": 8},
        "dense_below = 17 or more",
    ),
    ({"backend": "nothing"}, "attention.backend"),
    ({"block_size": 0}, "block_size"),
    (
        {"cp": ContextParallel(None, "contiguous", "local", 8), "block_size": 16},
        "block_size=16",
    ),
    ({"cp": True}, r"cp=bool is not a ContextParallel; write cp=ContextParallel\(mesh\)"),
    ({"scale": torch.tensor(0.5)}, "scale is a tensor; write scale=1.0, and multiply q"),
    ({"recomputed": -0.1, "block_size": 4}, "0 to 1"),
    ({"recomputed": 0.5, "block_size": 4, "mask": Full()}, "write recomputed=0 or 1"),
    (
        {"recomputed": 0.5, "block_size": 4, "mask": prefix_lm([16], [9])},
        "causal mask; write recomputed=0 or 1",
    ),
    ({"sinks": _x(3)}, r"sinks has shape \[3\]; write one logit a query head, \[2\]"),
    (
        {"sinks": _x(2, dtype=torch.float64)},
        r"sinks is torch.float64; write sinks.float\(\), or the dtype of q \(torch.float32\)",
    ),
    ({"sinks": _x(2).to("meta")}, 'sinks is on meta, q on cpu; write sinks.to."cpu".'),
]


@pytest.mark.parametrize("options, words", REFUSED)
def test_options_that_do_not_fit(options, words):
    q = _x(2, 2, 16, 8)
    with pytest.raises(ValueError, match=words):
        attend(q, q, q, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layout": "diagonal"}, "layout"),
        ({"schedule": "spiral"}, "schedule"),
        ({"schedule": "group_cast", "overlap_stages": (2, 0)}, "overlap_stages"),
        ({"backward_circulates": "v"}, "backward_circulates"),
        ({"route_by": "index"}, "route_by"),
        ({"gradient_dtype": "bfloat16"}, "gradient_dtype='bfloat16' .*write torch.bfloat16"),
        ({"gradient_dtype": torch.int8}, "gradient_dtype=torch.int8 is not a floating dtype"),
        ({"costs": Costs()}, 'costs would be ignored with layout "striped"'),
    ],
)
def test_context_parallel_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        ContextParallel(None, **options)


@pytest.mark.parametrize(
    "options, schedules, instead",
    [
        ({"backward_circulates": "q"}, ("all_gather", "group_cast", "ulysses"), "ring"),
        ({"route_by": "mask"}, ("all_gather", "group_cast", "ulysses"), "ring"),
        ({"overlap_stages": (2, 2)}, ("all_gather", "ring", "ulysses"), "group_cast"),
    ],
    ids=str,
)
def test_options_of_other_schedules_are_not_ignored(options, schedules, instead):
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        for schedule in schedules:
            refusal = f'ignored with schedule "{schedule}".*schedule="{instead}"'
            with pytest.raises(ValueError, match=refusal):
                ContextParallel(mesh, schedule=schedule, **options)
        ContextParallel(mesh, schedule=instead, **options)
    # The same program on one rank.
    ContextParallel(None, **options)


def test_a_process_group_is_not_a_mesh():
    """Advised is the mesh of that group."""
    with fake_world(2):
        group = dist.group.WORLD
        with pytest.raises(ValueError, match="mesh=ProcessGroup .*DeviceMesh.from_group"):
            ContextParallel(group)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        assert ContextParallel(mesh).size == 2


def test_a_context_parallel_lives_until_the_backward():
    """It must not live longer. Only the graph holds a reference."""
    cp = ContextParallel(None, "contiguous", "local", block_size=16)
    reference = weakref.ref(cp)
    q = _x(1, 2, 32, 8).requires_grad_()
    out = attend(q, q, q, cp=cp)
    del cp
    out.sum().backward()
    del out
    assert q.grad is not None and reference() is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_module_shares_its_context_parallel(copied, ranks):
    """Such as an EMA of its weights, which outlives the module."""
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        module = nn.Linear(8, 8)
        module.cp = ContextParallel(mesh, block_size=16)
        key = module.cp.key
        cp = copied(module.cp) if copied is copy.copy else copied(module).cp
        del module
        gc.collect()
        q = _x(1, 2, 32, 8).requires_grad_()
        attend(q, q, q, cp=cp).sum().backward()
        assert cp.key == key


@pytest.mark.parametrize("mask", MASKS)
def test_the_default_device_of_torch_changes_nothing(mask):
    """What is not on the device of q, such as a mask, is on the CPU."""
    q, k, v = (torch.randn(2, heads, 192, 8).requires_grad_() for heads in (4, 2, 2))

    def call() -> list[Tensor]:
        # A copy remembers no rows.
        pattern = PATTERNS["dense" if mask == "full" or "slices" in mask else "vertical_slash"]
        out = attend(q, k, v, mask=copy.deepcopy(MASKS[mask]), pattern=pattern, block_size=16)
        return [out, *torch.autograd.grad(out.sum(), (q, k, v))]

    wanted = call()
    with torch.device("meta"):
        got = call()
        prefix_lm([60, 50], [9, 20])
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


def test_a_key_without_its_object_is_refused():
    with pytest.raises(RuntimeError, match="is gone: keep the ContextParallel"):
        ops.lookup("attend nothing")


def test_a_plain_call_enters_few_files():
    """docs/architecture.md has the number: so much has to be read to follow attend(q, k, v)."""
    root = Path(__file__).parents[2]
    folders = tuple(str(root / name) for name in ("titan_sparse", "kernels"))
    entered = set()

    def note(frame, event, _) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(folders):
            entered.add(Path(name).resolve())

    def call() -> None:
        q, k, v = (_x(1, heads, 256, 8).requires_grad_() for heads in (4, 2, 2))
        attend(q, k, v).sum().backward()

    # What is imported or remembered once does not count, nor what the collector frees in between.
    call()
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    said = (root / "docs/architecture.md").read_text()
    assert f"`attend(q, k, v)` runs code of {len(entered)} files." in said
