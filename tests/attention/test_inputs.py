"""What attend() is given: devices, forward-mode AD, second derivatives, and
tensors of no elements."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.attention.problems import PATTERNS, combinations
from tests.fake_step import fake_world
from tests.refusals import refused
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks import (
    Causal,
    Dilated,
    Documents,
    Full,
    Mask,
    MaskRanges,
    SlidingWindow,
)
from titan_sparse.attention.observe import recording
from titan_sparse.attention.patterns import MoBA, VerticalSlash, XAttention

BLOCK, SEQ_LEN = 16, 64
MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(4),
    "documents": Documents([]),
    "full": Full(),
    "slices": Dilated(4, 2),
}
COMBINATIONS = combinations(MASKS)


def _x(*shape: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device)


def _refused(words: str, *qkv: Tensor, **options) -> None:
    with refused(words):
        attend(*qkv, block_size=BLOCK, **options)


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan"), float("inf")])
def test_a_scale_that_turns_the_order_around_is_refused(scale):
    """Kernels would compute NaN, and MoBA would choose the wrong chunks."""
    qkv = [_x(1, 2, SEQ_LEN, 8) for _ in range(3)]
    for pattern in PATTERNS.values():
        _refused("scale=.* is not a finite number above 0", *qkv, pattern=pattern, scale=scale)
    with pytest.raises(ValueError, match="scale=.* is not a finite number above 0"):
        PATTERNS["moba"].select(*qkv[:2], Causal(), block_size=BLOCK, scale=scale)
    # As advised.
    q, k, v = qkv
    attend(-q, k, v, block_size=BLOCK, scale=0.25)


def test_a_block_is_a_whole_number_of_tokens():
    qkv = [_x(1, 2, SEQ_LEN, 8) for _ in range(3)]
    for size in (0, 16.5):
        with pytest.raises(ValueError, match="block_size=.*: a block holds a whole number"):
            attend(*qkv, block_size=size)
        with pytest.raises(ValueError, match="block_size=.*: a block holds a whole number"):
            ContextParallel(None, block_size=size)
    wanted = attend(*qkv, block_size=16)
    assert torch.equal(attend(*qkv, block_size=16.0), wanted)
    assert torch.equal(attend(*qkv, cp=ContextParallel(None, block_size=16.0)), wanted)


# Devices


@pytest.mark.parametrize("elsewhere", [(0,), (2,), (1, 2)])
def test_tensors_on_several_devices_are_refused(elsewhere):
    """The op would follow the `meta` tensor and return memory that nobody wrote."""
    qkv = [_x(1, 2, SEQ_LEN, 8) for _ in range(3)]
    for number in elsewhere:
        qkv[number] = qkv[number].to("meta")
    _refused("q, k and v must be on one device, not .*meta", *qkv)


@pytest.mark.parametrize("name", ["start", "stop", "document_start", "slices"])
@pytest.mark.parametrize("pattern", ["dense", "vertical_slash"])
def test_a_mask_on_another_device_is_refused(name, pattern):
    mask = Dilated(4, 2) if name == "slices" else Documents([20, 12])
    ranges = mask.rows(SEQ_LEN)
    ranges = ranges._replace(**{name: getattr(ranges, name).to("meta")})
    q = _x(1, 2, SEQ_LEN, 8)
    _refused(
        'mask is on meta, q on cpu; write mask.rows.*device="cpu"',
        *(q, q, q),
        mask=ranges,
        pattern=PATTERNS[pattern],
    )


# Masks made by hand


def _by_hand(start: list[int], stop: list[int], **options) -> MaskRanges:
    pair = (torch.tensor([x], dtype=torch.int32) for x in (start, stop))
    return MaskRanges(*pair, **options)


@pytest.mark.parametrize("as_rows", [True, False])
@pytest.mark.parametrize(
    "ranges, words",
    [
        (_by_hand([0, 0], [2, 2]), r"later key, but says .* write MaskRanges\(.*causal=False"),
        (_by_hand([0, 1], [1, 2], plain=True), "hides earlier keys; write plain=False"),
        (_by_hand([0, 0], [1, 3], causal=False), "do not exist; write 0 <= start <= stop <= 2"),
        (_by_hand([-1, 0], [1, 2]), "do not exist"),
        (_by_hand([1, 1], [0, 2]), "do not exist"),
        (_by_hand([1, 0], [2, 2], causal=False), "lower for a later query; .* Slices"),
        (_by_hand([0, 0], [2, 1], causal=False), "lower for a later query"),
        (
            _by_hand([0, 0], [1, 2])._replace(start=torch.zeros(1, 2)),
            r"float32 .*write start.int\(\)",
        ),
        (MaskRanges(torch.zeros(2).int(), torch.ones(2).int()), r"are \[2\], \[2\]; write"),
    ],
)
def test_a_mask_that_is_not_as_it_says_is_refused(ranges, words, as_rows):
    """Kernels would compute other pairs than it shows, and patterns would select none of them."""

    class Own(Mask):
        def rows(self, seq_len, device="cpu"):
            return ranges

    q = _x(1, 1, 2, 8)
    _refused(words, q, q, q, mask=ranges if as_rows else Own())


def test_a_mask_returns_ranges():
    class Pair(Mask):
        def rows(self, seq_len, device="cpu"):
            return Causal().rows(seq_len)[:2]

    q = _x(1, 1, 2, 8)
    _refused(r"Pair.rows\(\) returned tuple; write MaskRanges", q, q, q, mask=Pair())


@pytest.mark.parametrize(
    "pattern", [XAttention(stride=4, threshold=1.0, dense_below=16), MoBA(16, 99)], ids=str
)
@pytest.mark.parametrize("hidden", [0, 20])
def test_queries_after_some_that_see_nothing_select(pattern, hidden):
    """The first 20 queries see nothing, and the others all earlier keys, or those from there on."""
    position = torch.arange(SEQ_LEN)
    sees_any = position >= 20
    start, stop = torch.where(sees_any, hidden, 0), torch.where(sees_any, position + 1, 0)
    ranges = _by_hand(start.tolist(), stop.tolist())
    q, k, v = (_x(1, 2, SEQ_LEN, 8) + number for number in range(3))
    wanted = attend(q, k, v, ranges, block_size=BLOCK)
    out, aux = attend(q, k, v, ranges, pattern, block_size=BLOCK, return_aux=True)
    torch.testing.assert_close(out, wanted)
    assert torch.equal(aux.index.dense(ranges), ranges.dense()[:, None].expand(1, 2, -1, -1))


@pytest.mark.parametrize("document_start", [None, torch.zeros(1, SEQ_LEN, dtype=torch.int32)])
def test_queries_that_see_nothing_do_not_raise_caps(document_start):
    """A document's share of a cap is its share of the tokens, and no more than all of it."""
    position = torch.arange(SEQ_LEN)
    start, stop = (torch.where(position < 40, 0, x) for x in (40, position + 1))
    ranges = _by_hand(start.tolist(), stop.tolist(), document_start=document_start)
    options = {"budget": "independent", "count_sinks": True, "sinks": 0, "local_slashes": 1}
    caps = {"max_verticals": 5, "max_slashes": 1}
    pattern = VerticalSlash(recall=0.999, probe=16, dense_below=16, **options, **caps)
    q, k, _ = (_x(1, 2, SEQ_LEN, 8) + number for number in range(3))
    counts = pattern.select(q, k, ranges, block_size=BLOCK).counts()
    assert counts == {"verticals": [5, 5], "slashes": [1, 1]}


@pytest.mark.parametrize("mask, pattern", COMBINATIONS)
def test_meta_tensors_give_meta_tensors(mask, pattern):
    q = _x(2, 4, SEQ_LEN, 8, device="meta")
    k = _x(2, 2, SEQ_LEN, 8, device="meta")
    sinks = _x(4, device="meta")
    leaves = [x.requires_grad_() for x in (q, k, sinks)]
    out, aux = attend(
        *(q, k, k, MASKS[mask], PATTERNS[pattern]), block_size=BLOCK, return_aux=True, sinks=sinks
    )
    out.sum().backward()
    assert all(x.grad.shape == x.shape and x.grad.is_meta for x in leaves)
    assert out.device.type == aux.lse.device.type == "meta"
    index = PATTERNS[pattern].select(q, k, MASKS[mask], block_size=BLOCK)
    shapes = [x.shape for x in aux.index.tensors()]
    assert [x.shape for x in index.tensors()] == shapes and index.verticals.is_meta
    assert out.shape == q.shape and aux.lse.shape == q.shape[:3]


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_a_dtensor_is_refused(name):
    """As tensor parallelism leaves them with use_local_output=False."""
    inputs = {key: _x(1, 2, SEQ_LEN, 8) for key in ("q", "k", "v")} | {"sinks": _x(2)}
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        inputs[name] = DTensor.from_local(inputs[name], mesh)
        with pytest.raises(ValueError, match=f"{name} is a DTensor; write {name}.to_local()"):
            attend(**inputs)
        attend(**inputs | {name: inputs[name].to_local()})


@pytest.mark.parametrize("name", ["q", "v", "sinks"])
@pytest.mark.parametrize("make", [Tensor.tolist, Tensor.numpy, Tensor.to_sparse])
def test_what_is_not_a_dense_tensor_is_refused(name, make):
    inputs = {key: _x(1, 2, SEQ_LEN, 8) for key in ("q", "k", "v")} | {"sinks": _x(2)}
    inputs[name] = make(inputs[name])
    with pytest.raises(ValueError, match=f"{name} is not a dense torch.Tensor"):
        attend(**inputs)


# Forward-mode AD


@pytest.mark.parametrize(
    "number, name, compiled", [(0, "q", False), (1, "k", False), (2, "v", True)]
)
def test_a_tangent_is_refused(number, name, compiled, fresh_compiler):
    """Otherwise the tangent would be dropped, and the derivative would be 0."""
    qkv = [_x(1, 2, SEQ_LEN, 8) for _ in range(3)]
    function = attend
    if compiled:
        function = torch.compile(attend, backend="eager")
        function(*qkv)  # the graph without tangents must not serve
    with forward_ad.dual_level():
        qkv[number] = forward_ad.make_dual(qkv[number], torch.ones_like(qkv[number]))
        with pytest.raises(ValueError, match=f"{name} has a tangent .*write out.backward"):
            function(*qkv)
        # What has no tangent loses none.
        plain = qkv[number - 1]
        attend(plain, plain, plain)


@pytest.mark.parametrize("compiled", [False, True])
def test_jvp_is_refused(compiled, fresh_compiler):
    q = _x(1, 2, SEQ_LEN, 8)

    def attended(sinks: Tensor) -> Tensor:
        return attend(q, q, q, sinks=sinks)

    def tangent(sinks: Tensor) -> Tensor:
        _, of_out = torch.func.jvp(attended, (sinks,), (sinks,))
        return of_out

    if compiled:
        tangent = torch.compile(tangent, backend="eager")
    with pytest.raises(ValueError, match="sinks has a tangent .*jvp"):
        tangent(_x(2))


def test_vmap_is_refused():
    x = _x(3, 1, 2, SEQ_LEN, 8).requires_grad_()
    with pytest.raises(ValueError, match="q is inside of torch.vmap.* write .*batch of q"):
        torch.vmap(attend)(x, x, x)
    out = attend(x[0], x[1], x[2])
    with pytest.raises(ValueError, match="d_out is inside of torch.vmap.* one after the other"):
        torch.autograd.grad(out, x, _x(2, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_second_derivative_is_refused(number, pattern):
    """By any input, the sinks among them."""
    inputs = [_x(1, 2, SEQ_LEN, 8) for _ in range(3)] + [_x(2)]
    inputs[number].requires_grad_()
    *qkv, sinks = inputs
    out = attend(*qkv, pattern=PATTERNS[pattern], block_size=BLOCK, sinks=sinks)
    [first] = torch.autograd.grad(out.square().sum(), inputs[number], create_graph=True)
    with pytest.raises(ValueError, match="no second derivative; write create_graph=False"):
        first.sum().backward()


# No elements


@pytest.mark.parametrize("batch, seq_len", [(0, SEQ_LEN), (2, 0)])
@pytest.mark.parametrize("mask, pattern", COMBINATIONS)
def test_no_batch_or_no_tokens(batch, seq_len, mask, pattern):
    """Results and gradients are empty, an index selects nothing, and nothing is recorded."""
    for recomputed in (0.0,) if mask == "full" else (0.0, 0.5):
        q = torch.zeros(batch, 4, seq_len, 8, dtype=torch.bfloat16, requires_grad=True)
        k = torch.zeros(batch, 2, seq_len, 8, dtype=torch.bfloat16, requires_grad=True)
        v = torch.zeros_like(k, requires_grad=True)
        sinks = torch.ones(4, requires_grad=True)
        options = {"block_size": BLOCK, "recomputed": recomputed, "sinks": sinks}
        with recording() as record:
            out, aux = attend(q, k, v, MASKS[mask], PATTERNS[pattern], return_aux=True, **options)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert aux.lse.shape == q.shape[:3] and aux.lse.dtype == torch.float32
        assert (aux.index.verticals == seq_len).all()
        assert record.visited == []
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        assert torch.equal(sinks.grad, torch.zeros(4))


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(0, 0, 8), (0, 2, 8), (2, 0, 8), (2, 2, 0)])
def test_no_heads_and_no_dimensions_are_refused(heads, kv_heads, head_dim):
    q = _x(1, heads, SEQ_LEN, head_dim)
    k = _x(1, kv_heads, SEQ_LEN, head_dim)
    _refused("Hq, Hkv and D must be 1 or more", q, k, k)
