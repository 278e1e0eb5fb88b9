"""What a run reports about recall: how much the caps cut, counted by hand, and what was requested."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.distributed import run_processes
from tests.reference import structured_qkv
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Attention
from titan_sparse.options import VerticalSlashOptions as Budgets
from titan_sparse.training.recall import CapCount, Capped, asked_recall

LAYERS, BLOCK, TOKENS = 2, 16, 192
CUT = VerticalSlash(recall=0.9, sinks=2, local_slashes=1, max_verticals=20, max_slashes=3)


def _note_selections(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """`capped` [B, Hq, 2] of every selection from now on."""
    seen = []
    select = VerticalSlash.select_tensors

    def noted(pattern, q, k, ranges, cp, scale):
        tensors = select(pattern, q, k, ranges, cp, scale)
        index = pattern.index(tensors, ranges, *q.shape[:2], cp.block_size)
        seen.append(index.capped.clone())
        return tensors

    patch.setattr(VerticalSlash, "select_tensors", noted)
    return seen


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recall")
    write_texts(folder / "texts")
    return folder


def _heads(capped: Tensor) -> Tensor:
    """bool [B, Hq, 2] -> [B, Hq, 3]: what is counted of each head."""
    verticals, slashes = capped.double().unbind(-1)
    both = verticals * slashes
    return torch.stack([verticals, slashes, both], dim=-1)


def _run(folder: Path, output: str, caplog, **settings) -> SimpleNamespace:
    """Five steps of two micro-batches; lines of steps 1, 3 and 5, recall in those of 1 and 3."""
    shared = {
        "training__gradient_accumulation_steps": 2,
        "metrics__log_every": 3,
        "metrics__recall_every": 3,
        "metrics__tensorboard": True,
    }
    config = tiny_config(folder, output, **shared | settings)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "titan_sparse"):
        seen = _note_selections(patch)
        train(config)
    said = [record for record in caplog.records if record.name == "titan_sparse"]
    return SimpleNamespace(
        # [steps, micro-batches, layers, B, Hq, 2]
        capped=torch.stack(seen).unflatten(0, (5, 2, LAYERS)).double(),
        lines=metrics_of(config),
        progress=[r.getMessage() for r in said if r.getMessage().startswith("step ")],
        board=EventAccumulator(str(folder / output / "tensorboard")).Reload(),
    )


@pytest.mark.parametrize(
    "budget, max_verticals, max_slashes", [("independent", 200, 12), ("joint", 60, 8)]
)
def test_a_run_whose_caps_cut(folder, caplog, budget, max_verticals, max_slashes):
    """Every selection counts, of steps without a line too, and each of them once, although blocks
    are computed again."""
    run = _run(
        folder,
        budget,
        caplog,
        attention__vertical_slash__budget=budget,
        attention__vertical_slash__probe_rows="last",
        attention__vertical_slash__sinks=30,
        attention__vertical_slash__count_sinks=True,
        attention__vertical_slash__local_slashes=2,
        attention__vertical_slash__recall=0.8,
        attention__vertical_slash__max_verticals=max_verticals,
        attention__vertical_slash__max_slashes=max_slashes,
    )
    # [steps, micro-batches, layers, B, Hq]; of two independent budgets one is enough.
    verticals, slashes = run.capped.unbind(-1)
    cut = verticals * slashes if budget == "independent" else torch.maximum(verticals, slashes)
    assert cut.mean() < 1 and cut[0].mean() != cut[-1].mean(), "the case proves nothing"
    assert [line["step"] for line in run.lines] == [1, 3, 5]
    steps_of_lines = [slice(0, 1), slice(1, 3), slice(3, 5)]
    for line, steps in zip(run.lines, steps_of_lines, strict=True):
        assert line["heads_capped"] == pytest.approx(cut[steps].mean().item())
        assert line["capped"] == pytest.approx(run.capped[steps].mean().item())
        assert line["verticals_at_cap"] == pytest.approx(verticals[steps].mean().item())
        assert line["recall_asked"] == 0.8
    _check_progress_and_board(run)


def _check_progress_and_board(run: SimpleNamespace) -> None:
    for line, progress in zip(run.lines, run.progress, strict=True):
        assert progress.endswith(f"capped {100 * line['heads_capped']:.1f} % of heads")
        said = f"recall {100 * line.get('recall', 0):.1f} % (asked 80 %)"
        assert (said in progress) == ("recall" in line) == ("recall" in progress)
    for field in ("capped", "heads_capped", "verticals_at_cap", "recall_asked"):
        values = [event.value for event in run.board.Scalars(f"attention/{field}")]
        assert values == pytest.approx([line[field] for line in run.lines])
    # [layers], of the steps since the line before
    last = run.capped[3:].mean((0, 1, 3, 4, 5))
    for layer in range(LAYERS):
        [_, _, event] = run.board.Scalars(f"attention_capped_by_layer/{layer}")
        assert event.value == pytest.approx(last[layer].item())


# Counting


def _capped_by_hand(q: Tensor, k: Tensor) -> Tensor:
    index = CUT.select(q, k, Causal(), block_size=BLOCK)
    return _heads(index.capped).mean((0, 1))


def test_what_a_checkpoint_repeats_is_counted_once(monkeypatch):
    q, k, v = (x.requires_grad_() for x in structured_qkv(2, 4, 2, TOKENS, 8))
    by_hand = _capped_by_hand(q, k)
    assert 0 < by_hand.min() and by_hand.max() <= 1
    ran = _note_selections(monkeypatch)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern=CUT, block_size=BLOCK)

    with counting_caps() as shares:
        # It keeps nothing, not even what was selected.
        checkpoint(run, q, k, v, use_reentrant=False).sum().backward()
    assert len(ran) == 2 and len(shares) == 1
    assert torch.equal(shares[0], by_hand)
    run(q, k, v)
    assert len(shares) == 1, "counted outside of counting_caps()"


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


def _check_ranks() -> None:
    """Each rank's own data, and data that two ranks share: two forwards of two layers."""
    cp = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), block_size=BLOCK)
    for shares_data in (False, True):
        count = CapCount()
        by_hand = torch.zeros(LAYERS, 3, dtype=torch.float64)
        for forward in range(2):
            first = 10 * forward + 100 * dist.get_rank() * (not shares_data)
            layers = [structured_qkv(1, 4, 2, TOKENS, 8, seed=first + n) for n in range(LAYERS)]
            by_hand += torch.stack([_capped_by_hand(q, k) for q, k, _ in layers])
            with count.counting():
                for inputs in layers:
                    if shares_data:
                        attend(*[cp.shard(x, 2) for x in inputs], pattern=CUT, cp=cp)
                    else:
                        attend(*inputs, pattern=CUT, block_size=BLOCK)
        alone = by_hand.clone()
        dist.all_reduce(by_hand)
        assert shares_data == torch.equal(2 * alone, by_hand), "the case proves nothing"
        got = torch.stack(count.read(), dim=1)
        torch.testing.assert_close(got, by_hand / 4, rtol=1e-12, atol=0)
        assert count.read() is None


def test_ranks_agree():
    run_processes(2, _check_ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_counting_on_a_gpu_waits_for_nothing():
    q, k, v = (x.to("cuda", torch.bfloat16) for x in structured_qkv(1, 4, 2, 2048, 64))
    ranges = Causal().rows(2048, "cuda")
    count = CapCount()

    def run() -> None:
        with count.counting():
            attend(q, k, v, ranges, CUT)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    by_hand = _heads(CUT.select(q, k, ranges).capped).mean((0, 1))
    means = count.sums / count.forwards
    assert torch.equal(means[0], by_hand) and by_hand.max() > 0


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


def test_a_head_that_both_caps_cut_counts_once():
    capped = Capped(*torch.tensor([[0.5], [0.75], [0.25]]))
    assert capped.of_heads("joint") == 1.0 and capped.of_heads("independent") == 0.25
