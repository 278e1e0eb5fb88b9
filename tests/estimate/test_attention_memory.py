"""Buffers of context parallelism, counted where they are kept, and attention's workspace by hand."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fake_step import fake_world
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.context_parallel.schedule import SCHEDULES
from titan_sparse.attention.masks.ranges import Causal, Full
from titan_sparse.attention.patterns import Dense
from titan_sparse.estimate.memory import attention_workspace, cp_buffers
from titan_sparse.estimate.step import StepShape
from titan_sparse.models.flavours import FLAVOURS

MODEL = dataclasses.replace(FLAVOURS["debug"], heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    "schedule, inter, intra, circulates, kv_heads, most",
    [
        ("ring", 1, 3, "kv", 2, 1),
        ("all_gather", 1, 3, "kv", 2, 1),
        ("double_ring", 3, 2, "kv", 2, 1),
        ("group_cast", 1, 3, "kv", 2, 1),
        # Own blocks that are handed on between nodes are not all needed.
        ("group_cast", 3, 1, "kv", 2, 1.1),
        # Some hops of the forward have a buffer that no hop of so short a backward uses.
        ("ring", 1, 4, "q", 4, 1.35),
        ("double_ring", 2, 2, "q", 2, 1.35),
    ],
)
def test_buffers_are_those_that_are_kept(schedule, inter, intra, circulates, kv_heads, most):
    """Rank 0, with collectives that transfer nothing. Received tensors still occupy memory."""
    ranks = inter * intra
    mask = Full() if schedule == "group_cast" else Causal()
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (inter, intra), mesh_dim_names=("cp_inter", "cp_intra"))
        cp = ContextParallel(mesh, "striped", schedule, 16, backward_circulates=circulates)
        q = torch.randn(2, 4, 32, 8, requires_grad=True)
        k = torch.randn(2, kv_heads, 32, 8, requires_grad=True)
        attend(q, k, k, mask, Dense(), cp).sum().backward()
    step = StepShape(
        model=dataclasses.replace(MODEL, kv_heads=kv_heads),
        sequences=2,
        seq_len=32 * ranks,
        width=4,
        cp=ranks,
        inter=inter,
        schedule=SCHEDULES[schedule],
        circulates_queries=circulates == "q",
    )
    kept = sum(memory.nbytes for memory in cp.memory.values())
    assert kept <= cp_buffers(step) <= most * kept


TOKENS = 1024
"""Of a rank."""
QUERY = TOKENS * 4 * 8
"""Elements of q."""
KV = TOKENS * 2 * 8
"""Elements of k."""
ALONE = StepShape(model=MODEL, sequences=1, seq_len=TOKENS, backend="triton")
MHA = {"model": dataclasses.replace(MODEL, kv_heads=4)}


def _on_four(schedule: str, **changes) -> dict:
    return {"seq_len": 4 * TOKENS, "cp": 4, "schedule": SCHEDULES[schedule], **changes}


# In bf16 with sums in fp32, by hand from what each schedule and backend holds.
@pytest.mark.parametrize(
    "of_both, change, expected",
    [
        # dq, dk and dv; and the keys and values, or gradients, that are sent.
        ({}, _on_four("ring"), 4 * QUERY + 4 * 2 * KV + 4 * 2 * KV),
        # dk and dv; dq as a sum and as it is sent; q, d_out and out in bf16.
        (
            {},
            _on_four("ring", circulates_queries=True),
            4 * 2 * KV + 4 * 2 * QUERY + 2 * 3 * QUERY,
        ),
        # dk and dv of four ranks, of both heads, or of the only one.
        ({}, _on_four("all_gather"), 2 * 4 * 4 * KV),
        # Two stages of 1.5 chunks, each with gradients and twice: as sent and as received.
        ({}, _on_four("group_cast"), 4 * QUERY + 2 * KV * (2 * 4 + 2 * 1.5 * (2 + 4))),
        # Between nodes sums of what is handed on as well.
        ({}, _on_four("group_cast", inter=2), 4 * QUERY + 2 * KV * (3 * 4 + 2 * 1.5 * (2 + 4))),
        # FlashAttention-4 sums dq in fp32, and where query heads share keys also dk and dv.
        ({}, {"backend": "flex"}, 4 * (QUERY + 2 * KV)),
        (MHA, {"backend": "flex"}, 4 * QUERY),
        # flex receives the 12 blocks of a stage as 16.
        (
            _on_four("group_cast"),
            {"backend": "flex"},
            4 * (QUERY + 2 * KV) + 2 * KV * (2 - 1.5) * (2 + 4),
        ),
        # cuDNN: dq, and where query heads share keys also rounded dk and dv of each query head.
        ({}, {"backend": "cudnn"}, 4 * QUERY + 2 * 2 * QUERY),
        # all_gather: one head at a time.
        (_on_four("all_gather"), {"backend": "cudnn"}, (4 * QUERY + 2 * 2 * QUERY) / 2),
    ],
)
def test_workspace_by_hand(of_both, change, expected):
    before = dataclasses.replace(ALONE, **of_both)
    after = dataclasses.replace(before, **change)
    assert attention_workspace(after) - attention_workspace(before) == pytest.approx(expected)
