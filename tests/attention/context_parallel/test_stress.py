"""Context parallelism under stress: late ranks, interleaved calls, kept
buffers, bytes on the wire."""

import functools
import gc
import random
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from tests.attention.context_parallel.against_one import mesh_of
from tests.attention.problems import PATTERNS, Problem, problem
from tests.distributed import run_processes
from tests.reference import structured_qkv
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.backends import BACKENDS
from titan_sparse.attention.context_parallel.comm import Pending
from titan_sparse.attention.masks.ranges import Causal, Documents, Mask, SlidingWindow
from titan_sparse.attention.patterns import Dense, Pattern
from titan_sparse.config import Attention
from titan_sparse.training.attention import build_context_parallel
from titan_sparse.training.faults.process_groups import set_timeout

eager = BACKENDS["eager"]

BLOCK = 16
SEQ_LEN = 2 * 8 * BLOCK
LONGEST_DELAY_SECONDS = 0.008
HANG_SECONDS = 40
PACKED = Documents([131, 7, 100]) & SlidingWindow(100)
VERTICAL = PATTERNS["vertical_slash"]


def _context(axes: tuple[int, int], *arguments, **options) -> ContextParallel:
    """ContextParallel(mesh, *arguments, **options) whose transfers fail instead of hanging."""
    cp = ContextParallel(mesh_of(axes), *arguments, **options)
    set_timeout(HANG_SECONDS)
    return cp


def _inject_delays() -> None:
    """Delay this process from here on, by a different time at every call: computing, sending,
    waiting, gathering.
    """
    delays = random.Random(dist.get_rank())

    def delayed(function):
        @functools.wraps(function)
        def late(*args, **kwargs):
            time.sleep(max(0.0, delays.uniform(-LONGEST_DELAY_SECONDS, LONGEST_DELAY_SECONDS)))
            return function(*args, **kwargs)

        return late

    for owner, names in (
        (eager, ("forward", "backward")),
        (Pending, ("__init__", "wait")),
        (ContextParallel, ("all_reduce", "all_gather", "all_to_all")),
    ):
        for name in names:
            setattr(owner, name, delayed(getattr(owner, name)))


def layer_inputs(heads: int = 4, seq_len: int = SEQ_LEN, head_dim: int = 8) -> list[Tensor]:
    """q, k and v of three layers, and d_out; two KV heads."""
    made = [structured_qkv(1, heads, 2, seq_len, head_dim, seed) for seed in (3, 4, 5)]
    return [
        made[0][0],
        *(x for _, *kv in made for x in kv),
        structured_qkv(1, heads, heads, seq_len, head_dim, seed=2)[2],
    ]


def layers(
    cp: ContextParallel | None,
    mask: Mask,
    pattern: Pattern,
    inputs: list[Tensor],
    backend: str = "eager",
    block_size: int | None = None,
) -> list[Tensor]:
    """Three attention layers, each feeding the queries of the next: whole tensors of out, dq, and
    each dk and dv.
    """
    shard, unshard = (cp.shard, cp.unshard) if cp else (lambda x, dim: x,) * 2
    *inputs, d_out = inputs
    leaves = [shard(x, 2).clone().requires_grad_() for x in inputs]
    x = leaves[0]
    for k, v in zip(leaves[1::2], leaves[2::2]):
        x = attend(x, k, v, mask, pattern, cp, backend, block_size=block_size)
    gradients = torch.autograd.grad(x, leaves, shard(d_out, 2))
    return [unshard(y.detach(), 2) for y in (x, *gradients)]


def _check_delays() -> None:
    contexts = []
    for layout, schedule, circulates, mask, pattern in (
        ("striped", "ring", "q", Causal(), VERTICAL),
        ("striped", "all_gather", "auto", Causal(), Dense()),
        ("contiguous", "double_ring", "kv", PACKED, VERTICAL),
        ("contiguous", "group_cast", "auto", PACKED, VERTICAL),
        ("striped", "ulysses", "kv", Causal(), VERTICAL),
    ):
        cp = _context((2, 2), layout, schedule, 2 * BLOCK, circulates)
        contexts.append((cp, mask, pattern))
    inputs = layer_inputs()
    wanted = [layers(*case, inputs) for case in contexts]
    _inject_delays()
    for case, want in zip(contexts, wanted):
        for number, (x, y) in enumerate(zip(layers(*case, inputs), want, strict=True)):
            assert torch.equal(x, y), (number, case[0].key, dist.get_rank())


class _Call:
    """One attention call whose forward and backward run when the caller chooses."""

    def __init__(self, cp: ContextParallel, p: Problem):
        self.cp, self.p = cp, p
        self.leaves = [cp.shard(x, 2).clone().requires_grad_() for x in p.inputs]

    def forward(self) -> None:
        self.out = self.p.attend(*self.leaves, cp=self.cp)

    def backward(self) -> list[Tensor]:
        d_out = self.cp.shard(self.p.d_out, 2)
        return [self.out.detach(), *torch.autograd.grad(self.out, self.leaves, d_out)]

    def alone(self) -> list[Tensor]:
        """Out and gradients, copied because their buffers may be reused."""
        self.forward()
        return [x.clone() for x in self.backward()]


def _check_interleaved() -> None:
    for schedule, circulates in (
        ("ring", "kv"),
        ("all_gather", "auto"),
        ("double_ring", "q"),
        ("group_cast", "auto"),
        ("ulysses", "kv"),
    ):
        cp = _context((2, 2), "striped", schedule, 2 * BLOCK, circulates)
        # The same shapes twice, so that the buffers are the same, and others; a batch of 1 makes
        # views of them.
        shapes = [(1, 4, 2, 8), (1, 4, 2, 8), (2, 4, 1, 4)]
        cases = [(Causal(), VERTICAL), (PACKED, VERTICAL), (Causal(), Dense())]
        calls = []
        for seed, ((batch, *heads, dim), case) in enumerate(zip(shapes, cases)):
            inputs = structured_qkv(batch, *heads, SEQ_LEN, dim, seed)
            calls.append(_Call(cp, Problem(inputs, *case, 2 * BLOCK)))
        wanted = [call.alone() for call in calls]
        for call in calls:
            call.forward()
        results = {number: calls[number].backward() for number in (2, 0, 1)}
        for number, want in enumerate(wanted):
            for x, y in zip(results[number], want, strict=True):
                assert torch.equal(x, y), (cp.key, circulates, number)


def _check_no_new_buffers() -> None:
    """A slot grows to the largest request. Batches that come again need no new memory."""
    for schedule in ("double_ring", "all_gather", "group_cast"):
        # By the index, a hop that no step has needed so far has no buffer yet.
        route_by = "mask" if schedule == "double_ring" else "auto"
        cp = _context((2, 2), "zigzag", schedule, BLOCK, route_by=route_by)
        calls = []
        for seed in range(2):
            mask = Documents([60 + 40 * seed, 100]) & SlidingWindow(90)
            calls.append(_Call(cp, problem((4, 2), mask, VERTICAL, seq_len=SEQ_LEN, seed=seed)))
        held = []
        for call in calls * 2:
            call.alone()
            memory = cp.memory.items()
            held.append({slot: (x.data_ptr(), x.nbytes) for (slot, *_), x in memory})
        if schedule == "group_cast":
            # Blocks inside the node, those that are handed on, and their gradients.
            slots = {"group cast", "group cast received", "inner_gradient", "outer_gradient"}
            assert held[1].keys() >= slots, held
        assert held[1] and held[1:] == held[1:2] * 3, (cp.key, held)


def _check_nothing_is_held() -> None:
    """Objects that outlive the process groups may abort the process when Python exits."""
    held = []
    for schedule in ("ring", "all_gather", "group_cast", "ulysses"):
        cp = build_context_parallel(
            Attention(schedule=schedule, block_size=BLOCK),
            mesh_of((4,)),
        )
        q, k, v = [cp.shard(x, 2).requires_grad_() for x in structured_qkv(1, 4, 2, SEQ_LEN, 8)]
        attend(q, k, v, Causal(), Dense(), cp, "eager").sum().backward()
        held.append(weakref.ref(cp))
        owner = cp.by_heads or cp
        held.extend(weakref.ref(call) for call in owner.calls.values())
        del q, k, v
        gc.disable()  # no circle of references keeps it until a collection
        del cp, owner
        gc.enable()
    assert len(held) > 3 and not any(reference() for reference in held)


def _check_ranks() -> None:
    _check_interleaved()
    _check_no_new_buffers()
    _check_nothing_is_held()
    # These last, as nothing takes the delays away again.
    _check_delays()


def test_late_ranks_and_calls_in_between_each_other():
    run_processes(4, _check_ranks)
