"""What a run reports about recall, and the rows that probes look at."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from scripts.compare_runs import differences
from tests.distributed import run_processes
from tests.reference import structured_qkv
from tests.runs import metrics_of, tiny_config, train, write_texts
from titan_sparse.attention import ContextParallel, attend
from titan_sparse.attention.masks.ranges import Causal
from titan_sparse.attention.patterns import VerticalSlash
from titan_sparse.attention.patterns.vertical_slash import pattern
from titan_sparse.attention.recorder import counting_caps
from titan_sparse.config import Attention
from titan_sparse.evaluation.scorer import Sequence
from titan_sparse.options.patterns import VerticalSlashOptions as Budgets
from titan_sparse.training import model as training_model
from titan_sparse.training.attention import probe_seed
from titan_sparse.training.metrics import CapCount, asked_recall
from titan_sparse.training.trainer import Trainer

LAYERS, BLOCK, TOKENS = 2, 16, 192
CUT = VerticalSlash(recall=0.9, sinks=2, local_slashes=1, max_verticals=20, max_slashes=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recall")
    write_texts(folder / "texts")
    return folder


@pytest.mark.parametrize(
    "budget, max_verticals, max_slashes", [("independent", 200, 12), ("joint", 60, 8)]
)
def test_a_run_whose_caps_cut(folder, monkeypatch, budget, max_verticals, max_slashes):
    """Every selection counts, of steps without a line too, and each of them once, although blocks
    are computed again."""
    seen = []
    select = VerticalSlash.select_tensors

    def noted(pattern, q, k, ranges, cp, scale):
        tensors = select(pattern, q, k, ranges, cp, scale)
        index = pattern.index(tensors, ranges, *q.shape[:2], cp.block_size)
        seen.append(index.capped.clone())
        return tensors

    monkeypatch.setattr(VerticalSlash, "select_tensors", noted)
    config = tiny_config(
        folder,
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
        attention__vertical_slash__max_verticals=max_verticals,
        attention__vertical_slash__max_slashes=max_slashes,
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


def test_ranks_agree():
    run_processes(2, _check_ranks)


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


def test_a_recomputation_and_an_evaluation_look_at_the_same_rows(folder, monkeypatch):
    """Of the step, and of no step."""
    trainer, rows = _run_noting_rows(folder, "kept", "none")
    # Other rows in each step; the same ones for both micro-batches and layers.
    first, second = rows[1], rows[2]
    assert all(again.equal(first[0]) for again in first) and not first[0].equal(second[0])
    # Nothing is kept of attention: the backward selects anew.
    select = VerticalSlash.select_tensors
    selections = []
    counted = lambda *args: selections.append(0) or select(*args)  # noqa: E731
    monkeypatch.setattr(training_model, "SAVED_OPS", ())
    monkeypatch.setattr(VerticalSlash, "select_tensors", counted)
    _run_noting_rows(folder, "recomputed", "full")
    assert len(selections) > 2 * 2 * 2
    for field in ("loss", "grad_norm"):
        found = differences(folder / "kept", folder / "recomputed", field)
        assert all(step.relative < 1e-9 for step in found)

    tokens = np.arange(300) % 250
    seeds = []
    drawn = pattern.spread_rows
    monkeypatch.setattr(pattern, "spread_rows", lambda *args: seeds.append(args[4]) or drawn(*args))
    trainer.scorer.token_losses(Sequence(tokens, tokens), 300)
    assert set(seeds) == {0}
    assert len({probe_seed(7, step) for step in range(200)}) == 200
