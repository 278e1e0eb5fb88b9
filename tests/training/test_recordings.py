"""What a run reports about its attention: recall, and balance and communication, by hand."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from scripts.compare_runs import differences
from tests.distributed import on_ranks
from tests.reference import structured_qkv
from tests.runs import metrics_of, tiny_config, train
from titan_sparse.attention import ContextParallel, attend, recorder
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.observe import Recording, recording, worker_imbalance
from titan_sparse.attention.patterns import Dense, VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import pattern
from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Attention
from titan_sparse.evaluation.scorer import Sequence
from titan_sparse.options.patterns import VerticalSlashOptions as Budgets
from titan_sparse.training import model as training_model
from titan_sparse.training.attention import probe_seed
from titan_sparse.training.metrics import CapCount, asked_recall, context_parallel_averages
from titan_sparse.training.trainer import Trainer

LAYERS, BLOCK, TOKENS = 2, 16, 192
CUT = VerticalSlash(recall=0.9, sinks=2, local_slashes=1, max_verticals=20, max_slashes=3)


@pytest.mark.parametrize("budget, caps", [("independent", (200, 12)), ("joint", (60, 8))])
def test_a_run_whose_caps_cut(texts, monkeypatch, budget, caps):
    """Every selection counts once, of steps without a line too, although blocks are recomputed."""
    seen = []
    select = VerticalSlash.select_tensors

    def noted(pattern, q, k, ranges, cp, scale):
        tensors = select(pattern, q, k, ranges, cp, scale)
        index = pattern.index(tensors, ranges, *q.shape[:2], cp.block_size)
        seen.append(index.capped.clone())
        return tensors

    monkeypatch.setattr(VerticalSlash, "select_tensors", noted)
    config = tiny_config(
        texts,
        budget,
        training__gradient_accumulation_steps=2,
        metrics__log_every=3,
        metrics__recall_every=3,
        attention__vertical_slash__budget=budget,
        attention__vertical_slash__probe_rows="last",
        attention__vertical_slash__sinks=30,
        attention__vertical_slash__count_sinks=True,
        attention__vertical_slash__local_slashes=2,
        attention__vertical_slash__recall=0.8,
        attention__vertical_slash__max_verticals=caps[0],
        attention__vertical_slash__max_slashes=caps[1],
    )
    train(config)
    lines = metrics_of(config)
    # [steps, micro-batches, layers, B, Hq]; of two independent budgets one is enough.
    capped = torch.stack(seen).unflatten(0, (5, 2, LAYERS)).double()
    verticals, slashes = capped.unbind(-1)
    cut = verticals * slashes if budget == "independent" else torch.maximum(verticals, slashes)
    assert cut.mean() < 1 and cut[0].mean() != cut[-1].mean(), "the case proves nothing"
    assert [line["step"] for line in lines] == [1, 3, 5]
    steps_of_lines = [slice(0, 1), slice(1, 3), slice(3, 5)]
    for line, steps in zip(lines, steps_of_lines, strict=True):
        assert line["heads_capped"] == pytest.approx(cut[steps].mean().item())
        assert line["capped"] == pytest.approx(capped[steps].mean().item())
        assert line["verticals_at_cap"] == pytest.approx(verticals[steps].mean().item())
        assert line["recall_asked"] == 0.8


# Counting


def _capped_by_hand(q: Tensor, k: Tensor) -> Tensor:
    """The shares of heads whose verticals, slashes, and both are capped."""
    capped = CUT.select(q, k, Causal(), block_size=BLOCK).capped.double()
    return torch.cat([capped, capped.prod(-1, keepdim=True)], dim=-1).mean((0, 1))


def test_compiled_selections_are_counted(fresh_compiler):
    q, k, v = structured_qkv(2, 4, 2, TOKENS, 8)
    by_hand = _capped_by_hand(q, k)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern=CUT, block_size=BLOCK)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with counting_caps() as shares:
        for _ in range(2):  # compiling counts nothing, running does
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            compiled(*inputs).sum().backward()
    assert len(shares) == 2
    assert torch.equal(shares[0], by_hand) and torch.equal(shares[1], by_hand)


@on_ranks(2)
def test_ranks_agree():
    """Each rank's own data, and data that two ranks share: two forwards of two layers."""
    cp = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), block_size=BLOCK)
    for shares_data in (False, True):
        count = CapCount()
        by_hand = torch.zeros(LAYERS, 3, dtype=torch.float64)
        for forward in range(2):
            first = 10 * forward + 100 * dist.get_rank() * (not shares_data)
            layers = [structured_qkv(1, 4, 2, TOKENS, 8, seed=first + n) for n in range(LAYERS)]
            by_hand += torch.stack([_capped_by_hand(q, k) for q, k, _ in layers])
            with counting_caps() as shares:
                for inputs in layers:
                    if shares_data:
                        attend(*[cp.shard(x, 2) for x in inputs], pattern=CUT, cp=cp)
                    else:
                        attend(*inputs, pattern=CUT, block_size=BLOCK)
            count.add(shares)
        alone = by_hand.clone()
        dist.all_reduce(by_hand)
        assert shares_data == torch.equal(2 * alone, by_hand), "the case proves nothing"
        got = count.read()
        torch.testing.assert_close(got, by_hand / 4, rtol=1e-12, atol=0)
        assert count.read() is None


# What is asked for, and what is said


@pytest.mark.parametrize(
    "pattern, budgets, wanted",
    [
        ("vertical_slash", {}, 0.7),
        ("xattention", {}, None),
        ("dense", {}, None),
        ("vertical_slash", {"min_verticals": 64, "max_verticals": 64}, 0.7),
        ("vertical_slash", {"min_slashes": 4, "max_slashes": 4}, 0.7),
        ("vertical_slash", {"max_verticals": 0}, 0.7),
        ("vertical_slash", {"max_verticals": 0, "min_slashes": 4, "max_slashes": 4}, None),
    ],
)
def test_the_recall_that_was_asked_for(pattern, budgets, wanted):
    attention = Attention(pattern=pattern, vertical_slash=Budgets(recall=0.7, **budgets))
    assert asked_recall(attention) == wanted


PROBING = {
    "training__steps": 2,
    "training__seed": 7,
    "training__gradient_accumulation_steps": 2,
    "data__sequences": "fixed",
    "attention__mask": "causal",
    "attention__pattern": "vertical_slash",
    "attention__vertical_slash__probe_rows": "spread",
    "metrics__recall_every": 0,
}


def _run_noting_rows(folder: Path, name: str, mode: str) -> tuple[Trainer, dict]:
    """A trained run, and by step the rows that it looked at: a list of [n] each."""
    rows: dict[int, list[Tensor]] = {}
    spread_rows = pattern.spread_rows
    trainer = Trainer(tiny_config(folder, name, **PROBING, activation_checkpoint__mode=mode))

    def noted(*args):
        drawn = spread_rows(*args)
        rows.setdefault(trainer.progress.step + 1, []).append(drawn.position.flatten())
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pattern, "spread_rows", noted)
        trainer.train()
    return trainer, rows


def test_a_recomputation_and_an_evaluation_look_at_the_same_rows(texts, monkeypatch):
    """Of the step, and of no step."""
    trainer, rows = _run_noting_rows(texts, "kept", "none")
    # Other rows in each step; the same ones for both micro-batches and layers.
    first, second = rows[1], rows[2]
    assert all(again.equal(first[0]) for again in first) and not first[0].equal(second[0])
    # Nothing is kept of attention: the backward selects anew.
    select = VerticalSlash.select_tensors
    selections = []
    counted = lambda *args: selections.append(0) or select(*args)  # noqa: E731
    monkeypatch.setattr(training_model, "SAVED_OPS", ())
    monkeypatch.setattr(VerticalSlash, "select_tensors", counted)
    _run_noting_rows(texts, "recomputed", "full")
    assert len(selections) > 2 * 2 * 2
    for field in ("loss", "grad_norm"):
        found = differences(texts / "kept", texts / "recomputed", field)
        assert all(step.relative < 1e-9 for step in found)

    tokens = np.arange(300) % 250
    seeds = []
    drawn = pattern.spread_rows
    monkeypatch.setattr(pattern, "spread_rows", lambda *args: seeds.append(args[4]) or drawn(*args))
    trainer.scorer.token_losses(Sequence(tokens, tokens), 300)
    assert set(seeds) == {0}
    assert len({probe_seed(7, step) for step in range(200)}) == 200


# Balance and communication

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
OWN = 6 * BLOCK
"""Tokens of a rank."""


def _cp(layout: str, schedule: str, *options) -> ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return ContextParallel(mesh, layout, schedule, BLOCK, *options)


def _record(cp, calls=1, pattern=Dense(), dtype=torch.float64, delay=0.0, backward=False):
    """The recording of `calls` attention calls, and the index of the last."""
    seq_len = OWN * dist.get_world_size()
    local = [
        cp.shard(x, 2).requires_grad_()
        for x in structured_qkv(BATCH, HEADS, KV_HEADS, seq_len, DIM, dtype=dtype)
    ]
    dist.barrier()
    with recording() as seen:
        for _ in range(calls):
            time.sleep(delay)
            out, aux = attend(*local, Causal(), pattern, cp, return_aux=True)
            if backward:
                out.sum().backward()
    return seen, aux.index


def _check_work() -> None:
    ranks = dist.get_world_size()
    n = OWN
    own, other = n * (n + 1) // 2, n * n
    by_hand = [own + rank * other for rank in range(ranks)]
    by_hand = BATCH * HEADS * torch.tensor(by_hand, dtype=torch.float64)
    seen, _ = _record(_cp("contiguous", "ring"), calls=2)
    measured = seen.by_rank()
    assert torch.equal(measured.work, torch.stack([by_hand, by_hand]))
    assert torch.equal(measured.compute > 0, measured.work > 0)
    logged = context_parallel_averages(seen)
    busiest = by_hand.max() / by_hand.mean()
    assert logged["worker_imbalance"] == pytest.approx(busiest.item())
    assert logged["worker_imbalance"] == pytest.approx(2 - 1 / ranks, rel=0.02)
    for schedule in ("ring", "all_gather"):
        seen, _ = _record(_cp("zigzag", schedule))
        work = seen.by_rank().work
        assert context_parallel_averages(seen)["worker_imbalance"] == 1.0
        assert work.shape == (1, ranks) and work.sum() == by_hand.sum()


def _check_waiting() -> None:
    """A rank that is late makes the others wait, and that is not computing."""
    for schedule in ("ring", "all_gather"):
        cp, late = _cp("zigzag", schedule), dist.get_rank() == 1
        _record(cp)
        began = time.perf_counter()
        seen, _ = _record(cp, delay=1.0 * late)
        took = 1e3 * (time.perf_counter() - began)
        _, compute, elapsed = (x[0] for x in seen.by_rank())
        waited = elapsed - compute
        assert (elapsed >= compute).all() and (compute > 0).all()
        assert min(waited[0], waited[2]) > 800 and waited[1] < 500, (schedule, waited)
        assert compute.max() < 500 and elapsed[dist.get_rank()] < took
        logged = context_parallel_averages(seen)
        assert logged["exposed_communication_ms"] == pytest.approx(waited.mean().item())
        share = waited.sum() / elapsed.sum()
        assert logged["exposed_communication_share"] == pytest.approx(share.item())
        assert logged["worker_imbalance_time"] == pytest.approx(worker_imbalance(compute).item())


@pytest.mark.gpu
def test_times_on_a_gpu_need_no_waiting():
    device = torch.device("cuda")
    small, large = (torch.randn(n, n, device=device) for n in (256, 8192))
    small @ small, large @ large  # the first products load libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call = recorder.TimedCall(ContextParallel(None, schedule="local"), device)
        for x in (small, large):
            with call.computing():
                x @ x
            large @ large
        call.ended = recorder.mark(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compute, elapsed = call.milliseconds()
    assert 0 < compute and elapsed > 1.4 * compute


def _check_bytes() -> None:
    """Chunks of keys and values in bf16 (1), and their gradients in fp32 (2), on a ring of 3."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunk = 2 * BATCH * KV_HEADS * OWN * DIM * 2
    plain = (ranks - 1) * (1 + 1 + 2) * chunk
    # Causal and contiguous: chunk s is needed by the ranks after s; its gradient comes home around
    # the whole ring.
    keys, gradients = [1, 2, 0], [1, 1, 2]
    seen, _ = _record(_cp("contiguous", "ring"), dtype=torch.bfloat16, backward=True)
    assert seen.bytes_sent == (2 * keys[rank] + 2 * gradients[rank]) * chunk
    assert seen.plain_ring_bytes == plain
    logged = context_parallel_averages(seen)
    sent = (2 * sum(keys) + 2 * sum(gradients)) * chunk / ranks
    assert logged["cp_sent_of_plain_ring"] == pytest.approx(sent / plain)
    assert logged["cp_gib_sent"] == pytest.approx(sent / 2**30)


def _check_bytes_besides() -> None:
    """Verticals in bf16, their gradients in fp32, each summed over a ring. Selection alone."""
    ranks = dist.get_world_size()
    cp = _cp("striped", "ring")
    pattern = VerticalSlash(recall=0.7, max_verticals=40, dense_below=48)
    seen, index = _record(cp, 2, pattern=pattern, dtype=torch.bfloat16, backward=True)
    # Numbers in k and v of the verticals, and bytes of each in bf16 and in fp32.
    numbers = 2 * index.verticals.numel() * DIM
    expected = sum(2 * (2 * numbers * size * (ranks - 1) // ranks) for size in (2, 4))
    assert seen.bytes_of_verticals == expected > 0
    before = cp.sent["collectives"]
    q, k, _ = structured_qkv(BATCH, HEADS, KV_HEADS, OWN * ranks, DIM, dtype=torch.bfloat16)
    pattern.select(cp.shard(q, 2), cp.shard(k, 2), Causal(), cp)
    assert seen.bytes_of_selection == 2 * (cp.sent["collectives"] - before) > 0
    logged = context_parallel_averages(seen)
    assert logged["cp_gib_verticals"] * 2**30 == pytest.approx(seen.bytes_of_verticals)
    assert logged["cp_gib_selection"] * 2**30 == pytest.approx(seen.bytes_of_selection)
    assert seen.bytes_sent == seen.plain_ring_bytes
    assert _record(_cp("striped", "ring"))[0].bytes_of_verticals == 0


def _check_recordings_within_recordings() -> None:
    """Each counts its own calls and what they send, backward included."""
    pattern = VerticalSlash(recall=0.7, max_verticals=40, dense_below=48)

    def run(layout: str = "striped") -> Recording:
        return _record(_cp(layout, "ring"), pattern=pattern, backward=True)[0]

    def counts(seen: Recording) -> list[int]:
        all_bytes = (seen.bytes_sent, seen.plain_ring_bytes, seen.bytes_of_verticals)
        return [*all_bytes, seen.bytes_of_selection, len(seen.calls), len(seen.visited)]

    one = counts(run())
    assert min(one) > 0
    cp = _cp("striped", "ring")
    qkv = structured_qkv(BATCH, HEADS, KV_HEADS, OWN * dist.get_world_size(), DIM)

    def call() -> None:
        local = [cp.shard(x, 2).requires_grad_() for x in qkv]
        attend(*local, Causal(), pattern, cp).sum().backward()

    with recording() as outer, counting_caps() as outer_caps:
        call()
        with pytest.raises(KeyError), recording() as failing, counting_caps() as failing_caps:
            call()
            with recording() as inner, counting_caps() as inner_caps:
                call()
                call()
            assert run("contiguous").bytes_sent > 0
            raise KeyError
        with recording() as nothing:
            pass
        call()
    call()
    for seen, times in ((outer, 2), (inner, 2), (failing, 1), (nothing, 0)):
        assert counts(seen) == [times * number for number in one]
    # run() leaves caps to those who count them around it.
    assert len(outer_caps) == len(inner_caps) == len(failing_caps) == 2
    assert recorder.listeners.recording is None and recorder.listeners.capped is None


@on_ranks(3)
def test_recorded_over_ranks():
    _check_work()
    _check_bytes()
    _check_bytes_besides()
    _check_recordings_within_recordings()
    _check_waiting()
