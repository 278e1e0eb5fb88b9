"""Buffers of context parallelism, counted where they are kept."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.estimate.steps import step_of_words
from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.schedule import SCHEDULES, Moves
from titan_sparse.attention.masks.ranges import Causal, Full
from titan_sparse.attention.patterns import Dense
from titan_sparse.estimate import memory
from titan_sparse.estimate.attention_memory import attention_workspace, cp_buffers
from titan_sparse.estimate.memory import GIB, estimate
from titan_sparse.estimate.step import Step
from titan_sparse.kernels.gathered import launch
from titan_sparse.models.flavours import FLAVOURS

MODEL = dataclasses.replace(FLAVOURS["debug"], heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    "schedule, axes",
    [
        ("ring", (1, 3)),
        ("ring", (1, 2)),
        ("all_gather", (1, 3)),
        ("double_ring", (2, 2)),
        ("double_ring", (3, 2)),
        ("group_cast", (1, 3)),
        ("group_cast", (3, 1)),
    ],
)
def test_buffers_are_those_that_are_kept(schedule, axes):
    """Rank 0, with collectives that transfer nothing. Received tensors still occupy memory."""
    ranks = axes[0] * axes[1]
    moves_blocks = SCHEDULES[schedule].moves is Moves.BLOCKS
    mask = Full() if moves_blocks else Causal()
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
        cp = ContextParallel(mesh, "striped", schedule, 16)
        q = torch.randn(2, 4, 32, 8, requires_grad=True)
        k = torch.randn(2, 2, 32, 8, requires_grad=True)
        v = torch.randn(2, 2, 32, 8, requires_grad=True)
        attend(q, k, v, mask, Dense(), cp).sum().backward()
    kept = cp.buffers.nbytes
    step = Step(
        model=MODEL,
        sequences=2,
        seq_len=32 * ranks,
        width=4,
        cp=ranks,
        inter=axes[0],
        schedule=SCHEDULES[schedule],
    )
    expected = cp_buffers(step)
    if moves_blocks and axes[0] > 1:
        assert kept <= expected <= 1.1 * kept
    else:
        assert expected == kept


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("schedule, axes", [("ring", (1, 4)), ("double_ring", (2, 2))])
def test_buffers_with_queries_circulating(schedule, axes, kv_heads):
    """The same slots hold keys and values in the forward, and queries in the backward."""
    ranks = axes[0] * axes[1]
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_inter", "cp_intra"))
        cp = ContextParallel(mesh, "striped", schedule, 16, backward_circulates="q")
        q = torch.randn(2, 4, 32, 8, requires_grad=True)
        k = torch.randn(2, kv_heads, 32, 8, requires_grad=True)
        attend(q, k, k, Causal(), Dense(), cp).sum().backward()
    step = Step(
        model=dataclasses.replace(MODEL, kv_heads=kv_heads),
        sequences=2,
        seq_len=32 * ranks,
        width=4,
        cp=ranks,
        inter=axes[0],
        schedule=SCHEDULES[schedule],
        circulates_queries=True,
    )
    # Some hops of the forward have a buffer that no hop of so short a backward uses.
    assert cp.buffers.nbytes <= cp_buffers(step) <= 1.35 * cp.buffers.nbytes


TOKENS = 1024
"""Of a rank."""
QUERY = TOKENS * 4 * 8
"""Elements of q."""
KV = TOKENS * 2 * 8
"""Elements of k."""


# In bf16 with sums in fp32, by hand from what each schedule holds.
@pytest.mark.parametrize(
    "schedule, inter, kv_heads, expected",
    [
        # dq, dk and dv; and the keys and values, or gradients, that are sent.
        ("ring", 1, 2, 4 * QUERY + 4 * 2 * KV + 4 * 2 * KV),
        ("double_ring", 2, 2, 4 * QUERY + 4 * 2 * KV + 4 * 2 * KV),
        # dk and dv of four ranks, of both heads, or of the only one.
        ("all_gather", 1, 2, 2 * 4 * 4 * KV),
        ("all_gather", 1, 1, 2 * 4 * 4 * KV / 2),
        # Two stages of 1.5 chunks, each with gradients and twice: as sent and as received.
        ("group_cast", 1, 2, 4 * QUERY + 2 * KV * (2 * 4 + 2 * 1.5 * (2 + 4))),
        # Between nodes sums of what is handed on as well.
        ("group_cast", 2, 2, 4 * QUERY + 2 * KV * (3 * 4 + 2 * 1.5 * (2 + 4))),
    ],
)
def test_workspace_of_a_schedule_by_hand(schedule, inter, kv_heads, expected):
    model = dataclasses.replace(MODEL, kv_heads=kv_heads)
    alone = Step(model=model, sequences=1, seq_len=TOKENS, backend="triton")
    step = dataclasses.replace(
        alone, seq_len=4 * TOKENS, cp=4, inter=inter, schedule=SCHEDULES[schedule]
    )
    assert attention_workspace(step) - attention_workspace(alone) == expected


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "group_cast"])
def test_the_estimate_counts_workspace_and_buffers(monkeypatch, schedule):
    """Workspace counts in the backward of blocks, buffers in every phase, including the loss."""
    # Without an MLP to speak of, attention's backward is the worst point of a block's.
    model = dataclasses.replace(MODEL, intermediate_size=1)
    record = SCHEDULES[schedule]
    step = Step(model=model, sequences=1, seq_len=4 * TOKENS, cp=4, schedule=record, backend="flex")
    with_all = estimate(step)
    workspace = attention_workspace(step) / GIB
    buffers = cp_buffers(step) / GIB
    assert min(workspace, buffers) > 0
    monkeypatch.setattr(memory, "attention_workspace", lambda step: 0)
    monkeypatch.setattr(memory, "cp_buffers", lambda step: 0)
    for phase, parts in estimate(step).items():
        missing = sum(with_all[phase].values()) - sum(parts.values())
        of_backward = workspace if phase.startswith("backward") else 0
        assert missing == pytest.approx(buffers + of_backward, rel=1e-6), phase


@pytest.mark.parametrize("kv_heads, summed", [(2, QUERY + 2 * KV), (4, QUERY)])
def test_flash_attention_sums_in_fp32(kv_heads, summed):
    """dq, and where query heads share keys also dk and dv."""
    model = dataclasses.replace(MODEL, kv_heads=kv_heads)
    triton = Step(model=model, sequences=1, seq_len=TOKENS, backend="triton")
    flex = dataclasses.replace(triton, backend="flex")
    assert attention_workspace(flex) - attention_workspace(triton) == 4 * summed


def test_long_lists_of_blocks_count():
    """Full and partial ones, by query and by key, four bytes each; with verticals by head."""
    step = Step(model=MODEL, sequences=1, seq_len=TOKENS, backend="triton", most_blocks=10_000)
    lists = 4 * 4 * (TOKENS // 128) * 10_000
    assert attention_workspace(step) == lists
    assert attention_workspace(dataclasses.replace(step, verticals=128)) == 4 * lists


def test_eager_holds_scores_of_a_query_block():
    """Three in fp32, of all heads and keys."""
    step = Step(model=MODEL, sequences=2, seq_len=TOKENS, backend="eager")
    assert attention_workspace(step) == 3 * 4 * (2 * 4 * 128) * TOKENS


@pytest.mark.parametrize("kv_heads, rounded", [(2, 2 * QUERY), (4, 0)])
@pytest.mark.parametrize("schedule, share", [("local", 1), ("ring", 1), ("all_gather", None)])
def test_cudnn_sums_in_fp32_and_by_query_head(kv_heads, rounded, schedule, share):
    """dq, and where query heads share keys also rounded dk and dv of each head. all_gather: one head at a time."""
    model = dataclasses.replace(MODEL, kv_heads=kv_heads)
    ranks = 1 if schedule == "local" else 4
    triton = Step(
        model=model,
        sequences=1,
        seq_len=ranks * TOKENS,
        cp=ranks,
        schedule=SCHEDULES[schedule],
        backend="triton",
    )
    by_cudnn = dataclasses.replace(triton, backend="cudnn")
    more = attention_workspace(by_cudnn) - attention_workspace(triton)
    assert more == (share or 1 / kv_heads) * (4 * QUERY + 2 * rounded)


@pytest.mark.parametrize(
    "backend, ranks, words, gathers",
    [
        ("triton", 1, [], True),
        ("flex", 1, [], True),
        ("eager", 1, [], False),
        ("triton", 2, ["--parallelism.cp", "2"], False),
        ("triton", 1, ["--attention.sliding_window", "8192"], False),
        ("triton", 1, ["--attention.pattern", "dense"], False),
    ],
)
def test_moba_on_one_rank_gathers_queries(backend, ranks, words, gathers):
    """Lists and sums of some heads at a time, and dk and dv in fp32."""
    one = ["--parallelism.cp", "1", "--parallelism.cp_intra", "0"]
    step = step_of_words("variants/moba", backend, ranks, *one, *words)
    assert step.gathers_queries == gathers
    model = step.model
    by_blocks = attention_workspace(dataclasses.replace(step, gathers_queries=False))
    gradients = 2 * 4 * step.tokens * model.kv_heads * model.head_dim
    more = launch._LIST_BYTES + launch._TOTAL_BYTES + gradients if gathers else 0
    assert attention_workspace(step) == by_blocks + more
